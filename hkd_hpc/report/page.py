"""The page: what stands on it (Page), and its HTML."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hkd_hpc import figures
from hkd_hpc.analysis.tables import FORMATS, Table
from hkd_hpc.common.errors import UsageError, obtainable, printable
from hkd_hpc.common.words import listed
from hkd_hpc.figures import Figure, NotRecorded
from hkd_hpc.figures.catalogue import distinct, titled
from hkd_hpc.report import happened, origin
from hkd_hpc.report.study_tables import Tabled, numbers_in, tables_of
from hkd_hpc.report.trials import DATA, Trial, order_of_run, trials_of
from hkd_hpc.results import Run
from hkd_hpc.results.seeds import copies
from hkd_hpc.runtime import versions

HERE = Path(__file__).parent
MARK = "<!-- made by python -m hkd_hpc.report -->"  # in the head of every report: such a file may be replaced
MOST_FIGURED = 12  # trials whose first run gets figures of its own in a study
PIP = "pip install 'hkd_hpc[report]'"


@dataclass(frozen=True)
class Drawn:
    """The figures of a part of the page, and of what."""

    name: str
    title: str
    figures: Sequence[Figure | NotRecorded]


@dataclass(frozen=True)
class Page:
    """What stands on the page, from top to bottom; a run is known by its short name.

    Attributes:
        title: what the runs are.
        facts: (what, value) of the line below it.
        broken: (run, problem).
        unfinished: (run, state, rounds).
        remarks: each line with the runs that have it.
        results: tables of results.
        drawn: figures, part by part.
        happened: tables of what happened.
        origin: tables of what it comes from.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    broken: Sequence[tuple[str, str]]
    unfinished: Sequence[tuple[str, str, str]]
    remarks: dict[str, list[str]]
    results: Sequence[Tabled]
    drawn: Sequence[Drawn]
    happened: Sequence[Tabled]
    origin: Sequence[Tabled]


def page_of(runs: Sequence[Run]) -> Page:
    """Everything that is told of the runs."""
    names = happened.names_of(runs)
    trials = trials_of(run for run in runs if run.state != "broken")
    told = happened.remarks(names)
    told |= {line: [] for line in origin.differences(names)}
    return Page(
        title=title_of(trials, names),
        facts=facts_of(runs, trials),
        broken=[(name, run.problem) for run, name in names.items() if run.state == "broken"],
        unfinished=[
            (name, run.state, f"{len(run)} of {run.settings.get('fed.rounds', '?')} rounds")
            for run, name in names.items()
            if run.state in ("running", "stopped")
        ],
        remarks=told,
        results=tables_of(trials),
        drawn=drawn_of(runs, trials, names),
        happened=happened_tables(names),
        origin=origin_tables(names),
    )


def title_of(trials: Sequence[Trial], names: dict[Run, str]) -> str:
    """fedavg and fedhkd on cifar10"""
    schemes = list(dict.fromkeys(trial.scheme for trial in trials))
    data = list(dict.fromkeys(str(trial.settings[DATA]) for trial in trials))
    if not trials:
        return ", ".join(list(names.values())[:3])
    return f"{listed(schemes) if len(schemes) < 5 else f'{len(schemes)} schemes'} on {', '.join(data)}"


def facts_of(runs: Sequence[Run], trials: Sequence[Trial]) -> list[tuple[str, str]]:
    """Counts of runs and seeds, and the settings that all share and every reader asks for."""
    states = Counter(run.state for run in runs)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    facts = [("runs", f"{len(runs)} ({counts})" if len(runs) > 1 else counts)]
    for key, name in (
        ("fed.clients", "clients"),
        ("data.beta", "beta"),
        ("fed.rounds", "rounds"),
        ("train.epochs", "local epochs"),
        ("model.name", "model"),
    ):
        values = sorted({str(trial.settings.get(key)) for trial in trials}, key=lambda value: numbers_in((value,)))
        if values and len(values) < 5:
            facts.append((name, ", ".join(values)))
    seeds = sorted({run.settings["run.seed"] for run in runs if "run.seed" in run.settings})
    return [*facts, ("seeds", origin.shortened(map(str, seeds)))]


