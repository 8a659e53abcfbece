"""hkd_hpc.train(...) in the process of a notebook: the command's bits, errors as exceptions, nothing left."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import toy

import hkd_hpc
from hkd_hpc.comm.control.base import NullControl
from hkd_hpc.comm.transports.base import Comm


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz")


def settings(data, **more) -> dict:
    """Those of toy.settings, as a dict."""
    return dict(word.split("=", 1) for word in toy.settings(data)) | more


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run of two rounds, trained here."""
    return hkd_hpc.train(settings(data), out=tmp_path_factory.mktemp("run") / "one", quiet=True)


@pytest.fixture(scope="module")
def command(data, tmp_path_factory):
    """The folder of the same run, by the command."""
    folder = tmp_path_factory.mktemp("command") / "one"
    toy.train_ok(1, *toy.settings(data), "--out", folder)
    return folder


# ---- what it gives


def test_the_same_bits_and_rows_as_the_command(run, command):
    assert run.state == "complete"
    assert run.round_columns["weights_sha256"].tolist() == toy.metrics(command)["rounds/weights_sha256"].tolist()
    assert toy.rows(run.path) == toy.rows(command)


def test_again_after_another_scheme_and_outside_of_the_main_thread(data, run, tmp_path):
    hkd_hpc.train({"scheme": {"name": "fedprox", "mu": 0.5}, **settings(data)}, out=tmp_path / "prox", quiet=True)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(hkd_hpc.train, settings(data), out=tmp_path / "again", quiet=True).result()
    assert toy.last_sha(tmp_path / "again") == toy.last_sha(run.path)
    assert toy.last_sha(tmp_path / "prox") != toy.last_sha(run.path)


def test_in_a_thread_beside_a_run_of_the_main_thread_that_has_the_signal(data, run, tmp_path):
    """Only the main thread may set handlers: what another left there is not a thread's to give back."""
    before = signal.getsignal(signal.SIGTERM)
    control = NullControl()
    taken = signal.getsignal(signal.SIGTERM)
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(hkd_hpc.train, settings(data), out=tmp_path / "run", quiet=True).result()
        assert signal.getsignal(signal.SIGTERM) is taken
        control.finish()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert toy.last_sha(tmp_path / "run") == toy.last_sha(run.path)


def test_it_prints_the_command_s_lines_unless_it_is_to_be_quiet(data, tmp_path, capfd):
    short = settings(data, **{"fed.rounds": 1})
    hkd_hpc.train(short, out=tmp_path)
    assert "\nround 1/1  loss cross_entropy" in capfd.readouterr().out
    hkd_hpc.train(out=tmp_path, resume=True, quiet=True)
    assert capfd.readouterr().out == ""


# ---- what it raises


@pytest.mark.parametrize(
    "wrong, line",
    [
        ({"fed.rounds": 0}, "fed.rounds=0: not allowed; fed.rounds must be a whole number >= 1 and <= 1000000"),
        ({"fed": {"round": 3}}, "fed.round: no such setting; did you mean fed.rounds"),
        ({"scheme.name": "fedhkd", "scheme.mu": 1}, "scheme.mu: no such setting of fedhkd"),
        ({"data.path": "/nowhere.npz"}, "/nowhere.npz"),
        ({"--help": True}, "--help"),
        ([("fed.rounds", 3)], "must be a dict of settings and values"),
    ],
)
def test_wrong_settings_are_an_exception_with_the_command_s_line(data, tmp_path, wrong, line):
    given = settings(data) | wrong if isinstance(wrong, dict) else wrong
    with pytest.raises(hkd_hpc.UsageError) as raised:
        hkd_hpc.train(given, out=tmp_path / "run")
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "given, line",
    [
        ({"out": "x", "resume": "maybe"}, "--resume: only --resume or --resume=auto is allowed, not 'maybe'"),
        ({"out": "x", "resume": None}, "--resume: only --resume or --resume=auto is allowed, not 'None'"),
        ({"out": 5}, "--out 5: is no path; write it as text or as a pathlib.Path"),
        ({"out": b"x"}, "--out b'x': is no path"),
        ({"out": ""}, "--out : is empty; name a folder"),
        ({"config": 5}, "--config 5: is no path"),
        ({"preset": 5}, "--preset 5: no such preset"),
    ],
)
def test_wrong_options_are_an_exception_with_one_line(tmp_path, monkeypatch, given, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hkd_hpc.UsageError) as raised:
        hkd_hpc.train(**given)
    assert line in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_run_is_rejected_and_resumed_if_asked_to(data, run):
    with pytest.raises(hkd_hpc.UsageError, match="holds a run already; --resume resumes it"):
        hkd_hpc.train(settings(data), out=run.path)
    with pytest.raises(hkd_hpc.UsageError, match="say which run to resume with --out"):
        hkd_hpc.train(resume=True)
    before = toy.file_hashes(run.path)
    assert hkd_hpc.train(out=run.path, resume=True, quiet=True).state == "complete"
    assert toy.file_hashes(run.path) == before


