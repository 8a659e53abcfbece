"""The bench really runs, says everything once, and fails loudly; the table's numbers and verdicts are right."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hkd_hpc import config, schemes
from hkd_hpc.models import networks
from hkd_hpc.models.flat import FlatModel
from tools.bench import client_round, processes, scaling, suite, table
from tools.bench import metrics as bench_metrics
from tools.bench.table import Line

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TITLES = [
    "fedavg round, workload J: ours / bare loop",
    "fedavg round, workload S: ours / bare loop",
    "round of 5 epochs, workload J: fedhkd / fedavg (paper 1.47)",
    "round of 5 epochs, workload S: fedhkd / fedavg",
    "fedavg round, workload J: with train.augment=crop_flip / none",
    "fedavg round, workload J, mpirun -n 3: ours / bare loop in 2 processes",
    "share of a round that is no training, workload J",
    "fedavg round, workload S, mpirun -n 3: ours / bare loop in 2 processes",
    "share of a round that is no training, workload S",
    "peak memory (PSS) of 3 ranks, workload J",
    "exact exchange, 2 client ranks: / bare all-reduce of its bytes",
    "exact exchange, 2 client ranks: / pickled state dicts",
    "exact exchange, 2 client ranks: share of a round of workload J",
    "exact exchange, 11 ranks: / bare all-reduce of its bytes",
    "exact exchange, 11 ranks: / pickled state dicts",
    "mpirun -n 11 to the first training step / import torch alone",
    "default run, 11 ranks: data files mapped (copies on the node)",
]


def run_bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tools.bench", *arguments],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=580,
    )


def test_quick_bench_prints_every_row_once():
    done = run_bench("--quick")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("machine: ")
    assert "torch" in lines[0]
    assert lines[1].startswith("date: ")
    assert "commit: " in lines[1]
    for title in TITLES:
        found = [line for line in lines if line.startswith(title + "  ")]
        assert len(found) == 1, title
        assert found[0].endswith(("reached", "missed"))


def test_schemes_are_measured_against_the_reference():
    """One that keeps state on clients, one with work on the server, one with public images."""
    done = run_bench("--quick", "--schemes", "moon,fedgen,fedmd")
    assert done.returncode == 0, done.stderr
    rows = [line.split("  ")[0] or line.strip().split("  ")[0] for line in done.stdout.splitlines()[4:]]
    assert rows == [
        "round of 5 epochs, workload J: moon / fedavg (paper 2.36)",
        "round of 5 epochs, workload J: fedgen / fedavg (paper 1.21)",
        "fedgen, workload J: server's combine of 10 reports",
        "round of 5 epochs, workload J: fedmd / fedavg (paper 2.58)",
        "fedmd, workload J: server's combine of 10 reports",
        "round of 5 epochs, workload S: moon / fedavg",
        "round of 5 epochs, workload S: fedgen / fedavg",
        "fedgen, workload S: server's combine of 10 reports",
        "round of 5 epochs, workload S: fedmd / fedavg",
        "fedmd, workload S: server's combine of 10 reports",
    ]


def test_every_scheme_has_its_aim_and_the_papers_slowdown():
    assert {name: schemes.get(name).about.slowdown for name in schemes.PAPER} == {
        "fedavg": (None, None),
        "fedprox": (1.05, 1.18),
        "moon": (1.25, 2.36),
        "fedalign": (1.6, 4.16),
        "fedgen": (1.2, 1.21),
        "fedmd": (2.0, 2.58),
        "fedproto": (1.1, 1.34),
        "fedhkd": (1.1, 1.47),
        "fedhkd_star": (1.1, 1.29),
    }


def test_all_schemes_are_all_but_the_reference_job_by_job():
    others = ["fedprox", "moon", "fedalign", "fedgen", "fedmd", "fedproto", "fedhkd", "fedhkd_star"]
    assert list(suite.rows_of_schemes("all")) == [f"{name}_j" for name in others] + [f"{name}_s" for name in others]
    assert list(suite.rows_of_schemes("moon")) == ["moon_j", "moon_s"]


@pytest.mark.parametrize("scheme", schemes.PAPER)
def test_a_measured_round_has_everything_that_the_scheme_adds(scheme):
    settings = config.resolve(overrides=[f"scheme.name={scheme}", "model.name=small", "model.latent=8"])
    flat = FlatModel(networks.build(settings.model, 10, (3, 32, 32), seed=0))
    round, seen = client_round.Round(flat, settings, 130), []
    loss, combine = round.scheme.loss, round.scheme.combine
    round.scheme.loss = lambda *inputs: seen.append(loss(*inputs)) or seen[-1]
    round.scheme.combine = lambda server, reports: seen.append(reports) or combine(server, reports)
    assert round.run([0, 1], 1) > 0
    assert round.run([1], 1) > 0
    assert [len(terms) for terms in seen] == [len(round.scheme.terms)] * 9  # 130 images: 3 batches
    absent = {"feature"} if scheme == "fedhkd_star" else set()  # it has no feature term
    assert {name for name, term in seen[-1].items() if not term.detach() > 0} == absent
    assert set(round.clients[1].state) == set(round.scheme.client_state_shapes())
    assert round.combine(10) > 0
    assert all(len(tensor) == 10 and tensor.all() for tensor in seen[-1].values())


def test_an_unknown_scheme_is_exit_code_2(capsys):
    assert suite.main(["--schemes", "moon,nope"]) == 2
    assert "scheme.name=nope: no such scheme; known: fedavg, fedprox" in capsys.readouterr().err


def test_a_crash_of_what_is_measured_is_exit_code_1(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('broken on purpose')\n")
    done = run_bench("--quick", "--rows", "fedavg_s", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "ended with exit code 1" in done.stderr
    assert "broken on purpose" in done.stderr
    assert "reached" not in done.stdout


def test_a_failing_mpi_job_is_an_error_that_shows_its_output():
    process = processes.start_mpi(2, "-c", "import sys; print('about to fail'); sys.exit(3)")
    with pytest.raises(processes.BenchError, match="(?s)exit code 3.*about to fail"):
        processes.finish(process)


def test_a_missed_target_is_no_failure(monkeypatch, capsys):
    monkeypatch.setitem(suite.ROWS, "memory", lambda _: [Line("slow", (2.0, 4.0, 3.0), 1.5)])
    assert suite.main(["--rows", "memory"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        "slow",
        "3.00",
        "2.00",
        "..",
        "4.00",
        "of",
        "3",
        "<=",
        "1.50",
        "missed",
    ]


def test_an_unknown_row_is_exit_code_2(capsys):
    assert suite.main(["--rows", "fedavg_j,nope"]) == 2
    assert (
        "no such row: nope; known: fedavg_j, fedhkd_j, augmented_j, fedavg_s, fedhkd_s, round_j, round_s, exchange_2"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "values, at_most, verdict",
    [
        ((1.00, 1.05, 9.00), 1.05, "reached"),  # the median is 1.05, and at most 1.05 is asked
        ((1.00, 1.06, 1.07), 1.05, "missed"),
        ((1.00, 1.20), 1.10, "reached"),  # the median of two is their mean
        ((1.00, 1.22), 1.10, "missed"),
        ((5.00,), None, "-"),
    ],
)
def test_verdict_judges_the_median(values, at_most, verdict):
    assert Line("x", values, at_most).verdict == verdict


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (0.0123456, "0.0123"),
        (0.9996, "1.00"),
        (1.0499, "1.05"),
        (46.21, "46.2"),
        (118.4, "118"),
        (3750.0, "3750"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert table.number(value) == text


def test_table_is_plain_and_aligned():
    lines = [Line("a / b", (1.02, 0.98, 1.25), 1.05), Line("  a", (2.5,), unit="s"), Line("share", (0.5,), 1.0, "%")]
    assert table.table(lines).splitlines() == [
        "row    measured  spread               to reach   verdict",
        "a / b  1.02      0.980 .. 1.25 of 3   <= 1.05    reached",
        "  a    2.50 s    2.50 .. 2.50 of 1    -          -",
        "share  0.500 %   0.500 .. 0.500 of 1  <= 1.00 %  reached",
    ]


def test_pairs_alternate_until_the_time_is_used_up():
    calls = []
    sizes = suite.Sizes(min_pairs=2, max_pairs=9, row_s=0.0)
    a_s, b_s = suite.alternate(sizes, lambda i: calls.append(("a", i)) or 2.0, lambda i: calls.append(("b", i)) or 4.0)
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert suite.ratios(a_s, b_s) == (0.5, 0.5)


def test_pairs_stop_at_the_most():
    a_s, _ = suite.alternate(suite.Sizes(min_pairs=1, max_pairs=4, row_s=1000.0), lambda i: 1.0, lambda i: 1.0)
    assert len(a_s) == 4


def test_memory_of_a_process_is_its_proportional_share():
    assert 1e6 < processes.pss_bytes(os.getpid()) < 1e11
    assert processes.pss_bytes(2**22 + 1) == 0  # beyond the largest pid of Linux


def test_the_bare_loop_imports_nothing_of_ours():
    source = (ROOT / "tools/bench/bare_loop.py").read_text()
    imported = [line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert imported == ["sys", "time", "torch", "torch.nn.functional", "torchvision", "torch"]


def test_scaling_measures_fits_and_predicts():
    done = run_bench("--scaling", "--quick")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("machine: ")
    assert lines[1].startswith("date: ")
    names = ("agree", "sum", "relay", "gather", "broadcast")
    collectives = [line.split()[:2] for line in lines if line.strip().startswith(names)]
    assert collectives == [
        [name, str(ranks)] for ranks in (2, 3) for name in names for _ in range(1 + (name != "agree"))
    ] + [["agree", "3"], ["agree", "9"]]
    assert [line.split()[1] for line in lines if line.strip().startswith("status")] == ["3", "9"]
    for start, times in {
        "fitted: barrier ": 2,
        "left out, error: median ": 2,
        "strong scaling": 1,
        "weak scaling": 1,
        "Predicted, not measured: ": 1,
        "quick: tiny sizes": 1,
    }.items():
        assert len([line for line in lines if line.strip().startswith(start)]) == times, start
    assert [line for line in lines if line.startswith("10,000 clients: the exchange takes 5 % from ")]


@pytest.mark.parametrize("ratio, error", [(1.0, 0.0), (1.5, 0.5), (0.8, 0.25), (0.0, math.inf)])
def test_the_error_of_a_prediction_is_the_same_both_ways(ratio, error):
    """A model fitted to a noisy machine's times may predict nothing at all."""
    assert scaling.error(ratio) == pytest.approx(error)


