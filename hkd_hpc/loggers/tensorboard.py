"""Each round for TensorBoard, by its own writer: `tensorboard --logdir runs`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from hkd_hpc.loggers.base import Logger


class TensorBoardLogger(Logger):
    """An event file with a scalar for each column, the round as its step.

    A resumed run begins another file, whose first event has TensorBoard hide the rounds that come again.
    """

    needs = "tensorboard"

    def __init__(self, folder: Path, after_round: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        super().__init__(folder, after_round)
        self.logged = after_round if any(folder.glob("events.out.tfevents.*")) else 0
        self._time_s = time.time()
        self._writer = EventFileWriter(str(folder))
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=self._time_s, step=self.logged + 1, session_log=start))

    def log_round(self, round: int, values: Mapping[str, float]) -> None:
        """Write the numbers that were measured. The axis of time is the sum of the rounds' `wall_s`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._time_s += values["wall_s"]
        scalars = [
            Summary.Value(tag=name, simple_value=value) for name, value in values.items() if not math.isnan(value)
        ]
        self._writer.add_event(Event(wall_time=self._time_s, step=round, summary=Summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
