"""A rank that fails, is killed, or leaves: the whole job ends soon, non-zero, with one message: who, where, when."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import toy

from hkd_hpc.data import share
from hkd_hpc.models import evaluate
from hkd_hpc.schemes import PAPER
from tools.forked_ranks import end_when_last

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz")


class Fault(Exception):
    pass


def fail():
    raise Fault("on purpose")


KINDS = {
    "raise": fail,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "_exit": lambda: os._exit(0),
    "exit": lambda: sys.exit(0),
}


def before(owner, name, condition, action):
    """Patch a function so that `action` runs first whenever condition(*args)."""
    original = getattr(owner, name)

    def patched(*args, **kwargs):
        if condition(*args):
            action()
        return original(*args, **kwargs)

    setattr(owner, name, patched)


def install(place, action):
    """Make this rank do `action` in round 3 (or in set-up) at `place`."""
    from hkd_hpc.assembly import federation
    from hkd_hpc.schemes.fedhkd import FedHKD
    from hkd_hpc.server import Server

    if place == "set-up":
        before(federation, "partition_of", lambda *_: True, action)
    elif place == "report":
        before(FedHKD, "report", lambda scheme, client: client.round == 3, action)
    elif place == "test":
        before(Server, "test", lambda server, *_: len(server.history) == 3, action)
    else:
        toy.on_place(3, place, action)


# rank, place, kind: every kind on every rank, every place with several kinds
CASES = [
    (0, "set-up", "raise"),
    (1, "set-up", "kill"),
    (2, "set-up", "exit"),
    (1, "training", "raise"),
    (2, "training", "kill"),
    (1, "training", "_exit"),
    (2, "training", "exit"),
    (1, "report", "raise"),
    (2, "report", "_exit"),
    (0, "evaluation", "raise"),
    (0, "evaluation", "kill"),
    (0, "test", "_exit"),
    (0, "test", "exit"),
    (0, "reports", "kill"),
    (1, "reports", "raise"),
    (2, "message", "kill"),
    (1, "message", "exit"),
    (2, "weights", "_exit"),
    (0, "weights", "raise"),
]


@pytest.mark.parametrize("rank,place,kind", CASES)
def test_one_rank_fails(tmp_path, data, rank, place, kind):
    def patch(own):
        if own == rank:
            install(place, KINDS[kind])

    results = toy.train(3, *toy.settings(data, "fed.rounds=4"), "--out", tmp_path / "run", patch=patch)
    succeeded = {other for other, result in enumerate(results) if result.exit_code == 0}
    assert succeeded <= ({rank} if kind == "_exit" else set()), results
    output = "\n".join(result.output for result in results)
    lines = toy.our_lines([output])
    assert len(lines) == 1, output
    assert f"rank {rank} " in lines[0]
    if kind == "raise":
        assert "Fault: on purpose" in lines[0]
        assert output.count("Traceback") == 1
    if place == "set-up":
        assert "phase set-up" in lines[0]
        return
    assert "round 3" in lines[0], lines[0]
    phase = {"report": "training", "test": "evaluation"}.get(place, place)
    assert f"phase {phase}" in lines[0] or (rank and kind in ("kill", "_exit")), lines[0]
    assert phase != "training" or kind not in ("raise", "exit") or "client" in lines[0]
    saved = 3 if phase == "evaluation" else 2  # a round is saved before it is tested
    assert [toy.checkpoint(tmp_path / "run", round)["round"] for round in (saved - 1, saved)] == [saved - 1, saved]
    assert toy.rounds_done(tmp_path / "run") in (1, 2)  # the test of round 2 happens beside the training of round 3


def test_the_round_before_a_failure_is_saved(tmp_path, data):
    """A client fails at the very start of round 2, while rank 0 still saves round 1, which was finished: it is kept."""
    results = toy.train(
        3,
        *toy.settings(data),
        "--out",
        tmp_path / "run",
        patch=lambda rank: rank == 2 and toy.on_place(2, "training", fail),
    )
    assert all(result.exit_code for result in results)
    assert toy.checkpoint(tmp_path / "run", 1)["round"] == 1


def test_the_last_test_has_a_phase_of_its_own(tmp_path, data):
    def patch(rank):
        if rank == 0:
            from hkd_hpc.server import Server

            before(Server, "test", lambda server, *_: len(server.history) == 2, fail)

    lines = toy.our_lines(
        result.output for result in toy.train(2, *toy.settings(data), "--out", tmp_path / "run", patch=patch)
    )
    assert len(lines) == 1, lines
    assert "phase evaluation" in lines[0], lines


def test_a_failed_job_resumes(tmp_path, data):
    toy.train(
        3,
        *toy.settings(data),
        "--out",
        tmp_path / "run",
        patch=lambda rank: rank == 1 and toy.on_place(2, "weights", fail),
    )
    toy.train_ok(2, "--resume", "--out", tmp_path / "run")
    toy.train_ok(1, *toy.settings(data), "--out", tmp_path / "whole")
    assert toy.rows(tmp_path / "run") == toy.rows(tmp_path / "whole")


def test_nothing_is_left_behind_in_memory(tmp_path, data):
    """A rank that dies in set-up leaves no copy of the data in /dev/shm or the temporary folder."""

    def patch(rank):
        original = share.publish

        def publish(dataset):
            path = original(dataset)
            (tmp_path / "copies").write_text(path)
            return path

        share.publish = publish
        if rank == 2:
            install("set-up", fail)

    toy.train(3, *toy.settings(data), "--out", tmp_path / "run", patch=patch)
    copy = Path((tmp_path / "copies").read_text())
    assert copy.name.startswith("hkd_hpc-data-")
    assert not copy.exists()


def test_a_stopped_rank_is_named_after_the_time_out(tmp_path, data):
    def patch(rank):
        if rank == 2:
            toy.on_place(2, "training", stop_for_good)

    results = toy.train(
        3, *toy.settings(data, "comm.timeout_s=2"), "--out", tmp_path / "run", patch=patch, watch=end_when_last(2)
    )
    lines = toy.our_lines(result.output for result in results)
    assert len(lines) == 1, lines
    assert "rank 2 " in lines[0], lines
    assert "did not reach" in lines[0], lines
    assert "2 s" in lines[0], lines
    assert results[0].exit_code == 1
    assert results[1].exit_code == 1


TURN_S, TURNS, SILENT_S = 1.0, 10, 5.0  # a rank works for TURNS turns, twice as long as it may be silent


def slow_steps():
    from hkd_hpc.training import LocalTrainer

    before(LocalTrainer, "_step", lambda trainer, client, *_: client.round == 3, lambda: time.sleep(TURN_S))


def slow_tests():
    from hkd_hpc.worker import Worker

    original = Worker.test_global

    def test_global(self, *given):
        before(evaluate, "test", lambda *_: True, lambda: time.sleep(TURN_S))
        return original(self, *given)

    Worker.test_global = test_global


def slow_statistics():
    before(evaluate, "reestimate_batch_norm", lambda *_: True, lambda: time.sleep(TURN_S))


@pytest.mark.parametrize("slow", [slow_steps, slow_tests, slow_statistics])
def test_a_rank_that_works_after_the_last_round_is_not_late(tmp_path, data, slow):
    """Rank 2 fine-tunes 2 clients by 5 steps each, or tests 10 clients, while rank 1 has done so."""
    clients, epochs = (4, 5) if slow is slow_steps else (2 * TURNS, 0)
    more = [f"fed.clients={clients}", f"fed.finetune_epochs={epochs}", f"comm.timeout_s={SILENT_S}"]
    more += ["data.partition=iid", "train.batch_size=75"]
    toy.train_ok(3, *toy.settings(data, *more), "--out", tmp_path / "run", patch=lambda rank: rank == 2 and slow())


def stop_for_good():
    os.kill(os.getpid(), signal.SIGSTOP)


# ---- a set-up that fails

FAILS = """
from hkd_hpc.schemes.base import Scheme

