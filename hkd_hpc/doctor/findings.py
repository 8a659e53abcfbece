"""What a look at the machine gives: each kind of finding is declared once, beside the check that finds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
LEVELS = (OK, NOTE, WARNING, ERROR)  # the later, the worse


@dataclass(frozen=True)
class Kind:
    """A kind of finding.

    Attributes:
        name: section.name, as people search for it.
        level: note: worth knowing; warning: a run works, but slowly or not safely; error: it would fail, give wrong
            numbers, or waste nearly all of the machine.
        means: what it means for a run.
        mend: what to do, with {placeholders} for what `found` is given.
    """

    name: str
    level: str
    means: str
    mend: str

    def found(self, text: str, **values: object) -> Finding:
        """The finding itself.

        Args:
            text: what was seen, with its numbers.
            values: of the placeholders in `mend`.

        Returns:
            The finding.
        """
        return Finding(self, text, self.mend.format(**values))


@dataclass(frozen=True)
class Finding:
    """One kind, found here: what was seen, and the line that mends it."""

    kind: Kind
    text: str
    mend: str

    def as_json(self) -> dict[str, str]:
        """As the JSON document has it."""
        kind = self.kind
        return {"name": kind.name, "level": kind.level, "found": self.text, "means": kind.means, "mend": self.mend}


@dataclass(frozen=True)
class Section:
    """One part of the examination.

    Attributes:
        name: of the part.
        lines: what is there, for people.
        facts: the same for programs, anything that JSON can hold.
        findings: what is to be said of it.
    """

    name: str
    lines: list[str]
    facts: Mapping[str, Any]
    findings: list[Finding] = field(default_factory=list)

    @property
    def level(self) -> str:
        """The worst level of its findings, "ok" where there is none."""
        return worst(finding.kind.level for finding in self.findings)


def worst(levels: Iterable[str]) -> str:
    """The worst of several levels, "ok" where there is none."""
    return max(levels, key=LEVELS.index, default=OK)


def exit_code(level: str, strict: bool) -> int:
    """0, or 1 for an error, and for a warning too if `strict`."""
    return int(level == ERROR or (strict and level == WARNING))
