"""Epochs on a stage, and concurrent clients, give the bits of the usual way, for every scheme and control."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import Federation, Round, same_model, save_images
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hkd_hpc import schemes
from hkd_hpc.gpu import graphs
from hkd_hpc.gpu.concurrent import ConcurrentTrainer, fitting
from hkd_hpc.gpu.graphs import Graphs, RecordingTrainer
from hkd_hpc.models import networks
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.networks import Net
from hkd_hpc.schemes.base import Scheme
from hkd_hpc.schemes.fedhkd import FedHKD
from hkd_hpc.training import ClientRound, LocalTrainer

pytestmark = pytest.mark.slow

ALL = {**schemes.REGISTRY, **schemes.CONTROLS}
NOT_RECORDED = ("fedgen", "fedmd", "scaffold")  # these draw on the host, or sum up, in each batch
ROUNDS = 3
VARIANTS = [
    ("fedavg", ("train.clip_norm=0.1", "train.drop_last=true")),
    ("fedhkd", ("train.batch_size=11",)),  # 45 = 4 x 11 + 1
    ("fedhkd", ("fed.straggler_rate=0.5", "fed.straggler_epochs=1", "data.val_fraction=0.3")),
    ("moon", ("fed.participation=0.7", "train.batchnorm=local")),
    ("fedproto", ("scheme.weights=none",)),
    ("fedavg", ("train.optimizer=sgd", "train.momentum=0.9", "train.weight_decay=0.01", "train.lr=0.01")),
    ("moon", ("train.augment=crop_flip_reflect", "train.label_smoothing=0.1", "train.optimizer=sgd")),
]
BOTH = [*((name, ()) for name in ALL), *VARIANTS]
LONGER = ("train.epochs=3", "train.lr_halve_every=1")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.fixture(scope="module")
def usual(data):
    """usual(scheme, settings): rounds of the usual way, played once."""
    played: dict[tuple, list[Round]] = {}

    def play(scheme: str, more: tuple[str, ...]) -> list[Round]:
        if (scheme, more) not in played:
            played[scheme, more] = Federation(data, scheme, *LONGER, *more).play(ROUNDS)
        return played[scheme, more]

    return play


def same(own: list[Round], reference: list[Round]) -> bool:
    """Bit for bit: the model, and what clients reported but for seconds and memory."""
    names = [name for name in own[0].reports.dtype.names if not name.endswith(("_s", "memory_bytes"))]
    return len(own) == len(reference) and all(
        same_model(a, b) and all(np.array_equal(a.reports[name], b.reports[name]) for name in names)
        for a, b in zip(own, reference)
    )


def with_trainer(run: Federation, trainer: LocalTrainer) -> Federation:
    """Its clients are trained by this one."""
    run.part.trainer = run.part.worker.trainer = trainer
    return run


def recording(trainer: LocalTrainer, record) -> RecordingTrainer:
    """A trainer like this one, on the same model."""
    return RecordingTrainer(trainer.flat, trainer.scheme, trainer.config, record)


# ---- graphs


@pytest.mark.parametrize("scheme, more", [pair for pair in BOTH if pair[0] not in NOT_RECORDED])
def test_epochs_on_a_stage_give_the_same_bits(data, usual, scheme, more):
    """Here a recorded epoch is simply called again, on the staged tensors."""
    run = Federation(data, scheme, *LONGER, *more)
    calls = []
    with_trainer(run, recording(run.part.trainer, lambda work: lambda: calls.append(work) or work()))
    assert same(run.play(ROUNDS), usual(scheme, more))
    assert len(calls) > len(set(calls)) > 0  # recorded, and replayed


class FromDevice(TorchDispatchMode):
    """Rejects what a recording cannot hold: a tensor of the host. Optimizers' kernels, which only count as called, are
    not there for tensors of the meta device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = None if "_fused_" in func.__name__ else func(*args, **kwargs or {})
        devices = {each.device.type for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)}
        assert devices <= {"meta"}, f"{func}: {devices}"
        return out


