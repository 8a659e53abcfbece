"""The file system of the output folder: what a run does there is done once in a hidden folder, which goes again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.comm.control.base import leave
from hkd_hpc.comm.control.watch import write_stderr
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.console.messages import bytes_text
from hkd_hpc.doctor.clocks import SKEW_S
from hkd_hpc.doctor.context import Context
from hkd_hpc.doctor.findings import ERROR, NOTE, WARNING, Finding, Kind, Section
from hkd_hpc.runtime.paths import nearest_existing
from hkd_hpc.store.atomic import replace_text
from hkd_hpc.store.lock import RunLock
from hkd_hpc.store.tree import load_tree, save_tree

NAME = "files"
WRITTEN_BYTES = 16 << 20
TURNS = 3
SLOW_MB_S, SLOW_SAVE_S = 20.0, 0.5
NEEDED_INODES = 100  # a run makes about ten files, a study of ten runs a hundred
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
OF_ONE_HOST = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "f2fs", *IN_MEMORY)
FULL = {errno.ENOSPC: "no space is left", errno.EDQUOT: "the quota is used up", errno.EFBIG: "a file may not grow so"}

NO_FOLDER = Kind(
    "files.not_writable",
    ERROR,
    "a run cannot begin there",
    "--out DIR with a folder that you may write to",
)
READ_ONLY = Kind(
    "files.read_only",
    ERROR,
    "a run cannot begin there",
    "--out DIR on a file system that is mounted for writing on compute nodes (often $SCRATCH, seldom $HOME)",
)
NO_ROOM = Kind(
    "files.full",
    ERROR,
    "the run ends at its first save, or at a later one",
    "make room (du -sh {folder}/*), see your quota, or --out DIR on another disk",
)
LITTLE_ROOM = Kind(
    "files.little_room",
    ERROR,
    "the run ends with `cannot write` once the disk is full; what was saved by then stays good",
    "make room, --out DIR on another disk, or run.client_models=false",
)
FEW_INODES = Kind(
    "files.few_inodes",
    WARNING,
    "the disk takes no further files though it has room",
    "remove or pack folders of many small files",
)
NO_LOCK = Kind(
    "files.no_lock",
    ERROR,
    "two jobs could write into one run folder at the same time and spoil it",
    "--out DIR on a file system that keeps O_CREAT|O_EXCL exclusive (NFS 3 and later, Lustre, GPFS, local disks)",
)
NO_FLOCK = Kind(
    "files.no_flock",
    NOTE,
    "runs need no flock; other programs that open their files with HDF5 do, and so does `hkd data prepare`",
    "export HDF5_USE_FILE_LOCKING=FALSE before h5py, h5ls and the like (Lustre: mounted with -o flock)",
)
BROKEN = Kind(
    "files.broken",
    ERROR,
    "what a run saves there could not be read again",
    "--out DIR on another file system, and tell the site's administrators",
)
SLOW = Kind(
    "files.slow",
    WARNING,
    "rank 0 saves each round while the next one trains; below this speed the ranks wait for it",
    "--out DIR on a faster file system, or a larger run.checkpoint_every",
)
MEMORY = Kind(
    "files.in_memory",
    WARNING,
    "the run's files take memory from the ranks, and are gone with the node or the job",
    "--out DIR on a disk",
)
ONE_HOST = Kind(
    "files.one_host",
    WARNING,
    "a job that is requeued on another node does not find its run",
    "--out DIR on a file system that all nodes share",
)
CLOCK = Kind(
    "files.clock",
    WARNING,
    "file times are not those of this host: `status` may take a living run for dead",
    "have the site's administrators look at the time service of host and file server",
)


@dataclass
class Measured:
    """What was seen in the folder; None: it did not come to that."""

    place: str
    type: str
    source: str
    free_bytes: int
    free_inodes: int | None
    needed_bytes: int
    is_read_only: bool
    write_mb_s: float | None = None
    save_s: float | None = None
    hdf5_s: float | None = None
    has_flock: bool | None = None
    clock_off_s: float = 0.0
    problems: list[Finding] = field(default_factory=list)


def collect(context: Context) -> Section | None:
    """Rank 0, which alone writes files in a run."""
    if context.comm.rank:
        return None
    with context.comm.uninterrupted(), limited(context.config.comm.timeout_s, context.out):
        measured = measure(context.out, needed_bytes(context))
    return section_of(context.out, measured, context.several_hosts or "SLURM_JOB_ID" in os.environ)


@contextlib.contextmanager
def limited(limit_s: float, folder: Path) -> Iterator[None]:
    """A file system that does not answer (a lost server) ends the job after so many seconds, with one line."""

    def give_up() -> None:
        write_stderr(
            f"hkd_hpc: the file system of {folder} did not answer within {limit_s:g} s (comm.timeout_s): "
            f"name another folder with --out, or ask the site's administrators"
        )
        leave(1)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def needed_bytes(context: Context) -> int:
    """What a run with these settings has on the disk at most, as if its images were CIFAR10's: three checkpoints with
    what each client keeps, the last with all clients' models."""
    from hkd_hpc.models import networks
    from hkd_hpc.models.flat import FlatModel
    from hkd_hpc.payload import numbers_in
    from hkd_hpc.schemes.base import RunInfo
    from hkd_hpc.state import client_state
    from hkd_hpc.training import LocalTrainer

    config, clients, classes = context.config, context.config.fed.clients, 10
    try:
        flat = FlatModel(networks.build(config.model, classes, (3, 32, 32), 0))
        info = RunInfo(classes, config.model.latent, clients, len(flat.parameters_P), len(flat.values_V), 0)
        scheme = schemes.get(config.scheme.name)(config.scheme, info)
        trainer = LocalTrainer(flat, scheme, config)
    except (ImportError, UsageError):  # packages says so
        return 0
    usual, last = (clients * numbers_in(client_state.shapes_of(trainer, is_last)) for is_last in (False, True))
    return 4 * (3 * (len(flat.values_V) + numbers_in(trainer.own_shapes())) + 2 * usual + last)


