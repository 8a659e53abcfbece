"""docs/study.md, and its summary in README.md: what stands between `<!-- study: NAME -->` and `<!-- study end -->` is
computed; it is verified."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from hkd_hpc.analysis.tables import Table
from hkd_hpc.commands.bundled import PACKAGE
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.store.atomic import replace_text

from . import drawings, seconds, sections
from .answers import Answer, answers
from .in_short import in_short
from .tables import ASKED, Results

if TYPE_CHECKING:
    from hkd_hpc.figures import Lines

PAGE = Path(__file__).resolve().parents[2] / "docs/study.md"
README = PAGE.parents[1] / "README.md"
BLOCK = re.compile(r"(<!-- study: (\w+) -->\n).*?(<!-- study end -->)", re.DOTALL)
MEND = f"python -m {__package__} page mends it"
LEFT = ("table1.toml", "table2.toml")  # what the paper has beside, as specs of sweeps
COST = re.compile(r"^# (\d+) runs; about (\S+) GPU hours", re.MULTILINE)


def update(page: Path, results: Mapping[str, Results]) -> list[Path]:
    """Write the page and its figures, or the README's summary.

    Args:
        page: the file, whose other text stays.
        results: of every table, by its name.

    Returns:
        The files.

    Raises:
        UsageError: the page has a part that nobody computes, or matplotlib is missing.
    """
    text, figures = written(read(page), makers_of(page, results)), figures_of(page, results)
    for figure in figures:
        drawings.write(figure, page.parent)
    replace_text(page, text)
    return [page, *(page.parent / f"{figure.name}.svg" for figure in figures)]


def verify(page: Path, results: Mapping[str, Results]) -> None:
    """Whether the page has what `update` would write; draws nothing.

    Raises:
        RunError: it names the first difference.
        UsageError: the page has a part that nobody computes.
    """
    text, makers = read(page), makers_of(page, results)
    check_parts(text, makers)
    by_hand = [line for line in BLOCK.sub("", text).splitlines() if line.lstrip().startswith("|")]
    if by_hand and page.name != README.name:
        raise RunError(f"{page}: a table stands outside of the computed parts: {by_hand[0][:100]}")
    wanted = written(text, makers).splitlines()
    for number, (its, ours) in enumerate(zip([*text.splitlines(), ""], [*wanted, ""]), 1):
        if its != ours:
            raise RunError(f"{page}, line {number}: {first_difference(its, ours)}; {MEND}")
    for figure in figures_of(page, results):
        if not drawings.is_drawn(figure, page.parent):
            raise RunError(f"{page.parent / figure.name}.svg: does not show the runs that are there now; {MEND}")


def read(page: Path) -> str:
    try:
        return page.read_text()
    except OSError as error:
        raise UsageError(f"{page}: cannot be read ({error.strerror}); the page is in docs/ of a clone") from None


def written(text: str, makers: Mapping[str, Callable[[], str]]) -> str:
    """The text with its computed parts anew. UsageError for a part that nobody computes, or that is not there once."""
    check_parts(text, makers)
    return BLOCK.sub(lambda found: f"{found[1]}\n{makers[found[2]]()}\n\n{found[3]}", text)


def check_parts(text: str, known: Collection[str]) -> None:
    """UsageError unless each of the known parts is there once, and no other: before any of them is computed."""
    there = [found[2] for found in BLOCK.finditer(text)]
    for name in there:
        if name not in known:
            raise UsageError(f"<!-- study: {name} -->: is no part of the page; known: {', '.join(known)}")
    if "<!-- study" in BLOCK.sub("", text):
        raise UsageError(
            "<!-- study: a part is not marked as the others are: <!-- study: NAME --> to <!-- study end -->"
        )
    for name in known:
        if there.count(name) != 1:
            raise UsageError(f"<!-- study: {name} -->: is {there.count(name)} times on the page, must be there once")


def makers_of(page: Path, results: Mapping[str, Results]) -> dict[str, Callable[[], str]]:
    """What makes each part."""
    if page.name == README.name:
        return {"summary": partial(sections.summary, results)}
    own = {asked.name: partial(sections.section, asked, results) for asked in ASKED}
    told = cache(partial(answers, results, seconds.read()))
    return {
        "short": lambda: in_short(told()),
        "claims": lambda: claims(told()),
        "seconds": partial(str, seconds.table()),
        "cost": cost,
        **own,
    }


def figures_of(page: Path, results: Mapping[str, Results]) -> list[Lines]:
    if page.name == README.name:
        return []
    return [figure for asked in ASKED if (figure := sections.figure_of(asked, results[asked.name]))]


def claims(told: Sequence[Answer]) -> str:
    """Every claim with its answer."""
    head = ["claim", "table", "measured", "the paper", "answer", "a difference of the paper's size is", "seeds needed"]
    rows = [[one.claim, one.table, one.measured, one.papers, one.verdict, one.as_large, one.needed] for one in told]
    return str(Table(head, rows))


def cost() -> str:
    """Of what was not run, as its specs say."""
    heads = [(PACKAGE / "jobs/specs" / name).read_text() for name in LEFT]
    rows = [[head.splitlines()[0].removeprefix("# "), *COST.findall(head)[0]] for head in heads]
    return str(Table(["what", "runs", "GPU hours"], rows))


def first_difference(its: str, ours: str) -> str:
    """The first cell, or word, that is not the same in two lines."""
    separator = " | " if " | " in ours else " "
    pairs = zip([*its.split(separator), ""], [*ours.split(separator), ""])
    return next(f"has “{one}”, the runs say “{other}”" for one, other in pairs if one != other)