class OnMeta(LocalTrainer):
    """Takes each epoch's steps on tensors without values too: whatever reads one of them fails."""

    def take_steps(self, client, order_N, bounds, lr):
        meta = lambda values: {name: v.to("meta") if isinstance(v, torch.Tensor) else v for name, v in values.items()}
        images = {"x_train": client.x_train, "y_train": client.y_train, "drawn_N3": client.drawn_N3}
        parts = {part: meta(getattr(client, part)) for part in ("message", "cache")}
        given = replace(client, state={}, **parts, **meta(images))
        flat = FlatModel(copy.deepcopy(self.flat.net), "meta")
        given.net, given.flat, given.received_V = flat.net, flat, client.received_V.to("meta")
        other = LocalTrainer(flat, self.scheme, self.config)
        other._frozen = [(flat.parameters_P, flat.grad_P)] * bool(self._frozen)
        stage = graphs.Stage(given, given.received_V)
        other.optimizer.reset()
        with FromDevice():
            assert other.take_steps(stage.client, stage.order_N, bounds, stage.lr).is_meta
        return super().take_steps(client, order_N, bounds, lr)


@pytest.mark.parametrize("scheme, more", [pair for pair in BOTH if pair[0] not in NOT_RECORDED])
def test_a_recorded_epoch_waits_for_no_value_and_takes_nothing_from_the_host(data, scheme, more):
    run = Federation(data, scheme, *more)
    own = run.part.trainer
    with_trainer(run, OnMeta(own.flat, own.scheme, own.config)).play(2)


@pytest.mark.parametrize(
    "spoilt", [lambda entropy: entropy * entropy.item(), lambda entropy: entropy * torch.tensor(1.0)]
)
def test_a_loss_that_cannot_be_recorded_is_found(data, spoilt):
    run = Federation(data, "fedavg")
    own, loss = run.part.trainer, run.scheme.loss
    run.scheme.loss = lambda *of: {"cross_entropy": spoilt(loss(*of)["cross_entropy"])}
    with pytest.raises((RuntimeError, AssertionError), match="meta tensors|cpu"):
        with_trainer(run, OnMeta(own.flat, own.scheme, own.config)).play(1)


@pytest.mark.parametrize("name", ALL)
def test_which_schemes_can_be_recorded(name):
    scheme = object.__new__(schemes.get(name))
    net = Net(torch.nn.Flatten(), 4, 3)
    expected = f"{type(scheme).__name__} does not say `cuda_graph_safe = True`" if name in NOT_RECORDED else ""
    assert graphs.why_not(scheme, net, torch.device("cuda")) == expected
    assert graphs.why_not(scheme, net, torch.device("cpu")) == "there is no GPU"


class Derived(FedHKD):
    """Its loss may be another one."""


class OwnNet(Net):
    """Its forward may draw."""


def test_a_declaration_is_not_inherited():
    net, gpu = Net(torch.nn.Flatten(), 4, 3), torch.device("cuda")
    assert graphs.why_not(object.__new__(Derived), net, gpu) == "Derived does not say `cuda_graph_safe = True`"
    assert graphs.why_not(object.__new__(FedHKD), OwnNet(torch.nn.Flatten(), 4, 3), gpu) == (
        "OwnNet does not say `cuda_graph_safe = True`"
    )


class Old(Scheme):
    """As written for an older version."""

    captures = True
    sets_gradient = True

    def report_shapes(self):
        return {"count_C": (self.facts.classes,)}


def test_the_names_of_older_versions_are_taken_and_told(data, capsys):
    run = Federation(data, f"{__name__}:Old")
    assert capsys.readouterr().err.splitlines() == [
        "hkd_hpc: warning: Old: `captures` is called `cuda_graph_safe` now; it is taken as that",
        "hkd_hpc: warning: Old: `facts` is called `info` now; it is taken as that",
        "hkd_hpc: warning: Old: `sets_gradient` is not read any more; leave it away",
    ]
    assert graphs.why_not(run.scheme, run.net, torch.device("cuda")) == ""
    assert run.scheme.report_shapes() == {"count_C": (10,)}


def staged(client, message=None, **cache):
    client.net = client.flat = None
    client.received_V, client.message, client.cache = torch.zeros(5), message or {}, cache
    return client


def test_a_stage_is_for_clients_that_look_the_same(toy_client):
    def look(labels, known, any=True, sent=0.0, id=0):
        return graphs.signature(staged(toy_client(labels, id), {"h": torch.full((2,), sent)}, known=known, any=any))

    one = look([0, 1, 2], torch.zeros(3))
    assert one == look([2, 2, 2], torch.ones(3), sent=1.0, id=1)
    assert one != look([0, 1], torch.zeros(3))
    assert one != look([0, 1, 2], torch.zeros(3), any=False)
    assert one != look([0, 1, 2], torch.zeros(2))
    assert one != look([0, 1, 2], torch.zeros(3).bool())
    with pytest.raises(TypeError, match="client.cache\\['random'\\] is a Generator, no tensor and no plain value"):
        graphs.signature(staged(toy_client([0, 1]), random=np.random.default_rng(0)))


