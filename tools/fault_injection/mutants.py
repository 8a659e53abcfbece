"""Programs broken on purpose, each of which fault injection must notice (`--self-test`), and the intact one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .faults import NAN, around

if TYPE_CHECKING:
    import torch

    from hkd_hpc.client import Client
    from hkd_hpc.training import Trained

Mutation = Callable[[int], None]  # makes the program of this process wrong; gets the rank


class Mutant(NamedTuple):
    """What is broken, the kinds of fault that show it, and how it is broken in a rank's process."""

    name: str
    kinds: tuple[str, ...]
    mutation: Mutation | None


def write_in_place(rank: int) -> None:
    """Files are written under their own name, and not read back."""
    from hkd_hpc.store import tree

    around(tree, "replace_file", lambda original, path, write, verify=None: write(path))


def draw_by_rank(rank: int) -> None:
    """The order of a client's batches depends on the rank where it lives."""
    from hkd_hpc.common import rng

    def derive(original: Callable, seed: int, purpose: str, *rest: int) -> object:
        return original(seed + rank * (purpose == "batches"), purpose, *rest)

    around(rng, "derive", derive)


def pass_nan(rank: int) -> None:
    """Nothing is asked of a client's weights before they are added."""
    from hkd_hpc.worker import Worker

    def add(original: Callable, self: Worker, client: Client, trained: Trained, sent_V: torch.Tensor) -> None:
        self.sums[client.member].add(sent_V, self.weight_of(client))

    around(Worker, "_add", add)


WRITES = ("SIGKILL in a checkpoint's write", "SIGKILL in metrics.h5's write")
MUTANTS = (
    Mutant("checkpoints written in place, not verified", WRITES, write_in_place),
    Mutant("a random draw that depends on the rank", ("SIGKILL, all ranks",), draw_by_rank),
    Mutant("NaN passed by the quarantine", ("SIGTERM", NAN), pass_nan),
    Mutant("nothing broken", (*WRITES, "SIGTERM", NAN), None),
)
