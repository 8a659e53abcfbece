"""What metrics.h5 says of a run beside its results: one run of FedHKD, killed on three ranks and resumed on one."""

from __future__ import annotations

import json
import shutil
import socket
import time

import numpy as np
import pytest
import toy

COUNTS = ((40, 5, 15), (30, 30, 0), (10, 20, 30))  # training images of each client and class, 60 each
NU = 0.2  # shared: classes with at least 12 images
SHARED = [[1, 0, 1], [1, 1, 0], [0, 1, 1]]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Natural clients with COUNTS, each also a local test of six images."""
    labels = np.concatenate([np.repeat(np.arange(3), counts) for counts in COUNTS])
    images = toy.images(labels, 1, side=8), toy.images(np.arange(18) % 3, 2, side=8)
    return toy.save_data(
        tmp_path_factory.mktemp("data") / "data.npz",
        x_train=images[0],
        y_train=labels,
        x_test=images[1],
        y_test=np.arange(18) % 3,
        client_train=np.repeat(np.arange(3), 60),
        client_test=np.repeat(np.arange(3), 6),
    )


def arguments(data, *more):
    return toy.settings(data, "data.partition=natural", "scheme.name=fedhkd", f"scheme.nu={NU}", "fed.rounds=4", *more)


@pytest.fixture(scope="module")
def begun_unix_s():
    return int(time.time())


@pytest.fixture(scope="module")
def killed(tmp_path_factory, data, begun_unix_s):
    """Killed in round 3 of 4."""
    folder = tmp_path_factory.mktemp("run") / "run"

    def die(rank):
        toy.note_pid(folder.parent / "pids", 3)
        if rank == 1:
            toy.on_place(3, "weights", lambda: toy.kill_all(folder.parent / "pids"))

    toy.train(3, *arguments(data), "--out", folder, patch=die)
    return folder


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, killed):
    folder = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(killed, folder)
    toy.train_ok(1, "--resume", "--out", folder)
    return folder


def test_sessions_of_a_run_that_is_not_complete(killed, begun_unix_s):
    [session] = json.loads(toy.metrics(killed)["sessions_json"])
    assert begun_unix_s <= session.pop("started_unix_s") <= time.time()
    assert "pytest" in session.pop("command_line")  # whose process forked the ranks
    assert session == {
        "after_round": 0,
        "ranks": 3,
        "hosts": {socket.gethostname(): 3},
        "devices": {"cpu": 3},
        "launcher": "torchrun",
    }


def test_a_resumed_run_has_a_session_more(killed, resumed):
    before, after = (json.loads(toy.metrics(folder)["sessions_json"]) for folder in (killed, resumed))
    assert after[:-1] == before
    assert after[-1]["after_round"] in (1, 2)
    assert after[-1]["devices"] == {"cpu": 1}


def test_classes_that_were_shared(resumed):
    """By hand from COUNTS and NU, in every round alike; the clients train on all their images."""
    found = toy.metrics(resumed)
    assert found["partition/train_count"].tolist() == [list(counts) for counts in COUNTS]
    assert found["clients/knowledge_classes"].tolist() == [SHARED] * 4
    assert found["clients/knowledge_classes"].dtype == np.float16
