"""Runs on data and networks of one's own: the example of the docs, rows, sequences, floats; ranks, resume, export."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toy

from hkd_hpc import results
from hkd_hpc.export import main as export
from hkd_hpc.models import networks
from hkd_hpc.models.settings import ModelSettings

ROOT = toy.PROJECT
EXAMPLE = ROOT / "examples/my_data.py"
MINE = ("data.name=examples.my_data:load", "model.name=examples.my_data:MyRows", *toy.SMALL, "scheme.name=fedavg")
MODELS = '''
import torch
from torch import nn

class Words(nn.Module):
    """An embedding, a GRU, and its last output."""

    def __init__(self, classes, latent):
        super().__init__()
        self.words, self.gru = nn.Embedding(20, 6), nn.GRU(6, latent, batch_first=True)
        self.classifier = nn.Linear(latent, classes)

    def forward(self, x_BT):
        _, last = self.gru(self.words(x_BT))
        return last[0], self.classifier(last[0])
'''


@pytest.fixture(scope="module", autouse=True)
def at_home():
    """As when the command is given in the project's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The example on three ranks, measured, two rounds."""
    folder = tmp_path_factory.mktemp("run") / "rows"
    toy.train_ok(3, *MINE, "data.normalise=measured", "--out", folder)
    return folder


def one_line(results_) -> str:
    """What a rejected job said."""
    assert {result.exit_code for result in results_} == {2}
    [line] = toy.our_lines(result.output for result in results_)
    return line


def test_the_example_is_printed_whole():
    assert f"```python\n{EXAMPLE.read_text()}```" in (ROOT / "docs/data.md").read_text()


def test_rows_give_the_same_bits_on_any_number_of_ranks_and_when_resumed(run, tmp_path):
    toy.train_ok(1, *MINE, "data.normalise=measured", "fed.rounds=1", "--out", tmp_path / "one")
    toy.train_ok(1, "--resume", "--allow-change", "fed.rounds=2", "--out", tmp_path / "one")
    assert toy.rows(tmp_path / "one") == toy.rows(run)
    found = toy.metrics(run)
    assert found["partition/class_name"].tolist() == ["ill", "very ill", "well"]
    assert found["image_shape"].tolist() == [4]


def test_what_was_measured_is_stored_and_the_predictor_uses_it(run):
    """By hand: the network of the example on (x - mean) / std."""
    from examples.my_data import load

    x = load()["x_train"]
    found = toy.metrics(run)
    assert found["input/dtype"] == "float32"
    assert found["input/mean"] == pytest.approx(x.astype(np.float64).mean(0), rel=1e-5)
    model, test = results.load(run).model(), torch.from_numpy(load()["x_test"])
    by_hand = (test - torch.from_numpy(found["input/mean"]).float()) / torch.from_numpy(found["input/std"]).float()
    _, expected = type(model.net).forward(model.net, by_hand)
    assert torch.allclose(model(test), expected, atol=1e-5)
    with pytest.raises(TypeError, match="give them as torch.float32, as they lie in the data"):
        model(test.double())


def test_an_export_tells_the_numbers(run, tmp_path, capsys):
    assert export([str(run), "--out", str(tmp_path / "global.pt")]) == 0
    assert "6 tensors" in (said := capsys.readouterr().out)
    assert "; its inputs are normalised by mean " in said


def test_natural_clients_of_a_loader_are_counted():
    settings = [word for word in MINE if word not in ("fed.clients=3", "data.fraction=1")]
    (output,) = toy.train_ok(1, *settings, "data.partition=natural", "--dry-run")
    assert "6 clients, natural" in output


