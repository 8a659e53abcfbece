"""What a GPU computes: near to the CPU, the same with graphs and with concurrent clients, and what becomes of failures.

Kernels of a GPU may add in another order each time, and Adam makes a whole step of a gradient's last bit; so models are
compared by how far they are apart, as a share of how far training has moved them: CLOSE.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from comm_launch import mpirun
from federation import Federation, save_images

from hkd_hpc import assemble, config, schemes
from hkd_hpc.gpu.graphs import Graphs, RecordingTrainer, declares
from hkd_hpc.models import evaluate, networks
from hkd_hpc.runtime import environment
from hkd_hpc.schemes.base import Scheme
from hkd_hpc.training import ClientRound

pytestmark = pytest.mark.usefixtures("gpu")

CLOSE = 0.1
ALL = {**schemes.REGISTRY, **schemes.CONTROLS}
RECORDED = [name for name in ALL if declares(object.__new__(schemes.get(name)))]
LONGER = ("train.epochs=4", "train.batch_size=11", "train.clip_norm=1", "data.val_fraction=0.1")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "data.npz")


class Played:
    """A federation after two rounds; `steps`: how far each round moved the global weights, on the CPU."""

    def __init__(self, data, scheme: str, *more: str, device: str = "cuda", rounds: int = 2):
        self.run = Federation(data, scheme, *more, device=device)
        part = self.run.part
        before_V = part.weights_V.cpu().clone()
        self.rounds = self.run.play(rounds)
        self.moved_V = self.rounds[-1].weights_V.cpu() - before_V
        self.trainers = getattr(part.trainer, "trainers", [part.trainer])


def require_close(own: Played, reference: Played) -> None:
    assert (own.moved_V - reference.moved_V).norm() < CLOSE * reference.moved_V.norm()
    for a, b in zip(own.rounds, reference.rounds):
        assert not a.reports["status"].any()
        assert a.reports["train_n"].tolist() == b.reports["train_n"].tolist()
        assert a.reports["loss"] == pytest.approx(b.reports["loss"], rel=CLOSE, abs=1e-3)


@pytest.mark.parametrize("scheme", ALL)
def test_a_round_is_near_to_that_of_a_cpu(data, scheme):
    require_close(Played(data, scheme, rounds=1), Played(data, scheme, device="cpu", rounds=1))


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("scheme", RECORDED)
def test_graphs_are_near_to_the_usual_way(data, scheme, lanes):
    own = Played(data, scheme, *LONGER, "run.graphs=on", f"run.lanes={lanes}")
    for trainer in own.trainers:
        assert not trainer.graphs.failed
        assert any(trainer.graphs.recorded.values())
    require_close(own, Played(data, scheme, *LONGER))


@pytest.fixture
def deterministic():
    """As run.deterministic sets it, and off again."""
    yield "run.deterministic=true"
    assemble.set_up_torch(config.resolve(), torch.device("cuda"))


@pytest.mark.parametrize(
    "more", [("run.graphs=on",), ("run.lanes=3",), ("run.graphs=on", "run.lanes=3"), ("run.graphs=on", "run.lanes=2")]
)
@pytest.mark.parametrize(
    "model", ["small", "resnet18", "moon_cnn"]
)  # ResNet18's products are split, in memory that concurrent clients must not share
def test_deterministic_runs_have_the_same_bits_with_graphs_and_concurrent_clients(data, deterministic, model, more):
    settings = (*LONGER, f"model.name={model}", deterministic)
    assemble.set_up_torch(config.resolve(overrides=[deterministic]), torch.device("cuda"))
    own, usual = Played(data, "fedhkd", *settings, *more), Played(data, "fedhkd", *settings)
    assert not any(trainer.graphs.failed for trainer in own.trainers if "run.graphs=on" in more)
    assert torch.equal(own.rounds[-1].weights_V, usual.rounds[-1].weights_V)


@pytest.mark.parametrize("scheme", [name for name in ALL if name != "central"])
def test_concurrent_clients_are_near_to_one(data, scheme):
    own = Played(data, scheme, *LONGER, "run.lanes=3")
    assert len(own.trainers) == 3
    assert len(set(own.run.part.trainer.streams)) == 3
    require_close(own, Played(data, scheme, *LONGER))


class Waits(Scheme):
    """Is not what it declares."""

    cuda_graph_safe = True

    def loss(self, client, batch):
        terms = super().loss(client, batch)
        return {"cross_entropy": terms["cross_entropy"] * (1.0 if terms["cross_entropy"].item() < 1e9 else 0.0)}


def test_a_recording_that_breaks_off_is_one_warning(data, capsys):
    own = Played(data, "fedavg", *LONGER)
    broken = Federation(data, "fedavg", *LONGER, "run.graphs=on", device="cuda")
    broken.part.trainer.scheme = Waits(broken.scheme.settings, broken.scheme.info)
    assert isinstance(broken.part.trainer, RecordingTrainer)
    stream, start_V = torch.cuda.current_stream(), broken.part.weights_V.cpu().clone()
    capsys.readouterr()
    broken.play(2)
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hkd_hpc: warning")]
    assert "run.graphs=on: an epoch could not be recorded" in line
    assert torch.cuda.current_stream() == stream
    assert (broken.part.weights_V.cpu() - start_V - own.moved_V).norm() < CLOSE * own.moved_V.norm()


class Greedy(Scheme):
    """Each client holds two fifths of what is free at the start: two of them fit, three do not."""

    free_bytes = 0

    def begin(self, client):
        client.cache["much"] = torch.empty(int(0.4 * self.free_bytes), dtype=torch.uint8, device=client.y_train.device)


def test_without_enough_memory_concurrent_clients_are_halved(data, capsys):
    own = Federation(data, "fedavg", "run.lanes=3", device="cuda")
    own.play(1)
    assert len(own.part.trainer.trainers) == 3
    torch.cuda.empty_cache()
    greedy = Greedy(own.scheme.settings, own.scheme.info)
    greedy.free_bytes = torch.cuda.mem_get_info()[0]
    for trainer in own.part.trainer.trainers:
        trainer.scheme = greedy
    models = [weakref.ref(trainer.flat) for trainer in own.part.trainer.trainers[1:]]
    del trainer
    [played] = own.play(1)
    assert [model() for model in models] == [None, None]
    assert not played.reports["status"].any()
    assert len(own.part.trainer.trainers) == 1
    assert "3 concurrent clients need more memory than there is; from now on 1" in capsys.readouterr().err


def test_a_run_within_a_program_leaves_its_random_numbers_of_the_gpu_alone(gpu):
    torch.manual_seed(3)
    expected = torch.rand(4, device=gpu)
    torch.manual_seed(3)
    with environment.kept():
        torch.manual_seed(4)
        torch.rand(4, device=gpu)
    assert torch.equal(torch.rand(4, device=gpu), expected)


def test_fp32_is_fp32(gpu):
    assemble.set_up_torch(config.resolve(), gpu)
    a, b = torch.rand(2, 512, 512, generator=torch.Generator().manual_seed(0)).to(gpu)
    exact = a.double() @ b.double()
    assert ((a @ b).double() - exact).norm() < 1e-6 * exact.norm()
    assemble.set_up_torch(config.resolve(overrides=["train.precision=tf32"]), gpu)
    error = ((a @ b).double() - exact).norm() / exact.norm()
    assert error < 1e-2
    if torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0):
        assert error > 1e-5


@pytest.mark.parametrize("more", [("run.graphs=on",), ("run.lanes=3",), ()])
@pytest.mark.parametrize("scheme", ALL)
def test_bf16_trains_every_scheme(data, scheme, more):
    own, exact = Played(data, scheme, *LONGER, "train.precision=bf16", *more), Played(data, scheme, *LONGER)
    assert 0 < (own.moved_V - exact.moved_V).norm() < 5 * CLOSE * exact.moved_V.norm()
    for a, b in zip(own.rounds, exact.rounds):
        assert not a.reports["status"].any()
        assert a.reports["loss"] == pytest.approx(b.reports["loss"], rel=0.1, abs=0.01)


def test_tests_stay_in_fp32(gpu):
    net, mixed = (networks.build(config.resolve().model, 10, (3, 32, 32), 0, gpu).to(gpu) for _ in range(2))
    networks.train_in_bf16(mixed)
    x_uint8 = torch.arange(8 * 3 * 32 * 32, device=gpu).remainder(251).to(torch.uint8).reshape(8, 3, 32, 32)
    for own, exact in zip(evaluate.predict(mixed, x_uint8), evaluate.predict(net, x_uint8)):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own, exact)


def test_many_signatures_on_one_gpu(data):
    """Clients of ten sizes: the oldest graphs go, and nothing is lost."""
    own = Federation(data, "fedavg", "train.epochs=3", "run.graphs=on", device="cuda")
    trainer, [client, *_] = own.part.trainer, own.clients
    whole = client.x_train, client.y_train
    for images in [*range(16, 26), 16, 25]:
        client.x_train, client.y_train = whole[0][:images].contiguous(), whole[1][:images].contiguous()
        trainer.run(ClientRound(client, own.part.weights_V, own.part.counters, own.message, 1))
        assert bool(torch.isfinite(trainer.flat.values_V).all())
    assert isinstance(trainer.graphs, Graphs)
    assert len(trainer.graphs.recorded) == 8
    assert not trainer.graphs.failed


@pytest.mark.mpi
def test_the_communicators_contract_holds_with_rank_0_outside_the_nccl_group():
    result = mpirun(2, "contract_with_nccl")
    assert result.returncode == 0, result.stderr
    assert "contract holds with rank 0 outside the NCCL group" in result.stdout


@pytest.mark.mpi
def test_the_communicators_contract_holds_among_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    result = mpirun(3, "contract", "nccl")  # rank 0 shares that of rank 2
    assert result.returncode == 0, result.stderr
    assert "weights by nccl among ranks 1-2 (each has a GPU of its own)" in result.stdout
