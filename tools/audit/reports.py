"""What a client releases, made by the product's own code again and again, each time with other noise.

D and E are two neighbouring federations. An adversary knows all of both but the noise: so what each would release
without any, and their difference, the shift. Of a release it sees how far it lies from D along the shift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

import numpy as np
import torch

from hkd_hpc import assemble, averaging, config, payload, rounds
from hkd_hpc.client import Client
from hkd_hpc.comm.control.base import NullControl
from hkd_hpc.comm.transports.base import RankInfo
from hkd_hpc.comm.transports.local import LocalComm
from hkd_hpc.rank_run import RankRun
from hkd_hpc.schemes.base import Scheme
from hkd_hpc.training import ClientRound

from . import inputs

# of (sent_CX, from_CX, to_CX): the class means that were sent, and those of D and of E without noise
Scores = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[float, ...]]

AUDITED = 0  # the client that has the canary
KINDS = ("feature_CD", "soft_CC", "count_C", "weights_V")  # of what a round releases
SETTINGS = (
    "data.partition=natural",
    "data.fraction=1",
    f"fed.clients={inputs.CLIENTS}",
    f"model.name={__package__}.inputs:PassOn",
    f"model.latent={inputs.LATENT}",
    "train.optimizer=sgd",
    "train.epochs=1",
    "scheme.nu=0",
    "run.client_models=false",
)


def federation(loader: str, settings: Sequence[str]) -> RankRun:
    """A whole federation in this process, as a run of these settings assembles it, without files.

    Args:
        loader: a function of inputs.py.
        settings: "section.key=value" each.
    """
    names = [f"data.name={__package__}.inputs:{loader}", *SETTINGS, *settings]
    return assemble.build(config.resolve(overrides=names), one_process(), None)


def one_process() -> LocalComm:
    """The communicator of a federation that is all here."""
    return LocalComm(NullControl(), RankInfo(0, ["here"], 0, 1, torch.device("cpu"), "one process"))


class Pair(NamedTuple):
    """Two neighbouring federations with noise, and the same two without."""

    d: RankRun
    e: RankRun
    quiet_d: RankRun
    quiet_e: RankRun

    @classmethod
    def of(cls, data: str, settings: Sequence[str], quiet: Sequence[str]) -> Pair:
        """Of the loaders DATA_d and DATA_e; `quiet`: the settings that take the noise away."""
        named = [(f"{data}_{side}", more) for more in ((), quiet) for side in "de"]
        return cls(*(federation(loader, [*settings, *more]) for loader, more in named))


# --- one report, its model fixed


def distances(sent_CX: np.ndarray, from_CX: np.ndarray, to_CX: np.ndarray) -> tuple[float, float]:
    """How far a release lies from D towards E, as two adversaries measure it.

    The first by the likelihood ratio of independent noise. The second looks only at the differences between classes, in
    which noise that they share is not seen.
    """
    moved_CX, shift_CX = sent_CX - from_CX, to_CX - from_CX
    contrast = lambda value_CX: value_CX - value_CX.mean(0)
    return along(moved_CX, shift_CX), along(contrast(moved_CX), contrast(shift_CX))


def along(moved: np.ndarray, shift: np.ndarray) -> float:
    """The length of the part of `moved` along the shift."""
    return float(np.vdot(moved, shift) / np.linalg.norm(shift)) if shift.any() else 0.0


def report_scores(
    pair: Pair, trials: int, rounds: int = 1, trainings: int = 0, scores: Scores = distances
) -> tuple[np.ndarray, np.ndarray]:
    """(trials, scores) of D and of E: of the class means that the audited client reports in so many rounds.

    Args:
        pair: the federations.
        trials: of each of them.
        rounds: of a trial; a score is their sum, as the log-likelihood ratio is.
        trainings: 0: the model is the received one, the same in D and E. Else it is trained by each, and so often; the
            adversary knows the seed.
        scores: of one report.
    """
    number = count(1)  # of a round, each of which has noise of its own
    parts = []
    for training in range(1, max(trainings, 1) + 1):
        clients = [client_of(run, training, bool(trainings)) for run in (pair.d, pair.e)]
        parts.append(_scores_of(pair, clients, number, trials // max(trainings, 1), rounds, scores))
    score_d, score_e = (np.concatenate(part) for part in zip(*parts))
    return score_d, score_e


def _scores_of(
    pair: Pair, clients: Sequence[Client], number: Iterator[int], trials: int, rounds: int, scores: Scores
) -> list[np.ndarray]:
    """The same of D's client and of E's, as they are now."""
    from_CD, to_CD = (next(class_means(pair.quiet_d.trainer.scheme, client, [1])) for client in clients)
    found = []
    for run, client in zip((pair.d, pair.e), clients):
        means = class_means(run.trainer.scheme, client, islice(number, trials * rounds))
        found.append(np.array([scores(mean_CD, from_CD, to_CD) for mean_CD in means]))
    return [score.reshape(trials, rounds, -1).sum(1) for score in found]


def client_of(run: RankRun, round: int, is_trained: bool) -> Client:
    """The audited client with its model, whose forward pass over the training images is made once."""
    client = run.worker.clients[AUDITED]
    vars(client).pop("predict_train", None)
    given = ClientRound(client, run.weights_V, run.counters, payload.tensors_of(run.message[0]), round)
    run.trainer.begin(given)
    for _ in run.trainer.epochs(given) if is_trained else ():
        pass
    outputs = client.predict_train()
    vars(client)["predict_train"] = lambda values_V=None: outputs
    return client


def class_means(scheme: Scheme, client: Client, rounds: Iterable[int]) -> Iterator[np.ndarray]:
    """(classes, latent) float64 of the reports of these rounds."""
    for client.round in rounds:
        yield scheme.report(client)["feature_CD"].numpy().astype(np.float64)


# --- whole runs


def run_scores(pair: Pair, runs: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """(runs, 1) scores of D and of E: of all that the audited client and the sum of the weights release in a run.

    What a round shifts is that of the first one, which noise hardly changes. Each kind counts as its noise allows.
    """
    seed = count(1)
    [from_K], [to_K] = (list(play(run, 1, 1)) for run in (pair.quiet_d, pair.quiet_e))
    shift_K = [to - at for at, to in zip(from_K, to_K)]
    lengths_K = lambda sent_K: [along(sent - at, shift) for sent, at, shift in zip(sent_K, from_K, shift_K)]
    length_d, length_e = (  # (runs, rounds, kinds)
        np.array([[lengths_K(sent_K) for sent_K in play(run, rounds, one)] for one in islice(seed, runs)])
        for run in (pair.d, pair.e)
    )
    variance_K = length_d[: runs // 2].var((0, 1)).clip(1e-20)
    weight_K = np.array([np.linalg.norm(shift) for shift in shift_K]) / variance_K
    score_d, score_e = ((length * weight_K).sum((1, 2))[:, None] for length in (length_d, length_e))
    return score_d, score_e


def play(run: RankRun, count: int, seed: int) -> Iterator[list[np.ndarray]]:
    """The rounds of a run from its first weights: of each what the audited client reports, and the change of the global
    weights, as KINDS."""
    weights_V, message = run.weights_V.clone(), run.message.copy()
    for client in run.worker.clients:
        client.seed = seed
    for round in range(1, count + 1):
        received_V = run.weights_V.clone()
        gathered = rounds.gather_reports(run, round, rounds.train_cohort(run, round))
        assert gathered is not None  # one process is rank 0
        averaging.update_global_weights(run, round, gathered)
        rounds.send_message(run, round, gathered)
        report = payload.tensors_of(gathered[AUDITED])
        report["weights_V"] = run.weights_V - received_V
        yield [report[kind].numpy().astype(np.float64) for kind in KINDS]
    run.weights_V.copy_(weights_V)
    run.message = message
