"""Paired differences from FedAvg: interval, verdict, and what is not told."""

from __future__ import annotations

from hkd_hpc.results.differences import GOALS, differences, method_text

NAN = float("nan")


def rows_of(**values_by_scheme) -> dict:
    return {scheme: dict.fromkeys(GOALS, values) for scheme, values in values_by_scheme.items()}


def told(found, goal) -> dict[str, str]:
    return {scheme: str(cell) for scheme, cell in differences(found, goal).items()}


def test_paired_differences_with_their_interval_and_too_few_seeds():
    found = told(rows_of(fedavg=[0.5, 0.5, 0.5], near=[0.51, 0.52, 0.53], far=[0.4, 0.401, 0.402]), "local")
    assert found == {
        "near": "+0.020 ± 0.025, cannot be told with 3 seeds",  # t(.975, 2) = 4.3027, times .01 / sqrt(3)
        "far": "-0.099 ± 0.002, cannot be told with 3 seeds",
    }


def test_with_enough_seeds_a_clear_difference_is_called_and_a_missing_run_is_not():
    seeds = range(7)  # two schemes need 7
    found = told(
        rows_of(
            fedavg=[0.5] * 7,
            better=[0.51 + 0.001 * i for i in seeds],
            noise=[0.49, 0.51] * 3 + [0.5],
            missing=[0.6] * 6 + [NAN],
            local=[0.4 + 0.001 * i for i in seeds],
        ),
        "global",
    )
    assert {scheme: text.rpartition(", ")[2] for scheme, text in found.items()} == {
        "better": "better",
        "noise": "not separated",
        "missing": "–",
        "local": "worse",
    }
    assert found["better"].startswith("+0.013 ± 0.002, ")  # t(.975, 6) = 2.4469, times .00216 / sqrt(7)


def test_schemes_whose_runs_have_not_all_ended_count_in_the_correction_from_the_start():
    """Two of six seeds' sign flips in 64: p = .031, which is enough for one scheme and not for three."""
    better, under_way = [0.51 + 0.001 * i for i in range(6)], [0.6] * 5 + [NAN]
    assert told(rows_of(fedavg=[0.5] * 6, better=better), "local") == {"better": "+0.013 ± 0.002, better"}
    found = rows_of(fedavg=[0.5] * 6, better=better, one=under_way, two=under_way)
    assert told(found, "local")["better"] == "+0.013 ± 0.002, cannot be told with 6 seeds"
    assert method_text(found).endswith(
        "over the 3 schemes of a column (controls by themselves), level 0.05; that needs 7 seeds."
    )