def test_sequences_give_the_same_bits_on_ranks(tmp_path, monkeypatch):
    toy.write_module(tmp_path, "own_networks", MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    x = np.random.default_rng(0).integers(0, 20, (300, 7))
    data = toy.save_data(tmp_path / "words.npz", x_train=x, x_test=x[:100])
    arguments = toy.settings(data, "model.name=own_networks:Words", "scheme.name=fedhkd", "data.fraction=0.3")
    for size in (1, 3):
        toy.train_ok(size, *arguments, "--out", tmp_path / str(size))
    assert toy.rows(tmp_path / "1") == toy.rows(tmp_path / "3")
    logits = results.load(tmp_path / "1").model()(torch.from_numpy(x[:2]))
    assert logits.shape == (2, 10)


def test_a_token_beyond_the_embedding_is_told_in_a_line(tmp_path, monkeypatch):
    toy.write_module(tmp_path, "own_networks", MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    x = np.zeros((300, 7), np.int64)
    data = toy.save_data(tmp_path / "words.npz", x_train=x, x_test=np.where(np.arange(100)[:, None] == 99, 20, x[:100]))
    results = toy.train(2, *toy.settings(data, "model.name=own_networks:Words"), "--out", tmp_path / "run")
    [line] = toy.our_lines(result.output for result in results)
    assert [result.exit_code for result in results] == [2, 2]
    assert "forward on int64 sequences of shape (2, 7), all 20, raised IndexError: index out of range" in line


def test_half_and_half_is_what_bytes_have_always_been_normalised_by(tmp_path):
    """(x / 255 - .5) / .5, given as numbers: the same bits."""
    data = toy.save_data(tmp_path / "data.npz", 60, 20)
    for name, more in {"default": (), "given": ("data.mean=0.5", "data.std=0.5")}.items():
        toy.train_ok(1, *toy.settings(data, "scheme.name=fedavg", "fed.rounds=1", *more), "--out", tmp_path / name)
    assert toy.last_sha(tmp_path / "default") == toy.last_sha(tmp_path / "given")
    assert "input/mean" not in toy.metrics(tmp_path / "default")


def test_floats_are_trained_as_the_bytes_that_they_are(tmp_path):
    """x / 127.5 - 1 as float32, as they are: the bits of x as uint8."""
    data = toy.save_data(tmp_path / "bytes.npz", 60, 20)
    arrays = dict(np.load(data))
    real = {key: np.float32(1 / 127.5) * arrays[key].astype(np.float32) - 1 for key in ("x_train", "x_test")}
    np.savez(tmp_path / "floats.npz", **{**arrays, **real})
    for name, more in {"bytes": (), "floats": ("data.normalise=none",)}.items():
        settings = toy.settings(
            tmp_path / f"{name}.npz", "scheme.name=fedmd", "data.fraction=0.7", "fed.rounds=1", *more
        )
        toy.train_ok(2, *settings, "--out", tmp_path / name)
    assert toy.last_sha(tmp_path / "bytes") == toy.last_sha(tmp_path / "floats")


@pytest.mark.parametrize(
    "name, shape", [("small", (13, 40, 33)), ("resnet18", (2, 28, 28)), ("shufflenet_v2", (1, 32, 32))]
)
def test_the_first_layer_has_the_channels_of_the_data(name, shape):
    net = networks.build(ModelSettings(name=name, latent=8), 5, shape, 0).eval()
    feature, logits = net(torch.zeros(2, *shape))
    assert (feature.shape, logits.shape) == ((2, 8), (2, 5))


def test_two_channels_of_28_px_as_they_are_stored(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (60, 2, 28, 28), dtype=np.uint8)
    data = toy.save_data(tmp_path / "two.npz", 60, 20, x_train=x, x_test=x[:20])
    settings = toy.settings(
        data, "data.as_stored=true", "data.normalise=measured", "fed.rounds=1", "scheme.name=fedavg"
    )
    toy.train_ok(1, *settings, "--out", tmp_path / "run")
    found = toy.metrics(tmp_path / "run")
    assert found["image_shape"].tolist() == [2, 28, 28]
    assert found["input/std"] == pytest.approx((x / 255).std((0, 2, 3)), rel=1e-5)


def test_a_built_in_network_takes_no_rows(tmp_path):
    data = toy.save_data(tmp_path / "rows.npz", x_train=np.ones((300, 5)), x_test=np.ones((100, 5)))
    line = one_line(toy.train(2, *toy.settings(data), "--out", tmp_path / "run"))
    assert "model.name=small: takes images, and the data are rows; name a network of your own" in line
    assert not (tmp_path / "run").exists()
    line = one_line(toy.train(2, *MINE, "model.name=small", "--out", tmp_path / "run"))
    assert "model.name=small: takes images, and the data are rows" in line


def test_a_loader_is_called_once_on_a_node_and_gets_data_path(tmp_path, monkeypatch):
    text = "from examples.my_data import load as same\ndef load(path):\n    with open(path, 'a') as file:\n"
    toy.write_module(tmp_path, "counting_loader", text + "        file.write('read ')\n    return same()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    toy.train_ok(3, *MINE, "data.name=counting_loader:load", f"data.path={tmp_path / 'calls'}", "--dry-run")
    assert (tmp_path / "calls").read_text() == "read "


def test_a_loader_that_raises_ends_the_job_with_one_line(tmp_path, monkeypatch):
    toy.write_module(tmp_path, "raising_loader", "def load():\n    raise OSError('no network')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    line = one_line(toy.train(2, "data.name=raising_loader:load", *toy.SMALL, "--out", tmp_path / "run"))
    assert "raising_loader.py:2, in load: raise OSError('no network'): OSError: no network" in line


def test_a_loader_that_draws_other_data_on_another_node(tmp_path, monkeypatch):
    """Two nodes of one rank each."""
    text = "import os\nfrom examples.my_data import load as same\ndef load():\n    data = same()\n"
    toy.write_module(
        tmp_path, "drawing_loader", text + "    data['x_train'][0] += os.getpid() % 100_000\n    return data\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def patch(rank):
        from hkd_hpc.assembly import federation

        original = federation.node_copy

        def node_copy(settings, comm):
            comm.hosts, comm.local_rank, comm.local_size = ["a", "b"], 0, 1
            return original(settings, comm)

        federation.node_copy = node_copy

    results_ = toy.train(2, *MINE, "data.name=drawing_loader:load", "--out", tmp_path / "run", patch=patch)
    line = one_line(results_)
    assert "data.name=drawing_loader:load: ranks [1] have another data than rank 0 (content is " in line
    assert line.endswith("; a loader gives the same on every node")
