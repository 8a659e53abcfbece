"""What stays with a client: weights (FedBN, FedRep), a model of its own (Ditto), and the parts of its training."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import toy
from federation import Federation, same_model, save_images, settings

from hkd_hpc import assemble
from hkd_hpc.client import OWN_MODEL, OWN_WEIGHTS
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.models import evaluate
from hkd_hpc.run import initial_of
from hkd_hpc.schemes import contract
from hkd_hpc.schemes.base import Phase, Scheme
from hkd_hpc.schemes.ditto import DittoSettings
from hkd_hpc.schemes.fedrep import FedRepSettings
from hkd_hpc.state.checkpoint import RoundState
from hkd_hpc.training import ClientRound

pytestmark = pytest.mark.kernels

SAMPLED = ("fed.clients=4", "fed.participation=0.5")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "data.npz")


def test_defaults_are_the_papers():
    assert DittoSettings().lam == 1.0
    assert FedRepSettings().head_epochs == 10


# ---- personal weights

HEAD = {"classifier.weight", "classifier.bias"}


def floats(run, values_V):
    """By name, without BatchNorm's batch counters."""
    arrays = run.flat.arrays(values_V, run.flat.counters)
    return {name: value for name, value in arrays.items() if not name.endswith("tracked")}


def batch_norm(names):
    """Of the small network."""
    return {name for name in names if name.split(".")[2:3] == ["1"]}


@pytest.mark.parametrize("scheme", ["fedbn", "fedrep"])
def test_a_client_begins_with_its_own_part_and_the_average_of_the_rest(data, scheme):
    """Also one that rested: 2 of 4 clients a round; one that has no part of its own yet has the initial one."""
    run, ended, rested = Federation(data, scheme, *SAMPLED), {}, []
    original, initial = run.part.trainer.run, floats(run, run.part.weights_V.clone())

    def watch(given):
        average, own = floats(run, given.weights_V), ended.get(given.client.id)
        start = floats(run, run.part.trainer.start_of(given))
        personal = HEAD if scheme == "fedrep" else batch_norm(start)
        assert len(personal) == (2 if scheme == "fedrep" else 12)
        for name, value in start.items():
            expected = (own[1] if own else initial)[name] if name in personal else average[name]
            assert (value == expected).all(), name
        trained = original(given)
        if own:
            rested.append(run.part.done - own[0])
        ended[given.client.id] = run.part.done, floats(run, run.flat.values_V.clone())
        return trained

    run.part.trainer.run = watch
    run.play(6)
    assert max(rested) > 1
    assert all(OWN_WEIGHTS in client.state for client in run.clients)


AT_HOME = [
    ("local",),
    ("fedproto", "scheme.weights=none"),
    ("fedhkd", "scheme.weights=none"),
    ("fedhkd_star", "scheme.weights=none"),
    ("fedmd", "scheme.weights=none", "data.public_fraction=0.3"),
    ("fedbn",),
    ("fedrep",),
    ("fedavg", "train.batchnorm=local"),
]


def own_mask(run) -> torch.Tensor:
    """(V,) bool: what never travels."""
    own_V = torch.zeros(len(run.flat.values_V), dtype=torch.bool)
    for spans in run.part.trainer.own_spans.values():
        for start, stop in spans:
            own_V[start:stop] = True
    return own_V


@pytest.mark.parametrize("scheme, more", [(scheme, more) for scheme, *more in AT_HOME])
def test_what_never_travels_begins_as_the_run_did_however_late_a_client_joins(data, scheme, more):
    run, joined = Federation(data, scheme, *SAMPLED, *more), {}
    original, initial_V, own_V = run.part.trainer.begin, run.part.weights_V.clone(), own_mask(run)

    def watch(given):
        original(given)
        joined.setdefault(given.client.id, (given.round, given.client.received_V.clone(), given.weights_V.clone()))

    run.part.trainer.begin = watch
    run.play(6)
    late = [(start_V, global_V) for round, start_V, global_V in joined.values() if round > 1]
    assert late
    for start_V, global_V in late:
        assert torch.equal(start_V[own_V], initial_V[own_V])
        assert torch.equal(start_V[~own_V], global_V[~own_V])
        assert not torch.equal(global_V[own_V], initial_V[own_V])