class Fails(Scheme):
    def __init__(self, *given):
        raise ArithmeticError("on purpose")
"""


def without_gpu():
    from hkd_hpc.comm import connect

    connect.visible_devices = lambda requested: 0


def with_other_data():
    from hkd_hpc.assembly import federation

    original = federation.node_copy

    def node_copy(*given):
        dataset = original(*given)
        return dataclasses.replace(dataset, x_train=dataset.x_train[1:], y_train=dataset.y_train[1:])

    federation.node_copy = node_copy


class SetUpFault(NamedTuple):
    """What is wrong on some ranks, and the line that says so."""

    told: str
    settings: tuple[str, ...] = ()
    on: Callable[[int, int], bool] = lambda rank, size: True
    action: Callable[[], None] = lambda: None


def last(rank, size):
    return rank == size - 1


SET_UP_FAULTS = {
    "device": SetUpFault("torch sees no CUDA or ROCm device", ("run.device=cuda",), action=without_gpu),
    "data": SetUpFault("junk.npz", ("data.path={folder}/junk.npz",)),
    "scheme": SetUpFault("ArithmeticError: on purpose", ("scheme.name=failing:Fails",)),
    "exit": SetUpFault("left the job with sys.exit(0)", on=last, action=lambda: install("set-up", KINDS["exit"])),
    "killed": SetUpFault("ended without an error message", on=last, action=lambda: install("set-up", KINDS["kill"])),
    "other data": SetUpFault("ranks [2] have another data", on=last, action=with_other_data),
}
ONE_RANK = ("data", "scheme", "exit")


@pytest.fixture(scope="module")
def faulty(data, tmp_path_factory):
    """faulty(size, fault, out): such a job, and the lines of ours."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "junk.npz").write_bytes(b"no zip file")
    toy.write_module(folder, "failing", FAILS)

    def job(size, fault, out):
        def patch(rank):
            sys.path.insert(0, str(folder))
            if fault.on(rank, size):
                fault.action()

        more = [word.format(folder=folder) for word in fault.settings]
        results = toy.train(size, *toy.settings(data, *more), "--out", out, patch=patch)
        assert all(result.exit_code != 0 for result in results), results
        return toy.our_lines(result.output for result in results)

    return job


