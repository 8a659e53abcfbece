"""The settings of a run: one frozen dataclass a section, and all of them together.

Section `train` is declared in training.py, `data`, `model` and `privacy` in their packages, `scheme` in the file of
each scheme.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any

from hkd_hpc.comm.devices import BACKENDS
from hkd_hpc.common.errors import obtainable
from hkd_hpc.common.settings import setting
from hkd_hpc.config.training import TrainSettings
from hkd_hpc.data.settings import DataSettings
from hkd_hpc.models.settings import ModelSettings
from hkd_hpc.privacy.settings import PrivacySettings


@dataclass(frozen=True)
class FedSettings:
    """Clients and rounds (rounds.py)."""

    clients: int = setting(
        10,
        "number of clients; data.partition=natural or file: as many as the file has, if not given",
        low=1,
        high=100_000,
    )
    rounds: int = setting(10, "global rounds", low=1, high=1_000_000)
    participation: float = setting(1.0, "share of the clients sampled in each round", above=0, high=1)
    average: str = setting(
        "images",
        "weight of a client in the average: images: its number of training images; uniform: the same for all",
        choices=("images", "uniform"),
    )
    max_norm: float = setting(
        0.0,
        "largest L2 norm of a client's change of the weights, and of each tensor of its report but its counts of "
        "images; 0: only NaN, infinity and numbers beyond 65,536 are rejected",
        low=0,
        high=1e30,
    )
    max_bad_fraction: float = setting(
        0.5, "the run stops when more of a round's clients than this are rejected", low=0, high=1
    )
    drop_rate: float = setting(0.0, "chance that a sampled client does not answer in a round", low=0, high=1)
    straggler_rate: float = setting(0.0, "chance that a sampled client is a straggler in a round", low=0, high=1)
    straggler_epochs: int = setting(
        0, "local epochs that a straggler completes; 0: it is left out", low=0, high=100_000
    )
    server_optimizer: str = setting(
        "none",
        "what the server makes of the averaged update; none: the average; avgm: FedAvgM; adam: FedAdam; yogi: FedYogi "
        "(server_optimizer.py)",
        choices=("none", "avgm", "adam", "yogi"),
    )
    server_lr: float | None = setting(
        None, "learning rate of fed.server_optimizer; none: 1 for avgm, .01 for adam and yogi", above=0, high=1000
    )
    server_momentum: float = setting(0.9, "momentum of fed.server_optimizer (beta, beta 1)", low=0, below=1)
    server_beta2: float = setting(0.99, "adam and yogi: decay of the mean square of the updates", low=0, below=1)
    server_epsilon: float = setting(
        1e-3,
        "adam and yogi: tau, added to the root of the mean square of the updates; smaller adapts more",
        above=0,
        high=10,
    )
    finetune_epochs: int = setting(
        0,
        "at the end, also train the global model so many epochs on each client, with plain "
        "cross-entropy, and test it there; 0: not",
        low=0,
        high=100_000,
    )
    finetune_lr: float | None = setting(
        None,
        "learning rate of fine-tuning; none: what a round after the last would have, by train.lr_schedule",
        above=0,
        high=100,
    )

    @property
    def server_vectors(self) -> int:
        """Vectors of the model's size that the server optimizer keeps from round to round."""
        return {"none": 0, "avgm": 1}.get(self.server_optimizer, 2)


