"""Trees in HDF5 files: what is written comes back, and whatever happens to a file, wrong data never does."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from hkd_hpc.common.errors import RunError
from hkd_hpc.store import atomic
from hkd_hpc.store.tree import (
    BadFile,
    Leaf,
    Stream,
    _checksum_block,
    _digest,
    chunk_shape,
    load_tree,
    open_tree,
    save_tree,
)

ROOT = Path(__file__).resolve().parents[2]


def small_tree() -> dict:
    return {
        "weights": np.arange(6, dtype=np.float32).reshape(2, 3),
        "round": 7,
        "name": "é 中",
        "rounds": {"accuracy": Leaf(np.array([0.25, 0.5]), {"unit": "1", "model": "global", "moment": 2})},
    }


def assert_small_tree(tree: dict) -> None:
    assert sorted(tree) == ["name", "round", "rounds", "weights"]
    assert (tree["round"], tree["name"]) == (7, "é 中")
    assert tree["weights"].dtype == np.float32
    assert tree["weights"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tree["rounds"]["accuracy"].tolist() == [0.25, 0.5]


def run_python(code: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment, text=True, capture_output=True, timeout=300
    )


def test_every_type_survives(tmp_path):
    values = {
        "bool": True,
        "int": -3,
        "big": 2**64 - 1,
        "float": 0.1,
        "inf": float("inf"),
        "nan": float("nan"),
        "float32": np.float32(0.5),
        "int8": np.int8(-1),
        "numpy_bool": np.bool_(False),
        "zero_d": np.array(4),
        "empty_text": "",
        "long": "x" * 199_999 + "é",
        "numpy_text": np.str_("a"),
        "empty_group": {},
        "no_rows": np.zeros((0, 3), np.int16),
        "no_text": np.array([], dtype=str),
        "text": np.array([["é", ""], ["中文", "abc"]]),
        "mask": np.array([True, False]),
        "special": np.array([np.nan, -np.inf, 1.0], np.float64),
        "half": np.array([1.5], np.float16),
        "big_endian": np.array([1, 256], ">i4"),
        "strided": np.arange(12).reshape(3, 4)[:, ::2],
        "client_indices": np.arange(200 * 250, dtype=np.int64).reshape(200, 250),
    }
    save_tree(tmp_path / "t.h5", values)
    loaded = load_tree(tmp_path / "t.h5")
    assert sorted(loaded) == sorted(values)
    for key, plain in {
        "bool": True,
        "int": -3,
        "big": 18446744073709551615,
        "float": 0.1,
        "inf": float("inf"),
        "float32": np.float32(0.5),
        "int8": np.int8(-1),
        "numpy_bool": False,
        "zero_d": 4,
        "empty_text": "",
        "long": values["long"],
        "numpy_text": "a",
        "empty_group": {},
    }.items():
        assert loaded[key] == plain, key
        assert type(loaded[key]) is type(plain), key
    assert loaded["nan"] != loaded["nan"]
    for key in ("no_rows", "text", "mask", "special", "half", "big_endian", "strided", "client_indices"):
        assert loaded[key].dtype == values[key].dtype, key
        assert loaded[key].shape == values[key].shape, key
        assert loaded[key].tobytes() == values[key].tobytes(), key
    assert loaded["no_text"].shape == (0,)
    assert loaded["no_text"].dtype.kind == "U"


def test_the_file_is_plain_hdf5_with_checksums_units_and_a_last_mark(tmp_path):
    save_tree(tmp_path / "t.h5", small_tree(), {"created_by": "é"})
    with h5py.File(tmp_path / "t.h5") as file:
        assert file["weights"].fletcher32
        assert file["rounds/accuracy"].fletcher32
        assert file["name"].asstr()[()] == "é 中"
        assert tuple(h5py.check_string_dtype(file["name"].dtype)) == ("utf-8", None)
        assert dict(file["rounds/accuracy"].attrs) == {"unit": "1", "model": "global", "moment": 2}
        assert dict(file.attrs) == {"created_by": "é", "format_version": 1, "complete": 1}
    save_tree(tmp_path / "t.h5", {"hashes": np.array(["ab" * 32, "cd" * 32])})
    with h5py.File(tmp_path / "t.h5") as file:
        assert file["hashes"].fletcher32
        assert file["hashes"].asstr()[1] == "cd" * 32
    assert os.listdir(tmp_path) == ["t.h5"]


@pytest.mark.parametrize(
    "tree, key",
    [
        ({"a": {"b": None}}, "a/b"),
        ({"a": {"b": [1, 2]}}, "a/b"),
        ({"a": Path("x")}, "a"),
        ({"a": b"x"}, "a"),
        ({"a": np.array([1, None])}, "a"),
        ({"a": np.array(["2026-01-01"], "M8[D]")}, "a"),
        ({"a": 2**64}, "a"),
        ({"a": np.zeros(1, [("x", int)])}, "a"),
        ({"a": "x\0y"}, "a"),
        ({"a": "\ud800"}, "a"),
        ({"a": 1j}, "a"),
        ({"a": np.array(["x", "\ud800"])}, "a"),
        ({"a": {"b/c": 1}}, "a/b/c"),
        ({"a": {"": 1}}, "a/"),
        ({"a": {3: 1}}, "a/3"),
        ({"a": {".": 1}}, "a/."),
        ({"a": np.longdouble(1)}, "a"),
        ({"a": Leaf(1, {"unit": None})}, "a, attribute 'unit'"),
        ({"a": Leaf(1, {"unit": "x" * 70_000})}, "a, attribute"),
        ({"a": Leaf(1, {"unit": np.zeros(3)})}, "a, attribute"),
        ({"a": Leaf(Leaf(1))}, "a"),
        ([1], "the root"),
    ],
)
def test_an_unstorable_value_is_named_before_anything_is_written(tmp_path, tree, key):
    with pytest.raises(TypeError) as rejected:
        save_tree(tmp_path / "t.h5", tree)
    assert key in str(rejected.value)
    assert "\n" not in str(rejected.value)
    assert os.listdir(tmp_path) == []


def test_a_stream_is_written_one_member_at_a_time(tmp_path):
    written = []

    def make(client):
        # Everything before this member has left the caller: nothing is collected first.
        written.append(client)
        return {"weights": np.full(3, client), "count": client}

    members = ((f"{client}", lambda client=client: make(client)) for client in range(3))
    save_tree(tmp_path / "t.h5", {"clients": Leaf(Stream(members), {"by": "id"}), "none": Stream([])})
    assert written == [0, 1, 2]
    with open_tree(tmp_path / "t.h5") as file:
        assert file.names() == ["clients", "none"]
        assert file.names("clients") == ["0", "1", "2"]
        assert file.load("clients/2/weights").tolist() == [2, 2, 2]
        assert file.load("clients/1")["count"] == 1
        assert file.load("none") == {}
        assert file.attributes("clients") == {"by": "id"}


@pytest.mark.parametrize(
    "members, key",
    [
        ([("0", lambda: np.zeros(2)), ("1", lambda: {"x": None})], "clients/1/x"),
        ([("0", lambda: 1), ("0", lambda: 2)], "clients/0: the name comes twice"),
    ],
)
def test_a_bad_member_of_a_stream_leaves_the_older_file(tmp_path, members, key):
    save_tree(tmp_path / "t.h5", small_tree())
    with pytest.raises(TypeError, match=key):
        save_tree(tmp_path / "t.h5", {"clients": Stream(members)})
    assert_small_tree(load_tree(tmp_path / "t.h5"))
    assert os.listdir(tmp_path) == ["t.h5"]


def test_parts(tmp_path):
    save_tree(tmp_path / "t.h5", {"a": {"b": 1, "c": 2}, "d": {"e": {"f": "x"}}, "g": 3})
    assert load_tree(tmp_path / "t.h5", only=("a/b", "d", "g")) == {"a": {"b": 1}, "d": {"e": {"f": "x"}}, "g": 3}
    for key in ("a/x", "x", "g/x"):
        with pytest.raises(BadFile, match=key):
            load_tree(tmp_path / "t.h5", only=(key,))


@pytest.mark.parametrize(
    "shape, item_bytes, chunk",
    [
        ((5,), 4, (5,)),
        ((2, 3), 8, (2, 3)),
        ((11_209_994,), 4, (260_698,)),
        ((262_145,), 4, (131_073,)),
        ((1000, 1000), 4, (250, 1000)),
        ((3, 2_000_000), 1, (1, 1_000_000)),
        ((2,), 2_000_000, (1,)),
    ],
)
def test_chunks_hold_about_a_mebibyte(shape, item_bytes, chunk):
    assert chunk_shape(shape, item_bytes) == chunk


def test_large_array(tmp_path):
    weights = np.random.default_rng(0).standard_normal(3_000_001, np.float32)
    save_tree(tmp_path / "t.h5", {"weights": weights})
    assert load_tree(tmp_path / "t.h5")["weights"].tobytes() == weights.tobytes()
    assert os.path.getsize(tmp_path / "t.h5") < 12_000_004 * 1.02


# ---- files that must be rejected ----


def test_missing_foreign_and_unsealed_files(tmp_path):
    path = tmp_path / "t.h5"
    with pytest.raises(BadFile, match="there is no such file") as bad:
        load_tree(path)
    assert isinstance(bad.value, RunError)
    assert bad.value.path == path
    assert str(path) in str(bad.value)
    for content in (b"", b"x", b"PK" * 5000, b"\0" * 4096):
        path.write_bytes(content)
        with pytest.raises(BadFile, match="not an HDF5 file"):
            load_tree(path)
    for user_block in (0, 512):
        with h5py.File(path, "w", userblock_size=user_block) as file:
            file["a"] = 1
        with pytest.raises(BadFile, match="not written to its end, or not by hkd_hpc"):
            load_tree(path)
    with pytest.raises(BadFile, match="no ordinary file"):
        load_tree(tmp_path)


def reseal(path: Path) -> None:
    with open(path, "r+b") as file:
        block = _checksum_block(*_digest(file))
        file.seek(0)
        file.write(block)


def test_mark_and_format(tmp_path):
    save_tree(tmp_path / "t.h5", small_tree())
    with h5py.File(tmp_path / "t.h5", "r+") as file:
        file.attrs["format_version"] = 99
    with pytest.raises(BadFile, match="bytes do not match|truncated"):
        load_tree(tmp_path / "t.h5")
    reseal(tmp_path / "t.h5")
    with pytest.raises(BadFile, match="its format is 99; this version of hkd_hpc reads 1"):
        load_tree(tmp_path / "t.h5")
    with h5py.File(tmp_path / "t.h5", "r+") as file:
        del file.attrs["complete"]
    reseal(tmp_path / "t.h5")
    with pytest.raises(BadFile, match="incomplete"):
        load_tree(tmp_path / "t.h5")


def test_a_checksum_failure_below_an_intact_seal_is_a_bad_file(tmp_path):
    save_tree(tmp_path / "t.h5", {"a": np.full(1000, 1.5)})
    content = (tmp_path / "t.h5").read_bytes()
    place = content.index(np.full(10, 1.5).tobytes()) + 13
    (tmp_path / "t.h5").write_bytes(content[:place] + b"\x55" + content[place + 1 :])
    reseal(tmp_path / "t.h5")
    with pytest.raises(BadFile, match="cannot be read"):
        load_tree(tmp_path / "t.h5")


def test_no_flipped_bit_gives_wrong_data(tmp_path):
    save_tree(tmp_path / "good.h5", small_tree())
    content = (tmp_path / "good.h5").read_bytes()
    dice = random.Random(0)
    places = [*range(100), *range(508, 700), *(dice.randrange(len(content)) for _ in range(400)), len(content) - 1]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << dice.randrange(8)
        (tmp_path / "bad.h5").write_bytes(damaged)
        with pytest.raises(BadFile):
            load_tree(tmp_path / "bad.h5")
    assert len(places) == 693


def test_no_truncated_file_gives_wrong_data(tmp_path):
    save_tree(tmp_path / "good.h5", small_tree())
    content = (tmp_path / "good.h5").read_bytes()
    for length in {0, 1, 8, 511, 512, 513, 520, 600, *range(700, len(content), 97), len(content) - 1}:
        (tmp_path / "bad.h5").write_bytes(content[:length])
        with pytest.raises(BadFile, match="truncated" if length >= 520 else "truncated|not an HDF5 file|not written"):
            load_tree(tmp_path / "bad.h5")
    (tmp_path / "bad.h5").write_bytes(content + b"x")
    with pytest.raises(BadFile):
        load_tree(tmp_path / "bad.h5")


# ---- writers that die or are rejected ----

KILLED_WRITER = """
import os, random, signal, sys, time
import h5py, numpy as np
from hkd_hpc.store.tree import load_tree, save_tree
path = sys.argv[1]
tree = lambda version: {"version": version, "text": str(version), "data": np.full(200_000, version, np.float64)}
save_tree(path, tree(0))
began_s = time.monotonic()
save_tree(path, tree(0))
save_s = time.monotonic() - began_s
newest = 0
for attempt in range(20):
    pid = os.fork()
    if pid == 0:
        for version in range(newest + 1, 10**6):
            save_tree(path, tree(version))
    time.sleep(random.uniform(0.0, 4 * save_s))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    seen = load_tree(path)
    assert seen["text"] == str(seen["version"]), attempt
    assert np.all(seen["data"] == seen["version"]), attempt
    assert seen["version"] >= newest, attempt
    newest = seen["version"]