@pytest.mark.parametrize("size, fault", [(1, name) for name in ONE_RANK] + [(3, name) for name in SET_UP_FAULTS])
def test_a_set_up_that_fails_leaves_nothing(tmp_path, faulty, size, fault):
    [line] = faulty(size, SET_UP_FAULTS[fault], tmp_path / "run")
    assert SET_UP_FAULTS[fault].told in line
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size, fault", [(1, "scheme"), (3, "exit")])
def test_a_set_up_that_fails_leaves_a_folder_of_the_user_as_it_was(tmp_path, faulty, size, fault):
    (tmp_path / "notes.txt").write_text("mine")
    assert len(faulty(size, SET_UP_FAULTS[fault], tmp_path)) == 1
    assert os.listdir(tmp_path) == ["notes.txt"]


# ---- under a real mpirun

FAULTY = """
import os, sys, signal
if os.environ.get("OMPI_COMM_WORLD_RANK") == "2" and "hkd_hpc.train" in " ".join(sys.orig_argv):
    import hkd_hpc.comm.transports.base as base
    original = base.Comm.at
    def at(self, round, phase, client=None):
        original(self, round, phase, client)
        if (round, phase) == (3, "training"):
            ACTION
    base.Comm.at = at
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    "action,words",
    [
        ("raise ValueError('on purpose')", ("rank 2 ", "round 3", "training", "ValueError")),
        ("os.kill(os.getpid(), signal.SIGKILL)", ("rank 2 ", "round 3")),
    ],
)
def test_a_client_rank_fails_under_mpirun(tmp_path, data, action, words):
    env = toy.write_module(tmp_path, "sitecustomize", FAULTY.replace("ACTION", action))
    code, out, err = toy.mpirun(3, *toy.settings(data, "fed.rounds=4"), "--out", tmp_path / "run", env=env)
    assert code != 0
    lines = toy.our_lines([out, err])
    assert len(lines) == 1, err
    assert all(word in lines[0] for word in words), err
    assert toy.checkpoint(tmp_path / "run", 1)["round"] == 1


@pytest.mark.mpi
def test_a_set_up_that_fails_under_mpirun_leaves_nothing(tmp_path, data):
    settings = toy.settings(data, "run.device=cuda")
    code, out, err = toy.mpirun(3, *settings, "--out", tmp_path / "run", env={"CUDA_VISIBLE_DEVICES": ""})
    [line] = toy.our_lines([out, err])
    assert "torch sees no CUDA or ROCm device for ranks 0-2" in line
    assert code == 2
    assert os.listdir(tmp_path) == []


@pytest.mark.mpi
def test_no_rank_outlives_mpirun_and_resume_follows_at_once(tmp_path, data):
    folder = tmp_path / "run"
    arguments = toy.settings(data, "fed.rounds=400")
    job = toy.start_mpirun(3, *arguments, "--out", folder)
    threading.Thread(target=job.communicate, daemon=True).start()
    try:
        toy.wait_until(lambda: toy.rounds_done(folder) >= 2)
        pids = toy.rank_pids(job.pid)
        assert sorted(pids) == [0, 1, 2]
    finally:
        os.kill(job.pid, signal.SIGKILL)
    (result,) = toy.train(1, "--resume", "--out", folder, patch=stop_after_start)
    assert "resuming after round" in result.output, result
    assert result.exit_code == 3, result
    toy.wait_until(lambda: not any(toy.is_running(pid) for pid in pids.values()))


def stop_after_start(rank):
    """The resumed run need not run to its end: it leaves with code 3 in its first round."""
    toy.on_place(None, "weights", lambda: os._exit(3))


# ---- clients that cannot deliver

SIZES = (2, 63, 64, 65, 129)


def small(data, seed, *more):
    return toy.settings(
        data,
        "data.partition=natural",
        "fed.clients=7",
        "data.fraction=.5",
        "data.public_fraction=.01",
        f"data.partition_seed={seed}",
        "train.batch_size=64",
        *more,
    )


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """(data, partition seed): training images (0, 1, 2, 63, 64, 65, 129); client 0's only image is in the public
    set.
    """
    data, sizes, seed = small_clients(tmp_path_factory.mktemp("few"))
    assert sizes == [0, 1, *SIZES]
    return data, seed


@pytest.mark.parametrize("ranks, scheme", [(4, "fedhkd"), *((1, name) for name in PAPER)])
def test_small_clients_with_batch_norm(tmp_path, few, ranks, scheme):
    outputs = toy.train_ok(ranks, *small(*few, f"scheme.name={scheme}"), "--out", tmp_path / "run")
    found = toy.metrics(tmp_path / "run")
    assert found["clients/train_n"].tolist() == [[0, 0, 2, 63, 64, 65, 129]] * 2
    assert found["clients/status"].tolist() == [[2, 2, 0, 0, 0, 0, 0]] * 2
    assert found["rounds/train_n"].tolist() == [323, 323]
    assert np.isfinite(found["rounds/loss/cross_entropy"]).all()
    assert np.isfinite(found["rounds/global_test_loss"]).all()
    assert "[0, 1] have too few images" in outputs[0]


@pytest.mark.parametrize(
    "settings",
    [
        ("fed.participation=.15",),
        ("fed.drop_rate=.8",),
        ("fed.participation=.3", "fed.straggler_rate=.9", "train.batchnorm=reestimate"),
    ],
    ids=" ".join,
)
def test_a_round_never_has_clients_alone_that_cannot_train(tmp_path, few, settings):
    """One client a round, or hardly one that answers: without care rounds of clients 0 and 1 alone would be drawn."""
    for ranks in (1, 3):
        toy.train_ok(
            ranks, *small(*few, "fed.rounds=12", "run.checkpoint_every=12", *settings), "--out", tmp_path / str(ranks)
        )
    assert toy.rows(tmp_path / "1") == toy.rows(tmp_path / "3")
    found = toy.metrics(tmp_path / "1")
    assert (found["rounds/train_n"] > 0).all()
    assert np.isfinite(found["rounds/global_test_loss"]).all()
    status = found["clients/status"][:, :2]
    assert set(status[~np.isnan(status)]) <= {2}  # NaN: not sampled


def small_clients(folder):
    """(data, training images by client, partition seed): fraction .5 of twice the images, all of client 0 set aside."""
    from hkd_hpc.data.partition import Labels, Rule, make_partition

    counts = [1, 1, *(2 * size for size in SIZES)]
    ids = np.repeat(np.arange(7), counts)
    labels = np.arange(len(ids)) % 10
    for seed in range(3000):
        rule = Rule(clients=7, kind="natural", seed=seed, fraction=0.5, public_fraction=0.01)
        made = make_partition(Labels(labels, labels, 10, client_train=ids, client_test=np.arange(70) // 10), rule)
        sizes = [len(index) for index in made.train]
        if sizes == [0, 1, *SIZES]:
            break
    data = toy.save_data(folder / "data.npz", len(ids), 70, client_train=ids, client_test=np.arange(70) // 10)
    return data, sizes, seed


@pytest.mark.parametrize("size", [1, 3])
def test_all_clients_too_small(tmp_path, size):
    data = toy.save_natural(tmp_path / "data.npz", [1] * 10, 1)
    results = toy.train(
        size, *toy.settings(data, "data.partition=natural", "fed.clients=10"), "--out", tmp_path / "run"
    )
    assert all(result.exit_code in (1, 2) for result in results), results
    lines = toy.our_lines(result.output for result in results)
    assert len(lines) == 1, results
    assert "no client" in lines[0], results


def make_nan(clients, round):
    """These clients' weights become NaN at the end of their training in `round`."""

    def patch(rank):
        from hkd_hpc.training import LocalTrainer

        original = LocalTrainer.epochs

        def epochs(self, given):
            yield from original(self, given)
            if given.client.id in clients and given.round == round:
                self.flat.parameters_P[5] = float("nan")

        LocalTrainer.epochs = epochs

    return patch


