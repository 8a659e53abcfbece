"""What the paper's Tables 1 and 2 have for a trial, and how far the trial is from the paper's setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from hkd_hpc import schemes
from hkd_hpc.analysis.tables import NOTHING, Cell, Estimate, number
from hkd_hpc.config import load_toml
from hkd_hpc.config.presets import PRESETS
from hkd_hpc.report.trials import DATA, SCHEME, Trial, text_of

TABLES = Path(__file__).with_name("paper_tables.toml")
CELL = ("fed.clients", "data.beta")  # these and the data set say which cell is a trial's
COSTS = {"parameters_M": "{:.3f}", "train_s": "{:.2f}"}  # of Table 1 alone, with as many digits as ours


@dataclass(frozen=True)
class Published:
    """A cell of the paper.

    Attributes:
        table: "Table 1".
        accuracy: by "local" and "global".
        costs: by COSTS, as text; empty where the table has none.
        other_settings: what of the trial is not the paper's: "section.key" to (the trial's, the paper's).
    """

    table: str
    accuracy: Mapping[str, float]
    costs: Mapping[str, str]
    other_settings: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class BesidePaper(Estimate):
    """A mean with what the paper has for it."""

    published: float

    @property
    def side(self) -> int:
        """Where the paper's value is: +1 above our interval, -1 below it, 0 within, or where there is no interval."""
        away = self.published - self.mean
        return 0 if not abs(away) > self.half else 1 if away > 0 else -1

    def __str__(self) -> str:
        return f"{super().__str__()} [paper {self.published:.3f}{self.mark}]"

    @property
    def mark(self) -> str:
        return {0: "", 1: " ↑", -1: " ↓"}[self.side]

    def parts(self) -> dict[str, str]:
        where = {0: "", 1: "above", -1: "below"}[self.side]
        return {**super().parts(), " paper": number(self.published), " paper outside": where}

    def __html__(self) -> str:
        told = {0: "", 1: "above our interval", -1: "below our interval"}[self.side]
        mark = f' <abbr class="outside" title="{told}">{self.mark.strip()}</abbr>' if told else ""
        return f'{super().__str__()}<span class="paper">paper {self.published:.3f}{mark}</span>'


@dataclass(frozen=True)
class CostBesidePaper:
    """What training costs, with what the paper has for it, both as text. No mark: it is of another machine."""

    ours: str
    published: str

    def __str__(self) -> str:
        return f"{self.ours} [paper {self.published}]"

    def parts(self) -> dict[str, str]:
        return {"": self.ours, " paper": self.published}

    def __html__(self) -> str:
        return f'{escape(self.ours)}<span class="paper">paper {self.published}</span>'


def cost_cell(ours: str, published: str | None) -> Cell | str:
    """A cost, beside the paper's where both are there."""
    return ours if published is None or ours == NOTHING else CostBesidePaper(ours, published)


@cache
def contents() -> dict[str, Any]:
    """Of TABLES: its "source", and each "table"."""
    return load_toml(str(TABLES), "")


def published(trial: Trial) -> Published | None:
    """The cell of the paper for a trial, of the first table that has one; None where it has none."""
    for table in contents()["table"]:
        for place, column in enumerate(table["columns"]):
            is_cell = table["preset"] == trial.settings[DATA] and all(
                trial.settings.get(key) == column[key] for key in CELL
            )
            if is_cell and trial.scheme in table["local"]:
                accuracy = {goal: table[goal][trial.scheme][place] for goal in ("local", "global")}
                costs = {name: form.format(table[name][trial.scheme]) for name, form in COSTS.items() if name in table}
                papers = {**PRESETS[table["preset"]], **column}
                return Published(table["name"], accuracy, costs, other_settings(trial, papers))
    return None


def published_costs(trials: Sequence[Trial]) -> Mapping[str, str]:
    """COSTS of the first of these trials of one scheme for which the paper has them; empty where it has none."""
    return next((its.costs for its in map(published, trials) if its and its.costs), {})


def other_settings(trial: Trial, papers: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Where a trial's settings are not the paper's: those of its preset, and the scheme's own at their defaults."""
    own = schemes.settings_of(trial.scheme)
    defaults = {f"scheme.{name}": value for name, value in dataclasses.asdict(own()).items()}
    return {
        key: (trial.settings[key], value)
        for key, value in {**papers, **defaults}.items()
        if key != SCHEME and key in trial.settings and trial.settings[key] != value
    }


def other_settings_text(found: Published) -> str:
    """fed.rounds 10 (the paper's: 50), model.name small (resnet18); empty where all are the paper's."""
    return ", ".join(
        f"{key} {text_of(ours)} (paper {text_of(its)})" for key, (ours, its) in found.other_settings.items()
    )
