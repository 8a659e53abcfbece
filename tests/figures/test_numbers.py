"""The numbers of each figure, worked out by hand from three rounds of three clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hkd_hpc.analysis.statistics import intervals
from hkd_hpc.figures import Bars, HeatMap, Lines, NotRecorded, csv_of, of_run, of_study
from hkd_hpc.figures.groups import groups_of
from hkd_hpc.figures.look import look, looks_of
from hkd_hpc.figures.matrix import cells

T_OF_1 = 12.706205  # Student's t of .975 with one degree of freedom


def by_name(figures):
    return {figure.name: figure for figure in figures}


def by_series(figure):
    return {series.name: series for series in figure.series}


def test_intervals_leave_out_what_is_not_there():
    nan = float("nan")
    mean, half = intervals(np.array([[1.0, 1.0, nan], [3.0, nan, nan]]))
    np.testing.assert_allclose(mean, [2.0, 1.0, nan])
    np.testing.assert_allclose(half, [T_OF_1 * 1.0, nan, nan], rtol=1e-6)  # deviation sqrt 2, over sqrt 2


def test_accuracy_of_one_run_has_a_line_for_each_measure_and_no_band(recorded):
    figure = by_name(of_run(recorded()))["accuracy_rounds"]
    assert isinstance(figure, Lines)
    series = by_series(figure)
    assert list(series) == ["local", "worst tenth", "global"]
    np.testing.assert_array_equal(series["local"].x, [1, 2, 3])
    np.testing.assert_array_equal(series["local"].y, [0.2, 0.4, 0.6])
    np.testing.assert_array_equal(series["worst tenth"].y, [0.1, 0.2, 0.3])
    np.testing.assert_array_equal(series["global"].x, [1, 3])  # not tested in round 2
    assert series["local"].low is None


def test_a_file_has_the_figures_of_what_was_put_into_it(newest, saved):
    read, put = of_run(saved), of_run(newest())
    assert [type(figure) for figure in read] == [type(figure) for figure in put]
    assert [csv_of(one) for one in read if hasattr(one, "caption")] == [
        csv_of(one) for one in put if hasattr(one, "caption")
    ]


def test_two_seeds_are_one_line_with_a_band(recorded):
    seeds = [recorded(), recorded((0.4, 0.6, 0.8), run__seed=1)]
    local = by_series(by_name(of_study(seeds))["accuracy_rounds"])["local"]
    np.testing.assert_allclose(local.y, [0.3, 0.5, 0.7])
    np.testing.assert_allclose(local.high - local.y, [0.1 * T_OF_1] * 3, rtol=1e-6)  # deviation .2 / sqrt 2
    np.testing.assert_allclose(local.y - local.low, [0.1 * T_OF_1] * 3, rtol=1e-6)


def test_runs_of_two_files_are_no_seeds_of_one_line(recorded):
    runs = [recorded(data__name="file", data__path=f"/{name}.npz") for name in "xyx"]
    runs[2].settings["run.seed"] = 1
    found = [(group.setting, group.seeds) for group in groups_of(runs)]
    assert found == [("x", 2), ("y", 1)]


def test_runs_of_different_images_under_one_name_are_no_seeds_of_one_line(recorded):
    """Nobody knows what the fourth was of."""
    runs = [recorded(data__name="file", data__path="/x.npz", run__seed=seed) for seed in range(4)]
    for run, digit in zip(runs, "aba"):
        run.identity = {"data.content": digit * 64}
    found = [(group.setting, group.seeds) for group in groups_of(runs)]
    assert found == [("x aaaaaaaa", 2), ("x bbbbbbbb", 1), ("x", 1)]
    assert [group.seeds for group in groups_of(runs[::2])] == [2]


def test_a_shorter_seed_counts_as_long_as_it_goes(recorded):
    seeds = [recorded(), recorded((0.4, 0.6), run__seed=1)]
    local = by_series(by_name(of_study(seeds))["accuracy_rounds"])["local"]
    np.testing.assert_allclose(local.y, [0.3, 0.5, 0.6])
    assert np.isnan(local.high[2])


def test_time_of_two_seeds_is_one_grid(recorded):
    seeds = [recorded(), recorded((0.4, 0.6, 0.8), wall_s=2.0, run__seed=1)]  # at 1, 2, 3 s and at 2, 4, 6 s
    figure = by_name(of_study(seeds))["accuracy_time"]
    local = by_series(figure)["local"]
    assert figure.x_label == "wall time (s)"
    np.testing.assert_allclose(local.x, [2.0, 2.5, 3.0])
    np.testing.assert_allclose(local.y, [0.4, 0.475, 0.55])


def test_bytes_are_summed_over_kinds_and_rounds(recorded):
    figure = by_name(of_run(recorded()))["accuracy_bytes"]
    assert figure.x_label == "payload (kB)"
    np.testing.assert_allclose(by_series(figure)["local"].x, [3.444, 6.824, 10.0])


def test_restarts_are_marked(recorded):
    run = recorded(sessions=({"after_round": 0}, {"after_round": 2}))
    assert by_name(of_run(run))["accuracy_rounds"].marks == (2.0,)


def test_schemes_are_lines_and_other_settings_figures_of_their_own(recorded):
    runs = [
        recorded(run__seed=seed, scheme__name=scheme, data__beta=beta)
        for scheme in ("fedavg", "fedhkd")
        for beta in (0.2, 0.5)
        for seed in (0, 1)
    ]
    figures = by_name(of_study(runs))
    one = figures["accuracy_rounds_beta_0_2"]
    assert one.title == "Accuracy against rounds: beta 0.2"
    assert [(series.panel, series.name) for series in one.series[:3]] == [
        ("local", "fedavg (n=2)"),
        ("local", "fedhkd (n=2)"),
        ("worst tenth", "fedavg (n=2)"),
    ]
    assert "accuracy_rounds_beta_0_5" in figures


def test_a_scheme_looks_alike_in_all_figures_of_a_study(recorded):
    runs = [recorded(run__seed=seed, scheme__name=scheme) for scheme in ("fedavg", "fedhkd") for seed in (0, 1)]
    figures = by_name(of_study(runs))
    assert looks_of(figures["accuracy_rounds"])["fedhkd (n=2)"] == look(1)
    alone = replace(figures["accuracy_rounds"], series=figures["accuracy_rounds"].series[1:2])
    assert looks_of(alone) == {"fedhkd (n=2)": look(1)}


def test_a_scheme_with_two_settings_is_two_lines(recorded):
    runs = [recorded(scheme__nu=nu) for nu in (0.1, 0.25)]
    names = [series.name for series in by_name(of_study(runs))["accuracy_rounds"].series[:2]]
    assert names == ["fedhkd, nu 0.1", "fedhkd, nu 0.25"]


def test_no_figure_has_more_than_twelve_groups(recorded):
    figures = by_name(of_study(recorded(scheme__nu=0.01 * step) for step in range(13)))
    assert len({series.name for series in figures["accuracy_rounds_part_1"].series}) == 12
    assert len({series.name for series in figures["accuracy_rounds_part_2"].series}) == 3  # of one: the measures


def test_a_figure_is_named_by_the_fewest_settings_that_tell_it_from_others(recorded):
    runs = [
        recorded(data__beta=0.2, fed__rounds=10, fed__clients=4),
        recorded(data__beta=0.5, fed__rounds=10, fed__clients=6),
        recorded(data__beta=0.5, fed__rounds=20, fed__clients=6),
    ]
    titles = [figure.title for figure in of_study(runs) if figure.name.startswith("accuracy_rounds")]
    assert titles == [
        "Accuracy against rounds: beta 0.2, rounds 10",
        "Accuracy against rounds: beta 0.5, rounds 10",
        "Accuracy against rounds: beta 0.5, rounds 20",
    ]


def test_only_the_caption_of_several_seeds_speaks_of_their_grid(recorded):
    alone = by_name(of_run(recorded()))
    assert "Seeds" not in alone["accuracy_time"].caption + alone["accuracy_bytes"].caption
    assert "on one grid" in by_name(of_study([recorded(), recorded(run__seed=1)]))["accuracy_bytes"].caption


def test_partition(recorded):
    figure = by_name(of_run(recorded()))["partition"]
    assert isinstance(figure, HeatMap)
    np.testing.assert_array_equal(figure.z_YX, [[3, 1, 0], [0, 2, 2], [4, 0, 0]])
    assert figure.x == ("0", "1", "2")
    assert figure.z_range == (0, 4)


def test_accuracy_of_clients(recorded):
    figures = by_name(of_run(recorded()))
    np.testing.assert_array_equal(figures["client_accuracy"].z_YX[2], [0.6, 0.6, np.nan])
    np.testing.assert_array_equal(figures["client_accuracy_last"].series[0].y, [0.1, 0.2, 0.6])


def test_clients_sorted_over_the_seeds(recorded):
    series = by_name(of_study([recorded(), recorded(run__seed=1)]))["client_accuracy_sorted"].series[0]
    np.testing.assert_allclose(series.y[[0, 25, 50, 100]], [0.1, 0.15, 0.2, 0.6])


def test_clients_left_out_by_reason(recorded):
    series = by_series(by_name(of_run(recorded()))["left_out"])
    assert {name: one.y.tolist() for name, one in series.items()} == {
        "rejected": [0, 0, 1],
        "dropped out": [0, 1, 0],
        "not sampled": [0, 0, 1],
    }


def test_who_works_and_who_waits(recorded):
    figures = by_name(of_run(recorded()))
    # rank 1 trains clients 0 and 1: 4 s each round; rank 2 trains client 2: 4.5, 4.5, 0 s
    np.testing.assert_allclose(figures["waiting"].z_YX, [[0.5, 0.5, 0], [0, 0, 4]])
    series = by_series(figures["seconds_ranks"])
    np.testing.assert_allclose(series["busy"].y, [4.0, 3.0])
    np.testing.assert_allclose(series["waiting"].y, [1 / 3, 4 / 3])


def test_payload_beside_the_papers_formula(recorded):
    """nu .25: client 0 shares classes 0 and 1, client 1 classes 1 and 2, client 2 class 0; D = 4, C = 3, 4 bytes."""
    figure = by_name(of_run(recorded()))["payload"]
    formula = {series.panel: series.y.tolist() for series in figure.series if series.name == "formula"}
    assert formula == {
        # 5, 3 and 2 pairs of (4 + 3 + 1) floats
        "knowledge, up (B)": [5 * 32, 3 * 32, 2 * 32],
        # to 3, 3 and 2 clients: 3, 2 and 2 classes of (4 + 3) floats
        "knowledge, down (B)": [3 * 3 * 28, 3 * 2 * 28, 2 * 2 * 28],
    }


def test_the_formula_takes_the_recorded_classes_and_the_rule_for_rounds_of_an_older_version(newest):
    run = newest()
    shared_RMC = run.client_columns["knowledge_classes"].copy()
    shared_RMC[0] = np.nan  # then the rule: 5 pairs
    shared_RMC[1, 0] = 0  # client 0 shared none: 1 pair is left
    run.client_columns["knowledge_classes"] = shared_RMC
    figure = by_name(of_run(run))["payload"]
    up = next(one for one in figure.series if (one.panel, one.name) == ("knowledge, up (B)", "formula"))
    assert up.y.tolist() == [5 * 32, 1 * 32, 2 * 32]


@pytest.mark.parametrize(
    "scheme, up, down",
    [
        ("fedproto", [5 * 16, 3 * 16, 2 * 16], [3 * 3 * 16, 3 * 2 * 16, 2 * 2 * 16]),
        ("fedmd", [3 * 2 * 3 * 4, 2 * 24, 24], [3 * 24, 3 * 24, 2 * 24]),
        # the generator: (2 + 3) x 5 + 5, scale and shift 5 each, 5 x 4 + 4 = 64 floats
        ("fedgen", [3 * 3 * 4, 2 * 12, 12], [3 * 256, 3 * 256, 2 * 256]),
    ],
)
def test_formulas_of_other_papers(recorded, scheme, up, down):
    run = recorded(scheme__name=scheme, scheme__nu=0.0, scheme__hidden=5, scheme__noise_size=2)
    run.partition["public_index"] = np.arange(2)
    figure = by_name(of_run(run))["payload"]
    formula = [series.y.tolist() for series in figure.series if series.name == "formula"]
    assert formula == [up, down]


def test_payload_of_groups_beside_the_formulas_of_their_papers(recorded):
    """Of a round: (5 + 3 + 2) / 3 pairs, each 16 bytes of FedProto (D = 4) and 32 of FedHKD (D + C + 1)."""
    figure = by_name(of_study(recorded(scheme__name=name) for name in ("fedavg", "fedproto", "fedhkd")))["payload"]
    up = {series.name: series for series in figure.series if series.panel.startswith("knowledge, up")}
    assert up["formula"].x.tolist() == ["fedavg", "fedproto", "fedhkd"]
    np.testing.assert_allclose(up["formula"].y, [np.nan, 10 / 3 * 16, 10 / 3 * 32])
    assert not figure.stacked
    assert "fedproto: up n_i D, down n D; fedhkd: up n_i (D + C) + n_i, down n (D + C). n_i: classes" in figure.caption
    assert "n_i" not in by_name(of_run(recorded(scheme__name="fedavg")))["payload"].caption


def test_memory_of_each_rank_and_of_the_largest(newest):
    of_one = by_name(of_run(newest()))["memory"]
    assert of_one.y_label == "peak memory (GB)"
    assert dict(zip(of_one.series[0].x, of_one.series[0].y)) == {"1": 2.5, "2": 3.0}
    of_two = by_name(of_study([newest(), newest(run__seed=1)]))["memory"].series[0]
    assert of_two.y.tolist() == [3.0]
    assert of_two.low.tolist() == [3.0]  # the two do not differ


def test_who_shared_knowledge_of_what(newest):
    figures = by_name(of_run(newest()))
    assert figures["knowledge"].z_YX.tolist() == [[2, 2, 0], [0, 2, 2], [2, 0, 0]]
    classes_MR = [[2, 2, np.nan], [2, np.nan, 2], [1, 1, np.nan]]
    np.testing.assert_array_equal(figures["knowledge_rounds"].z_YX, classes_MR)
    labels = figures["knowledge_rounds"].x_label, figures["knowledge_rounds"].y_label
    assert labels == ("round", "client")
    assert figures["knowledge_pairs"].series[0].y.tolist() == [5, 3, 2]


def test_noise_against_signal(newest):
    series = by_series(by_name(of_run(newest()))["noise"])
    assert {name: one.y.tolist() for name, one in series.items()} == {"signal": [1, 1, 1], "noise": [2, 1, 0.5]}


def test_accuracy_of_classes(newest):
    figure = by_name(of_run(newest()))["class_accuracy"]
    np.testing.assert_array_equal(figure.z_YX.T, [[0.5, 0.5, 0.375], [np.nan] * 3, [1.0, 1.0, 0.75]])
    at_the_end = by_name(of_study([newest(), newest(run__seed=1), newest(scheme__name="fedavg")]))
    assert at_the_end["class_accuracy_last"].y == ("fedhkd (n=2)", "fedavg")
    assert at_the_end["class_accuracy_last"].z_YX.tolist() == [[1.0, 1.0, 0.75]] * 2


def test_unequal_models_test_each_image_once_for_each_architecture(newest):
    run = newest(model__names="small,resnet18,small")  # two tests of 14 images each would be the same with 28
    run.round_columns["global_test_n"] = 3 * run.round_columns["global_test_n"]
    run.round_columns["global_test_correct_by_class"] = np.array([[3, 6, 9], [0, 0, 0], [6, 12, 18]])
    run.confusion = 3 * run.confusion
    figures = by_name(of_run(run))
    np.testing.assert_array_equal(figures["class_accuracy"].z_YX.T, [[0.5, 0.5, 0.375], [np.nan] * 3, [1.0, 1.0, 0.75]])
    assert figures["confusion"].z_YX.tolist() == [[1, 0, 0], [0, 1, 0], [0.125, 0.125, 0.75]]
    assert figures["confusion"].caption.endswith(" 14 images, by each of the 3 architectures.")


def test_what_is_taken_for_what(newest):
    """Rows are shares of the images of a true class; one without images is not measured."""
    run = newest()
    figure = by_name(of_run(run))["confusion"]
    assert figure.z_YX.tolist() == [[1, 0, 0], [0, 1, 0], [0.125, 0.125, 0.75]]
    assert (figure.x_label, figure.y_label) == ("predicted class", "true class")
    assert figure.caption.endswith(" 14 images.")
    run.confusion = np.array([[2, 0, 0], [0, 0, 0], [1, 1, 6]])
    np.testing.assert_array_equal(by_name(of_run(run))["confusion"].z_YX[1], [np.nan] * 3)
    run.confusion = np.zeros((0, 0), int)
    assert by_name(of_run(run))["confusion"].reason == "a run has it once it is complete"
    run.part = lambda name: {"model": 100, "held": 300}  # a summary without it
    assert by_name(of_run(run))["confusion"].reason == "not recorded (a run of an older version)"


def test_a_scheme_without_knowledge_or_noise_says_so(newest):
    figures = by_name(of_run(newest("knowledge_classes", "noise_std", "signal_rms")))
    assert figures["knowledge"].reason == "the scheme shares no knowledge by class"
    assert figures["noise"].reason == "the scheme adds no noise to what it shares"


def test_nothing_measured_is_no_figure(newest):
    run = newest()
    run.round_columns["global_test_n"] = np.zeros(3, int)
    assert by_name(of_run(run))["class_accuracy"].reason == "nothing was measured yet"


def test_phases_by_round_and_by_group(recorded):
    of_one = by_series(by_name(of_run(recorded()))["seconds_phases"])
    assert of_one["train"].y.tolist() == [3, 3, 3]
    of_many = by_name(of_study([recorded(), recorded(scheme__name="fedavg")]))["seconds_phases"]
    assert isinstance(of_many, Bars)
    assert of_many.series[0].x.tolist() == ["fedhkd", "fedavg"]


def test_ranks_are_told_of_the_rounds_since_their_number_changed(newest):
    """Clients 0 and 1 live on rank 1, 2 on rank 2, since round 1; in rounds 2 and 3 rank 2 has 4.5 s and nothing to
    do, rank 1 4 s."""
    two = [{"after_round": 0, "ranks": 2}, {"after_round": 1, "ranks": 3}]
    run = newest(sessions=[*two, {"after_round": 2, "ranks": 3}])
    run.client_columns["memory_bytes"] = np.array([[9e9] * 3, [1e9, 2e9, 3e9], [1e9, 2e9, 3e9]])
    figures = by_name(of_run(run))
    assert {one.name: one.y.tolist() for one in figures["seconds_ranks"].series} == {
        "busy": [4.0, 2.25],
        "waiting": [0.25, 2.0],
    }
    np.testing.assert_array_equal(figures["waiting"].z_YX, [[np.nan, 0.5, 0], [np.nan, 0, 4]])
    assert figures["memory"].series[0].y.tolist() == [2.0, 3.0]
    other = newest(sessions=[*two[:1], {"after_round": 3, "ranks": 3}])
    figures = by_name(of_run(other))
    why = "no round has ended since the run was resumed on another number of ranks"
    assert [figures[name].reason for name in ("seconds_ranks", "memory")] == [why] * 2
    other.settings["run.seed"] = 1
    busy = by_series(by_name(of_study([run, other]))["seconds_ranks"])["busy"]
    np.testing.assert_array_equal(busy.y, [np.nan, 4.25, 2.0])  # of a rank by round, where a seed knows it


def test_a_part_that_is_alone_is_named_at_the_axis(recorded):
    """One rank waits for nobody, and bars of one colour have no legend."""
    runs = [recorded(), recorded(scheme__name="fedavg")]
    for run in runs:
        run.client_ranks = [0, 0, 0]
    assert by_name(of_study(runs))["seconds_ranks"].y_label == "time of a round: busy (s)"


def test_losses_may_be_negative_where_one_was(recorded):
    run = recorded()
    assert not by_name(of_run(run))["loss_terms"].is_signed
    run.round_columns["loss/dynamic"] = np.array([0.0, -0.1, 0.1])
    assert by_name(of_run(run))["loss_terms"].is_signed


def test_what_was_not_recorded_says_why(recorded):
    figures = by_name(of_run(recorded()))
    assert figures["memory"] == NotRecorded(
        "memory", "Peak memory", "not recorded (a run of an older version): clients/memory_bytes"
    )
    assert figures["wire_bytes"].reason == "nothing travelled: one process did it all"


def test_a_run_without_a_round_has_no_figures(recorded):
    assert of_run(recorded(())) == []
    assert of_study([]) == []


def test_a_cell_is_the_mean_of_all_that_it_stands_for():
    """Of 2 x 2 values 1, 2, 3 and a gap: 2, not the mean 2.25 of 1.5 and 3."""
    z_YX = np.full((400, 400), 5.0)
    z_YX[:2, :2] = [[1, 2], [3, np.nan]]
    z_YX[2:4, :2] = np.nan
    small_YX = cells(z_YX)
    assert small_YX.shape == (200, 200)
    assert small_YX[0, :2].tolist() == [2.0, 5.0]
    assert np.isnan(small_YX[1, 0])


def test_runs_that_differ_in_how_they_are_kept_are_seeds_of_one_line(recorded):
    runs = [recorded(run__evaluate_every=1), recorded(run__seed=1, run__evaluate_every=5, run__checkpoint_every=2)]
    assert [group.seeds for group in groups_of(runs)] == [2]


def test_long_runs_are_blocks(recorded):
    from hkd_hpc.figures.bars import blocks

    assert blocks(np.arange(5.0), 2).tolist() == [1.0, 3.5]
    assert blocks(np.array([1.0, np.nan, np.nan, np.nan]), 2).tolist()[0] == 1.0
