"""What figures are drawn from. They know no file: a recorded run (results.Run) is one, numbers made by hand another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


class Run(Protocol):
    """The part of results.Run that figures read; what it has not recorded is absent or empty."""

    @property
    def settings(self) -> Mapping[str, Any]: ...

    @property
    def identity(self) -> Mapping[str, str]: ...

    @property
    def round_columns(self) -> Mapping[str, np.ndarray]: ...

    @property
    def client_columns(self) -> Mapping[str, np.ndarray]: ...

    @property
    def client_ranks(self) -> Sequence[int]: ...

    @property
    def partition(self) -> Mapping[str, Any]: ...

    @property
    def sessions(self) -> Sequence[Mapping[str, Any]]: ...

    def part(self, name: str) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Planned:
    """A run that has not begun: its settings and its partition, as results.Run has them."""

    settings: Mapping[str, Any]
    partition: Mapping[str, Any]
    round_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    client_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    client_ranks: Sequence[int] = ()
    sessions: Sequence[Mapping[str, Any]] = ()
    identity: Mapping[str, str] = field(default_factory=dict)

    def part(self, name: str) -> Mapping[str, Any]:
        return {}
