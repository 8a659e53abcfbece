"""Figures of runs and studies: data first (of_run, of_study), then Plotly's dicts, matplotlib's figures, CSV, files."""

from hkd_hpc.figures.as_csv import csv_of
from hkd_hpc.figures.as_matplotlib import draw
from hkd_hpc.figures.as_plotly import plotly_of
from hkd_hpc.figures.catalogue import of_run, of_study
from hkd_hpc.figures.figure import Bars, Figure, HeatMap, Lines, NotRecorded, Series
from hkd_hpc.figures.files import write_figures
from hkd_hpc.figures.run import Run

__all__ = [
    "Bars",
    "Figure",
    "HeatMap",
    "Lines",
    "NotRecorded",
    "Run",
    "Series",
    "csv_of",
    "draw",
    "of_run",
    "of_study",
    "plotly_of",
    "write_figures",
]
