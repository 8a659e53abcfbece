"""Numbers from a confusion matrix, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hkd_hpc.analysis.classification import (
    accuracy_by_class,
    f1_by_class,
    images_by_class,
    mean_of_known,
)

# of 4 images of class 0 one is taken for 1; of 4 of class 1 two are taken for 0 and one for 2; none is of class 2
CONFUSION = np.array([[3, 1, 0], [2, 1, 1], [0, 0, 0]])


def test_accuracy_of_each_class():
    np.testing.assert_array_equal(images_by_class(CONFUSION), [4, 4, 0])
    np.testing.assert_array_equal(accuracy_by_class(CONFUSION), [3 / 4, 1 / 4, math.nan])


def test_f1_of_each_class():
    """Class 0: precision 3/5, recall 3/4; class 1: precision 1/2, recall 1/4."""
    expected = [2 / (5 / 3 + 4 / 3), 2 / (2 + 4), math.nan]
    np.testing.assert_allclose(f1_by_class(CONFUSION), expected, rtol=1e-15)


def test_a_class_that_is_never_predicted_right_has_f1_0():
    np.testing.assert_array_equal(f1_by_class(np.array([[0, 2], [0, 3]])), [0, 6 / 8])


@pytest.mark.parametrize("values, mean", [([0.25, math.nan, 0.75], 0.5), ([math.nan], math.nan), ([], math.nan)])
def test_a_mean_is_over_what_is_known(values, mean):
    np.testing.assert_equal(mean_of_known(np.array(values)), mean)