assert newest > 0
left = [name for name in os.listdir(os.path.dirname(path)) if name != "t.h5"]
assert all(name.startswith(".t.h5.") for name in left), left
assert all(name.endswith(".tmp") for name in left), left
print("left", len(left))
"""


def test_a_killed_writer_leaves_an_intact_file(tmp_path):
    done = run_python(KILLED_WRITER, tmp_path / "t.h5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("left "), done.stderr


def test_a_reader_that_keeps_the_file_open_disturbs_nothing(tmp_path):
    path = tmp_path / "metrics.h5"
    save_tree(path, {"round": np.arange(1)})
    hold = (
        "import h5py, sys; f = h5py.File(sys.argv[1]); print('open', flush=True); sys.stdin.read(); "
        "print(f['round'][:].tolist())"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", hold, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout.readline() == "open\n"
    with h5py.File(path) as mine, h5py.File(path) as again:
        for rounds in range(2, 22):
            save_tree(path, {"round": np.arange(rounds)})
            assert load_tree(path)["round"].tolist() == list(range(rounds))
        assert mine["round"][:].tolist() == again["round"][:].tolist() == [0]
    assert reader.communicate("", timeout=300)[0] == "[0]\n"
    assert reader.returncode == 0


@pytest.mark.parametrize("setting", ["TRUE", "FALSE", "BEST_EFFORT", "nonsense"])
def test_the_lock_variable_of_hdf5_changes_nothing(tmp_path, setting):
    code = (
        "import sys; from hkd_hpc.store.tree import *; save_tree(sys.argv[1], {'a': 1}); "
        "save_tree(sys.argv[1], {'a': 2}); print(load_tree(sys.argv[1]))"
    )
    with open_by_a_reader(tmp_path / "t.h5"):
        done = run_python(code, tmp_path / "t.h5", HDF5_USE_FILE_LOCKING=setting)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{'a': 2}\n", "")


def open_by_a_reader(path: Path) -> h5py.File:
    save_tree(path, {"a": 0})
    return h5py.File(path)


def assert_rejected_write_is_harmless(path: Path, reason: str) -> None:
    """Whatever stops a large write to `path`: one line, the older file, no leftover."""
    with pytest.raises(RunError) as rejected:
        save_tree(path, {"big": np.ones(1_000_000), **{f"small_{i}": np.ones(100) for i in range(100)}})
    assert str(rejected.value) == f"cannot write {path}: {reason}; the older file is untouched"
    assert_small_tree(load_tree(path))
    assert os.listdir(path.parent) == [path.name]


def test_a_full_disk_leaves_the_older_file(tmp_path):
    """On a real disk of 2 MB where mounting is allowed; the limit below is the same for everyone."""
    mount = shutil.which("mount")
    command = [mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if not mount or subprocess.run(command, capture_output=True).returncode:
        return assert_file_size_limit_is_harmless(tmp_path)
    try:
        save_tree(tmp_path / "t.h5", small_tree())
        for _ in range(3):
            assert_rejected_write_is_harmless(tmp_path / "t.h5", os.strerror(errno.ENOSPC))
        save_tree(tmp_path / "t.h5", small_tree())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_file_size_limit_leaves_the_older_file(tmp_path):
    assert_file_size_limit_is_harmless(tmp_path)


SIZE_LIMIT = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_tree import assert_rejected_write_is_harmless, save_tree, small_tree
path = Path(sys.argv[1])
save_tree(path, small_tree())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in (1000, 20_000, 2_000_000, 8_000_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    assert_rejected_write_is_harmless(path, "File too large")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
save_tree(path, small_tree())
"""


