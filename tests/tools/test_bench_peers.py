"""The peers' workload is the bench's, a peer that trains something else is told, a table is made whatever fails.

No peer is installed.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from torch import nn

from hkd_hpc.comm.control.watch import descendants
from tools.bench import peers as bench_peers
from tools.bench import processes
from tools.bench.peers import BARE, OURS, PLAIN, QUICK, Measurement, Peer
from tools.bench.processes import BenchError
from tools.peers import workload

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(sys.executable)
FIRST_ROUND = {"parameters": 10, "steps": [20], "loss": [2.5], "parameter_norm": 3.0, "buffer_norm": 4.0}


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=8), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 10))


# --- the workload


@pytest.mark.parametrize("name, parameters", [("J", 11_209_994), ("S", 1_286_734)])
def test_nets_are_those_of_the_jobs(name, parameters):
    assert sum(parameter.numel() for parameter in workload.build_net(name).parameters()) == parameters


def test_an_epoch_takes_each_image_once_in_batches_of_64_and_keeps_the_short_one():
    found = list(workload.batches(3, 375, 1))
    assert [len(y) for _, y in found] == [64, 64, 64, 64, 64, 55]
    assert sorted(workload.order(3, 375, 1).tolist()) == list(range(375))
    x, y = torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])
    whole_x, whole_y = workload.load(3, 375)
    assert torch.equal(x, whole_x[workload.order(3, 375, 1)])
    assert torch.equal(y, whole_y[workload.order(3, 375, 1)])
    assert x.dtype == torch.float32
    assert x.min() == -1
    assert x.max() == 1


def test_clients_and_rounds_have_orders_of_their_own():
    orders = {tuple(workload.order(client, 72, round).tolist()) for client in range(10) for round in (1, 2, 3)}
    assert len(orders) == 30


def test_the_first_step_is_adams():
    """Softmax regression by hand: the weights' gradient is (p - onehot)^T x / n, the step lr g / (|g| + eps)."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10, bias=False)).double()
    before = net[1].weight.detach().numpy().copy()
    x, y = (tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy() for tensor in workload.load(0, 8))
    logits = x.reshape(8, -1) @ before.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(8), y]).mean()
    gradient = (p - np.eye(10)[y]).T @ x.reshape(8, -1) / 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workload, "load", lambda client, images: (torch.from_numpy(x), torch.from_numpy(y)))
        assert workload.train(net, 0, 8, 1) == pytest.approx([loss], rel=1e-12)
    expected = before - 1e-3 * gradient / (np.abs(gradient) + 1e-8)
    np.testing.assert_allclose(net[1].weight.detach().numpy(), expected, rtol=0, atol=1e-9)


def test_a_round_averages_weights_and_running_statistics_of_clients_that_start_alike():
    net, start, totals, losses = small_net(), small_net(), {}, []
    for client in range(10):
        own = copy.deepcopy(start)
        losses += workload.train(own, client, 70, 2)
        for name, tensor in own.state_dict().items():
            totals[name] = totals.get(name, 0) + tensor.numpy().astype(np.float64)
    assert workload.average_round(net, 70, 2) == losses
    assert len(losses) == 20
    state = net.state_dict()
    assert set(workload.averaged(net)) == set(state) - {"1.num_batches_tracked"}
    for name in workload.averaged(net):
        np.testing.assert_allclose(state[name].numpy(), totals[name] / 10, rtol=1e-6, atol=1e-8)
    buffers = np.concatenate([totals[name] / 10 for name in ("1.running_mean", "1.running_var")])
    assert workload.norms(net)[1] == pytest.approx(np.linalg.norm(buffers), rel=1e-6)


def test_the_scripts_of_the_peers_use_nothing_of_ours():
    for script in (ROOT / "tools" / "peers").glob("*.py"):
        lines = [line.split() for line in script.read_text().splitlines()]
        imported = [words[1] for words in lines if words and words[0] in ("import", "from")]
        ours = {name for name in imported if name.startswith(("hkd_hpc", "tools"))}
        assert ours <= {"tools.bench.bare_loop", "tools.peers.workload", "tools.peers"}, script


# --- a peer


def test_a_script_says_what_it_trained():
    found, peak_bytes = bench_peers.run_peer(PLAIN, PYTHON, "S", 2, 2)
    assert found["steps"] == [10, 10]
    assert found["parameters"] == 1_286_734
    assert len(found["round_s"]) == 1
    assert 1e8 < peak_bytes < 1e10
    assert found["versions"] == {"torch": version("torch")}


def test_a_peer_that_is_not_there_says_so():
    absent = Peer("absent", "", "tools.peers.absent")
    with pytest.raises(BenchError, match=r"^tools.peers.absent: exit code 1: .*No module named tools.peers.absent\n"):
        bench_peers.run_peer(absent, PYTHON, "J", 8, 1)


def test_the_reason_is_the_first_exception_not_what_a_launcher_says_of_it():
    output = (
        "a warning\n[rank0]: Traceback (most recent call last):\n[rank0]: OSError: [Errno 98] Address already in use\n"
        "E1128 elastic failed (exitcode: 1)\ntorch.distributed.elastic.ChildFailedError: \n======\ntrain "
        "FAILED\n======\n"
    )
    assert bench_peers.reason_in(output) == "[rank0]: OSError: [Errno 98] Address already in use"
    assert bench_peers.reason_in("killed\n") == "killed"
    assert bench_peers.reason_in("") == "no output"


