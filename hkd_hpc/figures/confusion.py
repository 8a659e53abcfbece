"""What the global model takes for what at the end: its confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hkd_hpc.analysis.classification import images_by_class
from hkd_hpc.figures.federation import class_names
from hkd_hpc.figures.figure import Figure
from hkd_hpc.figures.groups import Group
from hkd_hpc.figures.kind import Kind, Words, adding
from hkd_hpc.figures.matrix import AVERAGED, heat_map


def confusion(words: Words, groups: Sequence[Group]) -> Figure | str:
    """Shares of the images of each true class; NaN of a class that has none."""
    run = groups[0].runs[0]
    confusion_CC = run.part("summary").get("global_test_confusion")
    if confusion_CC is None:
        return "not recorded (a run of an older version)"
    n_C = images_by_class(confusion_CC)
    share_CC = np.where(n_C[:, None] > 0, confusion_CC / np.maximum(n_C, 1)[:, None], np.nan)
    architectures = len(str(run.settings.get("model.names") or "one").split(","))
    of_each = f", by each of the {architectures} architectures" if architectures > 1 else ""
    words = adding(words, f"{n_C.sum() // architectures:,} images{of_each}.")
    labels = ("predicted class", "true class", "share of the true class")
    return heat_map(words, share_CC, labels, (class_names(run), class_names(run)), (0, 1))


KINDS = (
    Kind(
        "confusion",
        "What is taken for what at the end",
        "The global model after the last round on the official test split: of the images of each true class (row) the "
        f"share that is predicted as each class (column); hatched or grey: no test images of the class. {AVERAGED}",
        ("summary", "partition"),
        confusion,
        scope="run",
        lacking="a run has it once it is complete",
    ),
)
