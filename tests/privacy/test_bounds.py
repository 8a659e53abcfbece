"""Which networks of one's own the figures of the ledger hold of."""

from __future__ import annotations

import pytest
from federation import Federation, save_images

from hkd_hpc.common.errors import UsageError

VECTOR = ("privacy.mechanism=vector", "privacy.multiplier=4")
UPDATES = ("fed.average=uniform", "privacy.update_clip=.1", "privacy.update_multiplier=4")
HOLES = {
    "OfBatch": "layer extractor.3 has track_running_stats=False, and normalises by the batch in eval mode too",
    "Kept": "buffer mean_D is not persistent, and may carry what one client trains to another (a constant can be a "
    "parameter with requires_grad=False)",
    "Centred": "an image alone has other features in eval mode than among 16",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "images.npz")


def net(name: str) -> str:
    return f"model.name=moving_models:{name}"


@pytest.mark.parametrize("name", HOLES)
def test_a_network_in_which_an_image_moves_others_has_no_bound(data, name):
    with pytest.raises(UsageError) as caught:
        Federation(data, "fedproto", *VECTOR, net(name))
    assert str(caught.value) == (
        f"model.name=moving_models:{name}: {HOLES[name]}, so that one image moves what others give, and no bound of "
        "features holds; take another network, or privacy.* without noise and clip"
    )


def test_noise_on_updates_asks_only_that_nothing_is_carried_from_client_to_client(data):
    """A client's change is clipped as a whole, whichever of its images move others."""
    Federation(data, "fedavg", *UPDATES, net("Centred"))
    with pytest.raises(UsageError, match="buffer mean_D is not persistent, .* no bound of weights holds"):
        Federation(data, "fedavg", *UPDATES, net("Kept"))


@pytest.mark.parametrize("name", HOLES)
def test_where_no_bound_is_claimed_any_network_will_do(data, name):
    Federation(data, "fedproto", net(name))


@pytest.mark.parametrize(
    "model",
    [
        (net("Constant"),),
        ("model.name=tiny_models:Normed",),
        ("model.name=small", "model.norm=group"),
        ("model.name=resnet18", "model.stem=cifar"),
        ("model.name=small", "train.precision=bf16"),
    ],
    ids=" ".join,
)
def test_networks_that_treat_each_image_alone_have_one(data, model):
    Federation(data, "fedproto", *VECTOR, *model)
