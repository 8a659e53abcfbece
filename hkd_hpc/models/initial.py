"""The weights that a run begins with, from a file (model.init): an export of a run, or a state dict of the same model.

The networks of torchvision's names also take torchvision's own files, whose tensors ours have below `extractor`. Their
last layer gives the classes of ImageNet, where ours gives the latent vector, so that it belongs to the head.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.lazy import torch
from hkd_hpc.models.settings import ModelSettings
from hkd_hpc.runtime.versions import installed

if TYPE_CHECKING:
    from torch import nn

EXTRACTOR = "extractor."
HEAD = ("classifier.",)
HEAD_OF_TORCHVISION = (*HEAD, f"{EXTRACTOR}fc.", "latent_norm.")
COUNTER = "num_batches_tracked"  # of BatchNorm, which older files have not
MOST_TOLD = 3

Tensors = Mapping[str, "torch.Tensor"]


def check_present(path: str) -> None:
    """Raise UsageError unless model.init can be read, as far as that shows without torch; "": there is none."""
    try:
        if path and not Path(path).is_file():
            raise UsageError(f"model.init={path}: {'is no file' if Path(path).exists() else 'there is no such file'}")
    except OSError as error:  # a name that is too long, or in a folder that may not be read
        raise UsageError(f"model.init={path}: cannot be looked at ({error.strerror})") from None
    if path.endswith(".safetensors") and installed("safetensors") is None:
        raise UsageError(
            f"model.init={path}: safetensors is not installed; pip install safetensors, or give a .pt file"
        )


def load_into(net: nn.Module, settings: ModelSettings) -> None:
    """Set a network to the weights of the file; with init_head=new its head keeps those that it has.

    Args:
        net: with the initial weights of the seed; its tensors stay where they are.
        settings: with `init`, the file.

    Raises:
        UsageError: the file cannot be read, or does not fit the network: the first names that do not are told.
    """
    own = net.state_dict()
    given, head = as_ours(read(settings.init), own)
    if head == HEAD_OF_TORCHVISION and settings.stem != "imagenet":
        raise UsageError(
            f"model.init={settings.init}: torchvision's file has the first layers of model.stem=imagenet alone"
        )
    left_out = head if settings.init_head == "new" else ()
    taken = {name: tensor for name, tensor in given.items() if not name.startswith(left_out)}
    wrong = misfits(taken, {name: tensor for name, tensor in own.items() if not name.startswith(left_out)})
    if wrong:
        is_head = not left_out and all(name.startswith(head) for name in wrong)
        raise UsageError(
            f"model.init={settings.init}: does not fit model.name={settings.name}: {first_of(wrong)}"
            + "; model.init_head=new begins with a new head" * is_head
        )
    net.load_state_dict({**own, **taken})


def read(path: str) -> Tensors:
    """A state dict, of which nothing is executed. UsageError for anything else."""
    try:
        found = read_safetensors(path) if path.endswith(".safetensors") else read_pickle(path)
    except pickle.UnpicklingError:  # torch's own text advises to execute it
        raise UsageError(
            f"model.init={path}: is no state dict that can be read without executing what is in it"
        ) from None
    except Exception as error:  # of any kind: so may the file be
        said = str(error).partition("\n")[0][:100]
        raise UsageError(f"model.init={path}: is no state dict ({type(error).__name__}: {said})") from None
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise UsageError(f"model.init={path}: is no state dict, which has tensors by name and nothing else")
    return found


def read_pickle(path: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of protocols that torch does not write
        return torch.load(path, map_location="cpu", weights_only=True)


def read_safetensors(path: str) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


def as_ours(given: Tensors, own: Tensors) -> tuple[Tensors, tuple[str, ...]]:
    """(the tensors by our names, how the names of the head begin)."""
    is_ours = any(name in own for name in given) or not any(EXTRACTOR + name in own for name in given)
    if is_ours:
        return given, HEAD
    return {EXTRACTOR + name: tensor for name, tensor in given.items()}, HEAD_OF_TORCHVISION


def misfits(given: Tensors, own: Tensors) -> dict[str, str]:
    """What is wrong with each name that does not fit."""
    found = {name: "is not in the file" for name in own if name not in given and not name.endswith(COUNTER)}
    found |= {name: "is not in the model" for name in given if name not in own}
    both = {name: (given[name], own[name]) for name in own if name in given}
    return found | {name: text for name, pair in both.items() if (text := misfit(*pair))}


def misfit(given: torch.Tensor, own: torch.Tensor) -> str:
    """Why a tensor cannot take the values of another; empty where it can."""
    if given.shape != own.shape:
        return f"has shape {tuple(given.shape)}, not {tuple(own.shape)}"
    if given.is_floating_point() != own.is_floating_point():
        return f"is {given.dtype}, not {own.dtype}"
    return "" if bool(given.isfinite().all()) else "has NaN or infinity"


def first_of(wrong: Mapping[str, str]) -> str:
    """a is not in the file, b has shape (1,), not (2,) and 7 more"""
    told = [f"{name} {text}" for name, text in list(wrong.items())[:MOST_TOLD]]
    return ", ".join(told) + f" and {len(wrong) - MOST_TOLD} more" * (len(wrong) > MOST_TOLD)
