"""The loggers of a run, kept from ending or changing it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hkd_hpc.common.settings import shown
from hkd_hpc.common.stop import FROM_OUTSIDE, handlers_kept
from hkd_hpc.loggers.base import Logger, numbers_of
from hkd_hpc.runtime.frames import place_of

Row = Mapping[str, Any]  # of /rounds, by column


class Loggers:
    """Hands each round to all loggers; what one of them raises, of any kind, is told once and goes no further.

    Args:
        classes: of the loggers, by name (`loggers.classes_of`).
        folder: where they write; made if there are any.
        rows: the rounds that the run has already.
        warn: gets one line for each logger that fails.
    """

    def __init__(
        self, classes: Mapping[str, Any], folder: Path, rows: Sequence[Row], warn: Callable[[str], None]
    ) -> None:
        self._warn, self._failed = warn, set[str]()
        self._loggers: dict[str, Any] = {}
        for name, make in classes.items():
            with self._guarded(name):
                folder.mkdir(exist_ok=True)
                self._loggers[name] = logger = make(folder, len(rows))
                begin = getattr(logger, "begin", partial(Logger.begin, logger))
                begin([(int(row["round"]), numbers_of(row)) for row in rows])

    def log_round(self, row: Row) -> None:
        """Give all of them a round that is saved."""
        for name, logger in self._loggers.items():
            with self._guarded(name):
                logger.log_round(int(row["round"]), numbers_of(row))

    def close(self) -> None:
        """Close those that can be closed."""
        for name, logger in self._loggers.items():
            with self._guarded(name):
                getattr(logger, "close", lambda: None)()

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Within it an exception is told, the first of each logger."""
        try:
            with handlers_kept():
                yield
        except FROM_OUTSIDE:
            raise
        except BaseException as error:
            if name not in self._failed:
                self._failed.add(name)
                said = " ".join("".join(traceback.format_exception_only(error)).split())
                self._warn(
                    f"run.loggers={name}: {place_of(error)}failed with {shown(said)}; the run goes on without it, and "
                    "tells no more errors of this logger"
                )
