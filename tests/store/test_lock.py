"""The lock of a run folder: one holder at any time, the dead are replaced, the living are named."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy

from hkd_hpc.common.errors import UsageError
from hkd_hpc.store import lock
from hkd_hpc.store.lock import LockContent, LockWatch, RunLock, _own_content, _pid_space, is_held

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys, time
from hkd_hpc.store.lock import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
print("released", flush=True)
"""


def python(code: str, *arguments: object, **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "4711"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


@contextlib.contextmanager
def holder(folder: Path):
    """A process that holds the lock of `folder`; killed at the end."""
    process = python(HOLDER, folder)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def content_of(**changes) -> bytes:
    return json.dumps({**json.loads(_own_content()), **changes}).encode()


def silent(text: str) -> None:
    pass


def test_the_lock_says_who_holds_it_and_goes_with_its_holder(tmp_path):
    with RunLock(tmp_path):
        written = json.loads((tmp_path / "run.lock").read_text())
        assert written["host"] == socket.gethostname()
        assert written["pid"] == os.getpid()
        assert sorted(written) == ["host", "job", "pid", "pid_space", "pid_start", "since", "token", "user"]
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError), RunLock(tmp_path):
        raise ValueError
    assert os.listdir(tmp_path) == []


def test_a_living_holder_is_named(tmp_path):
    with holder(tmp_path) as process:
        with pytest.raises(UsageError) as rejected:
            RunLock(tmp_path).acquire(wait_s=0.3)
        assert str(rejected.value).startswith(
            f"{tmp_path} is in use by another run: host {socket.gethostname()}, process {process.pid}, job 4711, user "
        )
        assert str(rejected.value).endswith("; wait for its end or choose another --out")
        assert process.communicate("\n")[0] == "released\n"
        with RunLock(tmp_path, wait_s=0):
            pass


def test_a_lock_that_is_a_link_to_nowhere_is_reported_and_not_waited_for(tmp_path):
    (tmp_path / "run.lock").symlink_to(tmp_path / "none")
    with pytest.raises(UsageError, match="run.lock: is a link to a file that is not there; remove it"):
        RunLock(tmp_path).acquire()


def test_one_process_cannot_hold_it_twice(tmp_path):
    with RunLock(tmp_path), pytest.raises(UsageError, match=f"process {os.getpid()}"):
        RunLock(tmp_path).acquire(wait_s=0)


def test_waiting_for_a_holder_that_leaves(tmp_path):
    said = []
    with holder(tmp_path) as process:

        def told(line):
            said.append(line)
            print(file=process.stdin, flush=True)  # its word to leave

        with RunLock(tmp_path, wait_s=60, progress=told):
            assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    assert len(said) == 1
    assert said[0].startswith(f"waiting up to 60 s for {tmp_path}, held by another run: host ")


def test_a_killed_holder_is_replaced_at_once(tmp_path):
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        with RunLock(tmp_path, wait_s=0):
            assert os.listdir(tmp_path) == ["run.lock"]


def test_a_zombie_holds_nothing(tmp_path):
    with holder(tmp_path) as process:
        process.kill()
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        with RunLock(tmp_path, wait_s=0):
            pass
        assert process.returncode is None  # nobody has collected it so far


def test_a_pid_that_was_given_to_another_process_holds_nothing(tmp_path):
    (tmp_path / "run.lock").write_bytes(content_of(pid_start=1))
    with RunLock(tmp_path, wait_s=0):
        pass


@pytest.mark.parametrize(
    "content",
    [
        content_of(host="elsewhere", pid=1),
        content_of(pid_space="another boot pid:[1]", pid=2**22),
        b"",
        b'{"host": "a',
        b"[1]",
        b"\xff\x00",
    ],
)
def test_a_lock_that_does_not_move_is_taken_over(tmp_path, content):
    (tmp_path / "run.lock").write_bytes(content)
    os.utime(tmp_path / "run.lock", (4e9, 4e9))  # the clock of the other host is far ahead
    with pytest.raises(UsageError, match="host elsewhere, process 1|process 4194304|cannot be read"):
        RunLock(tmp_path, stale_s=60).acquire(wait_s=0.2)
    assert (tmp_path / "run.lock").read_bytes() == content
    with RunLock(tmp_path, wait_s=60, stale_s=0.3, progress=silent):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
        assert os.listdir(tmp_path) == ["run.lock"]


