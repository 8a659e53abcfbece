"""10,000 generated inputs in one process: each is understood, or rejected in one line with exit code 2. Never a
traceback.

The generated inputs are the same in every run (derandomize), so that CI is stable; `HKD_FUZZ=50000 pytest
tests/run/test_fuzz.py` draws so many others. What they found stands as examples in tests/run/test_input.py.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hkd_hpc import config, resume, schemes, train
from hkd_hpc.comm.control.rendezvous import derived_address
from hkd_hpc.comm.launchers import LAUNCHERS, RANKS, outside_of_jobs, read_hint, without_mpi
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.rank import RANK_NAMES, guess_rank
from hkd_hpc.config import command_line, presets
from hkd_hpc.data import sources
from hkd_hpc.store.folder import RunFolder

pytestmark = pytest.mark.slow

DRAWN = int(os.environ.get("HKD_FUZZ", 0))
KEYS = sorted({key for name in (*schemes.REGISTRY, *schemes.CONTROLS) for key in config.all_keys(name)})
ODD = [
    "",
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1",
    "2",
    "0.5",
    "1e999",
    "1e-400",
    "9" * 5000,
    "none",
    "true",
    "False",
    "\0",
    "é",
    "\udc80",
    "²",
    "١",
    "../..",
    "/dev/zero",
    "a:b",
    ":",
    ".:a",
    "json:JSONDecoder",
    "math:pi",
    "x" * 300,
    "'",
    '"',
    "a\nb",
    "\x1b[2J",
    "[1]",
    "{}",
    "fedavg",
    "central",
    "iid",
    "natural",
    "folder",
    "file",
    "group",
    "cifar",
    "gloo",
]


def examples(share: float):
    """So many of 10,000, always the same; of HKD_FUZZ, new ones."""
    return settings(
        max_examples=round(share * (DRAWN or 10_000)),
        derandomize=not DRAWN,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A folder to run in, with a file in the way and a file of settings."""
    before, handler = os.getcwd(), signal.getsignal(signal.SIGTERM)
    folder = tmp_path_factory.mktemp("fuzz")
    os.chdir(folder)
    Path("a_file").write_text("mine")
    Path("good.toml").write_text("[fed]\nrounds = 3\n")
    os.mkfifo("pipe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "make_parser", functools.cache(command_line.make_parser))  # a third of the time
        yield folder
    os.chdir(before)
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def lines(place):
    """lines(function): what it writes to the process's standard error, by whichever way, as lines."""

    def read(function) -> list[str]:
        file.seek(0)
        file.truncate()
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            function()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return file.read().decode(errors="replace").splitlines()

    with open(os.memfd_create("stderr"), "w+b") as file:  # a file on a disk costs more than all the rest
        yield read


def one_line(error: UsageError) -> None:
    text = str(error)
    assert text, text
    assert "\n" not in text, text
    assert text.isprintable(), text
    assert "Traceback" not in text, text


def check_start(arguments: list[str], lines) -> None:
    """The entry function as far as torch, with these arguments."""
    understood = command_line.understand(arguments)
    if isinstance(understood, str):
        return
    if isinstance(understood, command_line.Request):
        try:
            train.look_first(understood)
        except UsageError as error:
            one_line(error)
        return
    assert isinstance(understood, UsageError), repr(understood)

    def run():
        with pytest.raises(SystemExit) as ended:
            train.main(arguments)
        assert ended.value.code == 2

    told = lines(run)
    assert len(told) == 1, told
    assert told[0].startswith("hkd_hpc: "), told


words = st.one_of(st.sampled_from(ODD), st.text(max_size=20), st.integers().map(str), st.floats().map(str))
overrides = st.builds("{}={}".format, st.one_of(st.sampled_from(KEYS), st.text(max_size=12)), words)
options = st.one_of(
    st.tuples(st.just("--preset"), st.one_of(st.sampled_from(sorted(presets.PRESETS)), words)),
    st.tuples(st.just("--config"), st.one_of(st.sampled_from(["good.toml", "absent.toml", "pipe", "."]), words)),
    st.tuples(st.just("--out"), st.one_of(st.sampled_from(["a_file", "a_file/x", "new", "x" * 5000, "."]), words)),
    st.tuples(st.sampled_from(["--resume", "--dry-run", "--", "--help", "--version", "-x", "--resume=1", "-h"])),
    st.tuples(words),
    st.tuples(overrides),
)


@examples(0.35)
@given(st.lists(st.one_of(options, st.tuples(overrides)), min_size=1, max_size=4))
def test_command_lines(lines, groups):
    check_start([word for group in groups for word in group], lines)


scalars = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.sampled_from(ODD),
    st.text(max_size=10),
    st.dates(),
    st.datetimes(),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


def toml_of(tables: dict) -> bytes:
    """Nearly TOML: values as JSON writes them, dates bare."""
    rows = []
    for section, keys in tables.items():
        rows.append(f"[{section}]")
        rows += [f"{key} = {json.dumps(value, default=str)}" for key, value in keys.items()]
    return "\n".join(rows).encode(errors="surrogatepass")


sections = st.one_of(st.sampled_from(["scheme", *config.SECTIONS]), st.text(max_size=6))
names = st.one_of(st.sampled_from(sorted({key.partition(".")[2] for key in KEYS})), st.text(max_size=6))
tables = st.dictionaries(sections, st.dictionaries(names, scalars, max_size=3), max_size=3)
toml_files = st.one_of(
    tables.map(toml_of),
    st.binary(max_size=60),
    st.tuples(tables.map(toml_of), st.integers(0, 60)).map(lambda pair: pair[0][: pair[1]]),
    st.sampled_from(
        [
            b"a=" + b"[" * 5000,
            b"[fed]\nrounds=" + b"9" * 5000,
            b"[fed]\nrounds=0x" + b"f" * 5000,
            b"[scheme]\nname=[1]\n[foo]\nx=1",
            b"[scheme]\nname={}\n",
            b"\xff\xfe",
            b"x=1",
        ]
    ),
)


@examples(0.15)
@given(toml_files, st.lists(overrides, max_size=1), st.booleans())
def test_toml_files(lines, content, more, help):
    Path("fuzz.toml").write_bytes(content)
    check_start(["--config", "fuzz.toml", *more, *["--help"] * help], lines)


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(ODD)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=4), inner, max_size=2)),
    max_leaves=6,
)
stored = st.one_of(
    st.dictionaries(sections, st.dictionaries(names, values, max_size=3), max_size=3).map(json.dumps),
    values.map(json.dumps),
    st.text(max_size=30),
    st.sampled_from(["[" * 100_000, '{"fed": {"rounds": ' + "9" * 5000 + "}}", '{"scheme": {"name": [1]}}']),
)


