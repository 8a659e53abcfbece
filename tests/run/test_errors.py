"""Wrong input: exit code 2, one line for the whole job, no traceback, no folder; found before torch is loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import toy

NO_TORCH = 'import os, sys\nsys.stderr.write("torch was imported\\n")\nos._exit(77)\n'
WRONG = {
    "nan": (["data.beta=nan"], ("data.beta=nan", "> 0")),
    "typo": (["fed.cleints=3"], ("fed.cleints", "fed.clients")),
    "scheme": (["scheme.name=nope"], ("scheme.name=nope", "fedavg", "fedhkd")),
    "flag": (["--no-such-flag"], ("--no-such-flag",)),
    "number": (["fed.rounds=-1"], ("fed.rounds=-1", ">= 1")),
    "path": (["data.name=file"], ("data.path",)),
    "resume": (["--resume"], ("--out",)),
    "resume of nothing": (
        ["--resume", "--out", "runs/one"],
        (
            "--resume",
            "runs/one: holds no run; --resume=auto begins one",
        ),
    ),
    "resume of nothing, dry": (["--resume", "--dry-run", "--out", "."], ("holds no run",)),
    "resume of another kind": (["--resume=now", "--out", "."], ("--resume", "now")),
    "data": (["data.name=cifar10", "data.dir=no where"], ("python -m hkd_hpc.data prepare cifar10 --dir", "no where")),
    "config": (["--config", "absent.toml"], ("absent.toml",)),
    "folder": (["--out", "a_file"], ("a_file",)),
}


@pytest.fixture
def shadow(tmp_path):
    """A folder to run in, and an environment in which importing torch ends the process."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work/a_file").write_text("mine")
    return tmp_path / "work", toy.write_module(tmp_path / "modules", "torch", NO_TORCH)


def check(folder, code, out, err, words):
    assert code == 2, (code, out, err)
    assert "Traceback" not in out + err, err
    assert "torch was imported" not in err, err
    lines = [line for line in err.splitlines() if line.startswith("hkd_hpc:")]
    assert len(lines) == 1, err
    assert all(word in lines[0] for word in words), lines[0]
    assert sorted(os.listdir(folder)) == ["a_file"]
    assert (folder / "a_file").read_text() == "mine"


@pytest.mark.parametrize("name", WRONG)
def test_one_process(shadow, name):
    folder, env = shadow
    arguments, words = WRONG[name]
    paths = os.pathsep.join([env["PYTHONPATH"], str(toy.PROJECT)])
    ran = subprocess.run(
        [sys.executable, "-m", "hkd_hpc.train", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=300,
    )
    check(folder, ran.returncode, ran.stdout, ran.stderr, words)


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["nan", "scheme", "flag", "data", "config"])
def test_four_ranks(shadow, name):
    folder, env = shadow
    arguments, words = WRONG[name]
    check(folder, *toy.mpirun(4, *arguments, env=env, cwd=folder), words)


@pytest.mark.mpi
def test_the_line_is_there_when_rank_0_is_the_last_to_start(shadow):
    """The other ranks know of the mistake too, and their end makes the launcher end rank 0."""
    folder, env = shadow
    slow = 'import os, time\nif os.environ.get("OMPI_COMM_WORLD_RANK") == "0":\n    time.sleep(1.5)\n'
    toy.write_module(folder.parent / "modules", "sitecustomize", slow)
    check(folder, *toy.mpirun(3, "data.beta=nan", env=env, cwd=folder), ("data.beta=nan",))


def test_nobody_waits_for_a_rank_0_that_rejects(tmp_path):
    """Missing data is seen by rank 0 alone. Without a launcher that ends the others they must learn of it at once."""
    results = toy.train(3, "data.name=cifar10", f"data.dir={tmp_path}")
    assert [result.exit_code for result in results] == [2, 2, 2]
    assert len(toy.our_lines(result.output for result in results)) == 1


