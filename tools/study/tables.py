"""The tables of the study: what was asked for, and the finished runs of each, row by row and seed by seed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc import compare, schemes
from hkd_hpc.analysis.metrics import NAN
from hkd_hpc.commands.bundled import PACKAGE
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import Config, as_values, is_location, resolve, split_override
from hkd_hpc.jobs import Sweep
from hkd_hpc.runtime.machine import computed_as

from .records import KERNELS_OF, PAPERS, Record, read, variant_of

DATA = Path(__file__).with_name("data")
SPECS = PACKAGE / "specs"
IMAGES = "data.path=cifar10.npz"
PAIRED = ("small", "beta02", "beta5", "constant", "why")  # tables whose runs are compared with each other
OURS = "fedhkd"
MEASURED = {  # its runs are those of this table and row, with measurements beside
    "gradients": ("small", OURS),
    "gradients_resnet18": ("table1", OURS),
}
TRIAL, TUNED = "-trial", "-tuned"  # in the rows of a comparison that tunes

RowSeed = tuple[str, int]  # row and seed


def plain(config: Config) -> dict[str, Any]:
    """Settings as JSON has them."""
    return json.loads(json.dumps(as_values(config)))


@cache
def defaults_of(scheme: str) -> dict[str, Any]:
    return plain(resolve(overrides=[f"scheme.name={scheme}"]))


def is_tuning(row: str) -> bool:
    """Whether it is a trial, or of what one chose."""
    return TRIAL in row or TUNED in row


def without_controls(rows: Iterable[str]) -> list[str]:
    return [row for row in rows if row not in schemes.CONTROLS]


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
    def configs(self) -> dict[RowSeed, Config]:
        """Of each run that the spec may ask for: what tuning will choose is not known before."""
        path, over = str(SPECS / self.spec), [IMAGES, *self.more]
        if self.is_sweep:
            trials, _ = Sweep.from_toml(path, over).trials()
            return {(variant_of(trial.labels), int(trial.settings["run.seed"])): trial.config() for trial in trials}
        spec = compare.read_spec(path)
        spec.settings.update(map(split_override, over))
        found: dict[RowSeed, Config] = {}
        for run in compare.possible_runs(spec):
            config = compare.config_of(run)
            found[run.name.removesuffix(f"-s{config.run.seed}").removesuffix(PAPERS), config.run.seed] = config
        return found

    @property
    def required(self) -> set[RowSeed]:
        """Of the runs that are asked for in any case."""
        return {(row, seed) for row, seed in self.configs if not is_tuning(row)}

    @property
    def schemes_asked(self) -> list[str]:
        """Its rows that are schemes."""
        return list(
            dict.fromkeys(row for row in without_controls(row for row, _ in self.configs) if not is_tuning(row))
        )

    def settings(self, key: RowSeed) -> Mapping[str, Any]:
        """Of a run, as a record has them."""
        return plain(self.configs[key])

    def own(self, records: Sequence[Record]) -> Iterator[Record]:
        """Those that it asks for. UsageError for one of other settings; what an older version did not know was as it is
        by default now."""
        for record in records:
            run = record.row, record.seed
            if run not in self.configs:
                continue
            asked, defaults = self.settings(run), defaults_of(record.scheme)
            if strange := sorted(record.settings.keys() - asked.keys()):
                raise UsageError(
                    f"{self.name}: {record.row}, seed {record.seed}: has settings that {self.spec} does not know: "
                    f"{', '.join(strange)}"
                )
            for key, value in asked.items():
                own = record.settings.get(key, defaults[key])
                if own != value and not is_location(key):
                    raise UsageError(
                        f"{self.name}: {record.row}, seed {record.seed}: was run with {key}={own}, {self.spec} asks "
                        f"for {value}"
                    )
            yield record


ASKED = (
    Asked("table1", "Table 1: CIFAR10, 10 clients, ResNet18", "study_table1.toml"),
    Asked("small", "All nine schemes and the controls, small net", "study_small.toml"),
    Asked("beta02", "Beta .2, small net", "study_beta02.toml"),
    Asked("beta5", "Beta 5, small net", "study_beta5.toml"),
    Asked("constant", "A constant learning rate, small net", "study_constant.toml"),
    Asked("why", "Why: FedHKD's choices, small net", "study_why.toml", is_sweep=True),
    Asked("gradients", "Why: the gradients of FedHKD's terms, small net", "study_gradients.toml"),
    Asked("gradients_resnet18", "Why: the gradients of FedHKD's terms, ResNet18", "study_gradients_resnet18.toml"),
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

    @cached_property
    def seeds(self) -> list[int]:
        """0, 1, 2 ... as far as every scheme has come to its end: the only ones that are compared, so that none is
        picked."""
        rows = without_controls(self.rows) or list(self.rows)
        common = set.intersection(*(set(self.rows[row]) for row in rows)) if rows else set()
        return [seed for index, seed in enumerate(sorted(common)) if seed == index]

    @property
    def compared(self) -> Results:
        """The rows that have every seed of FedAvg and FedHKD: one under way would take seeds from the others."""
        core = self.only({schemes.REFERENCE, OURS} & self.rows.keys())
        return self.only(row for row, own in self.rows.items() if set(core.seeds) <= own.keys())

    def only(self, rows: Iterable[str]) -> Results:
        """The same with fewer rows."""
        kept = set(rows)
        return Results([record for record in self.records if record.row in kept])

    def values(self, row: str, measure: str) -> np.ndarray:
        """(S,) what the summaries of a row have, by the seeds in their order; NaN where it was not measured."""
        own = self.rows[row]
        return np.array([own[seed].summary.get(measure, NAN) if seed in own else NAN for seed in self.seeds])

    def check_pairs(self) -> None:
        """UsageError where runs of one seed and of the same settings of the data had different images."""
        images: dict[tuple, str] = {}
        for record in self.records:
            key = (record.seed, *sorted((k, str(v)) for k, v in record.settings.items() if k.startswith("data.")))
            own = f"{record.made['data_sha256']} {record.made['partition_sha256']}"
            if images.setdefault(key, own) != own:
                raise UsageError(f"{record.row}, seed {record.seed}: has other images than the other runs of its seed")

    def check_same_weights(self, where: str, plain: Mapping[int, Record]) -> None:
        """UsageError where one does not have the weights of its seed's plain run."""
        for record in self.records:
            other = plain.get(record.seed)
            if not other or other.made["weights_sha256"] != record.made["weights_sha256"]:
                raise UsageError(
                    f"{where}: {record.row}, seed {record.seed}: has the weights {record.made['weights_sha256'][:12]}; "
                    f"the run that it repeats has {other.made['weights_sha256'][:12] if other else 'not been made'}"
                )

    def check_origin(self, where: str) -> None:
        """UsageError where not all were made by one code, with one torch, on one kind of CPU, of one file of images."""
        first: dict[str, str] = {}
        for record in self.records:
            for fact, value in origin_of(record).items():
                if not value or value == "several":
                    raise UsageError(f"{where}: {record.row}, seed {record.seed}: does not say its {fact}")
                if first.setdefault(fact, value) != value:
                    raise UsageError(
                        f"{where}: {record.row}, seed {record.seed}: {fact} is {value}, and {first[fact]} of "
                        "other runs that it is compared with"
                    )