def test_a_stage_holds_copies(toy_client):
    first, second = (
        staged(toy_client([id, 1], id=id), {"h": torch.full((2,), float(id))}, x=torch.tensor(float(id)))
        for id in (1, 2)
    )
    stage = graphs.Stage(first, torch.zeros(5))
    addresses = [tensor.data_ptr() for tensor in graphs.tensors_of(stage.client).values()]
    stage.put(second, torch.tensor([1, 0]), 0.25)
    assert addresses == [tensor.data_ptr() for tensor in graphs.tensors_of(stage.client).values()]
    assert all(map(torch.equal, graphs.tensors_of(stage.client).values(), graphs.tensors_of(second).values()))
    assert stage.order_N.tolist() == [1, 0]
    assert stage.lr.item() == 0.25
    assert first.message["h"].tolist() == [1, 1]


def test_nine_signatures_push_the_oldest_out(toy_client):
    recorded = []
    own = Graphs(lambda work: recorded.append(work) or work)

    def visit(images: int) -> torch.Tensor:
        epoch = lambda client, order_N, bounds, lr: order_N.sum()
        return own.run(epoch, staged(toy_client([0] * images)), torch.arange(images), [], 0.1)

    for images in (1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 9, 1):
        assert visit(images).item() == images * (images - 1) // 2
    assert len(recorded) == 2
    assert len(own.recorded) == 8
    assert {key[1][0][1][0] for key in own.recorded} == {3, 4, 5, 6, 7, 8, 9, 1}


def test_what_was_recorded_stays_as_long_as_something_else_can_go(toy_client):
    own = Graphs(lambda work: work)
    for images in (1, 1, *range(2, 10)):
        own.run(
            lambda client, order_N, bounds, lr: order_N.sum(),
            staged(toy_client([0] * images)),
            torch.arange(images),
            [],
            0.1,
        )
    assert {key[1][0][1][0]: entry is not None for key, entry in own.recorded.items()} == {
        1: True,
        3: False,
        4: False,
        5: False,
        6: False,
        7: False,
        8: False,
        9: False,
    }


def test_stages_of_a_trainer_share_the_received_weights(toy_client):
    """Each gets those of its client before it is replayed."""
    own, seen = Graphs(lambda work: work), []
    for images, value in ((1, 1.0), (1, 2.0), (2, 3.0), (2, 4.0), (1, 5.0)):
        client = staged(toy_client([0] * images))
        client.received_V = torch.full((5,), value)
        own.run(
            lambda client, *_: seen.append(client.received_V) or client.received_V.sum(),
            client,
            torch.arange(images),
            [],
            0.1,
        )
    first, second = (entry[0].client.received_V for entry in own.recorded.values())
    assert first is second
    assert seen[1] is seen[3] is seen[4]
    assert first.tolist() == [5.0] * 5


def test_an_epoch_of_many_steps_is_not_recorded(toy_client, capsys):
    own, client = Graphs(reject), staged(toy_client([0, 1]))
    bounds = [(0, 1)] * (graphs.MOST_STEPS + 1)
    for _ in range(3):
        assert own.run(lambda *_: torch.tensor(7.0), client, torch.arange(2), bounds, 0.1).item() == 7
    assert not own.failed
    assert own.recorded == {}
    assert capsys.readouterr().err == (
        "hkd_hpc: warning: run.graphs=on: an epoch of 201 steps is not recorded, only those of up to 200\n"
    )


def reject_memory(work):
    try:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


def reject(work):
    raise RuntimeError("operation not permitted when stream is capturing\nand a long explanation")


@pytest.mark.parametrize(
    "record, why",
    [
        (reject, "RuntimeError: operation not permitted when stream is capturing"),
        (reject_memory, "OutOfMemoryError: CUDA out of memory"),
    ],
)  # the cause, not the end of the recording
def test_a_recording_that_fails_is_one_warning_and_nothing_else(data, usual, record, why, capsys):
    run = Federation(data, "fedhkd", *LONGER)
    with_trainer(run, recording(run.part.trainer, record))
    assert same(run.play(ROUNDS), usual("fedhkd", ()))
    assert capsys.readouterr().err == (
        f"hkd_hpc: warning: run.graphs=on: an epoch could not be recorded ({why}); training goes on without graphs\n"
    )


