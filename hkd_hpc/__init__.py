"""hkd_hpc: federated learning on non-IID data as an HPC job (FedHKD and the schemes it is compared with).

    import hkd_hpc
    run = hkd_hpc.train({"scheme.name": "fedhkd", "fed.rounds": 3}, out="runs/one")
    run = hkd_hpc.load("runs/one"); run.rounds; run.model()

Each name is imported when it is asked for: `import hkd_hpc` alone costs nothing.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hkd_hpc.version import __version__ as __version__

if TYPE_CHECKING:
    from hkd_hpc.common.errors import RunError, UsageError
    from hkd_hpc.jobs import Study, Sweep, launch, load_study
    from hkd_hpc.results import Run, load
    from hkd_hpc.train import in_this_process as train

__all__ = ["Run", "RunError", "Study", "Sweep", "UsageError", "launch", "load", "load_study", "train"]

_HOMES = {
    "hkd_hpc.common.errors": ("RunError", "UsageError"),
    "hkd_hpc.jobs": ("Study", "Sweep", "launch", "load_study"),
    "hkd_hpc.results": ("Run", "load"),
}

if sys.argv and sys.argv[0].startswith(("-m", __name__)):  # so early because the packages below import much: see there
    import_module("hkd_hpc.common.command").tell_interrupts_of(__name__)


def __getattr__(name: str) -> Any:
    if name == "train":  # the command's module, which can be called
        return import_module("hkd_hpc.train")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