LATE = {
    "label": ({"y_train": np.r_[np.arange(299) % 10, 11]}, ("y_train", "11")),
    "test label": ({"y_test": np.r_[np.arange(99) % 10, 10]}, ("y_test", "10")),
    "floats": ({"x_train": np.zeros((300, 3, 32, 32), np.float32)}, ("x_train", "float32", "uint8")),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", LATE)
def test_a_mistake_inside_the_data_file(tmp_path, name, size):
    """Found after the start, by the rank that reads for its node."""
    more, words = LATE[name]
    data = toy.save_data(tmp_path / "data.npz", **more)
    results = toy.train(size, *toy.settings(data), "--out", tmp_path / "run")
    assert [result.exit_code for result in results] == [2] * size, results
    output = "".join(result.output for result in results)
    lines = toy.our_lines([output])
    assert len(lines) == 1, output
    assert all(word in lines[0] for word in words), output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists(), "no folder is left of a run that never began"


def test_more_clients_than_images(tmp_path):
    data = toy.save_data(tmp_path / "data.npz", 20, 20)
    results = toy.train(2, *toy.settings(data, "fed.clients=30"), "--out", tmp_path / "run")
    assert [result.exit_code for result in results] == [2, 2]
    lines = toy.our_lines(result.output for result in results)
    assert len(lines) == 1
    assert "fed.clients=30" in lines[0]


def test_a_damaged_stored_config_is_one_line(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text('{"data": ')
    results = toy.train(1, "--resume", "--out", tmp_path / "run")
    assert results[0].exit_code in (1, 2), results[0].output
    assert "Traceback" not in results[0].output, results[0].output
    assert len(toy.our_lines([results[0].output])) == 1
    assert "config.json" in results[0].output


# ---- what is printed, and where


def test_help_and_version_are_printed_once():
    for flag, word in (("--help", "fed.rounds"), ("--version", "hkd_hpc ")):
        results = toy.train(3, flag)
        assert [result.exit_code for result in results] == [0, 0, 0]
        assert word in results[0].output
        assert [result.output for result in results[1:]] == ["", ""]


@pytest.fixture
def data(tmp_path):
    return toy.save_data(tmp_path / "data.npz")


def test_progress_lines(tmp_path, data):
    outputs = toy.train_ok(3, *toy.settings(data, "fed.rounds=3"), "--out", tmp_path / "run")
    assert outputs[1:] == ["", ""], "rank 0 alone prints"
    assert "\x1b" not in outputs[0]
    assert "\r" not in outputs[0]
    rounds = re.findall(
        r"^round +(\d)/3 .*loss cross_entropy \d.* soft .* feature .*local .*global .* left$", outputs[0], re.MULTILINE
    )
    assert rounds == ["1", "2", "3"]
    table = outputs[0][outputs[0].index("last round") :]
    for word in (
        "local (own",
        "global (averaged BatchNorm)",
        "re-estimated",
        "majority",
        "chance",
        "best = the best round, selected on the test set",
        "payload",
        "wire",
        "seconds by phase",
        str(tmp_path / "run/metrics.h5"),
        "round_0003.h5",
    ):
        assert word in table, word
    assert "private" not in outputs[0]


def test_a_dry_run_of_the_defaults_says_that_they_are():
    lines = toy.train_ok(1, "--dry-run")[0].splitlines()
    assert any(re.fullmatch(r"all \d+ settings are the defaults, which --help lists", line) for line in lines)
    assert not any(line.split() == ["setting", "value", "default"] for line in lines)


@pytest.mark.parametrize("size", [1, 3])
def test_dry_run(tmp_path, data, size):
    results = toy.train_ok(size, *toy.settings(data), "--dry-run", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert sorted(os.listdir(tmp_path)) == ["data.npz"]
    assert results[1:] == [""] * (size - 1)
    assert re.search(r"^fed\.rounds +2 +10$", results[0], re.MULTILINE)
    for word in (f"{size} rank", "3 clients", "class", "memory", "payload", "devices"):
        assert word in results[0], word
    client_lines = re.findall(r"^ +[012] +\d +\d+ +\d+ +\d+ +[\d ]+$", results[0], re.MULTILINE)
    assert [line.split()[2:5] for line in client_lines] == [["75", "0", "25"]] * 3  # train, val, test


@pytest.mark.parametrize(
    "size, scheme, told",
    [
        (1, "fedavg", ""),
        (4, "fedavg", ""),
        (5, "fedavg", "rank 4 has no client; start clients + 1 = 4 ranks"),
        (7, "fedavg", "ranks 4-6 have no client; start clients + 1 = 4 ranks"),
        (4, "central", "ranks 2-3 have no client; start clients + 1 = 2 ranks"),
    ],
)
def test_ranks_without_a_client_are_told_once(data, size, scheme, told):
    outputs = toy.train_ok(size, *toy.settings(data, f"scheme.name={scheme}"), "--dry-run")
    lines = [line for output in outputs for line in output.splitlines() if "no client;" in line]
    assert lines == [f"hkd_hpc: warning: {told}"] * bool(told)


NO_NETWORK = """
import socket
_connect = socket.socket.connect
def connect(self, address):
    if isinstance(address, tuple) and not str(address[0]).startswith("127.") and self.type == socket.SOCK_STREAM:
        raise AssertionError(f"connect to {address}")
    return _connect(self, address)
socket.socket.connect = connect
"""


def test_no_network_is_needed(tmp_path):
    """The bundled data in a network namespace of its own where that is permitted; and no connect() to the outside."""
    env = toy.write_module(tmp_path, "sitecustomize", NO_NETWORK)
    alone = ("unshare", "-n") if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0 else ()
    paths = os.pathsep.join([env["PYTHONPATH"], str(toy.PROJECT)])
    ran = subprocess.run(
        [
            *alone,
            sys.executable,
            "-m",
            "hkd_hpc.train",
            "fed.rounds=1",
            "train.epochs=1",
            "data.fraction=.1",
            "--out",
            tmp_path / "run",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert ran.returncode == 0, ran.stderr
    assert toy.rounds_done(tmp_path / "run") == 1


def test_a_gpu_that_was_asked_for_and_is_not_there_ends_all_ranks_before_training(tmp_path):
    hide = lambda rank: os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    arguments = toy.settings(toy.save_data(tmp_path / "data.npz"), "run.device=cuda")
    results = toy.train(2, *arguments, "--out", tmp_path / "run", patch=hide)
    assert [result.exit_code for result in results] == [2, 2]
    assert toy.our_lines([result.output for result in results]) == [
        "hkd_hpc: run.device=cuda, but torch sees no CUDA or ROCm device for ranks 0-1 (CUDA_VISIBLE_DEVICES=); "
        "run.device=auto takes the CPU there"
    ]
