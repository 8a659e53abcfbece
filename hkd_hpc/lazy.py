"""torch on first use: settings must be checkable before the seconds that its import takes on every rank.

Modules that hold settings (the schemes) write `from hkd_hpc.lazy import torch`; everything else imports torch itself.
"""
from __future__ import annotations

import importlib
import types


class LazyModule(types.ModuleType):
    """Stands for a module and imports it when the first attribute is asked for."""

    def __getattr__(self, name: str):
        if name.startswith("__"):  # inspection (doctest, inspect) must not trigger the import
            raise AttributeError(name)
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


torch = LazyModule("torch")
F = LazyModule("torch.nn.functional")
