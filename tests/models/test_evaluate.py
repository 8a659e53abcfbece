"""Eval passes leave no trace, keep the order, count right; BatchNorm measured anew is what one computes by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from hkd_hpc.models import evaluate
from hkd_hpc.models.images import normalise

pytestmark = pytest.mark.kernels


class Bare(nn.Module):
    """BatchNorm on the first pixel value of an image, which is also the feature; logits (f, -f)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x_BCHW):
        feature_BD = self.norm(x_BCHW[:, :1, 0, 0])
        return feature_BD, torch.cat([feature_BD, -feature_BD], 1)


def grey(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8).reshape(-1, 1, 1, 1)


@pytest.mark.parametrize(
    "pixels, mean, variance, batches",
    [
        ([0, 255], 0.0, 2.0, 1),  # values -1 and 1; unbiased variance (1 + 1) / 1
        ([0, 0, 255, 255], 0.0, 4 / 3, 1),
        ([255] * 250, 1.0, 0.0, 1),
        ([0] * 126 + [255] * 125, 0.0, 0.0, 2),  # batches of 126 and 125 count alike: means -1 and 1, variances 0
        ([0] * 200 + [255] * 400, 1 / 3, 0.0, 3),  # three batches of 200 with one value each
    ],
)
def test_batch_norm_measured_anew(pixels, mean, variance, batches):
    net = Bare()
    net.norm.running_mean.fill_(9.0), net.norm.running_var.fill_(9.0), net.norm.num_batches_tracked.fill_(9)
    evaluate.reestimate_batch_norm(net, grey(pixels))
    assert net.norm.running_mean.item() == pytest.approx(mean, abs=1e-6)
    assert net.norm.running_var.item() == pytest.approx(variance, abs=1e-6)
    assert net.norm.num_batches_tracked.item() == batches
    assert net.norm.momentum == 0.1
    assert net.training
    assert net.norm.weight.item() == 1.0
    assert net.norm.bias.item() == 0.0


def test_batch_norm_measured_anew_on_a_deeper_net(toy_net):
    """One batch: the layer's inputs are W x; nothing but the statistics changes."""
    net, random = toy_net(), np.random.default_rng(0)
    images = torch.from_numpy(random.integers(0, 256, (40, 3, 2, 2), dtype=np.uint8))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    evaluate.reestimate_batch_norm(net, images)
    inputs = (images.numpy().reshape(40, 12) / 127.5 - 1) @ before["extractor.1.weight"].double().numpy().T
    np.testing.assert_allclose(net.extractor[2].running_mean.numpy(), inputs.mean(0), atol=1e-5)
    np.testing.assert_allclose(net.extractor[2].running_var.numpy(), inputs.var(0, ddof=1), rtol=1e-5)
    unchanged = [name for name in before if "running" not in name and "tracked" not in name]
    assert all(torch.equal(net.state_dict()[name], before[name]) for name in unchanged)
    assert len(unchanged) == 7


@pytest.mark.parametrize("count, sizes", [(1, [1]), (250, [250]), (251, [126, 125]), (600, [200, 200, 200])])
def test_batches_are_even(count, sizes):
    assert [len(x) for x in evaluate.even_batches(torch.zeros(count, 1))] == sizes


def test_predict_keeps_the_order_and_changes_nothing():
    net = Bare().train()
    net.norm.running_mean.fill_(0.5), net.norm.running_var.fill_(4.0)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    pixels = grey([i % 256 for i in range(600)])  # three batches
    feature_ND, logits_NC = evaluate.predict(net, pixels)
    expected = (np.arange(600) % 256 / 127.5 - 1 - 0.5) / math.sqrt(4.0 + 1e-5)
    np.testing.assert_allclose(feature_ND[:, 0].numpy(), expected, atol=1e-6)
    assert torch.equal(logits_NC, torch.cat([feature_ND, -feature_ND], 1))
    assert net.training
    assert all(torch.equal(net.state_dict()[name], before[name]) for name in before)
    assert not feature_ND.requires_grad


def test_predictions_do_not_depend_on_the_company(toy_net):
    """An image alone and among 300 others: the same numbers (running statistics, not those of the batch)."""
    net = toy_net()
    images = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (300, 3, 2, 2), dtype=np.uint8))
    together, _ = evaluate.predict(net, images)
    alone, _ = evaluate.predict(net, images[270:271])
    np.testing.assert_allclose(together[270:271].numpy(), alone.numpy(), atol=1e-6)


def test_number_correct_and_summed_cross_entropy_by_hand():
    """Feature f = +-1 / sqrt(1 + 1e-5); logits (f, -f); right when label 0 goes with f > 0."""
    tested = evaluate.test(Bare(), grey([255, 255, 0]), torch.tensor([0, 1, 1]))
    f = 1 / math.sqrt(1 + 1e-5)
    right, wrong = math.log(1 + math.exp(-2 * f)), math.log(1 + math.exp(2 * f))
    assert (tested.n, tested.correct, tested.nonfinite, tested.accuracy) == (3, 2, 0, 2 / 3)
    assert tested.correct_C == (1, 1)
    assert tested.loss == pytest.approx(2 * right + wrong, rel=1e-6)