def measure(folder: Path, needed: int) -> Measured:
    """Look at the file system, and do what a run does there; the folder is as before afterwards."""
    place = nearest_existing(folder)
    disk, (kind, source) = os.statvfs(place), mount_of(place, Path("/proc/self/mountinfo").read_text())
    measured = Measured(
        place=str(place),
        type=kind,
        source=source,
        free_bytes=disk.f_bavail * disk.f_frsize,
        free_inodes=disk.f_favail if disk.f_files else None,
        needed_bytes=needed,
        is_read_only=bool(disk.f_flag & os.ST_RDONLY),
    )
    if measured.is_read_only:
        return measured
    try:
        own = Path(tempfile.mkdtemp(prefix=".hkd-doctor-", dir=place))
    except OSError as error:
        measured.problems.append(told(error, place))
        return measured
    try:
        try_out(own, measured)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return measured


def mount_of(place: Path, mountinfo: str) -> tuple[str, str]:
    """(type, source) of the file system that a path is on, from /proc/self/mountinfo."""
    best, found = "", ("?", "?")
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        point = fields.split()[4].replace("\\040", " ")
        if Path(os.path.realpath(place)).is_relative_to(point) and len(point) >= len(best):
            best, found = point, (rest.split()[0], rest.split()[1])
    return found


def try_out(own: Path, measured: Measured) -> None:
    """Each step by itself: where one fails, the others still tell something."""
    for step in (write_much, save_often, use_hdf5, use_lock, use_flock):
        try:
            step(own, measured)
        except (OSError, RunError, UsageError) as error:
            measured.problems.append(told(error, own.parent))


def told(error: Exception, place: Path) -> Finding:
    """The finding of an error that a step met."""
    cause = error if isinstance(error, OSError) else error.__cause__
    number = cause.errno if isinstance(cause, OSError) else None
    if number in FULL:
        return NO_ROOM.found(f"{place}: {FULL[number]} ({os.strerror(number)})", folder=place)
    if number in (errno.EACCES, errno.EPERM):
        return NO_FOLDER.found(f"{place}: {os.strerror(number)}")
    return BROKEN.found(f"{place}: {os.strerror(number) if number else error}")


def write_much(own: Path, measured: Measured) -> None:
    """A file of some MB, flushed to the disk."""
    data = np.random.default_rng(0).bytes(WRITTEN_BYTES)  # a file system may compress zeros
    path = own / "much"

    def write() -> None:
        with open(path, "wb", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())

    try:
        measured.write_mb_s = WRITTEN_BYTES / 1e6 / seconds_of(write)
    finally:
        path.unlink(missing_ok=True)


def save_often(own: Path, measured: Measured) -> None:
    """A small file, written, flushed and renamed as a run does; its time is compared with this host's clock."""
    path = own / "config.json"
    measured.save_s = seconds_of(lambda: replace_text(path, "{}"))
    before_s = time.time()
    replace_text(path, "{}")
    changed_s, after_s = path.stat().st_mtime, time.time()
    measured.clock_off_s = max(before_s - changed_s, changed_s - after_s, 0.0)


