"""The bench for GPUs runs through on a CPU, tiny; its lines say what was measured and what was not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tools.bench import gpu as bench_gpu
from tools.bench.gpu import QUICK, Bench

pytestmark = pytest.mark.slow

ROWS = [
    "plain PyTorch, resnet18, no test",
    "fedavg resnet18 run.graphs=off run.lanes=1",
    "fedavg resnet18 run.graphs=on run.lanes=1",
    "fedavg resnet18 run.graphs=on run.lanes=2",
    "fedhkd resnet18 run.graphs=off run.lanes=1",
    "fedhkd resnet18 run.graphs=on run.lanes=1",
    "fedavg resnet18 library",
    "fedavg resnet18 tf32",
    "fedhkd resnet18 tf32",
    "fedavg resnet18 bf16",
    "fedhkd resnet18 bf16",
    "fedavg resnet18",
    "fedmd resnet18",
    "plain PyTorch, shufflenet_v2, no test",
    "fedavg shufflenet_v2",
    "fedmd shufflenet_v2",
]


def test_it_runs_through_and_prints_every_row(capsys):
    assert bench_gpu.main(["--quick", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("machine: ")
    assert "commit: " in lines[1]
    assert lines[2] == "device: cpu"
    [best] = [line.removeprefix("every scheme, with ").rstrip(":") for line in lines if line.startswith("every scheme")]
    assert best in ("run.graphs=on run.lanes=1", "run.graphs=on run.lanes=2")
    rows = [line for line in lines if line.endswith(" rounds") and not line.startswith(" ")]
    named = [
        row[:78].strip().replace(f" {best} train.precision=", " ").replace(f" {best} model.convolution=", " ")
        for row in rows
    ]
    assert named[:11] == ROWS[:11]
    assert [name.replace(f" {best}", "") for name in named[11:]] == ROWS[11:]
    assert not any("failed" in line or "not measured" in line for line in lines)
    assert lines[-1].startswith("all 18 trials of the paper's Table 1")
    assert lines[-1].endswith(" GPU hours")


@pytest.fixture
def bench(tmp_path):
    def make(left_s: float = 60.0) -> Bench:
        return Bench(QUICK, torch.device("cpu"), Path("none.npz"), tmp_path, time.monotonic() + left_s)

    return make


def test_a_row_says_the_round_the_trial_the_ratio_and_how_many_rounds(bench, capsys):
    own = bench()
    assert own.row("a", lambda: [2.0, 4.0, 3.0]) == 3.0
    own.bare_s = 1.5
    assert own.row("b", lambda: [6.0]) == 6.0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["a", "3.00", "150", "-", "3", "rounds"],
        ["b", "6.00", "300", "4.00", "1", "rounds"],
    ]


def test_a_row_that_fails_or_comes_too_late_is_a_line(bench, capsys):
    assert bench().trial("fedavg", "resnet18") is None  # there are no such data
    assert bench(-1.0).row("late", lambda: [1.0]) is None
    failed, late = capsys.readouterr().out.splitlines()
    assert failed.startswith("fedavg resnet18 ")
    assert " failed: " in failed
    assert "none.npz" in failed
    assert late.split() == ["late", "not", "measured:", "no", "time", "left"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_gpu_it_is_one_line_and_exit_code_2(capsys):
    assert bench_gpu.main([]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hkd_hpc: no GPU: ")


def test_a_cpu_is_for_the_quick_one_only(capsys):
    assert bench_gpu.main(["--device", "cpu"]) == 2
    assert "--device cpu: only with --quick" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--minutes", "nan"), "--minutes nan: must be above 1"),
        (("--minutes", "0"), "--minutes 0: must"),
        (("--minutes", "-1"), "--minutes -1: must"),
        (("--data", "/nope.npz"), "--data /nope.npz: no such file"),
    ],
)
def test_what_cannot_be_meant_is_exit_code_2(arguments, words, capsys):
    assert bench_gpu.main(["--quick", "--device", "cpu", *arguments]) == 2
    assert words in capsys.readouterr().err
