"""Helpers of the integration tests: tiny data, runs of `hkd_hpc.train` (forked ranks or mpirun), and their files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from comm_launch import mpirun_path, session_folder

from tools.forked_ranks import Result, run_ranks

SMALL = ("fed.clients=3", "fed.rounds=2", "train.epochs=1", "train.batch_size=16", "model.latent=8", "data.fraction=1")
TIMES = ("seconds/", "wire_bytes/", "memory_bytes")  # columns that depend on the layout or the hour
MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
PROJECT = Path(__file__).resolve().parents[2]

# ---- data


def images(labels: np.ndarray, seed: int, side: int = 32) -> np.ndarray:
    """(N,3,side,side) uint8: noise, and for class c a bright block of its own place and colour."""
    random = np.random.default_rng(seed)
    pixels = random.normal(90, 20, (len(labels), 3, side, side))
    for c in range(10):
        rows, columns = slice(c // 5 * 14, c // 5 * 14 + 12), slice(c % 5 * 5, c % 5 * 5 + 5)
        pixels[labels == c, c % 3, rows, columns] += 130
    return np.clip(pixels, 0, 255).astype(np.uint8)


def save_data(path: Path, train: int = 300, test: int = 100, side: int = 32, **more: np.ndarray) -> Path:
    """An .npz of ten classes that a small net tells apart; `more`: client ids, or arrays in place of the usual ones."""
    y_train, y_test = np.arange(train) % 10, np.arange(test) % 10
    arrays = {
        "x_train": images(y_train, 1, side),
        "y_train": y_train,
        "x_test": images(y_test, 2, side),
        "y_test": y_test,
    }
    np.savez(path, **{**arrays, **more})
    return path


def save_natural(path: Path, sizes: Iterable[int], test_per_client: int = 10) -> Path:
    """The same with client ids: client i owns sizes[i] training images and `test_per_client` test images."""
    sizes = list(sizes)
    ids = np.repeat(np.arange(len(sizes)), sizes)
    return save_data(
        path,
        len(ids),
        test_per_client * len(sizes),
        client_train=ids,
        client_test=np.repeat(np.arange(len(sizes)), test_per_client),
    )


# ---- runs in forked ranks

Patch = Callable[[int], None]


def train_rank(rank: int, arguments: list[str], patch: Patch | None) -> None:
    """One rank of a job; `patch(rank)` changes the product in this process only."""
    from hkd_hpc import train

    if patch:
        patch(rank)
    sys.exit(train.main(arguments))


def train(size: int, *arguments: object, patch: Patch | None = None, **options) -> list[Result]:
    """The job with `size` ranks: how each rank ended. `options`: those of run_ranks."""
    import hkd_hpc.comm.transports.torch_dist
    import hkd_hpc.run
    import hkd_hpc.train  # noqa: F401  (here, so that no rank has to)

    return run_ranks(size, train_rank, [str(argument) for argument in arguments], patch, **options)


def train_ok(size: int, *arguments: object, **options) -> list[str]:
    """As `train`, for jobs that must succeed: the outputs by rank."""
    results = train(size, *arguments, **options)
    assert [result[:2] for result in results] == [(0, None)] * size, "\n---\n".join(map(str, results))
    return [result.output for result in results]


def settings(data: Path, *more: str) -> list[str]:
    """Arguments of a tiny run on the file `data`."""
    return ["data.name=file", f"data.path={data}", *SMALL, *more]


def our_lines(outputs: Iterable[str]) -> list[str]:
    """The lines of ours in all outputs of a job, warnings aside."""
    lines = [line for output in outputs for line in output.splitlines()]
    return [line for line in lines if line.startswith("hkd_hpc: ") and not line.startswith("hkd_hpc: warning:")]


def kill_all(folder: Path) -> None:
    """kill -9 of all ranks that `note_pid` wrote down, the caller last."""
    pids = [int(path.name) for path in folder.iterdir()]
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)


def note_pid(folder: Path, size: int) -> None:
    """Write this rank's pid down and wait until all have."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < size:
        time.sleep(0.005)


def on_place(round: int | None, phase: str, action: Callable[[], None]) -> None:
    """Call `action` when this rank says that it is at (round, phase); any round if None."""
    from hkd_hpc.comm.transports.base import Comm

    original = Comm.at

    def at(self, now, where, client=None):
        original(self, now, where, client)
        if where == phase and round in (None, now):
            action()

    Comm.at = at


def count_training(path: Path) -> None:
    """Append a line "round client" to `path` for every local training of this rank."""
    from hkd_hpc.training import LocalTrainer

    original = LocalTrainer.run

    def run(self, given):
        with open(path, "a") as file:
            file.write(f"{given.round} {given.client.id}\n")
        return original(self, given)

    LocalTrainer.run = run


def trained(path: Path) -> list[tuple[int, int]]:
    """What `count_training` noted: (round, client), sorted."""
    return sorted(tuple(map(int, line.split())) for line in path.read_text().splitlines())


# ---- runs under mpirun