@examples(0.05)
@given(stored)
def test_stored_settings_of_a_run_to_resume(text):
    request = command_line.parse(["--resume", "--out", "run"])
    try:
        resume.stored_settings(request, RunFolder("run"), text)
    except UsageError as error:
        one_line(error)
        assert "config.json" in str(error)


VARIABLES = sorted(
    {
        *RANK_NAMES,
        *RANKS,
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMI_SIZE",
        "PMI_FD",
        "SLURM_STEP_ID",
        "SLURM_NTASKS",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NUM_NODES",
        "SLURM_NNODES",
        "SLURM_NODEID",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "SLURM_JOB_ID",
    }
    - {"MASTER_ADDR"}
)
numbers = st.one_of(
    st.integers(0, 5).map(str),
    st.sampled_from(
        [
            "",
            "x",
            "-1",
            "²",
            "١",
            "9" * 5000,
            "1" * 18,
            "4294967291",
            "4(x2),3",
            "1(x999999999999)",
            "2(xy)",
            "(x",
            "True",
            " 1",
            "\udc80",
        ]
    ),
)
environments = st.dictionaries(st.sampled_from(VARIABLES), numbers, max_size=8)


@examples(0.35)
@given(
    environments,
    st.sampled_from(["127.0.0.1", "localhost", "", "a..b", "x" * 300, "é" * 80, "\udc80", None]),
    st.booleans(),
)
def test_environments(variables, address, has_mpi4py):
    env = {**variables, **({} if address is None else {"MASTER_ADDR": address})}
    assert guess_rank(env) >= 0
    assert not [name for name in outside_of_jobs(env) if name.startswith(LAUNCHERS)]
    try:
        hint = without_mpi(read_hint(env, has_mpi4py), env)
        assert 0 <= hint.rank < hint.size
        if hint.launcher == "torchrun":
            assert all(0 < port < 65536 for port in derived_address(hint, env).ports)
    except UsageError as error:
        one_line(error)


