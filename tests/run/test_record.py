"""What metrics.h5 says of a run beside its results: one run of FedHKD, killed on three ranks and resumed on one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
import toy

from hkd_hpc.results import load
from hkd_hpc.runtime.machine import cpu_kind
from hkd_hpc.store import layout

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
    assert shlex.split(session.pop("command_line")) == sys.orig_argv  # of the process that forked the ranks
    assert session == {
        "after_round": 0,
        "ranks": 3,
        "hosts": {socket.gethostname(): 3},
        "devices": {"cpu": 3},
        "cpu": cpu_kind(),
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


def test_right_predictions_by_class(resumed):
    """Six test images of each of three classes; together they are the accuracy."""
    found = toy.metrics(resumed)
    correct, n = found["rounds/global_test_correct_by_class"], found["rounds/global_test_n"]
    assert found["partition/global_test_count"].tolist() == [6, 6, 6]
    assert n.tolist() == [18] * 4
    assert correct.dtype == np.int64
    assert ((correct >= 0) & (correct <= 6)).all()
    np.testing.assert_array_equal(correct.sum(1) / n, found["rounds/global_test_accuracy"])


def test_the_confusion_matrix_goes_with_the_last_row(resumed):
    """Accuracy of a class, and its F1, by their formulas."""
    found = toy.metrics(resumed)
    confusion_CC = found["summary/global_test_confusion"]
    assert confusion_CC.sum(1).tolist() == [6, 6, 6]
    correct_C = found["rounds/global_test_correct_by_class"][-1]
    assert confusion_CC.diagonal().tolist() == correct_C.tolist()
    assert found["rounds/global_test_balanced_accuracy"][-1] == pytest.approx((correct_C / 6).mean(), rel=1e-12)
    f1_C = 2 * correct_C / (6 + confusion_CC.sum(0))
    assert found["rounds/global_test_macro_f1"][-1] == pytest.approx(f1_C.mean(), rel=1e-12)
    assert ((found["rounds/global_test_macro_auc"] >= 0) & (found["rounds/global_test_macro_auc"] <= 1)).all()
    assert found["rounds/global_test_classes"].tolist() == [3] * 4
    assert found["rounds/global_test_undefined"].astype(str).tolist() == [""] * 4


def test_measures_of_each_client_and_their_mean(resumed):
    """Each client tests two images of each class, so that its balanced accuracy is its accuracy."""
    found = toy.metrics(resumed)
    balanced_RM = found["clients/local_test_balanced_accuracy"]
    np.testing.assert_allclose(balanced_RM, found["clients/local_test_accuracy"], rtol=1e-12)
    for name in ("balanced_accuracy", "macro_f1"):
        mean_R = found[f"clients/local_test_{name}"].mean(1)
        np.testing.assert_allclose(found[f"rounds/local_test_{name}"], mean_R, rtol=1e-12)


def test_a_complete_run_shows_its_classes(resumed, killed):
    run = load(resumed)
    assert run.confusion.sum() == 18
    assert list(run.classes["n"]) == [6, 6, 6]
    accuracy_C = run.round_columns["global_test_correct_by_class"][-1] / 6
    np.testing.assert_array_equal(run.classes["accuracy"], accuracy_C)
    assert load(killed).confusion.shape == (0, 0)
    assert len(load(killed).classes) == 0


def test_noise_on_what_was_shared(resumed):
    """zeta 3, sigma 7: std 42 / N of the six shared classes of 40, 15, 30, 30, 20 and 30 images."""
    found = toy.metrics(resumed)
    std = (42 / 40 + 42 / 15 + 3 * 42 / 30 + 42 / 20) / 6
    assert found["rounds/noise_std"].tolist() == pytest.approx([std] * 4, rel=1e-6)
    assert (found["rounds/signal_rms"] >= 0).all()


def test_memory_of_the_ranks(resumed):
    """At least what torch takes, and less than a terabyte; a rank's peak never falls."""
    memory = toy.metrics(resumed)["clients/memory_bytes"]
    assert ((memory > 3e7) & (memory < 1e12)).all()
    assert (np.diff(memory[-2:], axis=0) >= 0).all()


# --- the layout, as docs/files.md tells it


def entry_of(path: str) -> layout.Entry:
    """The first entry that means this data set; those without a placeholder come first."""
    found = sorted(layout.entries(), key=lambda entry: entry.path.count("<"))
    return next(entry for entry in found if re.fullmatch(pattern_of(entry.path), path))


def pattern_of(path: str) -> str:
    """`a/<b or c>_d` means a/b_d and a/c_d; any name where there is no choice."""
    choice = lambda part: f"({'|'.join(part.split(' or '))})" if " or " in part else r"\w+"
    return "".join(choice(part[1:-1]) if part.startswith("<") else part for part in re.split("(<[^>]+>)", path))


def datasets(folder) -> dict[str, h5py.Dataset]:
    found = {}
    with h5py.File(folder / "metrics.h5") as file:
        file.visititems(lambda name, node: found.update({name: node}) if isinstance(node, h5py.Dataset) else None)
        yield from ((name, node.shape, node.dtype, dict(node.attrs)) for name, node in found.items())


SIZES = {"rounds": 4, "clients": 3, "clients + 1": 4, "classes": 3, "2": 2, "3": 3, "4": 4}


def test_every_data_set_has_the_shape_type_and_unit_that_the_docs_tell(resumed):
    wrong = []
    for name, shape, dtype, attributes in datasets(resumed):
        entry = entry_of(name)
        axes = [SIZES.get(axis) for axis in entry.shape.split(", ") if entry.shape]
        is_shape = len(axes) == len(shape) and all(size in (None, own) for size, own in zip(axes, shape))
        is_type = h5py.check_string_dtype(dtype) is not None if entry.dtype == "text" else dtype == entry.dtype
        if not (is_shape and is_type and attributes.get("unit", entry.unit) == entry.unit):
            wrong.append((name, shape, dtype, entry))
    assert wrong == []


def test_the_layout_has_a_version_while_the_run_goes_on_and_at_its_end(killed, resumed):
    versions = []
    for folder in (killed, resumed):
        with h5py.File(folder / "metrics.h5") as file:
            versions.append(file.attrs["layout_version"])
    assert versions == [2, 2]


def test_the_reader_of_the_docs(resumed, tmp_path):
    page = (toy.PROJECT / "docs/files.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "hkd_hpc" not in code
    assert len([line for line in code.splitlines() if line]) <= 10
    command = [sys.executable, "-c", code, str(resumed / "metrics.h5")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    found = toy.metrics(resumed)
    local, whole = (round(found[f"rounds/{name}_test_accuracy"][-1], 3) for name in ("local", "global"))
    assert done.stdout.splitlines() == [
        "layout 2 complete",
        f"local {local} after round 4 clients' local test sets",
        f"global {whole} after round 4 official test split",
        "shared classes of client 0: [0, 2]",
    ]