@pytest.mark.parametrize("scheme, more", [(scheme, more) for scheme, *more in AT_HOME])
def test_clients_that_join_after_a_resume_on_other_ranks_begin_with_it_too(data, tmp_path, scheme, more):
    """2 of 4 clients take part in round 1, the others in round 2."""
    asked = settings(data, scheme, *SAMPLED, "fed.rounds=3", *more)
    toy.train_ok(1, *asked, "--out", tmp_path / "straight")

    def stop(rank):
        toy.on_place(2, "training", lambda: (_ for _ in ()).throw(ArithmeticError("on purpose")))

    assert all(result.exit_code for result in toy.train(3, *asked, "--out", tmp_path / "run", patch=stop))
    [output, _] = toy.train_ok(2, "--resume", "--out", tmp_path / "run")
    assert "resuming after round 1" in output
    assert toy.rows(tmp_path / "run") == toy.rows(tmp_path / "straight")
    kept, expected = (toy.checkpoint(tmp_path / name, 3) for name in ("run", "straight"))
    names = [name for name in expected if name.split("/")[0] in ("client_states", "initial")]
    assert any(name.startswith("initial/") for name in names)
    for name in names:
        assert np.array_equal(kept[name], expected[name]), name


def test_what_an_older_checkpoint_lacks_comes_of_the_seed_or_of_the_global_weights(data, capsys):
    """initial_of gives what the seed does not."""
    run = Federation(data, "fedrep", "train.batchnorm=local")
    run.play(1)
    part, global_V = run.part, run.part.weights_V
    present, begun = part.trainer.own_parts(global_V), dict(part.worker.initial)
    held = {0: {name: tensor.numpy() for name, tensor in run.clients[0].state.items()}}
    state = RoundState(1, global_V, part.counters, part.message, held)
    equal = lambda found, expected: (
        found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    )
    assert equal(initial_of(part, state), {})
    assert equal(initial_of(part, replace(state, initial=begun)), begun)
    assert equal(initial_of(part, replace(state, client_states={})), present)  # it stayed with nobody until now
    assert capsys.readouterr().err == ""
    part.config = replace(part.config, model=replace(part.config.model, init="start.pt"))
    assert equal(initial_of(part, replace(state, initial=begun)), begun)
    assert capsys.readouterr().err == ""
    assert equal(initial_of(part, state), present)
    assert "kept no initial weights" in capsys.readouterr().err


def test_the_global_model_has_the_mean_of_what_is_personal(data):
    run = Federation(data, "fedrep", "data.partition=iid")
    parts, original = [], run.part.trainer.end
    run.part.trainer.end = lambda *given: parts.append(run.flat.values_V.clone()) or original(*given)
    [played] = run.play(1)
    torch.testing.assert_close(played.weights_V, torch.stack(parts).mean(0), rtol=0, atol=1e-6)


def test_without_batch_norm_fedbn_is_fedavg_and_says_so(data, capsys):
    runs = [Federation(data, scheme, "model.norm=group") for scheme in ("fedbn", "fedavg")]
    assert capsys.readouterr().err.splitlines() == [
        "hkd_hpc: warning: scheme fedbn: this model has nothing that would stay with a client"
    ]
    assert all(map(same_model, *(run.play(2) for run in runs)))


def test_a_rejected_client_keeps_the_part_of_before(data):
    run = Federation(data, "fedbn")
    run.play(1)
    kept, original = run.clients[1].state[OWN_WEIGHTS].clone(), run.scheme.loss

    def nonfinite(client, batch):
        return {
            name: value * (float("nan") if client.id == 1 else 1) for name, value in original(client, batch).items()
        }

    run.scheme.loss = nonfinite
    assert run.play(1)[0].reports["status"].tolist() == [0, 1, 0]
    assert torch.equal(run.clients[1].state[OWN_WEIGHTS], kept)


# ---- phases


class Watched(Scheme):
    """Two phases, each of which trains what the other one leaves alone; what the weights were after each."""

    def phases(self, client, epochs):
        body = [name for name, _ in client.net.named_parameters() if name not in HEAD]
        return [Phase(2, "head", frozen=body), Phase(epochs, "body", frozen=HEAD)]

    def begin(self, client):
        client.cache["steps"] = []

    def adjust_gradient(self, client):
        client.cache["steps"].append((client.phase, client.flat.parameters_P.clone()))
        SEEN[client.id] = client.cache["steps"]
        LEFT.append(client.epochs_left)


SEEN: dict[int, list] = {}
LEFT: list[int] = []  # epochs, after that of each step


def test_what_is_frozen_stays_to_the_bit_and_the_rest_moves_from_the_first_step_on(data):
    LEFT.clear()
    run = Federation(data, f"{__name__}:Watched", "train.epochs=3", "train.clip_norm=1")
    run.play(1)
    assert LEFT[:15] == [4, 4, 4, 3, 3, 3, 2, 2, 2, 1, 1, 1, 0, 0, 0]
    of_head = torch.zeros(len(run.flat.parameters_P), dtype=torch.bool)
    for start, stop in run.flat.spans_of(HEAD):
        of_head[start:stop] = True
    steps = SEEN[0]
    assert [name for name, _ in steps] == ["head"] * 6 + ["body"] * 9  # 45 images: 3 batches
    for (name, before_P), (_, after_P) in itertools.pairwise(steps):
        moved = before_P != after_P
        assert moved.any()
        assert not moved[~of_head if name == "head" else of_head].any()
        # a new Adam's first step is lr sign(gradient)
    for first in (0, 6):
        step_P = (steps[first + 1][1] - steps[first][1]).abs()
        assert step_P.max() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("head, straggler, steps", [(10, 2, 3 * (2 + 2)), (1, 2, 3 * (1 + 2)), (10, 5, 3 * (10 + 5))])
