"""A scheme or a model by its address module:Class, the package's and a user's own alike."""

from __future__ import annotations

import importlib

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.stop import FROM_OUTSIDE
from hkd_hpc.runtime.frames import own_frame


def load_object(address: str, what: str):
    """The object at module:Class; UsageError says which of the two is missing, or where the module itself fails."""
    module_name, _, class_name = address.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        advice = "; is it on PYTHONPATH?" if _is_missing(module_name, error) else ""
        raise UsageError(f"{what}: cannot import {module_name} ({error}){_line_of(error)}{advice}") from None
    except FROM_OUTSIDE:
        raise
    except BaseException as error:
        if not module_name.strip(".") or module_name.startswith(".") or "\0" in module_name:
            raise UsageError(f"{what}: must be module:Class, for example my_schemes:MyScheme") from None
        raise UsageError(
            f"{what}: importing {module_name} failed: {type(error).__name__}: {error}{_line_of(error)}"
        ) from None
    if not hasattr(module, class_name):
        raise UsageError(f"{what}: module {module_name} has no {class_name or 'class name after the colon'}")
    return getattr(module, class_name)


def _is_missing(module: str, error: ImportError) -> bool:
    """Whether the module itself, or a package that it is in, was not found; not something that it imports."""
    return isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")


def _line_of(error: BaseException) -> str:
    """Where in a user's module it happened: " (file, line 3)"."""
    frame = own_frame(error)
    return f" ({frame.filename}, line {frame.lineno})" if frame and not isinstance(error, SyntaxError) else ""
