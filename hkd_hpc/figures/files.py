"""Figures as files: PDF, SVG, PNG and the numbers as CSV."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from hkd_hpc.errors import UsageError
from hkd_hpc.figures.as_csv import csv_of
from hkd_hpc.figures.as_matplotlib import draw, style
from hkd_hpc.figures.figure import Figure, NotRecorded
from hkd_hpc.store.atomic import replace_file, replace_text

NO_DATE = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}  # the same figure is the same file


def write_figures(figures: Iterable[Figure | NotRecorded], folder: str | Path) -> list[Path]:
    """Write NAME.pdf, .svg, .png and .csv of each figure, each file whole or not at all.

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


def write_figure(figure: Figure, folder: Path) -> list[Path]:
    """The four files of one figure."""
    canvas = draw(figure)
    paths = {kind: folder / f"{figure.name}.{kind}" for kind in (*NO_DATE, "csv")}
    with style():
        for kind, metadata in NO_DATE.items():
            replace_file(paths[kind], partial(canvas.savefig, format=kind, metadata=metadata))
    replace_text(paths["csv"], csv_of(figure))
    return list(paths.values())