class Given(nn.Module):
    """The first pixel of an image chooses its logits."""

    def __init__(self, logits_KC):
        super().__init__()
        self.logits_KC = torch.tensor(logits_KC)

    def forward(self, x_BCHW):
        logits_BC = self.logits_KC[((x_BCHW[:, 0, 0, 0] + 1) * 127.5).round().long()]
        return logits_BC, logits_BC


@pytest.mark.parametrize("bad", [[math.nan, math.nan], [0.0, math.nan], [math.inf, 0.0], [0.0, -math.inf]])
def test_a_prediction_that_is_not_finite_is_never_correct(bad):
    """Class 0 is what argmax makes of two NaN; an image of 300, so that its batch is not the first."""
    images, labels = grey([0] * 299 + [1]), torch.zeros(300, dtype=torch.int64)
    tested = evaluate.test_with_auc(Given([[1.0, 0.0], bad]), images, labels)
    assert (tested.n, tested.correct, tested.nonfinite) == (300, 299, 1)
    assert tested.correct_C == (299, 0)
    assert all(map(math.isnan, measures(tested)))


def test_an_empty_test_set():
    tested = evaluate.test_with_auc(Bare(), grey([]), torch.zeros(0, dtype=torch.int64))
    assert (tested.n, tested.correct, tested.loss, tested.nonfinite) == (0, 0, 0.0, 0)
    assert all(map(math.isnan, measures(tested)))


def measures(tested):
    return tested.accuracy, tested.balanced_accuracy, tested.macro_f1, tested.macro_auc


# logits of four kinds of images: the last is torn between classes 0 and 1, and argmax takes the first
KINDS = [[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [0.5, 0.0, 3.0], [1.0, 1.0, 0.0]]


def test_measures_of_three_classes_by_hand():
    """Class 0: kinds 0 and 3, class 1: kinds 1, 3 and 0, class 2: no image.

    Probabilities of class 0: kind 0 .844, kind 3 .422, kind 1 .212; its images have .844 and .422, the others .212,
    .422 and .844: of 6 pairs 2 + 1 half and 1 + 1 half are right. Of class 1 they are .114, .422 and .576 with own
    .576, .422, .114 against .114, .422: 2, 1 + 1 half, 1 half.
    """
    tested = evaluate.test_with_auc(Given(KINDS), grey([0, 3, 1, 3, 0]), torch.tensor([0, 0, 1, 1, 1]))
    assert tested.confusion_CC.tolist() == [[2, 0, 0], [2, 1, 0], [0, 0, 0]]
    assert tested.correct_C == (2, 1, 0)
    expected = 3 / 5, (1 + 1 / 3) / 2, (4 / 6 + 2 / 4) / 2, (4 / 6 + 4 / 6) / 2
    assert measures(tested) == pytest.approx(expected, rel=1e-12)


def test_the_auc_agrees_with_all_pairs():
    """Every pair compared, on 300 images of 12 kinds, so that there are ties."""
    random = np.random.default_rng(0)
    logits_NC = random.normal(size=(12, 5)).astype(np.float32)[random.integers(0, 12, 300)]
    y_N = random.integers(0, 4, 300)  # class 4 has no images
    weight_NC = np.exp(logits_NC.astype(float))
    p_NC = weight_NC / weight_NC.sum(1, keepdims=True)
    pairs = [p_NC[y_N == own, own][:, None] - p_NC[y_N != own, own] for own in range(4)]
    expected = [((more > 0) + (more == 0) / 2).mean() for more in pairs]
    found = evaluate.auc_by_class(torch.from_numpy(logits_NC), torch.from_numpy(y_N))
    np.testing.assert_allclose(found, [*expected, math.nan], rtol=1e-12)


@pytest.mark.parametrize("score, auc", [([0.0, 1.0, 2.0], 0.5), ([2.0, 1.0, 1.0], 0.25), ([1.0, 1.0, 1.0], 0.5)])
def test_the_auc_of_three_images_by_hand(score, auc):
    """The second one against the first and the third."""
    assert evaluate.auc(torch.tensor(score), torch.tensor([False, True, False])) == auc


def test_one_class_alone_has_no_auc():
    tested = evaluate.test_with_auc(Given(KINDS), grey([0, 1]), torch.tensor([0, 0]))
    assert measures(tested)[:3] == (0.5, 0.5, 2 / 3)
    assert math.isnan(tested.macro_auc)


def test_training_goes_on_after_an_eval_pass(toy_net):
    net = toy_net()
    images = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    evaluate.predict(net, images)
    net(normalise(images))[1].sum().backward()
    assert net.classifier.bias.grad.tolist() == [4.0, 4.0, 4.0]