@pytest.mark.parametrize("scheme", ["fedavg", "fedhkd"])
def test_a_client_with_nan_counts_nothing(tmp_path, data, scheme):
    arguments = toy.settings(data, f"scheme.name={scheme}", "fed.rounds=3")
    for size in (1, 3):
        outputs = toy.train_ok(size, *arguments, "--out", tmp_path / str(size), patch=make_nan({1}, 2))
        warnings = [line for line in outputs[0].splitlines() if "warning" in line]
        assert len(warnings) == 1, outputs[0]
        assert "round 2" in warnings[0], outputs[0]
        assert "client 1" in warnings[0], outputs[0]
    assert toy.rows(tmp_path / "1") == toy.rows(tmp_path / "3")
    found = toy.metrics(tmp_path / "3")
    assert found["clients/status"].tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert found["clients/train_n"][1].tolist() == [75, 0, 75]
    assert found["rounds/clients_refused"].tolist() == [0, 1, 0]
    stored = toy.checkpoint(tmp_path / "3", 3)
    assert all(np.isfinite(value).all() for name, value in stored.items() if name.startswith(("global/", "message/")))


def test_all_clients_with_nan(tmp_path, data):
    results = toy.train(3, *toy.settings(data), "--out", tmp_path / "run", patch=make_nan({0, 1, 2}, 2))
    assert [result.exit_code for result in results] == [1, 1, 1]
    lines = toy.our_lines(result.output for result in results)
    assert len(lines) == 1
    assert "round 2" in lines[0]
    assert "3 of 3 clients were rejected, more than fed.max_bad_fraction=0.5" in lines[0]
    reasons = [line for line in results[0].output.splitlines() if "warning: round 2: client" in line]
    assert len(reasons) == 3
    assert all("rejected: extractor" in line and "has nan" in line for line in reasons)
    assert toy.checkpoint(tmp_path / "run", 1)["round"] == 1


# ---- two runs, one folder


@pytest.mark.mpi
def test_two_runs_on_one_folder(tmp_path, data):
    """The second one starts while the first trains; it ends and names the holder."""
    ended = []
    first = threading.Thread(
        target=lambda: ended.append(toy.mpirun(2, *toy.settings(data, "fed.rounds=12"), "--out", tmp_path / "run"))
    )
    first.start()
    toy.wait_until(lambda: (tmp_path / "run/run.lock").exists())
    results = toy.train(2, *toy.settings(data, "fed.rounds=12"), "--out", tmp_path / "run")
    first.join()
    assert ended[0][0] == 0, ended
    assert [result.exit_code for result in results] == [2, 2]
    [line] = toy.our_lines(result.output for result in results)
    assert re.search(r"in use by another run: host \S+, process \d+|holds a run already", line), line
    assert toy.rounds_done(tmp_path / "run") == 12
