"""Files whose tables grow: plain h5py at any moment, whatever kills the writer or reads; damage noticed; the same price
for every row.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest

from hkd_hpc.common.errors import RunError
from hkd_hpc.store import tree
from hkd_hpc.store.checksum import FIRST_BYTES, GrowingChecksum
from hkd_hpc.store.growing import MIN_CAPACITY, GrowingTree
from hkd_hpc.store.tree import BadFile, Leaf, load_tree, open_tree

REST = {
    "config_json": "é",
    "clients": {"rank": np.arange(3)},
    "partition": {"index": np.arange(500), "none": np.zeros(0)},
}
ATTRIBUTES = {
    "unit": "s",
    "model": "m" * 40,
    "data": "d" * 40,
    "moment": "t" * 40,
    "clients": "none",
    "weighting": "w" * 60,
}


def rows(first: int, last: int) -> dict:
    """Rounds first to last; every number can be told from any other."""
    rounds = np.arange(first, last + 1)
    return {
        "rounds": {
            "round": rounds,
            "accuracy": Leaf(rounds / 7, ATTRIBUTES),
            "sha": np.array([f"{n:064d}" for n in rounds], "U"),
            "warning": np.array(["ü" * (n // 10) for n in rounds], "U"),
            "loss": {"soft": Leaf(-rounds / 3, {"unit": "nat"})},
        },
        "clients": {"accuracy": Leaf(rounds[:, None] + np.array([0.25, np.nan, 0.75]), {"axes": "round, client"})},
    }


def save(file: GrowingTree, last: int) -> None:
    file.save(REST, lambda have: rows(have.get("rounds", 0) + 1, last))


def assert_rows(root, last: int) -> None:
    """What plain h5py finds, or the same as arrays."""
    text = lambda node: (node.asstr() if hasattr(node, "asstr") else node)[()].tolist() if len(node) else []
    rounds = np.arange(1, last + 1)
    assert root["rounds"]["round"][()].tolist() == rounds.tolist()
    assert root["rounds"]["accuracy"][()].tolist() == (rounds / 7).tolist()
    assert root["rounds"]["loss"]["soft"][()].tolist() == (-rounds / 3).tolist()
    assert text(root["rounds"]["sha"]) == [f"{n:064d}" for n in rounds]
    assert text(root["rounds"]["warning"]) == ["ü" * (n // 10) for n in rounds]
    np.testing.assert_array_equal(root["clients"]["accuracy"][()], rounds[:, None] + np.array([0.25, np.nan, 0.75]))
    assert root["clients"]["rank"][()].tolist() == [0, 1, 2]


def test_plain_h5py_finds_all_rows_and_older_handles_keep_theirs(tmp_path):
    """Over additions, texts that become longer, and files that are made anew. (HDF5 gives a process that opens a file
    by name what it has open already; through a Python file it looks again.)"""
    file, kept = GrowingTree(tmp_path / "m.h5"), []
    for last in range(1, 2 * MIN_CAPACITY + 3):
        save(file, last)
        kept.append(h5py.File(open(tmp_path / "m.h5", "rb"), "r"))
        with h5py.File(tmp_path / "m.h5") as root:
            assert_rows(root, last)
    for last, root in enumerate(kept, start=1):
        assert_rows(root, last)
        root.close()
    assert_rows(load_tree(tmp_path / "m.h5"), last)
    with h5py.File(tmp_path / "m.h5") as root:
        assert root["config_json"].asstr()[()] == "é"
        assert root["partition/index"][:].tolist() == list(range(500))
        assert dict(root["rounds/accuracy"].attrs) == ATTRIBUTES
        assert root["clients/accuracy"].attrs["axes"] == "round, client"
        assert dict(root.attrs) == {"format_version": 1, "complete": 1}
        assert sorted(root) == ["clients", "config_json", "partition", "rounds"]
    assert os.listdir(tmp_path) == ["m.h5"]


def test_a_table_that_comes_later_and_seldom_grows(tmp_path):
    file, events = GrowingTree(tmp_path / "m.h5"), []

    def tables(have: dict, last: int) -> dict:
        new = events[have.get("events", 0) :]
        more = (
            {"events": {"round": np.array([n for n, _ in new]), "what": np.array([text for _, text in new])}}
            if events
            else {}
        )
        return rows(have.get("rounds", 0) + 1, last) | more

    for last in range(1, 9):
        events += {3: [(3, "NaN")], 7: [(7, "late"), (7, "a longer one")]}.get(last, [])
        file.save(REST, lambda have, last=last: tables(have, last))
        found = load_tree(tmp_path / "m.h5")
        assert_rows(found, last)
        assert [*zip(found.get("events", {"round": []})["round"], found.get("events", {"what": []})["what"])] == events


def written_by(monkeypatch, action) -> int:
    """Bytes handed to files."""
    counted, original = [], tree.DeferredErrorFile.write
    with monkeypatch.context() as patch:
        patch.setattr(
            tree.DeferredErrorFile, "write", lambda file, data: (counted.append(len(data)), original(file, data))[1]
        )
        action()
    return sum(counted)


def test_a_row_costs_as_many_bytes_after_a_thousand_as_after_one(tmp_path, monkeypatch):
    """And all together, with the files made anew, in proportion to their number."""
    file = GrowingTree(tmp_path / "m.h5")
    tables = lambda have, last: {"rounds": {"x": np.arange(have.get("rounds", 0), last)}}
    costs = [written_by(monkeypatch, lambda: file.save({}, partial(tables, last=last))) for last in range(1, 1201)]
    anew = [number for number, cost in enumerate(costs) if cost != costs[1]]
    assert anew == [0, 64, 130, 262, 526, 1054]  # space for 64, 2 x 65, 2 x 131 ... rows
    assert sum(costs) < 1200 * 3 * costs[1]
    assert load_tree(tmp_path / "m.h5")["rounds"]["x"].tolist() == list(range(1200))


def test_a_reader_sees_one_moment_while_rows_are_added(tmp_path):
    file = GrowingTree(tmp_path / "m.h5")
    save(file, 3)
    with open_tree(tmp_path / "m.h5") as mine, h5py.File(tmp_path / "m.h5") as plain:
        save(file, 4)
        save(file, 500)
        assert_rows(mine.load(), 3)
        assert_rows(plain, 3)
    assert_rows(load_tree(tmp_path / "m.h5"), 500)


def test_a_reader_of_another_process_that_locks_the_file_disturbs_nothing(tmp_path):
    file = GrowingTree(tmp_path / "m.h5")
    save(file, 1)
    hold = (
        "import h5py, sys; f = h5py.File(sys.argv[1]); print('open', flush=True); sys.stdin.read(); "
        "print(len(f['rounds/round'][:]))"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", hold, tmp_path / "m.h5"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HDF5_USE_FILE_LOCKING": "TRUE"},
    )
    assert reader.stdout.readline() == "open\n"
    inode = (tmp_path / "m.h5").stat().st_ino
    save(file, 2)
    assert (tmp_path / "m.h5").stat().st_ino == inode  # it was not made anew
    assert_rows(load_tree(tmp_path / "m.h5"), 2)
    assert reader.communicate("", timeout=300)[0] == "1\n"


# ---- damage


def test_no_flipped_bit_gives_wrong_rows(tmp_path):
    """In what counts it is a bad file; in space that is free, and in older heads, nothing is lost."""
    file = GrowingTree(tmp_path / "m.h5")
    save(file, 2)
    save(file, 5)
    content = (tmp_path / "m.h5").read_bytes()
    checksum, dice = GrowingChecksum.of(content), random.Random(0)
    counts = range(FIRST_BYTES + checksum.base_bytes), range(checksum.head_at, checksum.head_at + checksum.head_bytes)
    with h5py.File(tmp_path / "m.h5") as root:
        column = root["clients/accuracy"]
        counts += (range(column.id.get_offset(), column.id.get_offset() + column.size * 8),)
    places = [place for part in counts for place in dice.choices(part, k=100)] + [*range(100), *range(505, 608)]
    for place in (*places, *(dice.randrange(len(content)) for _ in range(100))):
        damaged = bytearray(content)
        damaged[place] ^= 1 << dice.randrange(8)
        (tmp_path / "bad.h5").write_bytes(damaged)
        try:
            assert_rows(load_tree(tmp_path / "bad.h5"), 5)
            assert not any(place in part for part in counts), place
        except BadFile:
            pass


def test_a_file_that_is_cut_or_longer_is_bad(tmp_path):
    file = GrowingTree(tmp_path / "m.h5")
    save(file, 3)
    content = (tmp_path / "m.h5").read_bytes()
    for length in (0, 300, 511, 600, 700, 5_000, len(content) - 1):
        (tmp_path / "bad.h5").write_bytes(content[:length])
        with pytest.raises(BadFile, match="truncated|not an HDF5 file|not written to its end"):
            load_tree(tmp_path / "bad.h5")
    (tmp_path / "bad.h5").write_bytes(content + b"x")
    with pytest.raises(BadFile, match="do not match its checksum"):
        load_tree(tmp_path / "bad.h5")


@pytest.mark.parametrize("what", ["removed", "another file", "a bit flipped at the start", "cut"])
def test_a_file_that_is_not_as_it_was_left_is_made_anew(tmp_path, what):
    path = tmp_path / "m.h5"
    file = GrowingTree(path)
    save(file, 3)
    content = path.read_bytes()
    path.unlink()
    if what != "removed":
        path.write_bytes(
            {"another file": b"x" * len(content), "cut": content[:900]}.get(what, bytes([content[0] ^ 1]) + content[1:])
        )
    save(file, 4)
    assert_rows(load_tree(path), 4)


# ---- writers that die or are rejected

WRITER = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from hkd_hpc.store.growing import GrowingTree
from hkd_hpc.store.tree import load_tree
from test_growing import save
path = Path(sys.argv[1])
import os, random, signal
newest, dice = 1, random.Random(int(sys.argv[4]))
save(GrowingTree(path), newest)
attempt = 0
while attempt < int(sys.argv[3]) or newest < 6:
    attempt += 1
    child = os.fork()
    if child == 0:
        file = GrowingTree(path, sync_every_s=0.05)
        for last in range(newest, 10**6):
            save(file, last)
    time.sleep(dice.uniform(0.0, dice.choice((0.1, 0.5))))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = load_tree(path)["rounds"]["round"].tolist()
    assert found == list(range(1, len(found) + 1)) and len(found) >= newest, attempt
    newest = len(found)
print("rows", newest)
"""


