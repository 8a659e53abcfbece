"""A stop that loses nothing: SIGUSR1 or SIGUSR2 on any rank lets the whole job end after the round that is running.

A batch system sends such a signal some time before the limit (`#SBATCH --signal=USR2@120`; some libraries take USR1).
All ranks agree at the end of the round, the checkpoint is written whether it was due or not, and the exit code is
STOPPED, so that whoever started the job can tell "resume it with --resume" from success and failure. SIGTERM still ends
the job at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

STOPPED = 75  # sysexits' EX_TEMPFAIL: a temporary failure, try again
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class Terminated(BaseException):
    """SIGTERM came: raised in the main thread of a single process, so that it can say so and release what it holds."""


FROM_OUTSIDE = (KeyboardInterrupt, Terminated)  # what ends a process whosever code is running
RAISED_BY = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}  # where no control thread listens


class Termination:
    """The handler of SIGTERM where no control thread listens: raises Terminated, once. `came`: whether it did, for a
    finalizer or a callback of HDF5's swallows what is raised in it."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: object) -> None:
        if not self.came:
            self.came = True
            raise Terminated


class StopRequest:
    """`asked`: the number of the signal that came, 0 while there was none."""

    def __init__(self) -> None:
        self.asked = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Within it the signals are recorded instead of ending the process; in another than the main thread they cannot
        be.
        """
        with handled(SIGNALS, self._record):
            yield self

    def _record(self, number: int, frame: object) -> None:
        self.asked = number


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """After it signals mean what they meant before: libraries and a user's own code take some for themselves."""
    numbers = (*SIGNALS, signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # not from Python: nothing of ours
                signal.signal(number, handler)


@contextlib.contextmanager
def handled(numbers: Sequence[int], handle: Callable[[int, object], None]) -> Iterator[None]:
    """Within it these signals call `handle(number, frame)`; in another than the main thread nothing changes."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in numbers} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C, and a SIGTERM that raises, count within it at its end: where HDF5 calls back into Python an exception is
    only printed and lost, and where torch's C++ does while it is imported, it aborts the process.
    """
    came: list[int] = []
    raising = [signal.SIGINT, *[signal.SIGTERM] * isinstance(signal.getsignal(signal.SIGTERM), Termination)]
    try:
        with handled(raising, lambda number, frame: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[-1])


def name_of(number: int) -> str:
    """SIGUSR1"""
    return signal.Signals(number).name
