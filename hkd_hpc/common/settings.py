"""How one setting is declared, read from text and checked. Imports nothing heavy.

A section is a frozen dataclass whose fields are made with `setting(default, help, ...)`; its annotations are one of
"int", "float", "bool", "str", each optionally followed by " | None".
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from hkd_hpc.common import words
from hkd_hpc.common.errors import UsageError

NUMBER = re.compile(
    r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
)  # Python also takes 1_0, spaces and other scripts
KINDS = ("int", "float", "bool", "str")
BOUNDS = {
    "low": (">=", operator.ge),
    "above": (">", operator.gt),
    "high": ("<=", operator.le),
    "below": ("<", operator.lt),
}
LEAST_LIKENESS = 0.75  # of two names, one of which may have been meant by the other: apth and path


def setting(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    choices: Iterable[str] | None = None,
    own: str | None = None,
) -> Any:
    """A dataclass field with its documentation and what is allowed.

    Args:
        default: its value where nobody gives one; must be allowed itself.
        help: one line for people.
        low: smallest value.
        above: bound that a value must exceed.
        high: largest value.
        below: bound that a value must stay under.
        choices: all allowed values of a text.
        own: beside these, the form of an address of the user's own code: "module:function".

    Returns:
        The field; annotate it as int, float, bool or str, each optionally | None.
    """
    allowed = {"help": help, "low": low, "above": above, "high": high, "below": below, "choices": choices, "own": own}
    return dataclasses.field(default=default, metadata=allowed)


def allowed_text(field: dataclasses.Field) -> str:
    """What a value of this field may be, for error messages and --help."""
    meta, kind = field.metadata, type_text(field).replace(" | None", "")
    or_none = " or none" * type_text(field).endswith("| None")
    if meta.get("choices"):
        own = [f"or {meta['own']}"] * bool(meta["own"])
        return ", ".join(["one of " + ", ".join(map(str, meta["choices"])), *own]) + or_none
    told = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}[kind]
    if meta.get("low") is not None and meta.get("low") == meta.get("high"):
        return f"{meta['low']}"
    bounds = [f"{sign} {meta[name]}" for name, (sign, _) in BOUNDS.items() if meta.get(name) is not None]
    return " ".join([told, " and ".join(bounds)]).strip() + or_none


def type_text(field: dataclasses.Field) -> str:
    """The annotation as text, whether or not its module postpones annotations."""
    return field.type.__name__ if isinstance(field.type, type) else str(field.type)


def is_setting(field: dataclasses.Field) -> bool:
    """Whether a field was made with `setting` and has one of the types that can be read."""
    return "help" in field.metadata and type_text(field).replace(" | None", "") in KINDS


def check(key: str, field: dataclasses.Field, value: Any) -> Any:
    """The value in its declared type, or UsageError naming key, value and what is allowed."""
    try:
        result = _convert(type_text(field), value)
        if not _in_range(field.metadata, result):
            raise ValueError
        return result
    except (ValueError, TypeError, OverflowError):
        raise UsageError(f"{key}={shown(value)}: not allowed; {key} must be {allowed_text(field)}") from None


def shown(value: Any) -> str:
    """A value for a message: cut where it is long. Python does not print whole numbers of more than 4,300 digits."""
    try:
        text = str(value)
    except ValueError:
        return "(a number of thousands of digits)"
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def _convert(kind: str, value: Any) -> Any:
    if kind.endswith("| None"):
        if value is None or str(value).lower() in ("none", ""):
            return None
        kind = kind.replace(" | None", "")
    return {"int": _to_int, "float": _to_float, "bool": _to_bool, "str": _to_str}[kind](value)


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"[+-]?[0-9]+", str(value)):
        raise ValueError
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or (isinstance(value, str) and not NUMBER.fullmatch(value)):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _to_bool(value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ValueError
    return str(value).lower() == "true"


def _to_str(value: Any) -> str:
    if not isinstance(value, str) or any(ord(c) < 32 for c in value):
        raise ValueError
    return value


def _in_range(meta: Mapping[str, Any], value: Any) -> bool:
    if value is None:
        return True
    if meta.get("choices") and not (value in meta["choices"] or (meta["own"] and ":" in value)):
        return False
    return all(holds(value, meta[name]) for name, (_, holds) in BOUNDS.items() if meta.get(name) is not None)


def build(section: str, cls: type, values: dict[str, Any]):
    """An instance of the section's dataclass from raw values of its fields.

    Defaults are checked like values: a default of one's own scheme must be one that can be stored and read again.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    return cls(
        **{name: check(f"{section}.{name}", field, values.get(name, field.default)) for name, field in fields.items()}
    )


def unknown(
    word: str,
    known: Iterable[str],
    listed: str = "python -m hkd_hpc.train --help lists them",
    of_others: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """'x: no such setting; did you mean y?'; where nothing is near, where all are listed.

    of_others: {name: how to tell it} of settings that cannot be given here, named where none of the known ones is near.
    """
    near = nearest(word[:100], known) or [of_others[name] for name in nearest(word[:100], of_others)]
    hint = f"did you mean {words.listed(near, 'or')}?" if near else listed
    return f"{shown(word)}: no such setting; {hint}"


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """At most five names that may have been meant, the likeliest first. What counts is the last part: sections are
    long, and alike for names that have nothing in common."""
    section = word.rpartition(".")[0]
    scores = {key: likeness(word.rpartition(".")[2].lower(), key.rpartition(".")[2]) for key in known}
    least = max([LEAST_LIKENESS, *(score - 0.1 for score in scores.values())])
    near = [key for key, score in scores.items() if score >= least]
    return sorted(near, key=lambda key: (-scores[key], key.rpartition(".")[0] != section))[:5]


def likeness(word: str, name: str) -> float:
    """0 to 1; a word of a name of several words is like it, and a long form of a short name (lambda, lam)."""
    related = word in name.split("_") or (word.startswith(name) and len(word) <= 2 * len(name))
    return max(LEAST_LIKENESS * related, difflib.SequenceMatcher(None, word, name).ratio())


def first_paragraph(doc: str | None) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((doc or "").strip().split("\n\n")[0].split())