@dataclass(frozen=True)
class RunSettings:
    """How and where it runs; on a CPU, of all these only the seed and the number of threads change the bits of the
    weights.
    """

    seed: int = setting(0, "seed of everything random", low=0)
    threads: int = setting(
        1,
        "CPU threads a rank; another number adds in another order and gives other last bits: keep one "
        "number for all runs that are compared",
        low=1,
        high=4096,
    )
    device: str = setting("auto", "auto: a GPU where one is found", choices=("auto", "cpu", "cuda"))
    deterministic: bool = setting(
        False,
        "on GPUs: only operations that give the same bits in each run, or an error that names "
        "the one that does not; CPUs of one kind always give the same bits",
    )
    graphs: str = setting(
        "off",
        "on GPUs: on: a local epoch is one CUDA or HIP graph, for schemes and models that say "
        "`cuda_graph_safe = True`; its speed is unmeasured",
        choices=("off", "on"),
    )
    lanes: int = setting(
        1,
        "on GPUs: so many concurrent clients of a rank, each on a model of its own, or as many as fit into the "
        "memory; the results are the same, the speed is unmeasured; they want graphs",
        low=1,
        high=32,
    )
    checkpoint_every: int = setting(1, "rounds between two checkpoints; the last round always has one", low=1)
    evaluate_every: int = setting(1, "rounds between two tests of the global model; the last is always tested", low=1)
    target_accuracy: float = setting(
        0.0,
        "also say how many rounds, bytes and seconds the local and the global test accuracy took to reach this; 0: not",
        low=0,
        high=1,
    )
    stop_patience: int = setting(
        0,
        "end early when so many tests in a row bring no better accuracy on validation images (data.val_fraction), two "
        "rounds after the last of them; 0: not",
        low=0,
        high=1_000_000,
    )
    stop_on: str = setting(
        "global",
        "whose accuracy on validation images: global: the global model's; local: the clients' own models'",
        choices=("global", "local"),
    )
    client_models: bool = setting(True, "keep every client's model of the last round in the last checkpoint")
    loggers: str = setting(
        "",
        "what else gets each round's numbers, with commas between: tensorboard, csv, jsonl, or your own module:Class; "
        "they write to loggers/ in the run's folder and change no result",
    )


@dataclass(frozen=True)
class CommSettings:
    """Collectives (comm/)."""

    backend: str = setting(
        "auto", f"what carries the weights; auto: {obtainable('docs/architecture.md, Ranks')}", choices=BACKENDS
    )
    timeout_s: float = setting(1800.0, "longest wait for another rank", above=0, high=1e7)
    start_timeout_s: float = setting(120.0, "longest wait for all ranks at the start", above=0, high=1e7)


SECTIONS = {
    "data": DataSettings,
    "fed": FedSettings,
    "train": TrainSettings,
    "model": ModelSettings,
    "run": RunSettings,
    "comm": CommSettings,
    "privacy": PrivacySettings,
}


@dataclass(frozen=True)
class Config:
    """One run's settings, complete and checked. `scheme` is the settings dataclass of the chosen scheme."""

    scheme: Any
    data: DataSettings
    fed: FedSettings
    train: TrainSettings
    model: ModelSettings
    run: RunSettings
    comm: CommSettings
    privacy: PrivacySettings

    @property
    def partition_seed(self) -> int:
        return self.run.seed if self.data.partition_seed is None else self.data.partition_seed

    def lr(self, round: int) -> float:
        """Learning rate of a round (1, 2, ...)."""
        return self.train.lr_of(round, self.fed.rounds)

    def finetuning(self, round: int) -> Config:
        """The same with the epochs and the learning rate of fine-tuning; `round`: the one after the last."""
        train = dataclasses.replace(
            self.train,
            epochs=self.fed.finetune_epochs,
            lr=self.lr(round) if self.fed.finetune_lr is None else self.fed.finetune_lr,
            lr_schedule="constant",
            lr_warmup=0,
        )
        return dataclasses.replace(self, train=train)

    def to_json(self) -> str:
        """What config.json of a run holds.

        Returns:
            JSON: {section: {key: value}} of all settings, keys sorted. `hkd_hpc.config.from_json` reads it.
        """
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)


def as_values(config: Config) -> dict[str, Any]:
    return {
        f"{section}.{key}": value for section, keys in dataclasses.asdict(config).items() for key, value in keys.items()
    }


def absolute_paths(config: Config) -> Config:
    """The same with the paths of data and model absolute, so that a run can be resumed from another folder. What a
    loader of one's own gets as data.path is its own matter: a name, or an address."""
    absolute = lambda path: os.path.abspath(path) if path else ""
    data, model = config.data, config.model
    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            data,
            dir=os.path.abspath(data.dir),
            path=data.path if ":" in data.name else absolute(data.path),
            partition_file=absolute(data.partition_file),
        ),
        model=dataclasses.replace(model, init=absolute(model.init)),
    )