def test_a_peer_that_hangs_is_ended_with_all_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_peers, "RUN_S", 3.0)
    code = (
        f"import subprocess, time; child = subprocess.Popen(['sleep', '100']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(100)"
    )
    with pytest.raises(BenchError, match="^hung: not done after 3 s$"):
        bench_peers.run_peer(Peer("hung", "", "hung", ("-c", code)), PYTHON, "J", 8, 1)
    toy.wait_until(lambda: not toy.is_running(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize(
    "name, value",
    [
        ("parameters", 11),
        ("steps", [20, 20]),
        ("steps", [10]),
        ("loss", [2.50001]),
        ("parameter_norm", 3.00001),
        ("buffer_norm", 4.00001),
        ("buffer_norm", float("nan")),
    ],
)
def test_a_peer_that_trains_something_else_is_told(name, value):
    with pytest.raises(BenchError, match=f"^trains something else: {name} "):
        bench_peers.compare({**FIRST_ROUND, name: value}, FIRST_ROUND)


def test_sums_in_another_order_are_the_same():
    bench_peers.compare({**FIRST_ROUND, "parameter_norm": 3.0000003, "buffer_norm": 3.9999997}, FIRST_ROUND)


@pytest.mark.parametrize(
    "steps, loss, problem",
    [
        ([60, 60, 60, 60], [2.4, 2.3, 2.2, 2.1], None),
        ([60, 60, 60, 30], [2.4, 2.3, 2.2, 2.1], "trains something else: [60, 60, 60, 30] steps in its rounds"),
        ([60, 60, 60, 60], [2.4, 2.4, 2.4, 2.4], "does not learn: loss [2.4, 2.4, 2.4, 2.4]"),
    ],
)
def test_a_timed_run_made_all_steps_and_learned(steps, loss, problem):
    check = bench_peers.check_timed
    if problem is None:
        check({"steps": steps, "loss": loss}, bench_peers.Sizes())
    else:
        with pytest.raises(BenchError) as raised:
            check({"steps": steps, "loss": loss}, bench_peers.Sizes())
        assert str(raised.value).startswith(problem)


def test_a_peer_that_cannot_be_installed_is_marked_with_pips_words(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_peers, "same_torch", list)  # gigabytes
    peers, found = [Peer("gone", "./gone==1", "gone")], {"gone": {"J": Measurement(), "S": Measurement()}}
    assert bench_peers.prepare(tmp_path / "env", peers, found, QUICK) == {"gone": "./gone==1"}
    assert found["gone"]["J"].why.startswith("pip install ./gone==1: ")
    assert "gone" in found["gone"]["S"].why
    assert (tmp_path / "env" / "bin" / "python").exists()


def test_an_environment_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        BenchError, match=f"--env {tmp_path}/file/env: no environment could be made there: .*Not a directory"
    ):
        bench_peers.install(tmp_path / "file" / "env", Peer("gone", "gone==1", "gone"))


# --- the table


def test_table_has_medians_ratios_of_turns_and_reasons():
    found = {
        BARE: {"J": Measurement([10.0, 20.0, 12.0], [10**9, 2 * 10**9, 10**9]), "S": Measurement([4.0], [10**9])},
        OURS: {"J": Measurement([5.0, 8.0, 6.0], [2 * 10**9] * 3), "S": Measurement([3.0], [15 * 10**8])},
        "broken": {
            "J": Measurement(why="pip install: a | b\n c"),
            "S": Measurement([5.0], [3 * 10**9], why="exit code 1"),
        },
    }
    versions = {BARE: "torch 2", OURS: "this commit", "broken": "1.0"}
    assert bench_peers.table(found, versions).splitlines() == [
        "| system | version | J, s/round | S, s/round | J / bare | S / bare | peak PSS J, GB | peak PSS S, GB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| bare loop, 2 processes | torch 2 | 12.0 | 4.00 | 1 | 1 | 2.00 | 1.00 |",
        "| hkd_hpc | this commit | 6.00 | 3.00 | 0.500 (0.400 to 0.500) | 0.750 | 2.00 | 1.50 |",
        "| broken | 1.0 | pip install: a / b c | exit code 1 | – | – | – | – |",
    ]


def test_a_system_that_failed_is_not_tried_again(capsys):
    found, calls = Measurement(), []

    def fail():
        calls.append(1)
        raise BenchError("first line\nsecond line")

    for _ in range(2):
        bench_peers.attempt(found, "turn 1", fail)
    assert found.why == "first line"
    assert calls == [1]
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("turn 1: first line; ")
    assert second == "    second line"


def test_turns_of_nothing_are_exit_code_2(capsys):
    assert bench_peers.main(["--turns", "0"]) == 2
    assert "--turns 0: must be at least 1" in capsys.readouterr().err


def test_quick_run_of_ours_beside_the_bare_loop():
    command = [sys.executable, "-m", "tools.bench.peers", "--quick", "--no-peers", "--jobs", "S"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("machine: ")
    assert lines[2] == "quick: tiny sizes, the numbers mean nothing"
    rows = [line.split(" | ") for line in lines[3:]]
    assert [cells[0] for cells in rows] == ["| system", "| ---", "| bare loop, 2 processes", "| hkd_hpc"]
    seconds = [float(cells[2]) for cells in rows[2:]]
    assert all(0 < second < 300 for second in seconds)


# --- memory


def test_descendants_are_found_through_generations():
    shell = subprocess.Popen(["sh", "-c", "sleep 100 & sh -c 'sleep 100; true' & wait"], start_new_session=True)
    try:
        toy.wait_until(lambda: len(descendants(shell.pid)) == 3)
    finally:
        bench_peers.end_group(shell)


def test_peak_is_the_largest_sum_until_it_is_done():
    looks = iter([False, False, True])
    peak_bytes = processes.peak_until(lambda: next(looks), lambda: [os.getpid(), os.getpid()], every_s=0.0)
    assert peak_bytes > 1.5 * processes.pss_bytes(os.getpid())
    assert processes.peak_until(lambda: True, lambda: [os.getpid()]) == 0
