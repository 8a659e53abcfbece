"""Each round for TensorBoard, by its own writer: `tensorboard --logdir runs`."""

from __future__ import annotations

import io
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hkd_hpc.loggers.base import Round
from hkd_hpc.loggers.files import FileLogger

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

SUFFIX = ".hkd_hpc"  # of its files: a user's own logger may write others beside them


class TensorBoardLogger(FileLogger):
    """An event file with a scalar for each column, the round as its step.

    A resumed run writes another one, with all rounds, and removes those before it. Its first event has a TensorBoard
    that watches forget what it has read.
    """

    needs = "tensorboard"

    def __init__(self, folder: Path, after_round: int = 0) -> None:
        self._time_s = time.time()
        self.name = f"events.out.tfevents.{int(self._time_s):010d}.{socket.gethostname()}.{os.getpid()}{SUFFIX}"
        super().__init__(folder, after_round)

    def begin(self, rounds: Sequence[Round]) -> None:
        """Write the file, then remove those of earlier processes."""
        super().begin(rounds)
        for path in set(self.folder.glob(f"events.out.tfevents.*{SUFFIX}")) - {self.path}:
            path.unlink()

    def head(self) -> bytes:
        """The version of the format, and that rounds from 1 on come (again)."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        return record_of(Event(wall_time=self._time_s, file_version="brain.Event:2")) + record_of(
            Event(wall_time=self._time_s, step=1, session_log=SessionLog(status=SessionLog.START))
        )

    def content(self, round: int, values: Mapping[str, float]) -> bytes:
        """The numbers that were measured. The axis of time is the sum of the rounds' `wall_s`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._time_s += values["wall_s"]
        scalars = [
            Summary.Value(tag=name, simple_value=value) for name, value in values.items() if not math.isnan(value)
        ]
        return record_of(Event(wall_time=self._time_s, step=round, summary=Summary(value=scalars)))


def record_of(event: Event) -> bytes:
    """An event as it stands in the file: length, checksum, content, checksum."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    file = io.BytesIO()
    RecordWriter(file).write(event.SerializeToString())
    return file.getvalue()
