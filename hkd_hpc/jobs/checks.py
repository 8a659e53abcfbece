"""What would make the jobs of a launch fail, found before anything is submitted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from hkd_hpc import schemes
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import Config, check_fit
from hkd_hpc.data import public
from hkd_hpc.data.sources import check_present
from hkd_hpc.jobs import slurm
from hkd_hpc.jobs.executors import SUBMIT
from hkd_hpc.jobs.options import Options, check_options
from hkd_hpc.jobs.sweep import Trial
from hkd_hpc.jobs.work import data_sizes
from hkd_hpc.models import initial
from hkd_hpc.runtime import versions
from hkd_hpc.runtime.paths import nearest_existing
from hkd_hpc.store.folder import RunFolder


class Problems(UsageError):
    """All that is wrong; `lines`, one each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = list(lines)


def check(trials: list[Trial], executor: str, root: Path, options: Options) -> list[str]:
    """A line for each thing that would make the jobs fail; equal ones once."""
    if executor not in SUBMIT:
        return [f"executor {executor}: not known; one of {', '.join(SUBMIT)}"]
    tests: list[Callable[[], None]] = [partial(check_root, root), partial(check_options, options, executor)]
    tests += [slurm.check_programs, partial(slurm.check_root, root)] * (executor == "slurm")
    # with another Python its packages count, not this one's
    tests += tests_of([trial.config() for trial in trials], installed_here=not options.python)
    problems = told(tests)
    if executor == "slurm" and not problems:
        problems += dict.fromkeys(slurm.rejections(trials, root, options))
    return problems


def tests_of(configs: list[Config], installed_here: bool = True) -> list[Callable[[], None]]:
    """What runs with these settings need, once each: data, initial weights, public images for those who train on them,
    packages. Each raises UsageError."""
    data = dict.fromkeys(config.data for config in configs)
    models = dict.fromkeys((config.model.title, config.model.needs_torchvision) for config in configs)
    starts = dict.fromkeys(config.model.init for config in configs)
    return [
        *(partial(check_present, each) for each in data),
        *(partial(check_fit, config) for config in configs),
        *(partial(initial.check_present, path) for path in starts),
        *(partial(check_public_images, config) for config in configs if schemes.get(config.scheme.name).needs_public),
        *(partial(versions.check, *model) for model in models if installed_here),
    ]


def check_public_images(config: Config) -> None:
    """By the heads of the data's files; what cannot be read there others say."""
    sizes = data_sizes(config)
    if sizes is not None:
        public.check(config.scheme.name, config.data, config.fed.clients, sizes.train)


def told(tests: Iterable[Callable[[], None]]) -> list[str]:
    """What the tests say, equal lines once."""
    problems: dict[str, None] = {}
    for test in tests:
        try:
            test()
        except UsageError as error:
            problems[str(error)] = None
    return list(problems)


def check_no_file(root: Path) -> Path:
    """The folder that the root is or would be made in; UsageError for a file."""
    place = nearest_existing(root)
    if not place.is_dir():
        raise UsageError(f"--root {root}: {place} is a file; name a folder")
    return place


def check_root(root: Path) -> None:
    place = check_no_file(root)
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"--root {root}: {place} cannot be written to; name another folder")
    if RunFolder(root).holds_run():
        raise UsageError(f"--root {root}: holds a run, which a study would hide; name another folder")