def start_mpirun(
    size: int,
    *arguments: object,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    before: tuple[str, ...] = (),
) -> subprocess.Popen:
    """`mpirun -n size python -m hkd_hpc.train arguments`, started; outputs are pipes of text."""
    paths = os.pathsep.join(filter(None, [(env or {}).get("PYTHONPATH"), str(PROJECT), os.environ.get("PYTHONPATH")]))
    command = [*before, mpirun_path(), "-n", str(size), sys.executable, "-m", "hkd_hpc.train", *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **MPI_ENV, "TMPDIR": session_folder(), **(env or {}), "PYTHONPATH": paths},
    )


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A real disk of that size (4m), made and mounted at `place`; a test that needs it is skipped where none may be."""
    place.mkdir()
    mount = shutil.which("mount")
    if (
        not mount
        or subprocess.run([mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True).returncode
    ):
        pytest.skip("mounting is not allowed here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@contextlib.contextmanager
def full_disk(place: Path) -> Iterator[Path]:
    """A small disk with half a megabyte left: small files go there, larger ones do not."""
    with small_disk(place, "3m") as disk:
        (disk / "much").write_bytes(b"\1" * (5 << 19))
        yield disk


def mpirun(size: int, *arguments: object, timeout_s: float = 300, **options) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the whole job."""
    job = start_mpirun(size, *arguments, **options)
    try:
        out, err = job.communicate(timeout=timeout_s)
    finally:
        job.kill()
    return job.returncode, out, err


def rank_pids(job_pid: int) -> dict[int, int]:
    """{rank: pid} of the Python ranks below an mpirun."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and descends(int(entry.name), job_pid):
            rank = _rank_of(entry)
            if rank is not None:
                found[rank] = int(entry.name)
    return found


def descends(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            return False
    return pid == ancestor


def _rank_of(entry: Path) -> int | None:
    try:
        if b"hkd_hpc.train" not in (entry / "cmdline").read_bytes():
            return None
        variables = (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    ranks = [int(v.split(b"=")[1]) for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")]
    return ranks[0] if ranks else None


def is_running(pid: int) -> bool:
    """False for a process that is gone or waits, dead, for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(true: Callable[[], object], timeout_s: float = 300) -> None:
    """Poll until `true()`; AssertionError when time is up."""
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.02)


# ---- files of a run


def flat_tree(group: h5py.Group, prefix: str = "") -> dict[str, object]:
    """{"a/b": value} of all data sets below a group, strings as str."""
    found: dict[str, object] = {}
    for name, node in group.items():
        if isinstance(node, h5py.Group):
            found |= flat_tree(node, f"{prefix}{name}/")
        elif h5py.check_string_dtype(node.dtype):
            found[prefix + name] = node.asstr()[()]
        else:
            found[prefix + name] = node[()]
    return found


def metrics(folder: Path) -> dict[str, object]:
    """Everything in metrics.h5, read with plain h5py."""
    with h5py.File(folder / "metrics.h5", "r") as file:
        return flat_tree(file)


def rounds_done(folder: Path) -> int:
    """Rows of metrics.h5, 0 while there is none."""
    try:
        with h5py.File(folder / "metrics.h5", "r") as file:
            return len(file["rounds/round"])
    except FileNotFoundError:
        return 0


def last_sha(folder: Path) -> str:
    return str(metrics(folder)["rounds/weights_sha256"][-1])


def rows(folder: Path) -> dict[str, list]:
    """All columns of rounds and clients that do not depend on time or layout, NaN as None so that == compares them."""
    return {name: plain(np.asarray(value)) for name, value in metrics(folder).items() if is_result(name)}


def is_result(name: str) -> bool:
    group, _, column = name.partition("/")
    return (
        group in ("rounds", "clients")
        and not column.endswith("_s")
        and name != "clients/rank"
        and not column.startswith(TIMES)
    )


def plain(array: np.ndarray) -> list:
    return [plain(value) if isinstance(value, np.ndarray) else None if value != value else value for value in array]


def checkpoint(folder: Path, round: int) -> dict[str, object]:
    with h5py.File(folder / f"checkpoints/round_{round:04d}.h5", "r") as file:
        return flat_tree(file)


def state_dict(folder: Path, round: int, order: Iterable[str]) -> dict[str, np.ndarray]:
    """The global tensors of a checkpoint, in the order of the model's state dict."""
    stored = checkpoint(folder, round)
    return {name: np.asarray(stored[f"global/{name}"]) for name in order}


def sha256_by_rule(tensors: dict[str, np.ndarray]) -> str:
    """The documented rule: per tensor "name dtype shape" and a line feed, then its bytes (little-endian, C order)."""
    text = b"".join(
        f"{name} {array.dtype.str} {array.shape}\n".encode() + array.tobytes("C") for name, array in tensors.items()
    )
    return hashlib.sha256(text).hexdigest()


def file_hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_module(folder: Path, name: str, text: str) -> dict[str, str]:
    """A module of the user's own; returns the environment that makes it importable."""
    (folder / f"{name}.py").write_text(text)
    return {"PYTHONPATH": str(folder)}