def test_one_rank_of_a_launcher_s_world_is_told_to_use_the_command(data, tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(hkd_hpc.UsageError, match="rank 1 of 4 .*; for 4 ranks start python -m hkd_hpc.train"):
        hkd_hpc.train(settings(data), out=tmp_path)


def interrupt_in(monkeypatch, round: int, phase: str) -> None:
    """Ctrl-C when the training is there."""
    original = Comm.at

    def at(self, now, where, client=None):
        original(self, now, where, client)
        if (now, where) == (round, phase):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Comm, "at", at)


def test_ctrl_c_is_keyboard_interrupt_and_the_run_resumes_to_the_same_bits(data, run, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        interrupt_in(patched, 2, "weights")
        with pytest.raises(KeyboardInterrupt):
            hkd_hpc.train(settings(data), out=tmp_path, quiet=True)
    stopped = hkd_hpc.load(tmp_path)
    assert (stopped.state, len(stopped)) == ("stopped", 1)
    again = hkd_hpc.train(out=tmp_path, resume="auto", quiet=True)
    assert (again.state, toy.last_sha(tmp_path)) == ("complete", toy.last_sha(run.path))


def test_what_fails_in_one_s_own_scheme_is_raised_as_it_is(data, tmp_path, monkeypatch):
    toy.write_module(
        tmp_path,
        "failing",
        "from hkd_hpc.schemes.base import Scheme\n\n\nclass Mine(Scheme):\n"
        "    def begin(self, client):\n        raise ZeroDivisionError('mine')\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError, match="mine"):
        hkd_hpc.train({**settings(data), "scheme.name": "failing:Mine"}, out=tmp_path / "run", quiet=True)
    assert hkd_hpc.load(tmp_path / "run").state == "stopped"


# ---- what it leaves behind in the process: nothing


def test_environment_signals_and_torch_are_what_they_were(data, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    mine = lambda number, frame: None
    before = {number: signal.signal(number, mine) for number in (signal.SIGTERM, signal.SIGUSR1)}
    threads, environment = torch.get_num_threads(), dict(os.environ)
    torch.set_num_threads(2)
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    try:
        hkd_hpc.train(settings(data), out=tmp_path, quiet=True).model()
        assert [signal.getsignal(number) for number in before] == [mine, mine]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert dict(os.environ) == environment
    drawn, others = torch.rand(3), (np.random.rand(), random.random())
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert others == (np.random.rand(), random.random())


def test_import_hkd_hpc_imports_neither_torch_nor_h5py():
    code = (
        "import sys, hkd_hpc\n"
        "assert {'train', 'load', 'launch', 'UsageError'} <= set(dir(hkd_hpc))\n"
        "print([name for name in ('torch', 'h5py', 'numpy') if name in sys.modules])\n"
        "hkd_hpc.train, hkd_hpc.load, hkd_hpc.launch, hkd_hpc.Sweep, hkd_hpc.UsageError\n"
        "print([name for name in ('torch', 'h5py', 'pandas') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=toy.PROJECT)
    assert (done.stdout, done.stderr) == ("[]\n[]\n", "")


def test_train_is_the_command_s_module_too():
    from hkd_hpc import train

    assert train is sys.modules["hkd_hpc.train"]
    assert callable(train.main)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        hkd_hpc.trian  # noqa: B018


# ---- models


def test_the_global_model_predicts_with_the_accuracy_of_the_last_row(data, run):
    with np.load(data) as arrays:
        x, y = torch.from_numpy(arrays["x_test"]), torch.from_numpy(arrays["y_test"])
    model = run.model()
    assert not model.training
    assert model(x).shape == (100, 10)
    correct = int((model(x).argmax(1) == y).sum())
    assert correct / 100 == run.round_columns["global_test_accuracy"][-1]


def test_a_client_s_own_model_predicts_with_its_accuracy(data, run):
    with np.load(data) as arrays:  # clients test on training images of their own
        x, y = torch.from_numpy(arrays["x_train"]), torch.from_numpy(arrays["y_train"])
    part = run.partition
    own = part["test_index"][part["test_offset"][1] : part["test_offset"][2]]
    correct = int((run.model(client=1)(x[own]).argmax(1) == y[own]).sum())
    assert correct / len(own) == run.client_columns["local_test_accuracy"][-1, 1]
    with pytest.raises(hkd_hpc.UsageError, match="no model of client 3: round 2 holds those of 0, 1, 2"):
        run.model(client=3)


def test_images_of_another_shape_are_rejected(data, run):
    with np.load(data) as arrays:
        own = arrays["x_test"].shape[1:]
    told = re.escape(f"give them as (B, {', '.join(map(str, own))}), B of them at once")
    for wrong in ((2, own[0] + 1, *own[1:]), (2, *own[:-1], own[-1] + 1), own):
        with pytest.raises(ValueError, match=rf"inputs are of shape {re.escape(str(tuple(wrong)))}; {told}"):
            run.model()(torch.zeros(wrong, dtype=torch.uint8))


def test_images_of_an_unknown_range_are_rejected(run):
    with pytest.raises(TypeError, match="give them as torch.uint8, 0 to 255"):
        run.model()(torch.zeros(1, 3, 32, 32))
