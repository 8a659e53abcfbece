"""torch on first use: settings must be checkable before the seconds that its import takes on every rank.

Modules that hold settings (the schemes) write `from hkd_hpc.common.lazy import torch`; all others import torch itself.
"""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING

from hkd_hpc.common.stop import interrupts_held

__all__ = ["F", "LazyModule", "torch", "torch_environment"]


class LazyModule(types.ModuleType):
    """Stands for a module and imports it when the first attribute is asked for."""

    def __getattr__(self, name: str):
        if name.startswith("__"):  # inspection (doctest, inspect) must not trigger the import
            raise AttributeError(name)
        with interrupts_held():
            module = importlib.import_module(self.__name__)
        value = getattr(module, name)
        setattr(self, name, value)
        return value


def torch_environment(threads: int) -> dict[str, str]:
    """What must be in the environment before torch is imported: threads of this process, and huge pages for large
    tensors.

    Huge pages (where the system grants them on request) save a twentieth of a ResNet18's training time on CPUs.
    CUBLAS_WORKSPACE_CONFIG is what cuBLAS needs to give the same bits in each run (run.deterministic).
    """
    return {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "THP_MEM_ALLOC_ENABLE": "1",
    }


if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
else:
    torch = LazyModule("torch")
    F = LazyModule("torch.nn.functional")