ARRAYS = {
    "x_train": np.arange(12 * 64, dtype=np.uint8).reshape(12, 8, 8),
    "y_train": np.arange(12) % 3,
    "x_test": np.zeros((6, 8, 8), np.uint8),
    "y_test": np.arange(6) % 3,
    "client_train": np.arange(12) % 2,
    "client_test": np.arange(6) % 2,
}
CHANGES = [
    lambda a: None,
    lambda a: a[:0],
    lambda a: a[:-1],
    lambda a: a.astype(np.float32) * np.nan,
    lambda a: a.astype(bool),
    lambda a: a.astype(np.int8) - 3,
    lambda a: a.astype(np.uint64) + np.uint64(2**63),
    lambda a: a * 0,
    lambda a: a[..., None],
    lambda a: a.reshape(-1),
    lambda a: a.ravel()[0],
    lambda a: a.astype("S3"),
    lambda a: a.astype(complex),
    lambda a: a[None],
    lambda a: a.astype(np.int64) + 2**62,
    lambda a: a.astype(object),
    lambda a: a.astype("M8[s]"),
    lambda a: np.asfortranarray(a),
    lambda a: a.astype([("a", "u1"), ("b", "f8")]),
    lambda a: a.astype(">i4"),
    lambda a: np.empty((2**20, 0), np.uint8),
]
changes = st.dictionaries(st.sampled_from(sorted(ARRAYS)), st.sampled_from(range(len(CHANGES))), max_size=2)


def save(path: str, arrays: dict) -> None:
    if path.endswith(".npz"):
        return np.savez(path, **arrays)
    with h5py.File(path, "w") as file:
        for key, array in arrays.items():
            array = np.asarray(array)
            file[key] = (
                array.astype("S") if array.dtype == object else array.astype("i8") if array.dtype.kind == "M" else array
            )


def damage(path: str, seed: int) -> None:
    """Cut it, or change some of its bytes."""
    drawn, content = random.Random(seed), bytearray(Path(path).read_bytes())
    for place in drawn.sample(range(len(content)), drawn.choice([1, 1, 2, 9])):
        content[place] = drawn.choice([0, 255, content[place] ^ 1 << drawn.randrange(8)])
    Path(path).write_bytes(content[: drawn.randrange(len(content))] if drawn.random() < 0.2 else content)


@examples(0.1)
@given(changes, st.sampled_from([".npz", ".h5"]), st.one_of(st.none(), st.integers(0, 2**32)))
def test_data_files(changed, ending, seed):
    arrays = {key: CHANGES[changed[key]](array) if key in changed else array for key, array in ARRAYS.items()}
    save(f"fuzz{ending}", {key: array for key, array in arrays.items() if array is not None})
    if seed is not None:
        damage(f"fuzz{ending}", seed)
    try:
        data = sources.load("file", "", f"fuzz{ending}")
        assert data.x_train.dtype == np.uint8
        assert data.x_train.shape[1:] == (3, 32, 32)
        assert (
            0 <= min(data.y_train.min(), data.y_test.min()) <= max(data.y_train.max(), data.y_test.max()) < data.classes
        )
    except UsageError as error:
        one_line(error)
        assert f"fuzz{ending}" in str(error)