def assert_file_size_limit_is_harmless(folder: Path) -> None:
    done = run_python(SIZE_LIMIT, folder / "t.h5", Path(__file__).parent)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_in_a_stream_stops_making_members(tmp_path):
    made = []

    def make(client):
        made.append(client)
        return np.ones(100_000)

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    members = [(str(client), lambda client=client: make(client)) for client in range(50)]

    def check(disk):
        if len(made) == 4:
            raise full

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hkd_hpc.store.tree.DeferredErrorFile.check", check)
        with pytest.raises(RunError, match="No space left on device; no file was left behind"):
            save_tree(tmp_path / "t.h5", {"clients": Stream(members)})
    assert made == [0, 1, 2, 3]
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_one_line(tmp_path):
    with pytest.raises(RunError) as rejected:
        save_tree(tmp_path / "gone" / "t.h5", small_tree())
    assert str(rejected.value) == (
        f"cannot write {tmp_path}/gone/t.h5: No such file or directory; no file was left behind"
    )


def test_what_does_not_read_back_is_not_renamed(tmp_path):
    save_tree(tmp_path / "t.h5", small_tree())

    def flush_badly(path):
        if path.suffix == ".tmp":
            with open(path, "r+b") as file:
                file.truncate(700)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic, "_flush", flush_badly)
        with pytest.raises(RunError, match="does not read back .it is truncated.*the older file is untouched"):
            save_tree(tmp_path / "t.h5", {"a": 1})
    assert_small_tree(load_tree(tmp_path / "t.h5"))
    assert os.listdir(tmp_path) == ["t.h5"]


def test_importing_the_store_loads_neither_h5py_nor_torch():
    done = run_python(
        "import sys, hkd_hpc.store.tree, hkd_hpc.store.folder, hkd_hpc.store.lock; "
        "print([name for name in ('h5py', 'torch', 'mpi4py') if name in sys.modules])"
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_an_interrupt_while_a_file_is_written_counts_when_it_is_there(tmp_path):
    def write(path):
        path.write_text("one half")
        signal.raise_signal(signal.SIGINT)
        path.write_text("the whole")

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        atomic.replace_file(tmp_path / "file", write)
    assert (tmp_path / "file").read_text() == "the whole"
    assert len(list(tmp_path.iterdir())) == 1
    assert signal.getsignal(signal.SIGINT) is handler
