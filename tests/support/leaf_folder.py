"""Folders as LEAF's preprocess.sh leaves them, small: FEMNIST's images of writers, Shakespeare's lines of roles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

CLASSES = 62
USERS_A_FILE = 40


def save_leaf(folder: Path, splits: dict[str, dict[str, tuple[list, list]]]) -> Path:
    """DIR/<split>/all_data_<i>_niid_0_keep_0_<split>_9.json of {user: (x, y)}, some users to a file."""
    for split, users in splits.items():
        (folder / split).mkdir(parents=True)
        names = list(users)
        for at in range(0, len(names), USERS_A_FILE):
            own = {name: users[name] for name in names[at : at + USERS_A_FILE]}
            content: dict[str, Any] = {
                "users": list(own),
                "num_samples": [len(y) for _, y in own.values()],
                "user_data": {name: {"x": x, "y": y} for name, (x, y) in own.items()},
            }
            file = folder / split / f"all_data_{at // USERS_A_FILE}_niid_0_keep_0_{split}_9.json"
            file.write_text(json.dumps(content))
    return folder


def femnist(writers: int, seed: int = 0) -> dict[str, dict[str, tuple[list, list]]]:
    """Writers f0000_00 ... with 10 to 29 training and 2 to 4 test images of 784 numbers 0..1, ink by class."""
    random = np.random.default_rng(seed)
    splits: dict[str, dict[str, tuple[list, list]]] = {"train": {}, "test": {}}
    for writer in range(writers):
        counts = {"train": random.integers(10, 30), "test": random.integers(2, 5)}
        mix = random.choice(CLASSES, 12, replace=False)
        for split, count in counts.items():
            labels = random.choice(mix, count) if split == "test" or writer else np.arange(CLASSES)
            splits[split][f"f{writer:04d}_{writer % 50:02d}"] = (images(labels, random), labels.tolist())
    return splits


def images(labels: np.ndarray, random: np.random.Generator) -> list[list[float]]:
    """White images with a block of ink at a place of the class, whole grey levels / 255 as LEAF has them."""
    pixels = np.full((len(labels), 28, 28), 255) - random.integers(0, 30, (len(labels), 28, 28))
    for image, label in zip(pixels, labels):
        row, column = divmod(int(label), 8)
        image[3 * row : 3 * row + 4, 3 * column : 3 * column + 4] -= 200
    return np.round(pixels / 255, 6).reshape(len(labels), 784).tolist()
