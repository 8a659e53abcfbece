"""All schemes on the same data, weights and seeds, and what separates them: `python -m hkd_hpc.compare`."""

from hkd_hpc.compare.command import main
from hkd_hpc.compare.runs import config_of, paper_runs
from hkd_hpc.compare.spec import Spec, Tuning, read_spec
from hkd_hpc.compare.tuning import CHOSEN_BY, choose, possible_runs, tuning_runs
from hkd_hpc.results.differences import GOALS, Accuracies, differences, method_text

__all__ = [
    "CHOSEN_BY",
    "GOALS",
    "Accuracies",
    "Spec",
    "Tuning",
    "choose",
    "config_of",
    "differences",
    "main",
    "method_text",
    "paper_runs",
    "possible_runs",
    "read_spec",
    "tuning_runs",
]
