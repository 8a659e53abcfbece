"""The scenarios of tools.fault_injection: what number N of a seed is, all of it drawn from (seed, N)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.cohort import draw_cohort
from hkd_hpc.common import rng

from .faults import CLIENT_PHASES, FILE_KINDS, KINDS, NAN, SERVER_PHASES, START_PHASES, Fault

CLASSES, TRAIN_IMAGES, TEST_IMAGES, SIDE = 10, 160, 50, 32
MOST_RANKS = 4
LONGEST_DELAY_S = 0.3
SMALL = (
    "data.name=file",
    "data.fraction=.7",
    "train.epochs=1",
    "train.batch_size=16",
    "model.latent=8",
    "run.device=cpu",
)


@dataclass(frozen=True)
class Step:
    """One attempt: perhaps `damage` to files (at `place`, 0 to 1), then so many ranks run, perhaps into a fault."""

    ranks: int
    fault: Fault | None
    damage: str | None = None
    place: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """A run and what befalls it. `nan`: (client, round) whose weights become NaN."""

    seed: int
    number: int
    scheme: str
    settings: tuple[str, ...]
    rounds: int
    checkpoint_every: int
    nan: tuple[int, int] | None
    steps: tuple[Step, ...]


def draw_scenario(seed: int, number: int, kinds: tuple[str, ...]) -> Scenario:
    """Scenario `number` of a seed, with faults of these kinds; nine in a row have the nine schemes."""
    random = rng.stream(seed, "torture", number)  # the name of before: seeds that are on record draw the same scenarios
    pick = lambda *choices: choices[random.integers(len(choices))]
    scheme = list(schemes.PAPER)[(seed + number) % len(schemes.PAPER)]
    clients, rounds, every, participation = pick(3, 4, 5), pick(3, 4, 5), pick(1, 1, 2), pick(0.6, 0.8, 1.0)
    run_seed = int(random.integers(1000))
    nan = draw_nan(random, clients, participation, run_seed, rounds) if NAN in kinds and random.random() < 0.4 else None
    settings = (
        f"scheme.name={scheme}",
        f"fed.clients={clients}",
        f"fed.rounds={rounds}",
        f"fed.participation={participation}",
        f"run.seed={run_seed}",
        f"run.checkpoint_every={every}",
        f"run.evaluate_every={pick(1, 1, 2)}",
        f"train.batchnorm={pick('average', 'local', 'reestimate')}",
        f"model.norm={pick('batch', 'batch', 'group')}",
        f"fed.drop_rate={0 if nan else pick(0, 0, 0.2)}",
        f"fed.finetune_epochs={pick(0, 0, 1)}",
        *(("scheme.nu=0.05",) if hasattr(schemes.settings_of(scheme), "nu") else ()),
    )
    return Scenario(seed, number, scheme, settings, rounds, every, nan, draw_steps(random, rounds, kinds))


def draw_nan(
    random: np.random.Generator, clients: int, participation: float, run_seed: int, rounds: int
) -> tuple[int, int]:
    """A client of the cohort of a round; every cohort has two at least, so that no more than half are bad."""
    round = int(random.integers(1, rounds + 1))
    return int(random.choice(draw_cohort(clients, participation, run_seed, round))), round


def draw_steps(random: np.random.Generator, rounds: int, kinds: tuple[str, ...]) -> tuple[Step, ...]:
    """Three to six attempts, each on another number of ranks than the one before; the last is left in peace."""
    at_rounds = sorted(random.integers(1, rounds + 1, random.integers(2, 6)).tolist())
    steps: list[Step] = []
    ranks = 0
    for round in (*at_rounds, None):
        kind = draw_weighted(random, {name: KINDS[name].weight for name in KINDS if name in kinds})
        min_ranks = KINDS[kind].min_ranks if kind and round else 1
        ranks = int(random.choice([size for size in range(min_ranks, MOST_RANKS + 1) if size != ranks]))
        damage = draw_weighted(random, {name: weight for name, weight in FILE_KINDS.items() if name in kinds})
        damage = damage if steps and random.random() < 0.5 else None
        fault = draw_fault(random, kind, ranks, round) if kind and round else None
        steps.append(Step(ranks, fault, damage, float(random.random())))
    return tuple(steps)


def draw_weighted(random: np.random.Generator, weights: dict[str, float]) -> str | None:
    share = np.array(list(weights.values()))
    return str(random.choice(list(weights), p=share / share.sum())) if weights else None


def draw_fault(random: np.random.Generator, name: str, ranks: int, round: int) -> Fault:
    kind = KINDS[name]
    phases = kind.phases or (START_PHASES if kind.starting else ())
    alone = ranks == 1
    if kind.server or alone:
        victim = 0
    elif phases == ("training",):
        victim = int(random.integers(1, ranks))
    else:
        victim = int(random.integers(ranks))
    own = (*CLIENT_PHASES, *SERVER_PHASES) if alone else SERVER_PHASES if victim == 0 else CLIENT_PHASES
    fitting = phases if kind.starting else tuple(phase for phase in phases if phase in own) or own
    delay_s = float(random.random() * LONGEST_DELAY_S) if kind.delayed and random.random() < 0.7 else 0.0
    return Fault(name, victim, str(random.choice(fitting)), round, delay_s, int(random.integers(1, 7)))


def save_data(path: Path) -> Path:
    """An .npz of ten classes: noise, and for class c a bright block of its own place and colour."""
    y_train, y_test = np.arange(TRAIN_IMAGES) % CLASSES, np.arange(TEST_IMAGES) % CLASSES
    np.savez(path, x_train=images(y_train, 1), y_train=y_train, x_test=images(y_test, 2), y_test=y_test)
    return path


def images(label_N: np.ndarray, seed: int) -> np.ndarray:
    """(N, 3, SIDE, SIDE) uint8."""
    pixels = np.random.default_rng(seed).normal(90, 20, (len(label_N), 3, SIDE, SIDE))
    for c in range(CLASSES):
        top, left = c // 5 * 14, c % 5 * 5
        pixels[label_N == c, c % 3, top : top + 12, left : left + 12] += 130
    return np.clip(pixels, 0, 255).astype(np.uint8)