def test_killed_at_any_instant_and_read_all_the_time(tmp_path):
    """The writer gets kill -9 again and again; another process opens the file with plain h5py all the while."""
    killed_and_read(tmp_path, kills=12)


def killed_and_read(folder: Path, kills: int, seed: int = 0) -> int:
    """How often it was opened and read."""
    path, seen, done = folder / "m.h5", [], threading.Event()

    def read():
        while not done.is_set():
            if path.exists():
                with h5py.File(path, "r") as root:
                    assert_rows(root, len(root["rounds/round"]))
                    seen.append(len(root["rounds/round"]))
            time.sleep(0.001)

    problems: list[BaseException] = []
    guarded = lambda: problems.append(error) if (error := attempt(read)) else None
    reader = threading.Thread(target=guarded)
    reader.start()
    try:
        ran = subprocess.run(
            [sys.executable, "-c", WRITER, path, Path(__file__).parent, str(kills), str(seed)],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            timeout=300,
        )
    finally:
        done.set()
        reader.join()
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("rows "), ran.stderr
    assert not problems, problems
    assert seen == sorted(seen)
    with h5py.File(path) as root:
        assert_rows(root, int(ran.stdout.split()[1]))
    return len(seen)


def attempt(action) -> BaseException | None:
    try:
        action()
    except BaseException as error:
        return error
    return None


