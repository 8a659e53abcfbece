"""A run's columns as tables: pandas frames where pandas is installed, structured arrays of NumPy elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from hkd_hpc.analysis import classification
from hkd_hpc.results.parts import Columns

if TYPE_CHECKING:
    import pandas

    Frame: TypeAlias = pandas.DataFrame | np.ndarray


def rounds_table(columns: Columns) -> Frame:
    """One row a round, `round` first; of a column of classes one for each class, name/0, name/1 ..."""
    first = {"round": columns["round"]} if "round" in columns else {}
    return table_of(first | dict(flat_columns(columns, axes=1)))


def clients_table(rounds: np.ndarray, columns: Columns, names: list[str]) -> Frame:
    """One row for each client that was sampled in a round.

    Args:
        rounds: (rounds,), their numbers.
        columns: (rounds, clients) or (rounds, clients, classes) each.
        names: of natural clients; empty where they have none.

    Returns:
        Columns round, client, perhaps name, and those of `columns`.
    """
    shape = next((column.shape[:2] for column in columns.values()), (0, 0))
    round_RM, client_RM = np.broadcast_to(rounds[:, None], shape), np.broadcast_to(np.arange(shape[1]), shape)
    sampled_RM = ~np.isnan(columns["status"]) if "status" in columns else np.ones(shape, bool)
    found = {"round": round_RM, "client": client_RM}
    found |= {"name": np.broadcast_to(np.array(names), shape)} if names else {}
    return table_of({name: column[sampled_RM] for name, column in (found | dict(flat_columns(columns, 2))).items()})


def classes_table(confusion_CC: np.ndarray, names: Sequence[str]) -> Frame:
    """One row a class.

    Args:
        confusion_CC: images by true and predicted class.
        names: of the classes; empty where these are their numbers.

    Returns:
        Columns class, name, n, accuracy, f1 and undefined.
    """
    n_C = classification.images_by_class(confusion_CC)
    return table_of(
        {
            "class": np.arange(len(n_C)),
            "name": np.array(list(names) or [str(number) for number in range(len(n_C))], str)[: len(n_C)],
            "n": n_C,
            "accuracy": classification.accuracy_by_class(confusion_CC),
            "f1": classification.f1_by_class(confusion_CC),
            "undefined": np.where(n_C > 0, "", "no test images of this class"),
        }
    )


def flat_columns(columns: Columns, axes: int) -> Iterator[tuple[str, np.ndarray]]:
    """Each of so many axes; one that has one more is taken apart along it."""
    for name, column in columns.items():
        if column.ndim == axes:
            yield name, column
        else:
            yield from ((f"{name}/{place}", column[..., place]) for place in range(column.shape[-1]))


def table_of(columns: Mapping[str, np.ndarray]) -> Frame:
    """The columns, of one length, side by side; float16 as float32, since pandas warns as it prints the first."""
    widened = lambda column: column.astype(np.float32) if column.dtype == np.float16 else column
    columns = {name: widened(column) for name, column in columns.items()}
    try:
        import pandas
    except ImportError:
        return structured(columns)
    return pandas.DataFrame(dict(columns))


def structured(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """The same as a structured array, so that table["round"] is a column in both."""
    rows = len(next(iter(columns.values()), ()))
    table = np.empty(rows, [(name, column.dtype) for name, column in columns.items()])
    for name, column in columns.items():
        table[name] = column
    return table