def test_no_phase_of_a_straggler_is_longer_than_its_epochs(data, head, straggler, steps):
    """3 clients of 3 batches; with as many epochs as train.epochs, which are 5, a client is no straggler."""
    late = ("fed.straggler_rate=1", f"fed.straggler_epochs={straggler}", "train.epochs=5", "fed.clients=3")
    run = Federation(data, "fedrep", f"scheme.head_epochs={head}", *late)
    run.play(1)
    assert [client.epochs_left for client in run.clients] == [0, 0, 0]
    assert run.part.trainer.steps == 3 * steps


@pytest.mark.parametrize(
    "phases, part",
    [
        (None, "must return a list of Phase(epochs, ...), not None"),
        ([], "with one epoch at least; it returned []"),
        ([Phase(0)], "with one epoch at least"),
        ([Phase(1), Phase(1)], "of different names"),
        ([Phase(1, own_model="mine")], "client_state_shapes() must declare 'mine' with (100,)"),
    ],
)
def test_wrong_phases_are_told_in_one_line(data, phases, part):
    with pytest.raises(RunError) as error:
        contract.phases(Federation(data, "fedavg").scheme, phases, 100)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


class Personal(Scheme):
    def personal(self, net):
        return ["classifier.weight", "nope"]


def test_a_personal_weight_that_the_model_lacks_is_told(data):
    with pytest.raises(RunError, match="personal.. must return names of the model's tensors.*it names 'nope'"):
        Federation(data, f"{__name__}:Personal")


# ---- a model of the client's own


def test_dittos_global_model_is_fedavgs_and_its_clients_test_another(data):
    ditto, fedavg = Federation(data, "ditto", "train.epochs=3"), Federation(data, "fedavg", "train.epochs=3")
    for own, reference in zip(ditto.play(3), fedavg.play(3)):
        assert same_model(own, reference)
    assert own.reports["loss"][:, 1].all()  # the proximal term of the personal models
    for client, report in zip(ditto.clients, own.reports):
        ditto.flat.values_V.copy_(client.state["personal"])
        tested = evaluate.test(ditto.net, client.x_test, client.y_test)
        assert tested.correct == report["test_correct"]
        assert not torch.equal(client.state["personal"], own.weights_V)


def test_a_personal_model_goes_on_from_where_it_was_however_long_it_rests(data):
    run, ended, rested = Federation(data, "ditto", *SAMPLED), {}, []
    trainer, original = run.part.trainer, run.part.trainer._begin_phase

    def watch(given, phase):
        original(given, phase)
        id, round = given.client.id, run.part.done + 1
        if phase.name == "personal":
            before = ended.get(id, (round, given.weights_V))
            assert torch.equal(run.flat.values_V, before[1])
            rested.append(round - before[0])

    def note(given, run_one=trainer.run):
        trained = run_one(given)
        ended[given.client.id] = run.part.done + 1, given.client.state["personal"].clone()
        return trained

    trainer._begin_phase, trainer.run = watch, note
    run.play(6)
    assert max(rested) > 1


def test_the_model_that_is_kept_for_the_user_is_the_one_that_was_tested(data):
    run = Federation(data, "ditto")
    part = run.part
    part.worker.train(1, [0, 1, 2], part.weights_V, part.counters, {}, True)
    for client in run.clients:
        assert torch.equal(client.state[OWN_MODEL], client.state["personal"])


# ---- a step of the scheme's own


@pytest.mark.parametrize("average", ["images", "uniform"])
def test_feddyns_server_goes_on_by_the_share_of_those_that_delivered(data, average):
    """Of 4 clients of unequal sizes 2 take part in a round."""
    run = Federation(data, "feddyn", *SAMPLED, f"fed.average={average}")
    part, sizes = run.part, [len(client.y_train) for client in run.clients]
    weight = (lambda client: sizes[client]) if average == "images" else (lambda client: 1)
    drift_P, ended, original = torch.zeros(run.scheme.info.parameters), {}, part.trainer.run

    def watch(given):
        trained = original(given)
        ended[given.client.id] = run.flat.parameters_P.clone()
        return trained

    part.trainer.run = watch
    for _ in range(3):
        ended.clear()
        received_P = part.weights_V[: len(drift_P)].clone()
        [played] = run.play(1)
        assert sorted(ended) == played.cohort
        delivered, all_clients = sum(map(weight, ended)), sum(map(weight, range(4)))
        mean_P = sum(weight(client) * own_P for client, own_P in ended.items()) / delivered
        drift_P = drift_P + delivered / all_clients * (mean_P - received_P)
        torch.testing.assert_close(played.weights_V[: len(drift_P)], mean_P + drift_P, rtol=0, atol=1e-6)


