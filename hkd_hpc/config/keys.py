"""Which settings there are, and what is wrong with names that are none: all of it in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from hkd_hpc import schemes
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.groups import grouped
from hkd_hpc.common.settings import shown, unknown
from hkd_hpc.config.sections import SECTIONS


def str_or_shown(value: Any) -> str:
    """A text as it is; what a TOML file has in its place, as messages show it."""
    return value if isinstance(value, str) else shown(value)


def all_keys(scheme_name: Any) -> list[str]:
    """Every key that can be set, for messages."""
    known = scheme_name if str_or_shown(scheme_name) in {**schemes.REGISTRY, **schemes.CONTROLS} else schemes.DEFAULT
    return keys_of(schemes.settings_of(known))


def keys_of(scheme_class: type) -> list[str]:
    """Every key that can be set with a scheme of these settings."""
    classes = {"scheme": scheme_class, **SECTIONS}
    return [f"{section}.{field.name}" for section, cls in classes.items() for field in dataclasses.fields(cls)]


class NotOfThisScheme(UsageError):
    """A setting that the chosen scheme has not, but `owners` have."""

    def __init__(self, key: str, scheme: str, owners: list[str]) -> None:
        have = "has" if len(owners) == 1 else "have"
        super().__init__(f"{key}: no such setting of {scheme}; {', '.join(owners)} {have} it")
        self.key, self.scheme, self.owners = key, scheme, owners


class SeveralProblems(UsageError):
    """More than one thing is wrong: all of them in one line, and each by itself in `parts`."""

    def __init__(self, parts: list[UsageError]) -> None:
        super().__init__("; ".join(map(str, parts)))
        self.parts = parts


def parts_of(error: UsageError) -> list[UsageError]:
    """Each thing that is wrong by itself."""
    return error.parts if isinstance(error, SeveralProblems) else [error]


def raise_all(problems: list[UsageError]) -> None:
    """Raises what is wrong, if anything is."""
    if problems:
        raise problems[0] if len(problems) == 1 else SeveralProblems(problems)


def wrong_names(scheme: str, keys: Iterable[str], soft: Collection[str] = ()) -> list[UsageError]:
    """What is wrong with the scheme's name, and with each key that is no setting; without a scheme nothing is known of
    keys of section `scheme`. Those in `soft` may be any."""
    own = {key for key in keys if key.startswith("scheme.")}
    try:
        known, problems, free = keys_of(schemes.settings_of(scheme)), [], own & set(soft)
    except UsageError as error:
        known, problems, free = all_keys(schemes.DEFAULT), [error], own
    return problems + [no_setting(key, scheme, known) for key in keys if key not in known and key not in free]


def no_setting(key: str, scheme: str, known: list[str]) -> UsageError:
    """What is wrong with a key that is none of the `known` ones."""
    owners = owners_of_keys()
    if key in owners:
        return NotOfThisScheme(key, scheme, owners[key])
    of_others = {name: f"{name} (of {', '.join(having)})" for name, having in owners.items() if name not in known}
    return UsageError(unknown(key, known, of_others=of_others))


def owners_of_keys() -> dict[str, list[str]]:
    """{"scheme.mu": ["fedprox", ...]}: which of the schemes and controls here have a setting."""
    return grouped(
        (f"scheme.{field.name}", scheme)
        for scheme in (*schemes.REGISTRY, *schemes.CONTROLS)
        for field in dataclasses.fields(schemes.settings_of(scheme))
    )