class FakeTime:
    """Time that goes on only while somebody sleeps, and what happens meanwhile."""

    def __init__(self, meanwhile):
        self.now_s, self.meanwhile = 1000.0, meanwhile

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        self.meanwhile(self.now_s)

    strftime = staticmethod(time.strftime)


def test_a_holder_with_a_heartbeat_on_another_host_keeps_its_lock(tmp_path, monkeypatch):
    """Its heartbeats come every 2 s; it would be dead after 10 s without one, and is waited for a minute."""
    (tmp_path / "run.lock").write_bytes(content_of(host="elsewhere"))

    def beat(now_s):
        os.utime(tmp_path / "run.lock", (1000, now_s // 2 * 2))  # its clock is decades behind

    monkeypatch.setattr(lock, "time", FakeTime(beat))
    with pytest.raises(UsageError, match="host elsewhere"):
        RunLock(tmp_path, progress=silent).acquire(wait_s=60)


def test_a_holder_whose_heartbeats_end_loses_its_lock(tmp_path, monkeypatch):
    """By the same clock: the last one comes 4 s after the first look, the takeover 10 s later."""
    (tmp_path / "run.lock").write_bytes(content_of(host="elsewhere"))

    def beat(now_s):
        if now_s < 1004:
            os.utime(tmp_path / "run.lock", (1000, now_s))

    clock = FakeTime(beat)
    monkeypatch.setattr(lock, "time", clock)
    with RunLock(tmp_path, wait_s=60, progress=silent):
        assert 1013.8 < clock.now_s < 1014.3


def test_the_holder_has_a_heartbeat(tmp_path):
    with RunLock(tmp_path, heartbeat_s=0.05):
        os.utime(tmp_path / "run.lock", (0, 0))
        toy.wait_until(lambda: (tmp_path / "run.lock").stat().st_mtime > 0)


def test_a_lost_lock_is_reported_once_and_left_to_its_new_holder(tmp_path):
    lost = []
    with RunLock(tmp_path, heartbeat_s=0.05, on_lost=lost.append):
        (tmp_path / "new").write_bytes(content_of(host="elsewhere", pid=7))
        (tmp_path / "new").replace(tmp_path / "run.lock")  # at once: an empty lock would be another's too
        toy.wait_until(lambda: lost)
        time.sleep(0.2)
    assert len(lost) == 1
    assert lost[0].startswith(f"the lock of {tmp_path} was taken over by another run: host elsewhere, process 7")
    assert json.loads((tmp_path / "run.lock").read_text())["host"] == "elsewhere"


def test_a_lock_file_removed_by_hand_comes_back(tmp_path):
    with RunLock(tmp_path, heartbeat_s=0.05):
        (tmp_path / "run.lock").unlink()
        toy.wait_until(lambda: (tmp_path / "run.lock").exists())
        with pytest.raises(UsageError):
            RunLock(tmp_path).acquire(wait_s=0)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("claimant", [content_of(pid_start=1), content_of(host="elsewhere"), b""])
def test_a_taker_that_died_in_between_stops_nobody(tmp_path, claimant):
    dead = content_of(pid_start=1)
    (tmp_path / "run.lock").write_bytes(dead)
    (tmp_path / f".run.lock.{LockContent(dead, 0).mark}").write_bytes(claimant)
    with RunLock(tmp_path, wait_s=60, stale_s=0.2, progress=silent):
        assert os.listdir(tmp_path) == ["run.lock"]
    assert os.listdir(tmp_path) == []


def test_a_taker_at_work_is_not_disturbed(tmp_path):
    dead = content_of(pid_start=1)
    (tmp_path / "run.lock").write_bytes(dead)
    claim = tmp_path / f".run.lock.{LockContent(dead, 0).mark}"
    claim.write_bytes(content_of())
    with pytest.raises(UsageError):
        RunLock(tmp_path).acquire(wait_s=0.3)
    assert (tmp_path / "run.lock").read_bytes() == dead
    assert claim.exists()


CONTENDER = """
import os, random, signal, sys, time
from hkd_hpc.store.lock import RunLock
folder, inside, log, turns, dies = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5] == "dies"
random.seed(os.getpid())
def alone():
    try:
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        sys.exit("two inside")
for turn in range(turns):
    with RunLock(folder, wait_s=100, progress=lambda text: None):
        alone()
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(random.uniform(0, 0.01))
        os.unlink(inside)
        if dies and turn == turns - 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_five_contenders_are_inside_one_at_a_time_even_when_they_die_there(tmp_path):
    folder, inside, log = tmp_path / "run", tmp_path / "inside", tmp_path / "log"
    folder.mkdir()
    processes = [python(CONTENDER, folder, inside, log, 5, how) for how in ("dies", "dies", "dies", "dies", "lives")]
    results = [(process.communicate(timeout=300)[1], process.returncode) for process in processes]
    assert results == [("", -9), ("", -9), ("", -9), ("", -9), ("", 0)]
    inside_pids = [int(line) for line in log.read_text().split()]
    assert sorted(inside_pids) == sorted(process.pid for process in processes for _ in range(5))
    with RunLock(folder, wait_s=0):
        pass
    assert os.listdir(folder) == []


TAKER = """
import os, sys, time
from hkd_hpc.common.errors import UsageError
from hkd_hpc.store.lock import RunLock
print("ready", flush=True)
sys.stdin.readline()
try:
    RunLock(sys.argv[1], 4.0, stale_s=1.0, progress=lambda text: None, on_lost=lambda text: print("lost")).acquire()
    print("mine", flush=True)
except UsageError as rejected:
    print("rejected" if "host elsewhere" not in str(rejected) else str(rejected), flush=True)
sys.stdin.readline()
"""


def test_of_several_takers_of_a_dead_lock_one_wins(tmp_path):
    (tmp_path / "run.lock").write_bytes(content_of(host="elsewhere"))
    takers = [python(TAKER, tmp_path) for _ in range(5)]
    assert [taker.stdout.readline() for taker in takers] == ["ready\n"] * 5
    for taker in takers:
        taker.stdin.write("\n")
        taker.stdin.flush()
    said = [taker.stdout.readline() for taker in takers]
    holder_pid = json.loads((tmp_path / "run.lock").read_text())["pid"]
    assert sorted(said) == ["mine\n"] + ["rejected\n"] * 4
    assert holder_pid == takers[said.index("mine\n")].pid
    assert [taker.communicate("\n", timeout=300)[0] for taker in takers] == [""] * 5


def test_a_folder_that_is_not_there_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot lock .*gone: No such file or directory; name a folder"):
        RunLock(tmp_path / "gone").acquire()


def test_processes_of_another_container_are_not_judged_by_their_pid():
    assert _pid_space().count("-") == 4
    assert "pid:[" in _pid_space()


def test_one_look_tells_whether_a_living_process_holds_it(tmp_path):
    assert not is_held(tmp_path)
    with holder(tmp_path) as process:
        assert is_held(tmp_path)
        assert not is_held(tmp_path, "job.lock")
        process.kill()
        process.wait()
        assert not is_held(tmp_path)
        assert (tmp_path / "run.lock").exists()


def test_a_holder_elsewhere_counts_as_dead_after_a_minute_without_a_sign(tmp_path):
    (tmp_path / "job.lock").write_bytes(content_of(host="elsewhere"))
    for age_s, held in ((0, True), (45, True), (75, False), (-86400, False)):
        os.utime(tmp_path / "job.lock", (time.time() - age_s,) * 2)
        assert is_held(tmp_path, "job.lock") == held


def test_looks_over_time_tell_of_a_holder_elsewhere_whatever_its_clock_says(tmp_path):
    path = tmp_path / "run.lock"
    watch = LockWatch(tmp_path, stale_s=0.2)
    assert watch.is_held() is False
    path.write_bytes(content_of(host="elsewhere"))
    assert watch.is_held() is None  # it may be of a dead one
    os.utime(path, (1.0, 1.0))
    assert watch.is_held() is True
    time.sleep(0.3)
    assert watch.is_held() is False
    path.write_bytes(content_of())
    assert watch.is_held() is True


def test_a_file_in_the_place_of_a_folder_holds_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    assert not is_held(tmp_path / "file")
    with pytest.raises(UsageError, match="cannot lock .*file: Not a directory"):
        RunLock(tmp_path / "file").acquire()


def test_locks_of_two_names_do_not_meet(tmp_path):
    with RunLock(tmp_path, wait_s=0, name="job.lock"), RunLock(tmp_path, wait_s=0):
        assert sorted(os.listdir(tmp_path)) == ["job.lock", "run.lock"]
