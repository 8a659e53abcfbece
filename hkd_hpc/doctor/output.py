"""The sections in words for one screen, or as one JSON document."""

from __future__ import annotations

import json
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hkd_hpc.common.words import counted
from hkd_hpc.doctor.findings import ERROR, NOTE, WARNING, Finding, Section, exit_code, worst

FORMAT = 1  # of the JSON document; a reader may meet further fields, and none that goes
WIDTH = 120


def section_text(section: Section) -> str:
    """A section: its name and level, what is there, and its findings below."""
    first = f"{section.name:12s}{section.level:9s}"
    lines = [wrapped(line, " " * len(first), " " * len(first)) for line in section.lines]
    return "\n".join([first + "\n".join(lines).lstrip(), *(finding_text(finding) for finding in section.findings)])


def finding_text(finding: Finding) -> str:
    """A finding in three lines or more: what was found, what it means, what mends it."""
    lines = {
        " " * 6: f"{finding.kind.level.upper()} {finding.kind.name}: {finding.text}",
        " " * 8 + "means: ": finding.kind.means,
        " " * 8 + "mend:  ": finding.mend,
    }
    return "\n".join(wrapped(text, first, " " * 15) for first, text in lines.items())


def wrapped(text: str, first: str, others: str) -> str:
    """Lines of the screen's width, with what they begin with."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def summary_text(sections: Sequence[Section], strict: bool) -> str:
    """The last line: how many findings of each level, and the exit code."""
    counts = Counter(finding.kind.level for section in sections for finding in section.findings)
    parts = [counted(counts[level], level) for level in (ERROR, WARNING, NOTE)]
    return f"doctor: {', '.join(parts)}; exit code {code_of(sections, strict)}"


def level_of(sections: Sequence[Section]) -> str:
    return worst(section.level for section in sections)


def code_of(sections: Sequence[Section], strict: bool) -> int:
    """The exit code of the examination."""
    return exit_code(level_of(sections), strict)


def document(sections: Sequence[Section], strict: bool) -> str:
    """All of it as JSON, see docs/doctor.md."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "time_unix_s": time.time(),
        "level": level_of(sections),
        "exit_code": code_of(sections, strict),
        "sections": {
            section.name: {
                "level": section.level,
                "lines": section.lines,
                "facts": section.facts,
                "findings": [finding.as_json() for finding in section.findings],
            }
            for section in sections
        },
    }
    return json.dumps(content, indent=1)
