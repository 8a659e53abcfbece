"""One figure of a run, drawn for a notebook or a file."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hkd_hpc import figures
from hkd_hpc.common.errors import UsageError
from hkd_hpc.figures.as_matplotlib import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True)
class Plot:
    """A figure that a notebook shows.

    Attributes:
        figure: its numbers and words.
        canvas: matplotlib's figure, `plot.canvas.savefig("accuracy.pdf")`.
    """

    figure: figures.Figure
    canvas: Canvas

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        with style():
            self.canvas.savefig(content, format="png")
        return content.getvalue()


def plot(run: figures.Run, name: str) -> Plot:
    """The figure of this name, else the first whose name begins so.

    Raises:
        UsageError: There is none, the run has not recorded its numbers, or matplotlib is not installed.
    """
    found = figures.of_run(run)
    chosen = [one for one in found if one.name == name] or [one for one in found if one.name.startswith(name)]
    if not chosen:
        names = ", ".join(one.name for one in found)
        raise UsageError(f"{name}: no such figure; " + (f"there are {names}" if found else "no round is recorded yet"))
    first = chosen[0]
    if isinstance(first, figures.NotRecorded):
        raise UsageError(f"{first.title}: {first.reason}")
    return Plot(first, figures.draw(first))
