"""Input that is broken on purpose: what generated inputs found (tests/run/test_fuzz.py) and what people get wrong, on
real ranks too.

Each is one line that names the thing and says what is allowed, with exit code 2 on all ranks, and no folder is made.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import toy

from hkd_hpc import config, train
from hkd_hpc.comm.control.rendezvous import derived_address
from hkd_hpc.comm.launchers import Hint, read_hint
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.rank import guess_rank
from hkd_hpc.config import command_line
from hkd_hpc.config.effects import without_effect
from hkd_hpc.data import checks, sources

# ---- settings and files of settings


def problem_of(*arguments: str) -> str:
    """The one line that these arguments end with."""
    problem = command_line.understand(list(arguments))
    assert isinstance(problem, UsageError), repr(problem)
    return str(problem)


TOML = {
    "a whole number of 5000 hex digits": (
        "[fed]\nrounds = 0x" + "f" * 5000,
        "fed.rounds=(a number of thousands of digits): not allowed",
    ),
    "a number of 5000 digits": ("[fed]\nrounds = " + "9" * 5000, "not valid TOML"),
    "brackets 5000 deep": ("a = " + "[" * 5000, "not valid TOML"),
    "a list as a scheme": ("[scheme]\nname = [1]", "scheme.name=[1]: no such scheme"),
    "a list as a scheme beside an unknown section": ("[scheme]\nname = [1]\n[foo]\nx = 1", "foo.x: no such setting"),
    "no text": ("\udcff\udcfe", "not valid TOML"),
    "larger than any file of settings": ("#" * ((1 << 20) + 1), "no TOML file of at most 1048576 bytes"),
}


@pytest.mark.parametrize("name", TOML)
def test_toml_files(tmp_path, name):
    content, words = TOML[name]
    (tmp_path / "s.toml").write_bytes(content.encode(errors="surrogateescape"))
    assert words in problem_of("--config", str(tmp_path / "s.toml"))


@pytest.mark.parametrize("value", ["[1]", "0x" + "f" * 5000])
def test_help_about_a_scheme_that_is_no_text(tmp_path, value):
    (tmp_path / "s.toml").write_text(f"[scheme]\nname = {value}")
    assert "no such scheme" in problem_of("--help", "--config", str(tmp_path / "s.toml"))


@pytest.mark.parametrize(
    "argument, told",
    [
        ("--resume=autoo", "argument --resume: only --resume or --resume=auto is allowed, not 'autoo'"),
        ("--dry-run=yes", "argument --dry-run: takes no value, not 'yes'"),
    ],
)
def test_a_value_that_an_option_does_not_take(argument, told):
    assert problem_of(argument) == f"{told}; python -m hkd_hpc.train --help lists the options"


def test_what_would_never_end_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero"):
        assert "is no TOML file" in problem_of("--config", name)
    assert "--config" in problem_of("--config", "a\0b")


LONG = "x" * 5000


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--out", LONG], "cannot be looked at (File name too long)"),
        (["--out", "a\0b"], "is no name of a folder"),
        (["--out", ""], "is empty"),
        (["data.name=file", f"data.path={LONG}.npz"], "cannot be looked at (File name too long)"),
        (["data.name=folder", f"data.path={LONG}"], "cannot be looked at (File name too long)"),
        (["data.name=cifar10", f"data.dir={LONG}"], "cannot be looked at (File name too long)"),
        (["data.name=file", "data.path=a\0b.npz"], "data.path=a\\x00b.npz: not allowed"),
    ],
)
def test_names_that_cannot_be_files(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    problem = command_line.understand(arguments)
    if isinstance(problem, command_line.Request):
        with pytest.raises(UsageError) as caught:
            train.look_first(problem)
        problem = caught.value
    assert isinstance(problem, UsageError)
    assert words in str(problem)


def test_val_fraction_says_what_is_allowed():
    assert "data.val_fraction must be a number >= 0 and < 1" in problem_of("data.val_fraction=1")
    assert "stratified by class (a number >= 0 and < 1)" in config.help_text()


# ---- the variables of launchers


@pytest.mark.parametrize("text", ["²", "١", "9" * 5000, "9" * 19])
def test_numbers_that_are_none(text):
    with pytest.raises(UsageError, match="OMPI_COMM_WORLD_RANK='.*is not a whole number"):
        read_hint({"OMPI_COMM_WORLD_RANK": text, "OMPI_COMM_WORLD_SIZE": "4"}, has_mpi4py=True)
    assert guess_rank({"RANK": text, "PMI_RANK": "3"}) == 3


STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    "tasks, node, local_size",
    [
        ("1(x999999999999),3", "2", 1),
        ("2(x2),3", "2", 3),
        ("2(xy)", "0", None),
        ("(x2)", "0", None),
        ("2,²", "1", None),
        ("2", "7", None),
    ],
)
def test_tasks_per_node(tasks, node, local_size):
    hint = read_hint({**STEP, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}, has_mpi4py=False)
    assert hint.local_size == local_size


@pytest.mark.parametrize("name", ["a..b", "x" * 300])
def test_a_master_address_that_is_no_name(name):
    with pytest.raises(UsageError, match="set MASTER_ADDR"):
        derived_address(Hint("torchrun", 0, 2), {"MASTER_ADDR": name})
    with pytest.raises(UsageError, match="not a port"):
        derived_address(Hint("torchrun", 0, 2, 0, 2), {"MASTER_PORT": "9" * 5000})


# ---- data files

PIXELS, LABELS = np.zeros((6, 8, 8), np.uint8), np.array([0, 1, 2] * 2)
GOOD = {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS, "y_test": LABELS}


def rejection(path) -> str:
    with pytest.raises(UsageError) as caught:
        sources.load("file", "", path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_npz(path, members: dict[str, bytes]):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def npy(array, shape=None) -> bytes:
    """The bytes of an .npy, perhaps with a head that promises another shape."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": array.dtype.str, "fortran_order": False, "shape": shape or array.shape}
    )
    return out.getvalue() + array.tobytes()