def test_a_recording_without_memory_beside_others_halves_the_concurrent_clients(data, usual, capsys):
    run = concurrently(Federation(data, "fedhkd", *LONGER), 2, reject_memory)
    assert same(run.play(ROUNDS), usual("fedhkd", ()))
    [last] = run.part.trainer.trainers
    assert last.graphs.alone
    assert last.graphs.failed
    assert [line[:60] for line in capsys.readouterr().err.splitlines()] == [
        "hkd_hpc: warning: 2 concurrent clients need more memory than",
        "hkd_hpc: warning: run.graphs=on: an epoch could not be recor",
    ]


class ReadsState(Scheme):
    """Is not what it declares: the state of a client is not on the stage."""

    cuda_graph_safe = True

    def client_state_shapes(self):
        return {"scale": ()}

    def begin(self, client):
        client.state["scale"] = torch.tensor(2.0)

    def loss(self, client, batch):
        return {"cross_entropy": super().loss(client, batch)["cross_entropy"] * client.state["scale"]}


@pytest.mark.kernels
def test_what_is_not_on_the_stage_is_not_used_from_another_client(toy_trainer, toy_net, toy_client, capsys):
    trainer, client = toy_trainer(toy_net(batch_norm=False), "fedavg", "train.epochs=4"), toy_client([0, 1, 2])
    trainer.scheme = ReadsState(trainer.scheme.settings, trainer.scheme.info)
    start_V, counters = trainer.flat.values_V.clone(), [counter.clone() for counter in trainer.flat.counters]
    trainer.run(ClientRound(client, start_V, counters, {}, 1))
    usual_V = trainer.flat.values_V.clone()
    trainer = recording(trainer, lambda work: [work(), work][1])  # a recording runs the Python
    trainer.run(ClientRound(client, start_V, counters, {}, 1))
    assert torch.equal(trainer.flat.values_V, usual_V)
    assert "(KeyError: 'scale')" in capsys.readouterr().err


@pytest.mark.kernels
def test_steps_are_counted_where_python_takes_none(toy_trainer, toy_net, toy_client):
    trainer, client = toy_trainer(toy_net(), "fedavg", "train.epochs=5"), toy_client([0, 1, 2] * 5)  # 15: two batches
    trainer = recording(trainer, lambda work: (lambda done: lambda: done)(work()))
    trainer.run(ClientRound(client, trainer.flat.values_V.clone(), [torch.tensor(0)], {}, 1))
    assert trainer.steps == 10


# ---- concurrent clients


def concurrently(run: Federation, count: int, record=None) -> Federation:
    """So many local trainers, each as assemble makes the first."""
    part = run.part
    make = lambda: FlatModel(networks.build(part.config.model, 10, (3, 32, 32), part.config.run.seed))
    flats = [part.trainer.flat, *(make() for _ in range(1, count))]
    kind = (lambda *of: RecordingTrainer(*of, record)) if record else LocalTrainer
    return with_trainer(run, ConcurrentTrainer([kind(flat, run.scheme, part.config) for flat in flats]))


@pytest.mark.parametrize("scheme, more", BOTH)
def test_any_number_of_concurrent_clients_gives_the_same_bits(data, usual, scheme, more):
    for count in (2, 3):
        run = concurrently(Federation(data, scheme, *LONGER, *more), count)
        assert same(run.play(2), usual(scheme, more)[:2])
        steps = [trainer.steps for trainer in run.part.trainer.trainers]
        assert run.part.trainer.steps == sum(steps)
        assert scheme == "central" or all(steps[:2])


@pytest.mark.kernels
def test_graphs_of_concurrent_clients(data, usual):
    run = concurrently(Federation(data, "fedhkd", *LONGER), 2, lambda work: work)
    assert same(run.play(ROUNDS), usual("fedhkd", ()))


class Seen(Scheme):
    """Notes whose batches come when; `capacity`: more clients than that do not fit into memory."""

    def __init__(self, like: Scheme, capacity: int = 99):
        super().__init__(like.settings, like.info)
        self.seen, self.here, self.capacity = [], 0, capacity

    def begin(self, client):
        self.here += 1
        if self.here > self.capacity:
            self.here = 0
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    def loss(self, client, batch):
        self.seen.append(client.id)
        return super().loss(client, batch)

    def report(self, client):
        self.here -= 1
        return {}