@pytest.mark.parametrize("place", range(8))
def test_killed_before_any_of_its_writes_an_addition_counts_or_does_not(tmp_path, place):
    """Each write of an addition, and before the last one: the rows before are there, no other."""
    save(GrowingTree(tmp_path / "m.h5"), 3)
    child = os.fork()
    if child == 0:
        die_at_write(tmp_path / "m.h5", place)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (-signal.SIGKILL if place < 8 else 0)
    with h5py.File(tmp_path / "m.h5") as root:
        assert_rows(root, 3)
    assert_rows(load_tree(tmp_path / "m.h5"), 3)


def die_at_write(path: Path, place: int) -> None:
    """6 columns, the head, the first block."""
    file = GrowingTree(path)
    save(file, 3)
    original, writes = tree.DeferredErrorFile.write, iter(range(100))

    def write(disk, data):
        if next(writes) == place:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(disk, data)

    tree.DeferredErrorFile.write = write
    save(file, 4)
    os._exit(0)


LIMITED = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from hkd_hpc.common.errors import RunError
from hkd_hpc.store.growing import GrowingTree
from hkd_hpc.store.tree import load_tree
from test_growing import assert_rows, save
path = Path(sys.argv[1])
file = GrowingTree(path)
save(file, 3)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in (100, 1000, 10_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for _ in range(2):  # the second time it would be made anew
        try:
            save(file, 4)
        except RunError as rejected:
            assert str(rejected).startswith(f"cannot write {path}: File too large; the "), rejected
            assert str(rejected).endswith("untouched"), rejected
        else:
            raise AssertionError(limit)
        assert_rows(load_tree(path), 3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    file = GrowingTree(path)
    save(file, 3)
save(file, 4)
assert_rows(load_tree(path), 4)
"""


def test_a_quota_is_one_line_and_the_rows_before_stay(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path / "m.h5", Path(__file__).parent],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path) == ["m.h5"]


def test_a_full_disk_is_one_line_and_the_rows_before_stay(tmp_path):
    mount = shutil.which("mount")
    command = [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if not mount or subprocess.run(command, capture_output=True).returncode:
        return test_a_quota_is_one_line_and_the_rows_before_stay(tmp_path)
    try:
        file, last = GrowingTree(tmp_path / "m.h5"), 3
        save(file, last)
        with open(tmp_path / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(bytes(4096))
        with pytest.raises(RunError) as rejected:
            for last in range(4, MIN_CAPACITY):
                save(file, last)
        assert str(rejected.value) in (
            f"cannot write {tmp_path}/m.h5: {os.strerror(errno.ENOSPC)}; the {what} untouched"
            for what in ("rows before are", "older file is")
        )
        assert_rows(load_tree(tmp_path / "m.h5"), last - 1)
        (tmp_path / "filler").unlink()
        save(file, last)
        assert_rows(load_tree(tmp_path / "m.h5"), last)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
