"""What a confusion matrix says of a classifier beside its accuracy; docs/metrics.md has the formulas.

A confusion matrix has a row for each true class and a column for each predicted one: images, of which those without
finite logits are in no cell. A class that the images do not have is in no mean: nothing is known of it.
"""

from __future__ import annotations

import numpy as np

NAN = float("nan")


def images_by_class(confusion_CC: np.ndarray) -> np.ndarray:
    """(classes,) how many are of each class."""
    return confusion_CC.sum(1)


def accuracy_by_class(confusion_CC: np.ndarray) -> np.ndarray:
    """(classes,) the share of a class's images that is predicted right, its recall; NaN without images."""
    return _shares(confusion_CC.diagonal(), images_by_class(confusion_CC))


def f1_by_class(confusion_CC: np.ndarray) -> np.ndarray:
    """(classes,) the harmonic mean of precision and recall, 2 right / (images + predictions); NaN without images."""
    n_C = images_by_class(confusion_CC)
    return np.where(n_C > 0, _shares(2 * confusion_CC.diagonal(), n_C + confusion_CC.sum(0)), NAN)


def mean_of_known(values: np.ndarray) -> float:
    """Over the classes, or clients, that have a value, each alike; NaN where none has."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else NAN


def _shares(part_C: np.ndarray, whole_C: np.ndarray) -> np.ndarray:
    return np.where(whole_C > 0, part_C / np.maximum(whole_C, 1), NAN)