def origin_of(record: Record) -> dict[str, str]:
    """What else than settings and seed its numbers depend on."""
    made = record.made
    return {
        "code": made.get("code_sha256", "")[:12],
        **{name: made.get("versions", {}).get(name, "") for name in KERNELS_OF},
        "CPU": " ".join(computed_as(made.get("cpu", {})).values()),
        "device": " ".join(made.get("devices", ["cpu"])),
        "images": made["data_sha256"][:12],
    }


def checked(asked: Asked, records: Sequence[Record]) -> Results:
    """What a table's spec asks for, of finished runs. UsageError where they have other settings than the spec, are no
    pairs, or are of several codes, kinds of CPU or files of images."""
    results = Results(list(asked.own(records)))
    results.check_pairs()
    results.check_origin(asked.name)
    return results


def results_of(asked: Asked, folder: Path = DATA) -> Results:
    """The finished runs in a table's file. UsageError for a damaged one, and as `checked`."""
    return checked(asked, read(folder / f"{asked.name}.jsonl"))


def all_results(folder: Path = DATA) -> Mapping[str, Results]:
    """Of every table that is asked for, by its name. UsageError as `results_of`, of paired tables together too; and
    where a measured run is not the run that it repeats."""
    found = {asked.name: results_of(asked, folder) for asked in ASKED}
    together = Results([record for name in PAIRED for record in found[name].records])
    together.check_pairs()
    together.check_origin(" and ".join(name for name in PAIRED if found[name].records))
    for name, (table, row) in MEASURED.items():
        found[name].check_same_weights(name, found[table].rows.get(row, {}))
    return found
