"""How to reproduce runs: settings, commands, seeds, versions, hosts, devices, hashes."""

from __future__ import annotations

import dataclasses
import datetime
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from hkd_hpc import schemes
from hkd_hpc.analysis.tables import NOTHING, Table
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import SECTIONS
from hkd_hpc.report.trials import SCHEME, text_of
from hkd_hpc.results import Run
from hkd_hpc.runtime import provenance
from hkd_hpc.runtime.versions import REVISION

TRIALS = "submitit.core._submit"  # in the command line of each trial of a study
MOST_VALUES = 12  # of a setting, in one cell


def settings_table(names: dict[Run, str]) -> Table:
    """The settings that differ from the defaults in any run, with their values in all."""
    defaults: dict[str, Any] = {}
    values: dict[str, dict[str, None]] = {}
    differing = set()
    for run in names:
        standard = defaults_of(run.settings)
        defaults |= standard
        for key, value in run.settings.items():
            values.setdefault(key, {})[text_of(value)] = None
            if value != standard.get(key):
                differing.add(key)
    rows = [[key, shortened(values[key]), text_of(defaults.get(key))] for key in sorted(differing)]
    return Table(["setting", "value", "default"], rows, "Settings that differ from the defaults")


def defaults_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of all sections, and of the scheme's own settings where its code is here."""
    sections: dict[str, Any] = dict(SECTIONS)
    try:
        sections["scheme"] = schemes.settings_of(str(settings.get(SCHEME, schemes.DEFAULT)))
    except UsageError:  # one's own, which is not here
        pass
    found = {
        f"{name}.{key}": value
        for name, section in sections.items()
        for key, value in dataclasses.asdict(section()).items()
    }
    return {**found, SCHEME: schemes.DEFAULT}


def shortened(values: Iterable[str]) -> str:
    known = list(values)
    more = f" and {len(known) - MOST_VALUES} more" if len(known) > MOST_VALUES else ""
    return ", ".join(known[:MOST_VALUES]) + more


def facts_table(names: dict[Run, str]) -> Table:
    """Versions, hashes of code and data, hosts, devices: each value, and how many runs have it."""
    found = Counter(fact for run in names for fact in facts_of(run))
    rows = [[name, value, f"{count} of {len(names)}"] for (name, value), count in sorted(found.items())]
    return Table(["what", "value", "runs"], rows, "Versions, hashes, hosts and devices")


def facts_of(run: Run) -> set[tuple[str, str]]:
    """(name, value) of each."""
    found = {
        ("revision of the code" if name == REVISION else f"version of {name}", str(value))
        for name, value in run.versions.items()
    }
    found |= {(f"SHA-256 of {name}", str(value)) for name, value in run.identity.items()}
    for session in run.sessions:
        found |= {(what, str(value)) for what in ("hosts", "devices") for value in session.get(what, {})}
        found |= {(what, str(session[what])) for what in ("ranks", "launcher") if what in session}
    return found


def sessions_table(names: dict[Run, str]) -> Table | None:
    """Each process of each run, with its command line; None where no run has recorded any."""
    rows = [[name, *session_cells(run, session)] for run, name in names.items() for session in run.sessions]
    head = ["run", "started (UTC)", "after round", "ranks", "hosts", "devices", "command line"]
    return Table(head, rows, "Every start of every run") if rows else None


def session_cells(run: Run, session: Mapping[str, Any]) -> list[str]:
    started = session.get("started_unix_s")
    when = datetime.datetime.fromtimestamp(started, datetime.timezone.utc) if started else None
    listed = [", ".join(map(str, session.get(what, {}))) or NOTHING for what in ("hosts", "devices")]
    counts = [str(session.get(what, NOTHING)) for what in ("after_round", "ranks")]
    return [
        f"{when:%Y-%m-%d %H:%M:%S}" if when else NOTHING,
        *counts,
        *listed,
        command_of(run, session),
    ]


def command_of(run: Run, session: Mapping[str, Any]) -> str:
    """The command line; of a trial, which a job of its study started, one that repeats it."""
    command, config = str(session.get("command_line", NOTHING)), run.path / "config.json"
    if TRIALS not in command or not config.exists():
        return command
    return f"python -m hkd_hpc.train --config {shlex.quote(str(config))} --out DIR"


def differences(names: dict[Run, str]) -> list[str]:
    """A line for each thing beside the settings in which the complete runs differ: data, code, versions, threads."""
    facts = {name: facts_for_provenance(run) for run, name in names.items() if run.state == "complete"}
    return provenance.lines(provenance.mixed(facts))


def facts_for_provenance(run: Run) -> provenance.Provenance:
    """As it stands now; what changed on the way is told among the remarks."""
    versions = {f"version.{name}": [str(value)] for name, value in run.versions.items() if name != REVISION}
    threads = run.settings.get(provenance.THREADS)
    own = {} if threads is None else {provenance.THREADS: [str(threads)]}
    return {**versions, **{name: [str(value)] for name, value in run.identity.items()}, **own}