def test_an_array_that_promises_more_than_is_there(tmp_path):
    """NumPy would allocate 10 TB first."""
    members = {f"{key}.npy": npy(array) for key, array in GOOD.items()}
    path = write_npz(tmp_path / "a.npz", {**members, "x_train.npy": npy(PIXELS, (10**13,))})
    assert "key x_train: 512 bytes are there, 10000000000128 are announced" in rejection(path)
    assert sources.load("file", "", write_npz(tmp_path / "b.npz", members)).classes == 3


def test_a_zip_bomb_is_not_unpacked(tmp_path, monkeypatch):
    """100 MB of zeros in 100 kB, on a machine of 50 MB."""
    monkeypatch.setattr(checks, "memory_bytes", lambda: 50_000_000)
    members = {f"{key}.npy": npy(array) for key, array in GOOD.items()}
    bomb = write_npz(tmp_path / "a.npz", {**members, "x_train.npy": npy(np.zeros((10**8 // 64, 8, 8), np.uint8))})
    assert bomb.stat().st_size < 200_000
    assert "its arrays need 0.1 GB, and this machine has 0.1 GB of memory" in rejection(bomb)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for key, array in {**GOOD, "x_train": PIXELS[:0]}.items():
            file.create_dataset(key, data=array)
        del file["x_train"]
        file.create_dataset("x_train", (10**12, 8, 8), np.uint8, chunks=(1, 8, 8))  # nothing of it is stored
    assert "its arrays need 64,000.0 GB" in rejection(tmp_path / "a.h5")
    with pytest.raises(UsageError, match="its arrays need"):  # grey images of a pixel grow to 3 x 32 x 32
        checks.to_images(np.zeros((20_000, 1, 1), np.uint8), "here")


@pytest.mark.parametrize("at, byte", [("version", 255), ("name", 255)])
def test_a_damaged_directory_of_an_npz(tmp_path, at, byte):
    path = write_npz(tmp_path / "a.npz", {f"{key}.npy": npy(array) for key, array in GOOD.items()})
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + (6 if at == "version" else 46)] = byte
    if at == "name":
        content[entry + 9] |= 8  # the flag that names are UTF-8
    path.write_bytes(content)
    assert "truncated or not what its name says" in rejection(path)


def test_arrays_in_other_files_are_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(bytes(384))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.update(GOOD)
        del file["x_train"]
        file.create_dataset("x_train", (6, 8, 8), np.uint8, external=[(str(tmp_path / "secret"), 0, 384)])
    assert "key x_train: lies in other files" in rejection(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        del file["x_train"]
        file["x_train"] = h5py.ExternalLink("other.h5", "x_train")
    assert "key x_train is missing" in rejection(tmp_path / "a.h5")


# ---- twenty of them on three real ranks


def long_toml(folder):
    (folder / "deep.toml").write_text("a = " + "[" * 5000)
    return ["--config", folder / "deep.toml"]


def broken_data(change):
    def arguments(folder):
        data = toy.save_data(folder / "data.npz", 60, 20)
        change(data)
        return [*toy.settings(data), "--out", folder / "run"]

    return arguments


def with_arrays(**arrays):
    def arguments(folder):
        return [*toy.settings(toy.save_data(folder / "data.npz", 60, 20, **arrays)), "--out", folder / "run"]

    return arguments


ON_RANKS = {
    "deep TOML": (long_toml, {}, "not valid TOML"),
    "a device": (lambda folder: ["--config", "/dev/zero"], {}, "is no TOML file"),
    "a long name": (lambda folder: ["--out", "x" * 5000], {}, "--out"),
    "a value of many digits": (lambda folder: ["fed.rounds=" + "9" * 5000], {}, "fed.rounds="),
    "a control character": (lambda folder: ["data.dir=a\x1b[2J"], {}, "data.dir="),
    "not UTF-8": (lambda folder: ["data.name=\udc80"], {}, "data.name="),
    "an unknown preset": (lambda folder: ["--preset", "é"], {}, "--preset"),
    "a module that is none": (lambda folder: ["scheme.name=:"], {}, "module:Class"),
    "a class that is no scheme": (lambda folder: ["scheme.name=json:JSONDecoder"], {}, "is no scheme"),
    "resume of nothing named": (lambda folder: ["--resume"], {}, "--out"),
    "half an option": (lambda folder: ["--preset"], {}, "--preset"),
    "a port that is none": (lambda folder: [], {"MASTER_PORT": "99999"}, "MASTER_PORT='99999'"),
    "contradictory ranks": (
        lambda folder: [],
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "5"},
        "contradictory launchers",
    ),
    "a size of garbage": (lambda folder: [], {"PMI_RANK": "0", "PMI_SIZE": "²"}, "PMI_SIZE='²'"),
    "a device offset of garbage": (
        lambda folder: ["--out", folder / "run"],
        {"HKD_DEVICE_OFFSET": "x"},
        "HKD_DEVICE_OFFSET='x'",
    ),
    "cut data": (broken_data(lambda path: path.write_bytes(path.read_bytes()[:5000])), {}, "truncated"),
    "data that are no zip": (
        broken_data(lambda path: path.write_bytes(b"PK" + bytes(1000))),
        {},
        "truncated or not what its name says",
    ),
    "pickled objects": (with_arrays(y_train=np.array([{}] * 60, dtype=object)), {}, "data.npz"),
    "one class": (with_arrays(y_train=np.zeros(60, int), y_test=np.zeros(20, int)), {}, "at least 2 are needed"),
    "no image": (
        with_arrays(x_train=np.zeros((0, 3, 32, 32), np.uint8), y_train=np.zeros(0, int)),
        {},
        "holds no image",
    ),
}


@pytest.mark.parametrize("name", ON_RANKS)
def test_on_three_ranks(tmp_path, name):
    arguments, env, words = ON_RANKS[name]
    results = toy.train(3, *arguments(tmp_path), env=env)
    output = "".join(result.output for result in results)
    assert [result.exit_code for result in results] == [2, 2, 2], output
    lines = toy.our_lines([output])
    assert all(words in line for line in lines), output
    assert "Traceback" not in output, output
    assert 1 <= len(lines) <= (3 if env else 1), output  # ranks that cannot meet may each say it
    assert not (tmp_path / "run").exists()


# ---- settings without effect


@pytest.mark.parametrize(
    "given, told",
    [
        (["data.beta=0.1", "data.partition=iid"], ["data.beta=0.1 has no effect with data.partition=iid"]),
        (["data.beta=0.1"], []),
        (["data.beta=0.1", "data.partition=heuristic"], []),
        (["data.classes_per_client=3"], ["data.classes_per_client=3 has no effect with data.partition=dirichlet"]),
        (["model.stem=cifar"], ["model.stem=cifar has no effect with model.name=small"]),
        (["model.stem=cifar", "model.name=resnet18"], []),
        (
            ["train.batchnorm=local", "model.norm=group"],
            ["train.batchnorm=local has no effect with model.norm=group, which leaves no BatchNorm"],
        ),
        (["train.batchnorm=local", "model.norm=group", "model.latent_norm=batch"], []),
        (
            ["train.lr_halve_every=3", "train.lr_schedule=constant"],
            ["train.lr_halve_every=3 has no effect with train.lr_schedule=constant"],
        ),
        (["train.lr_every=3"], ["train.lr_every=3 has no effect with train.lr_schedule=halve"]),
        (["train.lr_factor=.5", "train.lr_schedule=step"], []),
        (
            ["train.lr_schedule=cosine", "train.lr_warmup=10"],
            ["train.lr_schedule=cosine has no effect with train.lr_warmup=10, which lasts all of fed.rounds=10"],
        ),
        (
            ["train.augment_padding=2", "train.augment=flip"],
            ["train.augment_padding=2 has no effect with train.augment=flip"],
        ),
        (["fed.server_lr=2"], ["fed.server_lr=2.0 has no effect with fed.server_optimizer=none"]),
        (
            ["fed.server_momentum=.5", "fed.server_epsilon=.1", "fed.server_optimizer=avgm"],
            ["fed.server_epsilon=0.1 has no effect with fed.server_optimizer=avgm"],
        ),
        (
            ["train.batchnorm=local", "model.norm=group", "model.name=moon_cnn"],
            [
                "model.norm=group has no effect with model.name=moon_cnn",
                "train.batchnorm=local has no effect with model.norm=group, which leaves no BatchNorm",
            ],
        ),
        (["fed.straggler_epochs=1"], ["fed.straggler_epochs=1 has no effect with fed.straggler_rate=0"]),
        (["scheme.sigma=3", "scheme.noise=off"], ["scheme.sigma=3.0 has no effect with scheme.noise=off"]),
        (
            ["scheme.zeta=3", "scheme.noise=off"],
            ["scheme.zeta=3.0 has no effect with scheme.noise=off, scheme.sigma=7 and scheme.clip=off"],
        ),
        (["scheme.zeta=3", "scheme.noise=off", "scheme.clip=box"], []),
        (
            ["scheme.name=central", "fed.participation=.5"],
            ["fed.participation=0.5 has no effect with scheme.name=central, which has one client"],
        ),
        (
            ["scheme.name=central", "fed.straggler_rate=0.5", "fed.straggler_epochs=1"],
            [
                "fed.straggler_rate=0.5 has no effect with scheme.name=central, which has one client",
                "fed.straggler_epochs=1 has no effect with scheme.name=central, which has one client",
            ],
        ),
        (["data.dir=x"], ["data.dir=x has no effect with data.name=fmnist"]),
    ],
)
def test_settings_without_effect(given, told):
    assert without_effect(config.resolve(overrides=given), dict(map(config.split_override, given))) == told


def test_settings_of_a_preset_are_not_blamed_on_anybody(tmp_path):
    data = toy.save_data(tmp_path / "data.npz", 60, 20)
    arguments = [
        *toy.settings(data, "data.partition=iid", "model.name=small", "fed.rounds=1"),
        "--preset",
        "cifar10",
        "--dry-run",
    ]
    results = toy.train_ok(2, *arguments)
    assert "has no effect" not in "".join(results)
    results = toy.train_ok(2, *arguments, "data.beta=.3")
    assert "hkd_hpc: warning: data.beta=0.3 has no effect with data.partition=iid\n" in results[0]
    assert results[1] == ""


# ---- schemes of one's own

OWN = """
import torch
from dataclasses import dataclass
from hkd_hpc.common.lazy import F
from hkd_hpc.schemes.base import About, Scheme, SchemeSettings
from hkd_hpc.common.settings import setting

class VectorLoss(Scheme):
    def loss(self, client, batch):
        return {"cross_entropy": F.cross_entropy(client.net(batch.x_BCHW)[1], batch.y_B, reduction="none")}

class NumberLoss(Scheme):
    def loss(self, client, batch):
        return {"cross_entropy": 0.5}

class LooseLoss(Scheme):
    def loss(self, client, batch):
        return {"cross_entropy": torch.tensor(1.0)}

class NoLoss(Scheme):
    def loss(self, client, batch):
        pass

class NoMessage(Scheme):
    def combine(self, server, reports):
        pass

class ListState(Scheme):
    def combine(self, server, reports):
        server.state["seen"] = [1, 2]
        return {}

class OddReport(Scheme):
    def report_shapes(self):
        return {"count_C": (10,)}
    def report(self, client):
        return {"count_C": torch.zeros(3)}

class HugeReport(Scheme):
    def report_shapes(self):
        return {"count_C": (10**12,)}

class ComplexReport(Scheme):
    def report_shapes(self):
        return {"count_C": (10,)}
    def report(self, client):
        return {"count_C": torch.zeros(10, dtype=torch.complex64)}

class SparseReport(ComplexReport):
    def report(self, client):
        return {"count_C": torch.zeros(10).to_sparse()}

class NoShapes(Scheme):
    def report_shapes(self):
        pass

class OddClientState(Scheme):
    def client_state_shapes(self):
        return {"memory": (2, 3)}
    def report(self, client):
        client.state["memory"] = torch.zeros(3)
        return {}

class TextTerms(Scheme):
    terms = "cross_entropy"

class NulTerm(Scheme):
    terms = ("cross\\0entropy",)

class SlashState(Scheme):
    def client_state_shapes(self):
        return {"memory/old": (3,)}

class OurState(Scheme):
    def client_state_shapes(self):
        return {"model": (3,)}

class NoRemark(Scheme):
    about = About(remark=None)

class NoAbout(Scheme):
    about = None

class OldTunes(Scheme):
    tunes = {"tau": (1, 2, 3, 4, 5)}

class OldNames(Scheme):
    remark = "of an older version"
    def report_floats(self, report):
        return 0

class OldShared(Scheme):
    def shared_classes(self, reports):
        return reports["count_C"] > 0

class NoWarning(Scheme):
    def warning(self, message):
        pass

class OddWarning(Scheme):
    def warning(self, message):
        return "\\udcff"

class NanDefault(Scheme):
    @dataclass(frozen=True)
    class Settings(SchemeSettings):
        tau: float = setting(float("nan"), "a number that no file of settings may have")

class PlainField(Scheme):
    @dataclass(frozen=True)
    class Settings(SchemeSettings):
        tau: float = 1.0
"""
MISTAKES = {
    "VectorLoss": (
        1,
        "loss() must return a dict with one scalar for each of its terms (cross_entropy), but cross_entropy is a "
        "torch.float32 tensor of shape (16,)",
    ),
    "NumberLoss": (1, "but cross_entropy is a float"),
    "LooseLoss": (1, "but none of them depends on the weights"),
    "NoLoss": (1, "loss() must return a dict with one scalar for each of its terms (cross_entropy), not None"),
    "NoMessage": (1, "combine() must return a dict of the declared tensors (none), not None"),
    "ListState": (1, "combine() may keep tensors alone in server.state; server.state['seen'] is a list"),
    "OddReport": (
        1,
        "report() must return a dict of the declared tensors (count_C), but count_C is a torch.float32 tensor of shape "
        "(3,) "
        "and declared as (10,)",
    ),
    "HugeReport": (1, "report_shapes() declares {'count_C': (1000000000000,)}, 4,000 GB; this machine has "),
    "ComplexReport": (1, "dense and of real numbers, but count_C is a torch.complex64 tensor of shape (10,)"),
    "SparseReport": (1, "dense and of real numbers, but count_C is a sparse torch.float32 tensor of shape (10,)"),
    "NoShapes": (1, "report_shapes() must return a dict from names to shapes, such as {'count_C': (10,)}, not None"),
    "OddClientState": (
        1,
        "client.state['memory'] is a torch.float32 tensor of shape (3,); client_state_shapes() declares (2, 3)",
    ),
    "TextTerms": (1, "terms must be the names of the loss terms"),
    "NulTerm": (1, "terms must be the names of the loss terms"),
    "SlashState": (1, "client_state_shapes() must return a dict from names to shapes"),
    "OurState": (1, "client_state_shapes() declares 'model', which the program itself keeps; take another name"),
    "NoAbout": (1, "about must be an About(...), not None"),
    "OldTunes": (2, "tunes is not read any more; write about = About(tunes=...) (hkd_hpc.schemes.base)"),
    "OldNames": (
        2,
        "hkd_hpc: scheme own_schemes:OldNames: remark is not read any more; write about = About(remark=...); "
        "report_floats is not read any more; write traffic(tensors, direction) (hkd_hpc.schemes.base)",
    ),
    "OldShared": (
        2,
        "shared_classes is not read any more; write count_C of report_shapes(), 0 where a class is not shared "
        "(hkd_hpc.schemes.base)",
    ),
    "NoRemark": (1, "remark must be text that a file can hold, not None"),
    "NoWarning": (1, "what warning() returns must be text that a file can hold, not None"),
    "OddWarning": (1, "what warning() returns must be text that a file can hold, not '\\udcff'"),
    "NanDefault": (2, "scheme.tau=nan: not allowed; scheme.tau must be a number"),
    "PlainField": (2, "Settings.tau: float is no setting; it must be made with hkd_hpc.common.settings.setting"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_ones_own_scheme_is_one_line(tmp_path, monkeypatch, name):
    toy.write_module(tmp_path, "own_schemes", OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = toy.save_data(tmp_path / "data.npz", 120, 20)
    code, words = MISTAKES[name]
    result = toy.train(1, *toy.settings(data, f"scheme.name=own_schemes:{name}"), "--out", tmp_path / "run")[0]
    lines = toy.our_lines([result.output])
    assert result.exit_code == code, result.output
    assert len(lines) == 1, result.output
    assert "Traceback" not in result.output, result.output
    assert words in lines[0], lines[0]
    assert f"own_schemes:{name}" in lines[0] or code == 2, lines[0]


@pytest.mark.parametrize(
    "text, words",
    [
        ("def f(:\n", "SyntaxError"),
        ("\n1 / 0\n", "ZeroDivisionError: division by zero ("),
        ("import sys\nsys.exit(5)\n", "SystemExit: 5 ("),
    ],
)
def test_a_module_that_fails_is_one_line(tmp_path, monkeypatch, text, words):
    toy.write_module(tmp_path, "failing_scheme", text)
    monkeypatch.syspath_prepend(str(tmp_path))
    told = problem_of("scheme.name=failing_scheme:Any")
    assert "importing failing_scheme failed: " in told
    assert words in told
    assert "line" in told


def test_a_module_that_is_not_found_and_one_whose_own_import_is_not(tmp_path, monkeypatch):
    toy.write_module(tmp_path, "needs_other", "import not_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert problem_of("scheme.name=not_here:Any").endswith("(No module named 'not_here'); is it on PYTHONPATH?")
    assert problem_of("scheme.name=needs_other:Any").endswith(f"({tmp_path}/needs_other.py, line 1)")


# ---- names that the terminal cannot show


def test_a_folder_whose_name_is_not_utf8(tmp_path):
    """Written, resumed and told, with an escape for what no text can hold."""
    data = toy.save_data(tmp_path / "data.npz", 60, 20)
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/run\xff")
    outputs = toy.train_ok(1, *toy.settings(data, "fed.rounds=1"), "--out", folder)
    assert "run\\udcff/metrics.h5" in outputs[0]
    assert Path(folder, "metrics.h5").exists()
    assert "already complete" in toy.train_ok(1, "--resume", "--out", folder)[0]