def toy_trainers(toy_trainer, toy_net, count, **more):
    trainers = [toy_trainer(toy_net(batch_norm=False)) for _ in range(count)]
    scheme = Seen(trainers[0].scheme, **more)
    for trainer in trainers:
        trainer.scheme = scheme
    return ConcurrentTrainer(trainers), scheme


def tasks(trainer, clients):
    start_V = trainer.flat.values_V.clone()
    return [ClientRound(client, start_V, [], {}, 1, 2) for client in clients]


def test_an_epoch_of_each_client_comes_before_a_second_of_any(toy_trainer, toy_net, toy_client):
    concurrent, scheme = toy_trainers(toy_trainer, toy_net, 2)  # 2 epochs of 1 batch
    waiting = tasks(concurrent, [toy_client([0, 1, 2], id=id) for id in range(3)])
    assert len(concurrent.train(waiting)) == 2
    assert len(concurrent.train(waiting[2:])) == 1
    assert scheme.seen == [0, 1, 0, 1, 2, 2]


def test_concurrent_clients_that_do_not_fit_are_halved_and_nothing_is_lost(toy_trainer, toy_net, toy_client, capsys):
    clients = [toy_client([0, 1, 2], id=id) for id in range(5)]
    alone, _ = toy_trainers(toy_trainer, toy_net, 1)
    expected = [alone.train([task])[0].loss_by_term for task in tasks(alone, clients)]
    concurrent, _ = toy_trainers(toy_trainer, toy_net, 5, capacity=1)
    waiting, got = tasks(concurrent, clients), []
    while waiting:
        trained = concurrent.train(waiting)
        got, waiting = got + [each.loss_by_term for each in trained], waiting[len(trained) :]
    assert got == expected
    assert len(concurrent.trainers) == 1
    assert capsys.readouterr().err.splitlines() == [
        "hkd_hpc: warning: 5 concurrent clients need more memory than there is; from now on 2 (run.lanes)",
        "hkd_hpc: warning: 2 concurrent clients need more memory than there is; from now on 1 (run.lanes)",
    ]


def test_a_trainer_that_goes_is_freed(toy_trainer, toy_net, toy_client):
    """Not only after its client's next round: its memory is what the others need."""
    concurrent, _ = toy_trainers(toy_trainer, toy_net, 2, capacity=1)
    clients = [toy_client([0, 1, 2], id=id) for id in range(2)]
    gone = weakref.ref(concurrent.trainers[1].flat)
    concurrent.train(tasks(concurrent, clients))
    assert gone() is None
    assert not hasattr(clients[1], "net")


def test_no_client_holds_a_model_between_rounds(data):
    run = concurrently(Federation(data, "moon", *LONGER), 2)
    run.play(1)
    lent = ("net", "flat", "received_V")
    assert not [client for client in run.clients if any(hasattr(client, name) for name in lent)]


def test_one_client_that_does_not_fit_is_an_error(toy_trainer, toy_net, toy_client):
    concurrent, _ = toy_trainers(toy_trainer, toy_net, 1, capacity=0)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        concurrent.train(tasks(concurrent, [toy_client([0, 1, 2])]))


def test_a_client_keeps_its_state_when_they_are_halved(toy_trainer, toy_net, toy_client):
    concurrent, _ = toy_trainers(toy_trainer, toy_net, 2, capacity=1)
    clients = [toy_client([0, 1, 2], id=id) for id in range(2)]
    kept = [torch.tensor(float(client.id)) for client in clients]
    for trainer in concurrent.trainers:
        trainer.config = replace(trainer.config, train=replace(trainer.config.train, batchnorm="local"))
    for client, tensor in zip(clients, kept):
        client.state = {"statistics": tensor.expand(len(concurrent.trainers[0].flat.statistics_S))}
    assert len(concurrent.train(tasks(concurrent, clients))) == 1
    assert list(clients[1].state) == ["statistics"]


@pytest.mark.parametrize(
    "asked, clients, free, each, fit",
    [
        (1, 10, 1000, 10, 1),
        (10, 10, 1000, 10, 10),
        (10, 4, 1000, 10, 4),
        (10, 10, 50, 10, 5),  # 45 of the 50 may be used: four beside the first
        (10, 10, 9, 10, 1),
        (10, 10, 0, 10, 1),
        (10, 10, 100, 0, 10),
        (4, 0, 100, 10, 1),
    ],
)
def test_how_many_fit(asked, clients, free, each, fit):
    assert fitting(asked, clients, free, each) == fit
