"""What a run leaves: metrics.h5 at any moment, hashes and bytes that can be recomputed, names and meanings, models."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import toy

from hkd_hpc.export import main as export_main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.fixture(scope="module")
def fedhkd(tmp_path_factory, data):
    """Three ranks, three clients, two rounds of FedHKD."""
    folder = tmp_path_factory.mktemp("fedhkd") / "run"
    toy.train_ok(3, *toy.settings(data, "scheme.name=fedhkd", "scheme.nu=0.05"), "--out", folder)
    return folder


def net_of(folder):
    from hkd_hpc import config
    from hkd_hpc.models import networks

    settings = config.from_json(toy.metrics(folder)["config_json"])
    return networks.build(settings.model, 10, (3, 32, 32), settings.run.seed)


def predictions(net, pixels):
    """Class of each image, eval mode, all in one batch."""
    net.eval()
    with torch.no_grad():
        return net(torch.from_numpy(pixels).float() / 127.5 - 1)[1].argmax(1).numpy()


def accuracy_of(folder, data, tensors):
    """Accuracy of a state dict on the official test split, computed here."""
    net, arrays = net_of(folder), np.load(data)
    net.load_state_dict({name: torch.as_tensor(array) for name, array in tensors.items()})
    return float((predictions(net, arrays["x_test"]) == arrays["y_test"]).mean())


def test_metrics_can_be_read_at_any_moment(tmp_path, data):
    """A reader opens the file again and again, and keeps every handle open, while a run goes on."""
    folder, kept, seen, problems, done = tmp_path / "run", [], set(), [], threading.Event()

    def read():
        while not done.is_set():
            if not (folder / "metrics.h5").exists():
                continue
            try:
                file = h5py.File(folder / "metrics.h5", "r")
                kept.append(file)
                columns = [node for node in file["rounds"].values() if isinstance(node, h5py.Dataset)]
                lengths = {len(column[()]) for column in columns}
                assert len(lengths) == 1
                assert all(len(sha) == 64 for sha in file["rounds/weights_sha256"])
                seen.update(lengths)
            except Exception as error:
                problems.append(repr(error))
            done.wait(0.01)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        toy.train_ok(2, *toy.settings(data, "fed.rounds=8"), "--out", folder)
    finally:
        done.set()
        reader.join()
    assert not problems, problems[:3]
    assert len(seen) >= 2
    assert toy.rounds_done(folder) == 8


def test_sha_can_be_recomputed_from_the_checkpoint(fedhkd):
    tensors = toy.state_dict(fedhkd, 2, net_of(fedhkd).state_dict())
    assert toy.sha256_by_rule(tensors) == toy.last_sha(fedhkd)
    assert tensors["extractor.stage1.1.num_batches_tracked"].dtype == np.int64
    first = toy.state_dict(fedhkd, 1, net_of(fedhkd).state_dict())
    assert toy.sha256_by_rule(first) == toy.metrics(fedhkd)["rounds/weights_sha256"][0]


def test_sha_is_an_hdf5_string(fedhkd):
    with h5py.File(fedhkd / "metrics.h5", "r") as file:
        column = file["rounds/weights_sha256"]
        assert h5py.check_string_dtype(column.dtype)
        assert column.shape == (2,)
        assert all(set(value) <= set("0123456789abcdef") for value in column.asstr()[()])


# the small net with latent 8: conv 3*32*9 + 32*64*9 + 64*128*9 = 93,024, BatchNorm 2 * (32 + 64 + 128) = 448 parameters
# and 448 running statistics, linear 128*8 + 8 = 1,032, classifier 8*10 + 10 = 90
FLOATS = 93_024 + 448 + 448 + 1_032 + 90


def test_payload_of_fedavg(tmp_path, data):
    toy.train_ok(
        1, *toy.settings(data, "scheme.name=fedavg", "fed.clients=4", "fed.participation=.5"), "--out", tmp_path / "run"
    )
    found = toy.metrics(tmp_path / "run")
    assert found["rounds/payload_bytes/weights_up"].tolist() == [2 * 4 * FLOATS] * 2
    assert found["rounds/payload_bytes/weights_down"].tolist() == [2 * 4 * FLOATS] * 2
    assert found["rounds/payload_bytes/knowledge_up"].tolist() == [0, 0]
    assert found["rounds/payload_bytes/knowledge_down"].tolist() == [0, 0]


def test_payload_of_fedhkd(fedhkd):
    """Up: classes that a client may share times (8 + 10 + 1) floats; down: classes that anyone shares, (8 + 10)."""
    found = toy.metrics(fedhkd)
    counts = found["partition/train_count"]
    shared = (counts > 0) & (counts >= 0.05 * counts.sum(1, keepdims=True) - 1e-9)
    assert 0 < shared.sum() < shared.size
    assert found["rounds/payload_bytes/knowledge_up"].tolist() == [4 * int(shared.sum()) * 19] * 2
    assert found["rounds/payload_bytes/knowledge_down"].tolist() == [4 * int(shared.any(0).sum()) * 18 * 3] * 2
    assert found["rounds/payload_bytes/weights_up"].tolist() == [3 * 4 * FLOATS] * 2


def test_wire_bytes(tmp_path, data, fedhkd):
    wire = {name: values for name, values in toy.metrics(fedhkd).items() if name.startswith("rounds/wire_bytes/")}
    # 2 client ranks each hand the flat vector over as float64 behind the total weight, one relays the float32 mean to
    # rank 0; slots are padded to 16 floats
    padded = FLOATS + 8 + 6
    assert wire["rounds/wire_bytes/weights"].tolist() == [2 * 8 * (padded + 1) + 4 * padded] * 2
    for kind in ("knowledge_up", "knowledge_down", "control"):
        assert (wire[f"rounds/wire_bytes/{kind}"] > 0).all(), kind
    toy.train_ok(1, *toy.settings(data), "--out", tmp_path / "alone")
    alone = {
        name: values
        for name, values in toy.metrics(tmp_path / "alone").items()
        if name.startswith("rounds/wire_bytes/")
    }
    assert alone
    assert all((values == 0).all() for values in alone.values())


def test_every_accuracy_says_what_it_is(fedhkd):
    with h5py.File(fedhkd / "metrics.h5", "r") as file:
        names = []
        file.visit(lambda name: names.append(name) if "accuracy" in name and not name.startswith("summary") else None)
        assert sorted(names) == [
            "clients/local_test_accuracy",
            "clients/local_test_balanced_accuracy",
            "clients/local_val_accuracy",
            "rounds/global_test_accuracy",
            "rounds/global_test_balanced_accuracy",
            "rounds/global_val_accuracy",
            "rounds/local_test_accuracy",
            "rounds/local_test_accuracy_std",
            "rounds/local_test_accuracy_worst_tenth",
            "rounds/local_test_balanced_accuracy",
            "rounds/local_val_accuracy",
        ]
        for name in names:
            assert {"model", "data", "moment", "clients", "unit"} <= set(file[name].attrs), name
        for name in ("clients/local_test_n", "rounds/local_test_n", "rounds/global_test_n"):
            assert (file[name][()] > 0).all()
        assert file["rounds/wall_s"].attrs["unit"] == "s"
        assert file["clients/train_s"].attrs["unit"] == "s"
        assert (file["clients/train_s"][()] > 0).all()
        assert (file["rounds/seconds/save"][()] > 0).all()
        assert file["rounds/seconds/save"].attrs["unit"] == "s"


def test_local_accuracy_is_weighted_by_images(fedhkd):
    found = toy.metrics(fedhkd)
    weights = found["clients/local_test_n"]
    expected = (found["clients/local_test_accuracy"] * weights).sum(1) / weights.sum(1)
    np.testing.assert_allclose(found["rounds/local_test_accuracy"], expected, atol=1e-12)


def test_the_partition_is_stored(fedhkd, data):
    found, labels = toy.metrics(fedhkd), np.load(data)["y_train"]
    train = np.split(found["partition/train_index"], found["partition/train_offset"][1:-1])
    assert [np.bincount(labels[index], minlength=10).tolist() for index in train] == found[
        "partition/train_count"
    ].tolist()
    everything = np.concatenate([found["partition/train_index"], found["partition/test_index"]])
    assert len(set(everything.tolist())) == len(everything) == 300
    assert len(found["partition/sha256"]) == 64
    assert len(found["partition/val_index"]) == 0
    assert found["partition/val_offset"].tolist() == [0] * 4


def test_validation_images_are_stored_and_shown(tmp_path, data):
    """100 images a client: 25 tested, floor(.2 * 75) = 15 held out, 60 trained on."""
    arguments = toy.settings(data, "data.partition=iid", "data.val_fraction=.2", "fed.rounds=1")
    toy.train_ok(1, *arguments, "--out", tmp_path / "run")
    found = toy.metrics(tmp_path / "run")
    for part, size in (("train", 60), ("val", 15), ("test", 25)):
        assert found[f"partition/{part}_offset"].tolist() == [0, size, 2 * size, 3 * size]
    everything = np.concatenate([found[f"partition/{part}_index"] for part in ("train", "val", "test")])
    assert sorted(everything.tolist()) == list(range(300))
    lines = toy.train_ok(1, *arguments, "--dry-run")[0].splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("client  rank  train   val  test"))
    assert [line.split()[2:5] for line in lines[row + 1 : row + 4]] == [["60", "15", "25"]] * 3


def test_only_rank_0_writes_files(tmp_path, data):
    def patch(rank):
        if rank == 0:
            return
        from hkd_hpc.store import atomic, folder, tree

        def reject(*_, **__):
            raise AssertionError("a client rank writes")

        folder.save_tree = tree.save_tree = folder.replace_text = atomic.replace_file = reject

    toy.train_ok(3, *toy.settings(data), "--out", tmp_path / "run", patch=patch)
    assert sorted(toy.file_hashes(tmp_path / "run")) == [
        "checkpoints/round_0001.h5",
        "checkpoints/round_0002.h5",
        "config.json",
        "log.txt",
        "metrics.h5",
    ]


@pytest.mark.parametrize("phase", ["training", "weights", "evaluation"])
def test_no_file_of_data_or_of_the_run_is_open_while_the_ranks_work(tmp_path, phase):
    """So no process that a rank forks can share one: not the data (HDF5 here), not a file that is being written."""
    with np.load(toy.save_data(tmp_path / "data.npz")) as arrays, h5py.File(tmp_path / "data.h5", "w") as file:
        for name in arrays:
            file[name] = arrays[name]

    def look():
        links = []
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the one through which we look is gone
                links.append(os.readlink(link))
        print(f"open: {[link for link in links if link.startswith(str(tmp_path))]}")

    outputs = toy.train_ok(
        2,
        *toy.settings(tmp_path / "data.h5"),
        "--out",
        tmp_path / "run",
        patch=lambda rank: toy.on_place(2, phase, look),
    )
    told = [line for output in outputs for line in output.splitlines() if line.startswith("open: ")]
    assert told
    assert set(told) == {"open: []"}


# ---- one client, one round


@pytest.fixture(scope="module")
def single(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("single") / "run"
    toy.train_ok(
        2, *toy.settings(data, "scheme.name=fedavg", "fed.clients=1", "fed.rounds=1", "train.epochs=6"), "--out", folder
    )
    return folder


def export(folder, path, *more):
    subprocess.run([sys.executable, "-m", "hkd_hpc.export", folder, "--out", path, *more], check=True, cwd=toy.PROJECT)
    return torch.load(path, weights_only=True)


def test_the_aggregate_of_one_client_is_its_model(single):
    own = toy.checkpoint(single, 1)["client_states/0/model"]
    tensors = toy.state_dict(single, 1, net_of(single).state_dict())
    start = 0
    net = net_of(single)
    parameters = [name for name, _ in net.named_parameters()]
    for name in parameters + [name for name, tensor in net.named_buffers() if tensor.is_floating_point()]:
        tensor = tensors[name].reshape(-1)
        np.testing.assert_allclose(own[start : start + len(tensor)], tensor, rtol=1e-7, atol=1e-11, err_msg=name)
        start += -(-len(tensor) // 16) * 16
    assert start == len(own)


def test_global_accuracy_is_that_of_the_exported_model(single, data, tmp_path):
    """It is the aggregate that was tested: the same number comes out of the exported file, by other code."""
    recorded = toy.metrics(single)["rounds/global_test_accuracy"][-1]
    assert recorded > 0.5
    exported = export(single, tmp_path / "global.pt")
    assert accuracy_of(single, data, exported) == recorded
    constant = {name: torch.full_like(tensor, 1) for name, tensor in exported.items()}
    assert accuracy_of(single, data, constant) == 0.1


def test_weights_set_to_a_constant_after_the_average_change_the_accuracy(tmp_path, data):
    def patch(rank):
        from hkd_hpc.aggregate import FixedPointSum

        original = FixedPointSum.mean_into

        def mean_into(self, out_V, summed, may_be_empty):
            weight = original(self, out_V, summed, may_be_empty)
            out_V.fill_(0.5)
            return weight

        FixedPointSum.mean_into = mean_into

    toy.train_ok(
        1,
        *toy.settings(data, "fed.clients=1", "fed.rounds=1", "train.epochs=6"),
        "--out",
        tmp_path / "run",
        patch=patch,
    )
    assert toy.metrics(tmp_path / "run")["rounds/global_test_accuracy"][-1] == 0.1


# ---- export

PLAIN = """
import sys
import numpy as np, torch
from torch import nn
assert not any(name.startswith("hkd_hpc") for name in sys.modules)
layers = {}
for stage, (inputs, outputs) in enumerate(((3, 32), (32, 64), (64, 128)), 1):
    convolution = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False)
    layers[f"stage{stage}"] = nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())
layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(128, 8))
net = nn.Module()
net.extractor = nn.Sequential()
for name, layer in layers.items():
    net.extractor.add_module(name, layer)
net.classifier = nn.Linear(8, 10)
net.load_state_dict(torch.load(sys.argv[1], weights_only=True))
net.eval()
data = np.load(sys.argv[2])
x, y = torch.from_numpy(data["x"]).float() / 127.5 - 1, torch.from_numpy(data["y"])
print(int((net.classifier(net.extractor(x)).argmax(1) == y).sum()))
"""


def correct_elsewhere(folder, model, x, y):
    """Number of correct predictions of a plain net that loads `model` in a process without this package."""
    (folder / "plain.py").write_text(PLAIN)
    np.savez(folder / "images.npz", x=x, y=y)
    ran = subprocess.run(
        [
            sys.executable,
            "-P" if sys.version_info >= (3, 11) else "-s",
            folder / "plain.py",
            model,
            folder / "images.npz",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


def test_exported_models_load_without_this_package(tmp_path, data, fedhkd):
    arrays, found = np.load(data), toy.metrics(fedhkd)
    export(fedhkd, tmp_path / "global.pt")
    correct = correct_elsewhere(tmp_path, tmp_path / "global.pt", arrays["x_test"], arrays["y_test"])
    assert correct / 100 == found["rounds/global_test_accuracy"][-1]
    export(fedhkd, tmp_path / "client.pt", "--client", "1")
    begin, end = found["partition/test_offset"][1:3]
    index = found["partition/test_index"][begin:end]
    correct = correct_elsewhere(tmp_path, tmp_path / "client.pt", arrays["x_train"][index], arrays["y_train"][index])
    assert correct / len(index) == found["clients/local_test_accuracy"][-1, 1]


def test_an_export_writes_over_a_file_with_force_alone(tmp_path, fedhkd, capsys):
    out = tmp_path / "global.pt"
    out.write_text("mine")
    assert export_main([str(fedhkd), "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"hkd_hpc: --out {out}: is there already; ")
    assert out.read_text() == "mine"
    assert export_main([str(fedhkd), "--out", str(out), "--force"]) == 0
    assert torch.load(out, weights_only=True).keys() == net_of(fedhkd).state_dict().keys()


def test_an_export_of_a_client_that_is_not_there_names_it(tmp_path, fedhkd, capsys):
    assert export_main([str(fedhkd), "--out", str(tmp_path / "client.pt"), "--client", "30"]) == 2
    assert capsys.readouterr().err.startswith(f"hkd_hpc: {fedhkd}: no model of client 30: round ")


def test_exported_dtypes_are_those_of_the_model(tmp_path, fedhkd):
    exported, wanted = export(fedhkd, tmp_path / "global.pt"), net_of(fedhkd).state_dict()
    assert {name: tensor.dtype for name, tensor in exported.items()} == {name: t.dtype for name, t in wanted.items()}


# ---- a user's own model

OWN = '''
import torch
from torch import nn


class Own(nn.Module):
    """A frozen layer, two layers that share their weight, a bool, an int32 and a float scalar buffer, no BatchNorm."""

    def __init__(self, classes, latent):
        super().__init__()
        self.frozen = nn.Conv2d(3, 4, 8, stride=8)
        self.frozen.weight.requires_grad_(False)
        self.mix = nn.Linear(64, 64)
        self.again = nn.Linear(64, 64)
        self.again.weight = self.mix.weight
        self.latent = nn.Linear(64, latent)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.classifier = nn.Linear(latent, classes)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("version", torch.tensor(3, dtype=torch.int32))

    def forward(self, x):
        hidden = torch.relu(self.frozen(x)).flatten(1)
        feature = self.latent(torch.relu(self.again(torch.relu(self.mix(hidden))))) * self.scale
        return feature, self.classifier(feature)
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    toy.write_module(tmp_path, "own_model", OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    return "model.name=own_model:Own"


def own_net(folder):
    import own_model

    from hkd_hpc.common.rng import torch_seed

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(0, "initial weights"))
        return own_model.Own(10, 8)


def test_a_users_own_model(tmp_path, data, own):
    """From training on two layouts to a state dict that its own class takes."""
    for size in (1, 3):
        toy.train_ok(size, *toy.settings(data, own), "--out", tmp_path / str(size))
    assert toy.rows(tmp_path / "1") == toy.rows(tmp_path / "3")
    stored, start = toy.checkpoint(tmp_path / "3", 2), own_net(tmp_path).state_dict()
    np.testing.assert_allclose(stored["global/frozen.weight"], start["frozen.weight"].numpy(), atol=1e-10)
    assert not np.allclose(stored["global/mix.weight"], start["mix.weight"].numpy(), atol=1e-4)
    assert stored["global/mask"].tolist() == [True, False, True]
    assert stored["global/mask"].dtype == bool
    assert stored["global/version"] == 3
    assert stored["global/version"].dtype == np.int32


def test_a_users_own_model_leaves_as_a_state_dict_it_can_load(tmp_path, data, own):
    toy.train_ok(1, *toy.settings(data, own), "--out", tmp_path / "run")
    for more in ([], ["--client", "0"]):
        exported = export(tmp_path / "run", tmp_path / f"own{len(more)}.pt", *more)
        net = own_net(tmp_path)
        net.load_state_dict(exported)  # strict: the second name of a shared weight must be there too
        assert {name: t.dtype for name, t in exported.items()} == {
            name: t.dtype for name, t in net.state_dict().items()
        }


def test_a_users_own_model_resumes(tmp_path, data, own):
    import signal

    arguments = toy.settings(data, own, "fed.rounds=3")
    toy.train_ok(1, *arguments, "--out", tmp_path / "whole")

    def patch(rank):
        toy.note_pid(tmp_path / "pids", 2)
        if rank == 0:
            toy.on_place(2, "message", lambda: toy.kill_all(tmp_path / "pids"))

    results = toy.train(2, *arguments, "--out", tmp_path / "run", patch=patch)
    assert {result.signal for result in results} == {signal.SIGKILL}
    toy.train_ok(3, "--resume", "--out", tmp_path / "run")
    assert toy.rows(tmp_path / "run") == toy.rows(tmp_path / "whole")
