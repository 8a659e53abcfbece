"""The tables of the study: what was asked for, and the finished runs of each, row by row and seed by seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hkd_hpc import compare
from hkd_hpc.analysis.metrics import NAN
from hkd_hpc.bundled import PACKAGE
from hkd_hpc.errors import UsageError
from hkd_hpc.jobs import Sweep

from .records import Record, read, variant_of

DATA = Path(__file__).with_name("data")
SPECS = PACKAGE / "specs"
IMAGES = "data.path=cifar10.npz"


@dataclass(frozen=True)
class Asked:
    """A table, whether or not any of its runs is finished.

    Attributes:
        name: of its file in data/.
        title: of its section.
        spec: its spec in tools/specs.
        is_sweep: whether the spec is one of `hkd sweep launch`, else of `hkd compare`.
        more: settings of the command over the spec's.
    """

    name: str
    title: str
    spec: str
    is_sweep: bool = False
    more: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """That makes or continues its runs, several seeds of them."""
        start = "python -m jobs launch" if self.is_sweep else "python -m tools.compare"
        executor = " --executor local" * self.is_sweep
        return f"{start} tools/specs/{self.spec}{executor} --root runs/{self.name} {' '.join((IMAGES, *self.more))}"

    @cached_property
    def places(self) -> set[tuple[str, int]]:
        """(row, seed) of each run that the spec asks for, as far as that is known before any is finished."""
        path = str(SPECS / self.spec)
        if self.is_sweep:
            trials, _ = Sweep.from_toml(path, [IMAGES, *self.more]).trials()
            return {(variant_of(trial.labels), int(trial.settings["run.seed"])) for trial in trials}
        spec = compare.read_spec(path)
        return {(scheme.replace(":", "."), seed) for scheme in spec.schemes for seed in spec.seeds}


ASKED = (
    Asked("table1", "Table 1: CIFAR10, 10 clients, ResNet18", "study_table1.toml"),
    Asked("small", "All nine schemes and the controls, small net", "study_small.toml"),
    Asked("beta02", "Beta .2, small net", "study_beta02.toml"),
    Asked("beta5", "Beta 5, small net", "study_beta5.toml"),
    Asked("why", "Why: FedHKD's choices, small net", "study_why.toml", is_sweep=True),
    Asked("gradients", "Why: the gradients of FedHKD's terms, small net", "study_gradients.toml"),
    Asked("tuned", "Every scheme tuned, small net, 10 rounds", "study_tuned.toml"),
    Asked(
        "smoke", "Smoke test: nine schemes, small net, 10 rounds", "cifar10_smoke.toml", more=("run.evaluate_every=1",)
    ),
)


@dataclass(frozen=True)
class Results:
    """The finished runs of a table.

    Attributes:
        records: all of them.
    """

    records: Sequence[Record]

    @cached_property
    def rows(self) -> dict[str, dict[int, Record]]:
        """By row and seed."""
        found: dict[str, dict[int, Record]] = {}
        for record in self.records:
            found.setdefault(record.row, {})[record.seed] = record
        return found

    @property
    def seeds(self) -> list[int]:
        """Those with which every row has come to its end: the only ones that are compared, so that none is picked."""
        return sorted(set.intersection(*(set(own) for own in self.rows.values()))) if self.rows else []

    def only(self, rows: Iterable[str]) -> Results:
        """The same with fewer rows."""
        kept = set(rows)
        return Results([record for record in self.records if record.row in kept])

    def values(self, row: str, measure: str) -> np.ndarray:
        """(S,) what the summaries of a row have, by the seeds in their order; NaN where it was not measured."""
        return np.array([self.rows[row][seed].summary.get(measure, NAN) for seed in self.seeds])

    def check_pairs(self) -> None:
        """UsageError where runs of one seed and of the same settings of the data had different images."""
        images: dict[tuple, str] = {}
        for record in self.records:
            key = (record.seed, *sorted((k, str(v)) for k, v in record.settings.items() if k.startswith("data.")))
            own = f"{record.made['data_sha256']} {record.made['partition_sha256']}"
            if images.setdefault(key, own) != own:
                raise UsageError(f"{record.row}, seed {record.seed}: has other images than the other runs of its seed")


def results_of(name: str, folder: Path = DATA) -> Results:
    """The finished runs in a table's file. UsageError for one that is damaged, or whose runs are no pairs."""
    results = Results(read(folder / f"{name}.jsonl"))
    results.check_pairs()
    return results


def all_results(folder: Path = DATA) -> Mapping[str, Results]:
    """Of every table that is asked for, by its name."""
    return {asked.name: results_of(asked.name, folder) for asked in ASKED}
