"""A world of real processes, forked from this one so that torch is imported once: for the tests and fault injection."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

FOREIGN = (
    "OMPI_",
    "PMI",
    "PRTE_",
    "SLURM_",
    "MPI_",
    "TORCHELASTIC_",
    "GROUP_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
)


Watch = Callable[[dict[int, int]], None]


class Result(NamedTuple):
    """How one rank ended: exit code (None if a signal ended it), signal (None if it exited), all that it printed."""

    exit_code: int | None
    signal: int | None
    output: str


def run_ranks(
    size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 180, **options: Any
) -> list[Result]:
    """Run function(rank, *args) in `size` forked processes of an env:// world; returns how each ended, by rank.

    A rank exits with 0, with its SystemExit's code, or with 1 after a traceback. When time is up all are killed, and
    AssertionError shows what they had printed. `options`: those of watch_ranks.
    """
    late, results = watch_ranks(size, function, *args, timeout_s=timeout_s, **options)
    outputs = "\n---\n".join(result.output for result in results)
    assert not late, f"ranks {late} still ran after {timeout_s} s; output:\n{outputs}"
    return results


def watch_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 180,
    env: dict[str, str] | None = None,
    watch: Watch = lambda running: None,
) -> tuple[list[int], list[Result]]:
    """As run_ranks, but ranks that have to be killed when time is up are returned first instead of raised.

    `watch` gets {rank: pid} of those that still run, every 10 ms, and may send them signals.
    """
    import torch  # noqa: F401  (here, so that no rank has to)

    with tempfile.TemporaryDirectory() as folder, held_port() as port:
        paths = [Path(folder, f"rank{rank}.txt") for rank in range(size)]
        world = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "LOCAL_WORLD_SIZE": str(size),
            **(env or {}),
        }
        pids = [_fork(rank, paths[rank], world, function, args) for rank in range(size)]
        late, statuses = _wait(pids, timeout_s, watch)
        outputs = [path.read_text(errors="replace") for path in paths]
    return late, [_result(status, output) for status, output in zip(statuses, outputs)]


def run_rank_values(size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """As run_ranks, for functions that must succeed: asserts that all exit with 0 and returns the outputs by rank."""
    results = run_ranks(size, function, *args, **options)
    assert [result[:2] for result in results] == [(0, None)] * size, "\n---\n".join(map(str, results))
    return [result.output for result in results]


def end_when_last(rank: int) -> Watch:
    """For watch_ranks: this rank, which stops (SIGSTOP) and so cannot end itself, is killed when it is the last."""

    def watch(running: dict[int, int]) -> None:
        if list(running) == [rank]:
            os.kill(running[rank], signal.SIGKILL)

    return watch


@contextmanager
def held_port() -> Iterator[int]:
    """A port of this host that the system gives to nobody else in the block, while a rank may listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets one listener share it
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _fork(rank: int, path: Path, world: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _become_rank(rank, path, world)
        function(rank, *args)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_rank(rank: int, path: Path, world: dict[str, str]) -> None:
    """Own output, own environment, one thread."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]
    os.environ.update({**world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    import torch

    torch.set_num_threads(1)


def _wait(pids: list[int], timeout_s: float, watch: Watch) -> tuple[list[int], list[int]]:
    """(ranks that were killed when time was up, the wait status of each rank)."""
    statuses: dict[int, int] = {}
    deadline_s = time.monotonic() + timeout_s
    running = dict(enumerate(pids))
    while running and time.monotonic() < deadline_s:
        for rank, pid in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[rank] = status
                del running[rank]
        watch(running)
        time.sleep(0.01)
    for rank, pid in running.items():
        os.kill(pid, signal.SIGKILL)
        statuses[rank] = os.waitpid(pid, 0)[1]
    return list(running), [statuses[rank] for rank in range(len(pids))]


def _result(status: int, output: str) -> Result:
    if os.WIFSIGNALED(status):
        return Result(None, os.WTERMSIG(status), output)
    return Result(os.WEXITSTATUS(status), None, output)
