"""What mkdocs puts into the pages while it builds them. Two kinds of line stand for text that is written elsewhere:

- `<!-- sections -->`, `<!-- schemes -->`, `<!-- presets -->`: tables of settings, from their declarations;
  `<!-- figures -->`: every figure; `<!-- layout -->`: what is in metrics.h5, from the descriptions of its columns;
  `<!-- findings -->`: what the doctor finds, from their declarations;
- `[Included here: FILE, HEADING](../FILE)`: the section of a Markdown file with this heading, or the whole file.

A link to what a page includes names the file itself, so that it also works where the pages are read unbuilt; built,
it leads to that page.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import re
from pathlib import Path
from typing import Any

from hkd_hpc import config as declarations
from hkd_hpc import schemes
from hkd_hpc.common.settings import allowed_text
from hkd_hpc.config import presets
from hkd_hpc.doctor import examine
from hkd_hpc.figures import catalogue
from hkd_hpc.store import layout

PAGES = Path(__file__).resolve().parent
ROOT = PAGES / "root"  # links to files of the tree, which a wheel holds as copies
INCLUDE = re.compile(r"^\[Included here: ([^,\]]+)(?:, ([^\]]+))?\]\([^)]+\)$", re.MULTILINE)
TABLES = re.compile(r"<!-- (sections|schemes|presets|layout|figures|findings) -->")
UNBUILT = re.compile(r"^Unbuilt, .+\n(?:.+\n)*\n?", re.MULTILINE)  # a paragraph for who reads the file itself
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """The text of a page with these lines replaced, and its links led to pages: for mkdocs, and `hkd docs copy`.

    Args:
        markdown: the file's text.
        page: of mkdocs, which fills in docstrings too.
    """
    filled = with_tables(INCLUDE.sub(lambda match: included(match[1], match[2]), markdown))
    if page is not None or filled != markdown:
        filled = UNBUILT.sub("", filled)
    return LINK.sub(lambda match: f"[{match[1]}]({page_of(match[2]) or match[2]})", filled)


def with_tables(markdown: str) -> str:
    """The text of a page with its tables."""
    return TABLES.sub(lambda match: MAKERS[match[1]](), markdown)


def included(file: str, heading: str | None) -> str:
    """The text of a Markdown file of the tree, or of one section; links that leave docs/ become plain text."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return LINK.sub(_link_within_docs, section(text, heading) if heading else text)


def page_of(target: str) -> str | None:
    """Of a link from docs/ to a file of the tree ("../FILE#anchor"): the same place in the page that includes it."""
    file, _, anchor = target.removeprefix("../").partition("#")
    for included_file, heading, page in inclusions():
        if target.startswith("../") and file == included_file and heading in ("", anchor):
            return page + (f"#{anchor}" if anchor else "")
    return None


@functools.cache
def inclusions() -> list[tuple[str, str, str]]:
    """(file, anchor of the section or "" for the whole file, name of the page) of what docs/ includes."""
    texts = {page.name: page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md"))}
    return [
        (file, heading.lower().replace(" ", "-"), page)
        for page, text in texts.items()
        for file, heading in INCLUDE.findall(text)
    ]


def section(text: str, heading: str) -> str:
    """From the line `## heading` to the next one of its level. Raises ValueError where there is none."""
    start = text.index(f"## {heading}\n")
    end = text.find("\n## ", start)
    return text[start : end if end >= 0 else None]


def _link_within_docs(match: re.Match[str]) -> str:
    words, target = match[1], match[2]
    return f"[{words}]({target.removeprefix('docs/')})" if target.startswith("docs/") else words


def section_texts() -> str:
    """Each section of the settings with its table."""
    texts = [f"### {name}\n\n{summary(cls)}\n\n{table(name, cls)}" for name, cls in declarations.SECTIONS.items()]
    return "\n\n".join(texts)


def scheme_texts() -> str:
    """What each scheme can be given beside them."""
    return "\n\n".join(map(scheme_text, (*schemes.REGISTRY, *schemes.CONTROLS)))


def preset_text() -> str:
    """What the presets are for, and what each sets."""
    return f"{preset_words()}\n\n{preset_table()}"


def layout_table() -> str:
    """What is in metrics.h5, one line for each data set."""
    rows = [
        f"| `/{entry.path}` | {entry.shape} | {entry.dtype} | {entry.unit} | {cell(entry.meaning)} | {entry.since} |"
        for entry in layout.entries()
    ]
    heads = ["| data set | shape | dtype | unit | meaning | since |", "|---|---|---|---|---|---|"]
    return "\n".join([*heads, *rows])


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


def figure_table() -> str:
    """One line for each figure."""
    of = {
        "run": "a run",
        "study": "a study",
        "both": "both",
    }
    rows = [
        f"| `{kind.name}` | {of[kind.scope]} | {cell(kind.title)} | {cell(kind.caption)} |" for kind in catalogue.KINDS
    ]
    return "\n".join(["| name | of | title | what it shows, and how it is computed |", "|---|---|---|---|", *rows])


def finding_table() -> str:
    """Every finding of the doctor."""
    rows = [f"| `{kind.name}` | {kind.level} | {cell(kind.means)} | {cell(kind.mend)} |" for kind in examine.kinds()]
    return "\n".join(["| finding | level | what it means | what mends it |", "|---|---|---|---|", *rows])


MAKERS = {
    "sections": section_texts,
    "schemes": scheme_texts,
    "presets": preset_text,
    "layout": layout_table,
    "figures": figure_table,
    "findings": finding_table,
}
