"""What all commands share: one parser, and one way to end. Imports next to nothing.

Exit codes: 0 done, 1 failed, 2 wrong input, 130 Ctrl-C, 141 nobody reads what is printed. What went wrong is one line.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TextIO

from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.common.rank import guess_rank

Arguments = ParamSpec("Arguments")

FAILED, WRONG_INPUT = 1, 2
INTERRUPTED = 128 + signal.SIGINT  # as shells name the end by a signal
NOT_READ = 128 + signal.SIGPIPE
STARTED: ContextVar[tuple[str, str]] = ContextVar("started", default=("", ""))  # a module, and the words that start it


@contextlib.contextmanager
def started_by(words: str, module: str) -> Iterator[None]:
    """Within it the module is what a person has started by these words."""
    token = STARTED.set((module, words))
    try:
        yield
    finally:
        STARTED.reset(token)


def program_of(module: str) -> str:
    """The words that start a command's module, for `Parser(prog=...)`: as they were typed, `hkd check`, else
    `python -m hkd_hpc.check`.
    """
    started, words = STARTED.get()
    return words if started == module else f"python -m {module}"


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors, so that they are told like all others, in one line and once per job.

    An option that does not exist is told before what is missing: it is mostly the reason.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, which all its ways to parse go through. Raises UsageError."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            return super().parse_known_args(words, namespace)
        except UsageError:
            if unknown := self._unknown(words):
                self.error(f"unrecognized arguments: {' '.join(unknown)}")
            raise

    def _unknown(self, words: list[str]) -> list[str]:
        """Long options that are none of ours, nor the beginning of one."""
        own = tuple(self._option_string_actions)
        names = [word.partition("=")[0] for word in itertools.takewhile(lambda word: word != "--", words)]
        return [name for name in names if name.startswith("--") and not any(one.startswith(name) for one in own)]

    def error(self, message: str) -> NoReturn:
        message = message.replace("ignored explicit argument", "takes no value, not")  # argparse rejects it
        raise UsageError(f"{message}; {self.prog} --help lists the options")


def exit_code(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Make a command's function say what went wrong and return the exit code for it.

    Args:
        main: does the command's work, and returns its exit code.

    Returns:
        The same, without its UsageError, RunError and KeyboardInterrupt, nor an OSError about stdout or a named file.
    """

    @functools.wraps(main)
    def told(*args: Arguments.args, **named: Arguments.kwargs) -> int:
        open_missing_streams()
        try:
            try:
                return main(*args, **named)
            finally:
                print(end="", flush=True)  # while a reader that has gone can still be told from an error
        except UsageError as error:
            return tell(error.lines, WRONG_INPUT)
        except RunError as error:
            return tell([str(error)], FAILED)
        except KeyboardInterrupt:
            return tell(["interrupted"], INTERRUPTED)
        except BrokenPipeError:
            discard(sys.stdout)
            return NOT_READ
        except OSError as error:
            if is_full(sys.stdout):
                discard(sys.stdout)
                return tell([f"what is printed cannot be written ({error.strerror})"], FAILED)
            if error.filename is None:
                raise
            return tell(
                UsageError(f"{error.filename}: cannot be read or written ({error.strerror})").lines, WRONG_INPUT
            )

    return told


def tell(lines: Iterable[str], code: int) -> int:
    """Say what is wrong, once per job; the exit code."""
    if guess_rank(os.environ) == 0:
        try:
            for line in lines:
                print(f"hkd_hpc: {line}", file=sys.stderr, flush=True)
        except BrokenPipeError:
            discard(sys.stderr)
    return code


def open_missing_streams() -> None:
    """Where the process was started without one (`2>&-`), the next file that it opens, perhaps a result, would take
    that descriptor, and get what libraries print there."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():  # each takes the lowest that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def is_full(stream: TextIO | None) -> bool:
    """Whether it keeps what was printed, because its disk takes no more."""
    try:
        print(end="", file=stream, flush=True)
    except OSError:
        return True
    return False


def discard(stream: TextIO) -> None:
    """What is left in its buffer goes nowhere: at the end Python would try again, and complain."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def tell_interrupts_of(package: str) -> None:
    """Have Ctrl-C told in one line too while `python -m PACKAGE[.MODULE]` imports its modules.

    That takes a second, on a busy file system many, and no function of ours is there yet to catch it. The package calls
    this before it imports anything else. Nothing happens in a program that merely imports the package.
    """
    if f"{module_to_start(sys.argv, sys.orig_argv)}.".startswith(f"{package}."):
        sys.excepthook = end_interrupted


def module_to_start(words: Sequence[str], all_words: Sequence[str]) -> str:
    """The module that `python -m MODULE`, or `python -m mpi4py -m MODULE`, is looking for; later, and else, "".

    Args:
        words: sys.argv, whose first is then "-m" in Python, and MODULE in mpi4py.
        all_words: sys.orig_argv.
    """
    if words[:1] == ["-m"]:
        return all_words[-len(words)].removeprefix("-m")
    return words[0] if words and list(all_words[-len(words) - 1 :][:2]) == ["-m", words[0]] else ""


def end_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A sys.excepthook: what Ctrl-C leaves behind is one line."""
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    os._exit(tell(["interrupted"], INTERRUPTED))  # Python would end itself by the signal