def use_hdf5(own: Path, measured: Measured) -> None:
    """A checkpoint of a small network, made, opened and compared."""
    path, weights = own / "round_0001.h5", np.arange(100_000, dtype=np.float32)
    measured.hdf5_s = seconds_of(lambda: save_tree(path, {"weights": weights}))
    if not np.array_equal(load_tree(path)["weights"], weights):
        measured.problems.append(BROKEN.found(f"{own.parent}: an HDF5 file has other numbers than were written"))


def use_lock(own: Path, measured: Measured) -> None:
    """The lock of a run's folder keeps a second one out."""
    silent: Callable[[str], None] = lambda text: None
    with RunLock(own, wait_s=0, progress=silent):
        second = RunLock(own, wait_s=0, progress=silent)
        try:
            second.acquire()
        except UsageError:
            return
        second.release()
    measured.problems.append(NO_LOCK.found(f"{own.parent}: a lock was given to two holders at the same time"))


def use_flock(own: Path, measured: Measured) -> None:
    """What HDF5 itself asks for."""
    with open(own / "flock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            measured.has_flock = True
        except OSError:
            measured.has_flock = False


def seconds_of(action: Callable[[], object]) -> float:
    """The median of some turns."""
    times_s = []
    for _ in range(TURNS):
        began_s = time.perf_counter()
        action()
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s)


def section_of(folder: Path, measured: Measured, may_move: bool) -> Section:
    """The section.

    Args:
        folder: the output folder.
        measured: what was seen there.
        may_move: whether a run may go on on another host.
    """
    problems = list(dict.fromkeys(measured.problems))  # a full disk stops several steps
    findings = [*problems, *check_room(measured), *check_kind(measured, may_move), *check_speed(measured)]
    facts = {name: value for name, value in vars(measured).items() if name != "problems"}
    return Section(NAME, [line_of(folder, measured)], facts, findings)


def line_of(folder: Path, measured: Measured) -> str:
    """For people."""
    room = f"{bytes_text(measured.free_bytes)} free, {bytes_text(measured.needed_bytes)} needed"
    parts = [f"{folder}: {measured.type} ({measured.source})", room]
    parts += [f"{measured.write_mb_s:.0f} MB/s with fsync"] if measured.write_mb_s is not None else []
    parts += [f"small file {1000 * measured.save_s:.1f} ms"] if measured.save_s is not None else []
    parts += [f"HDF5 {1000 * measured.hdf5_s:.1f} ms"] if measured.hdf5_s is not None else []
    return ", ".join(parts)


def check_room(measured: Measured) -> list[Finding]:
    """Room for a run, in bytes and in files."""
    place, free, needed = measured.place, measured.free_bytes, measured.needed_bytes
    findings = []
    if measured.is_read_only:
        findings += [READ_ONLY.found(f"{place}: is mounted read-only")]
    elif free < needed:
        findings += [LITTLE_ROOM.found(f"{place}: {bytes_text(free)} free, a run needs {bytes_text(needed)}")]
    if measured.free_inodes is not None and measured.free_inodes < NEEDED_INODES:
        findings += [FEW_INODES.found(f"{place}: room for {measured.free_inodes} more files (inodes)")]
    return findings


def check_kind(measured: Measured, may_move: bool) -> list[Finding]:
    """What this kind of file system cannot do."""
    place, findings = measured.place, []
    if measured.type in IN_MEMORY:
        findings += [MEMORY.found(f"{place}: {measured.type} is memory")]
    elif measured.type in OF_ONE_HOST and may_move:
        findings += [ONE_HOST.found(f"{place}: {measured.type} is a disk of this host alone")]
    if measured.has_flock is False:
        findings += [NO_FLOCK.found(f"{place}: no flock")]
    return findings


def check_speed(measured: Measured) -> list[Finding]:
    """Writes that ranks would have to wait for, and times that are not this host's."""
    place, findings = measured.place, []
    if measured.write_mb_s is not None and measured.write_mb_s < SLOW_MB_S:
        findings += [SLOW.found(f"{place}: {measured.write_mb_s:.1f} MB/s with fsync; {SLOW_MB_S:g} are enough")]
    if measured.save_s is not None and measured.save_s > SLOW_SAVE_S:
        findings += [SLOW.found(f"{place}: {measured.save_s:.2f} s for a small file; {SLOW_SAVE_S:g} s are enough")]
    if measured.clock_off_s > SKEW_S:
        findings += [CLOCK.found(f"{place}: its file times are {measured.clock_off_s:.1f} s off this host's clock")]
    return findings
