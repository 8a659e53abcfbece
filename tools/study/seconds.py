"""What a client's round of FedHKD takes, in CPU seconds of FedAvg's: measured by itself, the two in turns.

The study's runs do not tell it: they share their cores with each other and with other work. `python -m tools.study
seconds` measures, on a quiet machine, and adds the ratios to data/seconds.json: none that was made is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hkd_hpc.analysis.tables import Table
from hkd_hpc.common.errors import UsageError
from hkd_hpc.runtime.machine import header
from hkd_hpc.runtime.revision import package_sha256, revision
from hkd_hpc.store.atomic import replace_text

from .tables import DATA

FILE = DATA / "seconds.json"
ROWS = {"ResNet18": "fedhkd_j", "ShuffleNetV2": "fedhkd_s"}  # of tools.bench
PAIRS = 16  # of rounds; single ones are off by a tenth or more where a machine has other guests


def measure() -> dict[str, Any]:
    """Both networks, 7 minutes. BenchError when it crashes, UsageError in a clone with changes."""
    from ..bench import suite  # starts processes of its own

    if revision().endswith("-dirty"):
        raise UsageError("the clone has changes that are not committed: nobody could tell what was measured")
    ratios = {}
    for network, row in ROWS.items():
        lines: list = []
        suite.measure(suite.Sizes(max_pairs=PAIRS, row_s=300.0), {row: suite.ROWS[row]}, lines)
        ratios[network] = [round(value, 4) for value in lines[0].values]
    return {"made": [*header().splitlines(), f"code: {package_sha256()[:12]}"], "ratios": ratios}


def add(found: Mapping[str, Any], path: Path = FILE) -> None:
    """One more measurement beside those that are there."""
    replace_text(path, json.dumps([*_file(path), found], indent=1) + "\n")


def read(path: Path = FILE) -> Mapping[str, Sequence[float]]:
    """FedHKD's seconds / FedAvg's by network, one of each pair of rounds, of all measurements; none where there is no
    measurement."""
    found: dict[str, list[float]] = {}
    for each in _file(path):
        for network, values in each["ratios"].items():
            found.setdefault(network, []).extend(values)
    return found


def table(path: Path = FILE) -> str:
    """What was measured, and where."""
    measured = _file(path)
    rows = [
        [str(number), network, f"{median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}", str(len(values))]
        for number, each in enumerate(measured, 1)
        for network, values in each["ratios"].items()
    ]
    made = "\n".join(f"{number}. {'; '.join(each['made'])}." for number, each in enumerate(measured, 1))
    head = ["measurement", "round of 5 epochs, FedHKD / FedAvg", "median", "spread", "pairs"]
    return f"{Table(head, rows)}\n\n{made}"


def _file(path: Path) -> Sequence[Mapping[str, Any]]:
    try:
        return json.loads(path.read_text()) if path.exists() else []
    except ValueError as error:
        raise UsageError(f"{path}: is no record of seconds ({error}); get it back from git") from None
