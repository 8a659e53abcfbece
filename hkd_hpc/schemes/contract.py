"""What the methods of a scheme owe: a mistake in one's own scheme is one line that names scheme and method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any

import torch

from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.runtime.machine import memory_bytes
from hkd_hpc.schemes.base import About, Phase, Scheme
from hkd_hpc.store.tree import is_name, is_text

DECLARATIONS = ("report_shapes", "message_shapes", "client_state_shapes")
REPLACED = {  # names of older versions that nothing reads any more
    "remark": "about = About(remark=...)",
    "tunes": "about = About(tunes=...)",
    "slowdown": "about = About(slowdown=...)",
    "parameters_held": "about = About(models_held=...)",
    "report_floats": "traffic(tensors, direction)",
    "message_floats": "traffic(tensors, direction)",
    "shared_classes": "count_C of report_shapes(), 0 where a class is not shared",
    "noise_std": "protects = ('features', 'counts')",
}


def told_of(scheme: Scheme, net: torch.nn.Module) -> list[str]:
    """What people must know of a scheme on a model, before the first round."""
    return [*outdated(scheme, net), *nothing_personal(scheme, net)]


def outdated(scheme: Scheme, net: torch.nn.Module) -> list[str]:
    """A line for each name of an older version that still works, or that changes nothing."""
    told = [
        f"{type(thing).__name__}: `captures` is called `cuda_graph_safe` now; it is taken as that"
        for thing in (scheme, net)
        if says_captures(thing)
    ]
    name = type(scheme).__name__
    told += [f"{name}: `facts` is called `info` now; it is taken as that"] * reads_facts(scheme)
    return told + [f"{name}: `sets_gradient` is not read any more; leave it away"] * hasattr(scheme, "sets_gradient")


def nothing_personal(scheme: Scheme, net: torch.nn.Module) -> list[str]:
    """A line for a scheme whose personal weights this model does not have."""
    has_none = type(scheme).personal is not Scheme.personal and not scheme.personal(net)
    return [f"scheme {scheme.settings.name}: this model has nothing that would stay with a client"] * has_none


def says_captures(thing: object) -> bool:
    """Whether its class declares `cuda_graph_safe` under the name of older versions."""
    own = vars(type(thing))
    return own.get("captures") is True and "cuda_graph_safe" not in own


def reads_facts(scheme: Scheme) -> bool:
    """Whether a method of a class of its own names `info` as older versions did."""
    own = [cls for cls in type(scheme).__mro__ if cls is not Scheme]
    functions = [each for cls in own for each in vars(cls).values() if isinstance(each, FunctionType)]
    return any("facts" in code.co_names for function in functions for code in _codes(function.__code__))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions within it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def check_declarations(scheme: Scheme, kept: tuple[str, ...]) -> None:
    """UsageError for names of older versions; RunError unless `terms` are names, the remark is text and each
    declaration a dict from names to shapes: all of it goes into files. `kept`: the program's own names in a client's
    state.
    """
    name = scheme.settings.name
    terms = scheme.terms
    if not isinstance(terms, (tuple, list)) or not terms or not all(map(is_name, terms)):
        raise RunError(
            f"scheme {name}: terms must be the names of the loss terms, such as ('cross_entropy',), not {terms!r}"
        )
    _check_about(scheme)
    for method in DECLARATIONS:
        _check_shapes(scheme, method)
    taken = [key for key in kept if key in scheme.client_state_shapes()]
    if taken:
        raise RunError(
            f"scheme {name}: client_state_shapes() declares {taken[0]!r}, which the program itself keeps; take "
            "another name"
        )


def _check_about(scheme: Scheme) -> None:
    """UsageError for names of older versions, which nothing reads; RunError for a remark that no file can hold."""
    name = scheme.settings.name
    told = [f"{old} is not read any more; write {new}" for old, new in REPLACED.items() if hasattr(scheme, old)]
    if told:
        raise UsageError(f"scheme {name}: {'; '.join(told)} (hkd_hpc.schemes.base)")
    if not isinstance(scheme.about, About):
        raise RunError(f"scheme {name}: about must be an About(...), not {scheme.about!r}")
    check_text(scheme, "about.remark", scheme.about.remark)


def check_personal(scheme: Scheme, net: torch.nn.Module) -> None:
    """RunError unless personal() names tensors of the model."""
    names, known = scheme.personal(net), net.state_dict()
    wrong = [names] if isinstance(names, str) else [name for name in names if name not in known]
    if wrong:
        raise RunError(
            f"scheme {scheme.settings.name}: personal() must return names of the model's tensors, such as "
            f"[{next(iter(known), '')!r}]; it names {wrong[0]!r}"
        )


def check_unequal(scheme: Scheme) -> None:
    """UsageError for unequal models where what a scheme does holds for one model alone: tensors of its size beside the
    weights, of which nobody knows which belong together, or a step of the global weights of its own."""
    info = scheme.info
    other = type(scheme)(scheme.settings, replace(info, parameters=info.parameters + 1, values=info.values + 1))
    if (scheme.report_shapes(), scheme.message_shapes()) != (other.report_shapes(), other.message_shapes()):
        raise UsageError(
            f"model.names: scheme.name={scheme.settings.name} sends tensors of the model's size beside the weights, "
            "which unequal models do not have in common; give model.name, or take another scheme"
        )
    if type(scheme).global_step is not Scheme.global_step:
        raise UsageError(
            f"model.names: scheme.name={scheme.settings.name} steps the global weights by the share of clients that "
            "took part, which is another in each architecture; give model.name, or take another scheme"
        )


def phases(scheme: Scheme, given: Any, values: int) -> Sequence[Phase]:
    """What phases() returned. RunError unless these are different phases, one epoch at least, of declared models of V
    floats.
    """
    contract = f"scheme {scheme.settings.name}: phases() must return a list of Phase(epochs, ...)"
    if not isinstance(given, (list, tuple)) or not all(isinstance(phase, Phase) for phase in given):
        raise RunError(f"{contract}, not {given!r}")
    if len({phase.name for phase in given}) < len(given) or sum(phase.epochs for phase in given) < 1:
        raise RunError(f"{contract} of different names, with one epoch at least; it returned {given}")
    shapes = scheme.client_state_shapes()
    for phase in given:
        if phase.own_model and tuple(shapes.get(phase.own_model, ())) != (values,):
            raise RunError(f"{contract}; client_state_shapes() must declare {phase.own_model!r} with {(values,)}")
    return given


def _check_shapes(scheme: Scheme, method: str) -> None:
    """RunError unless a method declares shapes by name that fit into memory."""
    name, shapes = scheme.settings.name, getattr(scheme, method)()
    if not isinstance(shapes, dict) or not all(is_name(n) and _is_shape(s) for n, s in shapes.items()):
        raise RunError(
            f"scheme {name}: {method}() must return a dict from names to shapes, such as "
            f"{{'count_C': (10,)}}, not {str(shapes)[:200]}"
        )
    needed_bytes = 4 * sum(math.prod(shape) for shape in shapes.values())
    if needed_bytes > memory_bytes():
        raise RunError(
            f"scheme {name}: {method}() declares {str(shapes)[:200]}, {needed_bytes / 1e9:,.0f} GB; this "
            f"machine has {memory_bytes() / 1e9:,.0f} GB of memory"
        )


def declared_shapes(scheme: Scheme) -> dict[str, str]:
    """The loss terms, and each declared tensor by method and name, as text."""
    return {
        "terms": ", ".join(scheme.terms),
        **{
            f"{method} {name}": str(tuple(shape))
            for method in DECLARATIONS
            for name, shape in getattr(scheme, method)().items()
        },
    }


def check_text(scheme: Scheme, what: str, text: Any) -> None:
    """RunError unless it is a text that a file can hold."""
    if not isinstance(text, str) or not is_text(text):
        raise RunError(f"scheme {scheme.settings.name}: {what} must be text that a file can hold, not {text!r}")


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, (tuple, list)) and all(isinstance(size, int) and size >= 0 for size in shape)


def loss_terms(scheme: Scheme, terms: Any) -> list[torch.Tensor]:
    """The values of what loss() returned, in the order of `scheme.terms`. RunError unless each is one number."""
    contract = (
        f"scheme {scheme.settings.name}: loss() must return a dict with one scalar for each of its terms "
        f"({', '.join(scheme.terms)})"
    )
    if not isinstance(terms, dict) or terms.keys() != set(scheme.terms):
        raise RunError(f"{contract}, not {', '.join(map(str, terms)) if isinstance(terms, dict) else _kind(terms)}")
    for term, value in terms.items():
        if not isinstance(value, torch.Tensor) or value.ndim:
            raise RunError(f"{contract}, but {term} is {_kind(value)}")
    values = [terms[term] for term in scheme.terms]
    if not any(value.requires_grad for value in values):
        raise RunError(f"{contract}, but none of them depends on the weights")
    return values


def check_tensors(scheme: Scheme, method: str, tensors: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """RunError unless report() or combine() returned the tensors that the scheme declares, each of its shape."""
    contract = (
        f"scheme {scheme.settings.name}: {method}() must return a dict of the declared tensors "
        f"({', '.join(shapes) or 'none'})"
    )
    if not isinstance(tensors, dict):
        raise RunError(f"{contract}, not {_kind(tensors)}")
    if tensors.keys() != set(shapes):
        raise RunError(f"{contract}, not {', '.join(map(str, tensors)) or 'an empty dict'}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != tuple(shapes[name]):
            raise RunError(f"{contract}, but {name} is {_kind(tensor)} and declared as {tuple(shapes[name])}")
        if tensor.is_complex() or tensor.layout != torch.strided:
            raise RunError(f"{contract}, dense and of real numbers, but {name} is {_kind(tensor)}")


def check_client_state(scheme: Scheme, state: dict[str, Any], kept: tuple[str, ...]) -> None:
    """RunError unless a client keeps nothing but declared tensors of their shapes, and the program's own `kept`.

    What is not declared would be in no checkpoint: a resumed run would be another one.
    """
    name, shapes = scheme.settings.name, scheme.client_state_shapes()
    unknown = set(state) - set(shapes) - set(kept)
    if unknown:
        raise RunError(
            f"scheme {name} keeps {', '.join(sorted(map(str, unknown)))} in client.state, which its "
            "client_state_shapes() does not declare"
        )
    for key, shape in shapes.items():
        if key in state and not (isinstance(state[key], torch.Tensor) and tuple(state[key].shape) == tuple(shape)):
            raise RunError(
                f"scheme {name}: client.state[{key!r}] is {_kind(state[key])}; client_state_shapes() "
                f"declares {tuple(shape)}"
            )


def check_server_state(scheme: Scheme, state: Any) -> None:
    """RunError unless combine() keeps a dict of tensors that a checkpoint can hold."""
    contract = f"scheme {scheme.settings.name}: combine() may keep tensors alone in server.state"
    if not isinstance(state, dict):
        raise RunError(f"{contract}, a dict; it is {_kind(state)}")
    for key, value in state.items():
        if not is_name(key):
            raise RunError(f"{contract}, by names without a slash; {key!r} is none")
        if not isinstance(value, torch.Tensor) or value.is_complex() or value.dtype == torch.bfloat16:
            raise RunError(f"{contract}; server.state[{key!r}] is {_kind(value)}")


def _kind(value: Any) -> str:
    """'None', 'a list', 'a torch.float32 tensor of shape (16,)'"""
    if isinstance(value, torch.Tensor):
        return (
            f"a {'' if value.layout == torch.strided else 'sparse '}{value.dtype} tensor of shape {tuple(value.shape)}"
        )
    return "None" if value is None else f"a {type(value).__name__}"