def drawn_of(runs: Sequence[Run], trials: Sequence[Trial], names: dict[Run, str]) -> list[Drawn]:
    """Of a study the figures over seeds, then of the first run of each trial that has a round its own."""
    twice = {run for trial in trials for run in copies(trial.runs)}
    good = sorted((run for run in runs if run.state != "broken" and run not in twice), key=order_of_run)
    if len(good) < 2:
        return [Drawn("figures", "Figures", figures.of_run(run)) for run in good]
    begun = [[run for run in trial.runs if len(run) and run not in twice] for trial in trials]
    firsts = [own[0] for own in begun if own][:MOST_FIGURED]
    over_seeds = figures.of_study(good)
    taken = {figure.name.lower() for figure in over_seeds}
    own = [
        Drawn(f"run-{place}", f"Run {names[run]}", distinct(of_named(run, names[run]), taken))
        for place, run in enumerate(firsts)
    ]
    return [Drawn("figures", "Figures over seeds", over_seeds), *own]


def of_named(run: Run, name: str) -> list[Figure | NotRecorded]:
    """Its figures, with its name in theirs."""
    return [titled(figure, name) for figure in figures.of_run(run)]


def happened_tables(names: dict[Run, str]) -> list[Tabled]:
    found = [("runs", "Runs", happened.runs_table(names)), ("events", "Rejected clients", happened.events_table(names))]
    tables = [Tabled(name, title, table) for name, title, table in found if table]
    privacy = happened.privacy_table(names)
    return [*tables, privacy] if privacy else tables


def origin_tables(names: dict[Run, str]) -> list[Tabled]:
    found = [
        ("settings", "Settings", origin.settings_table(names)),
        ("sessions", "Starts and commands", origin.sessions_table(names)),
        ("facts", "Versions, hashes, hosts and devices", origin.facts_table(names)),
    ]
    return [Tabled(name, title, table) for name, title, table in found if table]


# ---------------------------------------------------------------------------------------------- HTML


def html_of(page: Page) -> str:
    """One file that needs no other. UsageError where Jinja2 or Plotly is not installed."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed, and the report needs it: {PIP}") from None
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: lines_of(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "html_of_table": lambda table: lines_of(table.html()),
        "copies_of": copies_of,
        "is_drawn": is_drawn,
    }
    return environment.get_template("page.html.j2").render(
        page=page,
        mark=MARK,
        plots=json_for_script({figure.name: figures.plotly_of(figure) for figure in all_figures(page.drawn)}),
        plotly=get_plotlyjs(),
        made=time.strftime("%Y-%m-%d %H:%M %Z"),
        version=versions.text(),
        manual=obtainable("docs/report.md"),
        css=(HERE / "page.css").read_text(encoding="utf-8"),
        script=(HERE / "page.js").read_text(encoding="utf-8"),
    )


def lines_of(text: str) -> str:
    """The text as `printable`, line by line."""
    return "\n".join(map(printable, text.split("\n")))


def copies_of(table: Table) -> dict[str, str]:
    """What the buttons copy."""
    return {name: write(table) for name, write in FORMATS.items()}


def is_drawn(figure: Figure | NotRecorded) -> bool:
    return isinstance(figure, Figure)


def all_figures(parts: Iterable[Drawn]) -> Iterable[Figure]:
    return (figure for part in parts for figure in part.figures if isinstance(figure, Figure))


def figures_for_paper(page: Page, each_run: bool) -> list[Figure]:
    """Of one run all that the page has, of many those over the seeds, and with `each_run` those of single runs too."""
    return list(all_figures(page.drawn if each_run else page.drawn[:1]))


def json_for_script(value: Any) -> str:
    """JSON that cannot end the <script> in which it stands."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
