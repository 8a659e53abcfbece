"""Membership inference on a trained run: can one tell which images a client trained on, from what it gave away?

Two attacks. On weights: the loss of an image under the model (Yeom et al. 2018), lower for members. On knowledge: how
far an image's feature lies from the released mean of its class, less for members. Members: a client's training images;
the others: its held-out images of the same classes. AUC .5 is guessing. These attacks are simple ones: a stronger one
may do better, so that an AUC near .5 proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from hkd_hpc import assemble, load, payload
from hkd_hpc.client import OWN_MODEL, Client
from hkd_hpc.common.errors import UsageError
from hkd_hpc.rank_run import RankRun
from hkd_hpc.results.models import newest_checkpoint
from hkd_hpc.training import ClientRound

from .auc import Auc, auc, mean_of
from .reports import one_process

HEADINGS = ("attack", "on", "members", "others", "AUC", "95 %")


@dataclass(frozen=True)
class Attack:
    """One line: what was attacked how, and with which success."""

    attack: str
    on: str
    auc: Auc

    @property
    def cells(self) -> tuple[str, ...]:
        """As HEADINGS."""
        low, high = self.auc.interval
        counts = f"{self.auc.members:,}", f"{self.auc.others:,}"
        return self.attack, self.on, *counts, f"{self.auc.value:.3f}", f"{low:.3f} .. {high:.3f}"


class Trained:
    """A finished run, assembled anew with the weights of its newest checkpoint.

    Args:
        path: its folder.

    Raises:
        UsageError: there is no good checkpoint, its models are unequal, or the data are not those of the run.
    """

    def __init__(self, path: Path):
        run = load(path)
        run.require()
        self.path, self.config = path, run.config
        self.round, self.tree = newest_checkpoint(path)
        if self.config.model.names:
            raise UsageError(
                f"{path}: has unequal models, which share no feature space to attack; audit one of equal ones"
            )
        self.part: RankRun = assemble.build(self.config, one_process(), None)
        assert self.part.server is not None  # one process is rank 0
        if self.tree["partition"]["sha256"] != self.part.server.static["partition"]["sha256"]:
            raise UsageError(f"{path}: the data are not those that it was trained on, so members are not known")

    @property
    def clients(self) -> list[Client]:
        """All of the federation, with their images."""
        return self.part.worker.clients

    @property
    def kept(self) -> dict[int, torch.Tensor]:
        """By client, the weights (V,) of its own model after the last round; empty where none were kept."""
        states = self.tree.get("client_states", {})
        return {int(c): torch.from_numpy(kept[OWN_MODEL]) for c, kept in states.items() if OWN_MODEL in kept}

    @property
    def remakes_reports(self) -> bool:
        """Whether a client's report follows from its kept model: not where it was made with the received one."""
        return self.config.privacy.extractor == "trained"

    @cached_property
    def message(self) -> dict[str, torch.Tensor]:
        """The knowledge of all clients, as the server sent it after the last round."""
        names = payload.tensors_of(self.part.message[0])
        return {name: torch.from_numpy(np.asarray(self.tree["message"][name])) for name in names}

    def given(self, client: Client, weights_V: torch.Tensor | None = None) -> Client:
        """The client with a model lent to it: its own, or the global one."""
        flat = self.part.trainer.flat
        global_V = torch.zeros_like(flat.values_V)
        counters = flat.load_arrays(self.tree["global"], global_V)
        model_V = global_V if weights_V is None else weights_V
        self.part.trainer.begin(ClientRound(client, model_V, counters, self.message, self.round))
        return client


def losses(client: Client, x: torch.Tensor, y_N: torch.Tensor) -> np.ndarray:
    """(N,) cross-entropy of each image under the model that the client holds."""
    return F.cross_entropy(client.predict(x)[1].double(), y_N, reduction="none").numpy()


def distances(client: Client, x: torch.Tensor, y_N: torch.Tensor, mean_CD: torch.Tensor) -> np.ndarray:
    """(N,) of each image's feature from the mean of its class."""
    return torch.linalg.vector_norm(client.predict(x)[0].double() - mean_CD.double()[y_N], dim=1).numpy()


Score = Callable[[torch.Tensor, torch.Tensor], np.ndarray]  # of images and labels: higher where they look like members


def attacked(client: Client, score: Score, classes_C: torch.Tensor) -> Auc:
    """On a client's training images against its held-out ones, both of these classes alone."""
    present_C = torch.bincount(client.y_train, minlength=client.classes) > 0
    chosen = present_C & classes_C
    of = lambda x, y_N: score(x[chosen[y_N]], y_N[chosen[y_N]]) if bool(chosen[y_N].any()) else np.zeros(0)
    return auc(of(client.x_train, client.y_train), of(client.x_test, client.y_test))


def by_client(attack: str, on: str, found: dict[int, Auc]) -> Iterator[Attack]:
    """The mean over the clients, and each of them where there are several."""
    yield Attack(attack, f"{on}, mean of {len(found)} clients", mean_of(list(found.values())))
    if len(found) > 1:
        for client, one in found.items():
            yield Attack(attack, f"  client {client}", one)


def on_weights(run: Trained) -> Iterator[Attack]:
    """The global model, and those of the clients that were kept."""
    every_C = torch.ones(run.clients[0].classes, dtype=torch.bool)
    loss = lambda client: lambda x, y_N: -losses(client, x, y_N)
    found = {client.id: attacked(run.given(client), loss(client), every_C) for client in run.clients}
    yield from by_client("loss", "global model", found)
    kept = run.kept
    found = {
        client.id: attacked(run.given(client, kept[client.id]), loss(client), every_C)
        for client in run.clients
        if client.id in kept
    }
    if found:
        yield from by_client("loss", "a client's own model", found)


def on_knowledge(run: Trained) -> Iterator[Attack]:
    """The means of all clients, and those that a client reported, where its model was kept."""
    if "feature_CD" not in run.message:
        return
    near = lambda client, mean_CD: lambda x, y_N: -distances(client, x, y_N, mean_CD)
    mean_CD, known_C = run.message["feature_CD"], run.message["count_C"] > 0
    found = {client.id: attacked(run.given(client), near(client, mean_CD), known_C) for client in run.clients}
    yield from by_client("distance", "class means of all clients", found)
    kept, found = run.kept, {}
    for client in run.clients:
        if client.id in kept and run.remakes_reports:
            report = run.part.trainer.scheme.report(run.given(client, kept[client.id]))
            found[client.id] = attacked(client, near(client, report["feature_CD"]), report["count_C"] > 0)
    if found:
        yield from by_client("distance", "class means that a client reported", found)


def missing(run: Trained) -> Iterator[str]:
    """What cannot be attacked, and why."""
    if "feature_CD" not in run.message:
        yield f"no attack on knowledge: scheme.name={run.config.scheme.name} sends no class means"
    if not run.kept:
        yield (
            "no attack on the clients' own models and reports: they are kept in runs with run.client_models=true alone"
        )
    elif not run.remakes_reports:
        yield "no attack on the clients' own reports: these were made by models that are not kept"


def attacks(path: Path) -> tuple[list[Attack], list[str]]:
    """All that a run's folder allows, and a line for what it does not. UsageError as Trained."""
    run = Trained(path)
    return [*on_weights(run), *on_knowledge(run)], list(missing(run))