def test_a_scheme_that_steps_and_a_server_optimizer_are_one_too_many(data):
    with pytest.raises(UsageError, match="fed.server_optimizer=avgm: scheme.name=feddyn steps the global weights"):
        Federation(data, "feddyn", "fed.server_optimizer=avgm")


# ---- control variates


def gradients_of(run) -> dict[int, list[torch.Tensor]]:
    """By client: the gradients of its batches as they are before they are corrected."""
    seen: dict[int, list[torch.Tensor]] = {}
    original = run.scheme.adjust_gradient

    def watch(client):
        seen.setdefault(client.id, []).append(client.flat.grad_P.clone())
        original(client)

    run.scheme.adjust_gradient = watch
    return seen


def test_control_variates_are_mean_gradients_and_the_servers_their_mean(data):
    run = Federation(data, "scaffold", *SAMPLED)
    own_P = {client.id: torch.zeros(run.scheme.info.parameters) for client in run.clients}
    seen = gradients_of(run)
    for _ in range(4):
        seen.clear()
        run.play(1)
        own_P |= {id: torch.stack(found).mean(0) for id, found in seen.items()}
        torch.testing.assert_close(run.message["control_P"], torch.stack([*own_P.values()]).mean(0))
    assert all(torch.allclose(client.state["control_P"], own_P[client.id]) for client in run.clients)
    assert assemble.FLOAT_BYTES * run.scheme.info.parameters == run.part.message.dtype["tensors"].itemsize


def test_under_plain_sgd_it_is_option_two_of_its_paper(toy_trainer, toy_net, toy_client):
    """c_i - c + (w_received - y_i) / (K lr), with 12 images in 2 epochs of 2 batches."""
    trainer, client = (
        toy_trainer(toy_net(), "scaffold", "train.optimizer=sgd", "train.lr=0.1"),
        toy_client([0, 1, 2] * 4),
    )
    size, random = trainer.scheme.info.parameters, torch.Generator().manual_seed(0)
    own_P, server_P = (0.1 * torch.randn(size, generator=random) for _ in range(2))
    client.state, start_V = {"control_P": own_P}, trainer.flat.values_V.clone()
    trainer.run(ClientRound(client, start_V, [torch.tensor(0)], {"control_P": server_P}, 1))
    expected_P = own_P - server_P + (start_V[:size] - trainer.flat.parameters_P) / (4 * 0.1)
    for start, stop in trainer.flat.active_spans:
        torch.testing.assert_close(client.state["control_P"][start:stop], expected_P[start:stop], rtol=0, atol=1e-5)


def test_the_gradient_is_corrected_by_both(toy_trainer, toy_net, toy_client):
    trainer, client = toy_trainer(toy_net(), "scaffold"), toy_client([0, 1, 2] * 4)
    size = trainer.scheme.info.parameters
    client.message, client.flat = {"control_P": torch.full((size,), 3.0)}, trainer.flat
    client.state = {"control_P": torch.full((size,), 1.0)}
    trainer.scheme.begin(client)
    trainer.flat.grad_P.fill_(0.5)
    trainer.scheme.adjust_gradient(client)
    assert set(trainer.flat.grad_P.tolist()) == {2.5}
    trainer.flat.grad_P.fill_(1.5)
    trainer.scheme.adjust_gradient(client)
    assert set(trainer.scheme.report(client)["control_P"].tolist()) == {0.0}  # mean of .5 and 1.5 is what it was


def test_control_variates_are_of_the_weights_that_are_stepped(toy_trainer, toy_net, toy_client):
    """What a library may leave in the gradient of the others, its rounding, would add up there from step to step."""
    trainer, client = toy_trainer(toy_net(), "scaffold"), toy_client([0, 1, 2] * 4)
    size = trainer.scheme.info.parameters
    trainer.flat.active_spans = [(8, 16), (32, size)]
    client.message, client.flat = {"control_P": torch.full((size,), 3.0)}, trainer.flat
    trainer.scheme.begin(client)
    for _ in range(2):
        trainer.flat.grad_P.fill_(0.5)
        trainer.scheme.adjust_gradient(client)
    expected_P = torch.zeros(size)
    expected_P[8:16] = expected_P[32:] = 1.0
    assert torch.equal(trainer.flat.grad_P, 0.5 + 3 * expected_P)
    assert torch.equal(trainer.scheme.report(client)["control_P"], 0.5 * expected_P)
