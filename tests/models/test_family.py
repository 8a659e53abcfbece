"""Unequal models in one flat buffer: where each lies, what is active, averaged and counted."""

import pytest
import torch

from hkd_hpc.common.errors import UsageError
from hkd_hpc.models import networks
from hkd_hpc.models.family import Family, member, members
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.settings import ModelSettings

NAMES = "tiny_models:Tiny,tiny_models:Normed"
TINY, NORMED = NAMES.split(",")
PARAMETERS = {  # by hand, 4 latent, 10 classes: 48 x 4 + 4, 4 x 10 + 10; 48 x 24 + 24, 2 x 24, 24 x 4 + 4, 50
    TINY: 196 + 50,
    NORMED: 1176 + 48 + 100 + 50,
}


@pytest.fixture(scope="module")
def settings():
    return ModelSettings(names=NAMES, latent=4)


@pytest.fixture
def flat(settings):
    return FlatModel(networks.build(settings, 10, (3, 32, 32), seed=3))


def test_each_member_has_the_initial_weights_that_it_has_alone(settings):
    net = networks.build(settings, 10, (3, 32, 32), seed=3)
    assert isinstance(net, Family)
    for name in settings.members:
        alone = networks.build(ModelSettings(name=name, latent=4), 10, (3, 32, 32), seed=3).state_dict()
        found = member(net, name).state_dict()
        assert list(found) == list(alone)
        assert all(torch.equal(found[key], alone[key]) for key in alone)


def test_one_model_is_its_own_only_member():
    net = networks.build(ModelSettings(name=TINY, latent=4), 10, (3, 32, 32), seed=3)
    assert member(net, "") is net
    assert members(net) == [net]


def test_parameters_by_hand(flat, settings):
    assert flat.parameter_counts(settings.members) == PARAMETERS
    assert flat.parameter_count == sum(PARAMETERS.values())


def test_what_a_client_sends_is_its_own_member_and_its_statistics(flat):
    assert flat.floats_of(TINY, but=[]) == 246
    assert flat.floats_of(NORMED, but=[]) == 1374 + 48  # running mean and variance of 24 channels
    statistics = [(len(flat.parameters_P), len(flat.values_V))]
    assert flat.floats_of(NORMED, but=statistics) == 1374


def test_members_share_no_place_in_the_buffer(flat):
    places = [set() for _ in range(2)]
    for place, name in zip(places, (TINY, NORMED)):
        for start, stop in flat.averaged_spans_of(name):
            place |= set(range(start, stop))
    assert not places[0] & places[1]
    assert sum(map(len, places)) == sum(stop - start for start, stop in flat.averaged_spans)


def test_only_what_is_lent_is_active(flat):
    assert flat.activate(TINY) is member(flat.net, TINY)
    tiny = flat.active_spans
    flat.activate(NORMED)
    assert sum(stop - start for start, stop in tiny) == 192 + 16 + 48 + 16  # 4, 40 and 10 up to a multiple of 16
    assert not {start for start, _ in tiny} & {start for start, _ in flat.active_spans}
    assert flat.statistics_spans_of(TINY) == []
    assert flat.statistics_spans_of(NORMED) == [(0, 64)]  # twice 24 up to 32


@pytest.mark.parametrize(
    "names, clients, of_clients",
    [
        ("a:A,b:B", 5, ["a:A", "b:B", "a:A", "b:B", "a:A"]),
        ("a:A, b:B, b:B", 4, ["a:A", "b:B", "b:B", "a:A"]),
        ("", 2, ["", ""]),
    ],
)
def test_names_are_assigned_in_turn(names, clients, of_clients):
    settings = ModelSettings(names=names)
    assert [settings.member_of(client) for client in range(clients)] == of_clients


def test_no_image_goes_through_a_family(flat):
    with pytest.raises(NotImplementedError):
        flat.net(torch.zeros(2, 3, 32, 32))


def test_a_member_that_cannot_be_made_is_named():
    with pytest.raises(UsageError, match="model.name=tiny_models:Nothing"):
        networks.build(ModelSettings(names="small,tiny_models:Nothing"), 10, (3, 32, 32), seed=0)
