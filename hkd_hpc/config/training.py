"""Section `train` of the settings, and the learning rate of a round.

    rounds 1 .. w of the warm-up:     lr * round / (w + 1)
    then, with t = 0, 1, ... of n:    by the schedule; n = fed.rounds - w

Every local step of a round has the same learning rate, whichever client takes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hkd_hpc.common.settings import setting
from hkd_hpc.models.augmentation import NAMES

SCHEDULES: dict[str, Callable[[TrainSettings, int, int], float]] = {
    "halve": lambda train, t, n: train.lr * 0.5 ** (t // train.lr_halve_every),
    "constant": lambda train, t, n: train.lr,
    "step": lambda train, t, n: train.lr * (train.lr_factor or 0.1) ** (t // train.lr_every),
    "exponential": lambda train, t, n: train.lr * (train.lr_factor or 0.99) ** t,
    "cosine": lambda train, t, n: train.lr_floor + (train.lr - train.lr_floor) * (1 + math.cos(math.pi * t / n)) / 2,
}


@dataclass(frozen=True)
class TrainSettings:
    """Local training, the same rule for every scheme (training.py)."""

    epochs: int = setting(5, "local epochs a round", low=1, high=100_000)
    batch_size: int = setting(64, "images a step", low=2, high=1_000_000)
    optimizer: str = setting(
        "adam",
        "of local training, new in every round; adam: betas .9 .999; sgd: with train.momentum; adamw: with decoupled "
        "weight decay",
        choices=("adam", "sgd", "adamw"),
    )
    momentum: float = setting(0.0, "train.optimizer=sgd: share of the last step in the next one", low=0, below=1)
    nesterov: bool = setting(False, "train.optimizer=sgd: Nesterov's momentum")
    weight_decay: float = setting(
        0.0,
        "pull of all weights to 0; adam, sgd: added to the gradient; adamw: lr * weight_decay a step",
        low=0,
        high=10,
    )
    lr: float = setting(1e-3, "learning rate of round 1, or after train.lr_warmup rounds", above=0, high=100)
    lr_schedule: str = setting(
        "halve",
        "of the learning rate, by rounds after the warm-up; halve: by .5 every lr_halve_every rounds; constant; step: "
        "by lr_factor every lr_every rounds; exponential: by lr_factor each round; cosine: to lr_floor by fed.rounds",
        choices=tuple(SCHEDULES),
    )
    lr_halve_every: int = setting(10, "train.lr_schedule=halve: rounds between two halvings", low=1)
    lr_every: int = setting(10, "train.lr_schedule=step: rounds between two steps", low=1)
    lr_factor: float | None = setting(
        None, "train.lr_schedule=step, exponential: the factor; none: .1 for step, .99 for exponential", above=0, high=1
    )
    lr_floor: float = setting(0.0, "train.lr_schedule=cosine: what the learning rate falls to", low=0, high=100)
    lr_warmup: int = setting(
        0, "first rounds, in which the learning rate rises evenly to train.lr", low=0, high=1_000_000
    )
    augment: str = setting(
        "none",
        "of the training images, drawn anew in each epoch, for every scheme; flip: mirrored or not; crop_flip: also a "
        "crop of the image with a black border; crop_flip_reflect: with a reflected border",
        choices=NAMES,
    )
    augment_padding: int = setting(
        4, "pixels of the border of train.augment=crop_flip, crop_flip_reflect on each side", low=1, high=4096
    )
    label_smoothing: float = setting(
        0.0,
        "share of each label that all classes get evenly, in the cross-entropy of every scheme's training; tests have "
        "none",
        low=0,
        below=1,
    )
    clip_norm: float = setting(0.0, "largest L2 norm of a step's gradient; 0: no clipping", low=0, high=1e9)
    drop_last: bool = setting(False, "leave out an epoch's short last batch, unless it is the only one")
    precision: str = setting(
        "fp32",
        "of products and convolutions; tf32: on GPUs, all of them; bf16: in training's "
        "passes, all else stays fp32; speed and accuracy of both are unmeasured",
        choices=("fp32", "tf32", "bf16"),
    )
    batchnorm: str = setting(
        "average",
        "running statistics: average: like weights; local: each client keeps its own, their "
        "average serves the global test only; reestimate: each round measured anew by the "
        "clients with the new global weights",
        choices=("average", "local", "reestimate"),
    )

    @property
    def augments(self) -> bool:
        """Whether a client sees other images in each epoch."""
        return self.augment != "none"

    def lr_of(self, round: int, rounds: int) -> float:
        """Learning rate of a round (1, 2, ...) of so many. After the last, for fine-tuning, the schedule continues; a
        cosine has ended and stays at the last round's.
        """
        if self.lr_schedule == "cosine":
            round = min(round, rounds)
        if round <= self.lr_warmup:
            return self.lr * round / (self.lr_warmup + 1)
        return SCHEDULES[self.lr_schedule](self, round - 1 - self.lr_warmup, rounds - self.lr_warmup)
