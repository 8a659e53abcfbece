"""One run of the study once more, with its recorded settings: are its weights those of then, or how near is it?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hkd_hpc.common.command import WRONG_INPUT
from hkd_hpc.common.errors import RunError, UsageError, obtainable
from hkd_hpc.config import is_location, split_override
from hkd_hpc.results import Run
from hkd_hpc.results.differences import GOALS
from hkd_hpc.runtime.machine import KERNELS, computed_as, cpu_kind, narrowing

from .answers import LAST
from .records import ACCURACIES, KERNELS_OF, Record, read, record_of

# of an accuracy: on another kind of CPU the last bits differ, and training lets them grow; no proof of equal code
TOLERANCE = 0.03


def recorded(folder: Path, table: str, row: str, seed: int) -> Record:
    """The run of a table. UsageError, which names what there is, where there is none."""
    records = read(folder / f"{table}.jsonl")
    found = [record for record in records if (record.row, record.seed) == (row, seed)]
    if found:
        return found[0]
    if not records:
        known = ", ".join(sorted(path.stem for path in folder.glob("*.jsonl")))
        raise UsageError(f"{table}: no such table has finished runs; tables: {known}")
    rows = {record.row: sorted(one.seed for one in records if one.row == record.row) for record in records}
    raise UsageError(f"{table} {row} {seed}: no such run; rows and seeds: {rows}")


def again(record: Record, places: Sequence[str], out: Path | None = None) -> Record:
    """Train it as it was trained.

    Args:
        record: of the run.
        places: "section.key=value" of where things are here, data.path above all.
        out: the run's folder, which stays; None: one that goes.

    Returns:
        The finished run.

    Raises:
        UsageError: a setting that is no place, which would make it another run; or what the training rejects.
        RunError: the training failed; it has said why.
    """
    here = dict(map(split_override, places))
    for key in here:
        if not is_location(key):
            raise UsageError(f"{key}: would make it another run; only places (data.path, data.dir) may be given")
    with tempfile.TemporaryDirectory(prefix="study-") as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(by_section({**record.settings, **here})))
        found = out or Path(folder) / "run"
        words = [sys.executable, "-m", "hkd_hpc.train", "--config", str(config), "--out", str(found)]
        code = subprocess.run(words, env=environment(record.made["cpu"], os.environ, cpu_kind({}))).returncode
        if code:
            problem = UsageError if code == WRONG_INPUT else RunError
            raise problem(f"{record.row}, seed {record.seed}: was not trained; it says above why")
        return record_of(Run(found), record.row)


def by_section(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """As config.json of a run has them."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        found.setdefault(section, {})[name] = value
    return found


def environment(cpu: Mapping[str, str], env: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """With the float kernels that the recorded run had, on a machine of the kind `here`."""
    return {name: value for name, value in env.items() if name not in KERNELS} | narrowing(cpu, here)


def compared(record: Record, found: Record) -> str:
    """What a run once more says of the recorded one.

    Returns:
        One sentence: the same bits, or accuracies within TOLERANCE, and what here is not as it was.

    Raises:
        RunError: neither; or the same bits with other accuracies.
        UsageError: it was another data set.
    """
    if record.made["data_sha256"] != found.made["data_sha256"]:
        page = obtainable("docs/data.md, 10,000 images of CIFAR-10")
        raise UsageError(f"data.path: has other images than the recorded run had; how to make them: {page}")
    then, now = record.made["weights_sha256"], found.made["weights_sha256"]
    others = excuses(record.made, found.made)
    gaps = {goal: found.summary[LAST[goal]] - record.summary[LAST[goal]] for goal in GOALS}
    told = ", ".join(f"{goal} {gap:+.4f}" for goal, gap in gaps.items())
    if then == now:
        if not others and (other := unequal(record, found)):
            raise RunError(f"the same weights, {now}, but not the recorded numbers: {other}")
        return f"the same weights: {now}"
    codes = [made.get("code_sha256", "")[:12] for made in (record.made, found.made)]
    code = f"; the code is another, {codes[1]}, not {codes[0]}" if codes[0] != codes[1] else ""
    if not others:
        raise RunError(
            f"other weights, {now}, not {then}, of the same versions and kind of CPU; accuracies {told}{code}"
        )
    if max(map(abs, gaps.values())) > TOLERANCE:
        raise RunError(f"other weights, and accuracies are not within {TOLERANCE}: {told}; {others}{code}")
    return f"accuracies within {TOLERANCE} ({told}), other weights, {now}, not {then}; {others}{code}"


def unequal(record: Record, found: Record) -> str:
    """The first number of the summary or of an accuracy by round that is another; empty where there is none."""
    rounds = {name: (record.rounds[name], found.rounds[name]) for name in ACCURACIES}
    ends = {name: (value, found.summary[name]) for name, value in record.summary.items() if name in found.summary}
    return next((f"{name} was {a}, is {b}" for name, (a, b) in {**ends, **rounds}.items() if a != b), "")


def excuses(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Of what may change the bits, all that is not as it was; empty where it is the same. Other code may not."""
    facts = [{n: made["versions"].get(n, "") for n in KERNELS_OF} | computed_as(made["cpu"]) for made in (then, now)]
    names = [name for name in {**facts[0], **facts[1]} if facts[0].get(name) != facts[1].get(name)]
    return "; ".join(
        f"{name} was {facts[0].get(name, 'not set')}, is {facts[1].get(name, 'not set')}" for name in names
    )
