"""What mkdocs puts into the pages while it builds them. Two lines stand for text that is written elsewhere:

- `<!-- settings -->`: every setting, preset and scheme, from their declarations;
- `[Included here: FILE, HEADING](../FILE)`: the section of a Markdown file with this heading, or the whole file.
"""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path
from typing import Any

from hkd_hpc import config as declarations
from hkd_hpc import schemes
from hkd_hpc.config import presets
from hkd_hpc.settings import allowed_text

ROOT = Path(__file__).resolve().parents[1]
INCLUDE = re.compile(r"^\[Included here: ([^,\]]+)(?:, ([^\]]+))?\]\([^)]+\)$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page; returns it with these lines replaced."""
    markdown = INCLUDE.sub(lambda match: included(match[1], match[2]), markdown)
    return markdown.replace("<!-- settings -->", settings_tables()) if "<!-- settings -->" in markdown else markdown


def included(file: str, heading: str | None) -> str:
    """The text of a Markdown file of the tree, or of one section; links that leave docs/ become plain text."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return LINK.sub(_link_within_docs, section(text, heading) if heading else text)


def section(text: str, heading: str) -> str:
    """From the line `## heading` to the next one of its level. Raises ValueError where there is none."""
    start = text.index(f"## {heading}\n")
    end = text.find("\n## ", start)
    return text[start : end if end >= 0 else None]


def _link_within_docs(match: re.Match[str]) -> str:
    words, target = match[1], match[2]
    return f"[{words}]({target.removeprefix('docs/')})" if target.startswith("docs/") else words


def settings_tables() -> str:
    """All that can be set, as Markdown: the sections, what each scheme adds, and the presets."""
    parts = ["## Sections"]
    parts += [f"### {name}\n\n{summary(cls)}\n\n{table(name, cls)}" for name, cls in declarations.SECTIONS.items()]
    parts += ["## Settings of each scheme", "Given as `scheme.key=value`, beside `scheme.name`."]
    parts += [scheme_text(name) for name in (*schemes.REGISTRY, *schemes.CONTROLS)]
    return "\n\n".join([*parts, "## Presets", preset_words(), preset_table()])


def scheme_text(name: str) -> str:
    """The settings of one scheme."""
    cls = schemes.settings_of(name)
    own = [field for field in dataclasses.fields(cls) if field.name != "name"]
    return f"### scheme.name={name}\n\n" + (
        f"{summary(cls)}\n\n{table('scheme', cls)}" if own else "No settings of its own."
    )


def summary(cls: type) -> str:
    """The first paragraph of a section's docstring."""
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


def table(section_name: str, cls: type) -> str:
    """One line for each setting of a section: key, default, what is allowed, what it means."""
    rows = [row(f"{section_name}.{field.name}", field) for field in dataclasses.fields(cls)]
    return "\n".join(["| setting | default | allowed | meaning |", "|---|---|---|---|", *rows])


def row(key: str, field: dataclasses.Field) -> str:
    """One setting."""
    allowed, meaning = cell(allowed_text(field)), cell(field.metadata["help"])
    return f"| `{key}` | `{shown(field.default)}` | {allowed} | {meaning} |"


def shown(value: Any) -> str:
    """A value as the command line takes it; a text without a letter in quotation marks."""
    if value == "":
        return '""'
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def cell(text: str) -> str:
    """Text that Markdown leaves as it is in a table."""
    return re.sub(r"([|*_\[\]])", r"\\\1", html.escape(text, quote=False))


def preset_words() -> str:
    """What the presets are for: the paragraphs of their module."""
    paragraphs = (presets.__doc__ or "").split("\n\n")[1:]
    return "\n\n".join(f"- {cell(' '.join(paragraph.split()))}" for paragraph in paragraphs)


def preset_table() -> str:
    """What each preset sets."""
    rows = [
        f"| `{name}` | {', '.join(f'`{key}={shown(value)}`' for key, value in values.items())} |"
        for name, values in presets.PRESETS.items()
    ]
    return "\n".join(["| preset | sets |", "|---|---|", *rows])