@pytest.mark.parametrize("more", [("--rows", "memory"), ("--schemes", "moon")])
def test_scaling_is_a_bench_of_its_own(more, capsys):
    assert suite.main(["--scaling", *more]) == 2
    assert "--scaling: is a bench of its own" in capsys.readouterr().err


def test_the_record_of_a_run_is_measured(capsys):
    """Each row once."""
    assert bench_metrics.main(["--quick"]) == 0
    told = capsys.readouterr().out
    numbers = len(bench_metrics.OF_CLIENTS)
    assert numbers >= 15
    for title in (
        f"metrics.h5, 6 rounds x 2 clients x {numbers} numbers: all rounds",
        f"metrics.h5, 80 rounds x 3 clients x {numbers} numbers: all rounds",
        f"metrics.h5, 80 rounds x 3 clients x {numbers} numbers: a last round / a first one",
        "the same 6 rounds x 2 clients, written anew in each: all rounds",
        "a checkpoint in each of 6 rounds x 2 clients: a last one / a first one",
    ):
        assert told.count(title) == 1, title
    assert bench_metrics.main(["--slow"]) == 2


def test_a_last_round_by_a_first_one():
    assert bench_metrics.later_by_earlier([2.0, 2.0, 40.0, 7.0, 9.0, 3.0, 3.0, 1.0], 3) == 1.5
