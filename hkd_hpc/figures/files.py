"""Figures as files: PDF, SVG, PNG and the numbers as CSV."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hkd_hpc.common.errors import UsageError
from hkd_hpc.figures.as_csv import csv_of
from hkd_hpc.figures.as_matplotlib import draw, style
from hkd_hpc.figures.figure import Figure, NotRecorded
from hkd_hpc.store.atomic import replace_file, replace_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

NO_DATE: dict[str, dict] = {
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
    "png": {},
}  # the same figure is the same file


def write_figures(figures: Iterable[Figure | NotRecorded], folder: str | Path) -> list[Path]:
    """Write NAME.pdf, .svg, .png and .csv of each figure, each file complete or not at all.

    Args:
        figures: from of_run or of_study; what was not recorded is passed over.
        folder: is made where it is not there.

    Returns:
        The files.

    Raises:
        UsageError: without matplotlib, or where the folder cannot be made.
        RunError: where the system fails to write.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--figures {folder}: {error.strerror}; name a folder that can be made and written to"
        ) from None
    return [path for figure in figures if not isinstance(figure, NotRecorded) for path in write_figure(figure, folder)]


def check_picture(path: Path) -> None:
    """UsageError for a picture whose ending names no kind of picture, or that lies in no folder."""
    if path.suffix[1:] not in NO_DATE:
        raise UsageError(
            f"--out {path}: found the ending {path.suffix!r}, allowed are {', '.join(f'.{k}' for k in NO_DATE)}"
        )
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}")


def write_picture(figure: Figure | NotRecorded, path: Path) -> None:
    """One figure as the picture that the path's ending names, complete or not at all. Raises as `write_figures`."""
    if isinstance(figure, NotRecorded):
        raise UsageError(f"--out {path}: {figure.reason}")
    canvas = draw(figure)
    with style():
        _save(canvas, path)


def _save(canvas: Canvas, path: Path) -> None:
    kind = path.suffix[1:]
    replace_file(path, partial(canvas.savefig, format=kind, metadata=NO_DATE[kind]))


def write_figure(figure: Figure, folder: Path) -> list[Path]:
    """The four files of one figure."""
    canvas = draw(figure)
    paths = {kind: folder / f"{figure.name}.{kind}" for kind in (*NO_DATE, "csv")}
    with style():
        for kind in NO_DATE:
            _save(canvas, paths[kind])
    replace_text(paths["csv"], csv_of(figure))
    return list(paths.values())
