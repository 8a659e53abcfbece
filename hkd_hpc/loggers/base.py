"""What a logger is, and the numbers that it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hkd_hpc.analysis.metrics import in_order

Round = tuple[int, Mapping[str, float]]  # what `Logger.log_round` gets


class Logger:
    """What a run calls; a class of one's own may inherit from it, and need not.

    Args:
        folder: `loggers/` in the folder of the run; it exists.
        after_round: completed rounds of the run, 0 for a new one. Rounds beyond it that the logger has already, from a
            process that was killed, come again.

    Attributes:
        logged: the last round that the logger has (optional). Those up to `after_round` that it lacks are given first,
            by `begin`.
    """

    def __init__(self, folder: Path, after_round: int = 0) -> None:
        self.folder, self.logged = folder, after_round

    def begin(self, rounds: Sequence[Round]) -> None:
        """Before the first round of this process (optional): take in the rounds up to `after_round`, of the record."""
        for round, values in rounds[getattr(self, "logged", len(rounds)) :]:
            self.log_round(round, values)

    def log_round(self, round: int, values: Mapping[str, float]) -> None:
        """Take in a round, which is saved.

        Args:
            round: from 1 on.
            values: the numbers of its row in metrics.h5's /rounds, by column: "local_test_accuracy", "loss/soft", ...;
                NaN where nothing was measured.
        """
        raise NotImplementedError

    def close(self) -> None:
        """After the last round of this process (optional); not where the process fails or is killed."""


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Those columns of a row of /rounds that are one number, `round` aside, in an order that all rows share."""
    return {name: row[name] for name in in_order(row) if name != "round" and isinstance(row[name], (int, float))}
