"""The same bits whatever the layout: number of ranks, sampling, unequal clients, logging, checkpoints, transport."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import subprocess

import numpy as np
import pytest
import toy

from hkd_hpc.models import networks
from hkd_hpc.models.settings import ModelSettings
from hkd_hpc.store.tree import load_tree

UNEQUAL = (5, 40, 17, 64, 30)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    return toy.save_natural(tmp_path_factory.mktemp("data") / "unequal.npz", UNEQUAL)


def natural(path, *more):
    return toy.settings(path, "data.partition=natural", f"fed.clients={len(UNEQUAL)}", *more)


def compare(folder, sizes, arguments):
    """All sizes give the rows of one rank."""
    for size in sizes:
        toy.train_ok(size, *arguments, "--out", folder / str(size))
    expected = toy.rows(folder / str(sizes[0]))
    assert len(expected["rounds/weights_sha256"][-1]) == 64
    for size in sizes[1:]:
        assert toy.rows(folder / str(size)) == expected, size
    return expected


@pytest.mark.parametrize("scheme", ["fedavg", "fedhkd", "fedhkd_star"])
def test_same_rows_on_any_number_of_ranks(tmp_path, data, scheme):
    sizes = (1, 2, 3, 4, 11) if scheme == "fedhkd" else (1, 3)
    arguments = toy.settings(data, f"scheme.name={scheme}", "fed.rounds=3", "data.beta=0.3")
    rows = compare(tmp_path, sizes, arguments)
    if scheme != "fedavg":
        assert all(value > 0 for value in rows["rounds/loss/soft"][1:]), (
            "knowledge must be in use for this to mean much"
        )


def test_taps_that_no_image_meets_stay_as_they_began_on_any_number_of_ranks(tmp_path, data):
    """Neither trained nor averaged: on one pixel 8 of 9 taps of a 3 x 3 convolution see padding alone."""
    begun = dict(networks.build(ModelSettings(name="resnet18", latent=8), 3, (3, 32, 32), 0).named_parameters())
    compare(
        tmp_path, (1, 3), toy.settings(data, "model.name=resnet18", "model.latent=8", "fed.clients=4", "fed.rounds=2")
    )
    weight = "extractor.layer4.1.conv2.weight"
    kept = load_tree(tmp_path / "3" / "checkpoints" / "round_0002.h5")["global"][weight]
    changed_YX = (kept != begun[weight].detach().numpy()).any((0, 1))
    assert changed_YX.tolist() == [[False] * 3, [False, True, False], [False] * 3]


def test_schemes_differ_and_noise_matters(tmp_path, data):
    for name, more in {
        "fedavg": ["scheme.name=fedavg"],
        "fedhkd": ["scheme.name=fedhkd"],
        "star": ["scheme.name=fedhkd_star"],
        "quiet": ["scheme.name=fedhkd", "scheme.sigma=0"],
    }.items():
        toy.train_ok(1, *toy.settings(data, *more), "--out", tmp_path / name)
    assert len({toy.last_sha(folder) for folder in tmp_path.iterdir()}) == 4


def test_sampled_clients(tmp_path, data):
    rows = compare(tmp_path, (1, 3, 4), toy.settings(data, "fed.participation=.5", "fed.clients=4", "fed.rounds=3"))
    assert rows["rounds/clients_sampled"] == [2, 2, 2]
    taken = [[value is not None for value in row] for row in rows["clients/train_n"]]
    assert [sum(row) for row in taken] == [2, 2, 2]
    assert [[v is not None for v in row] for row in rows["clients/local_test_accuracy"]] == taken


def test_unequal_natural_clients(tmp_path, unequal):
    rows = compare(tmp_path, (1, 3, 5), natural(unequal))
    assert rows["clients/train_n"][0] == list(map(float, UNEQUAL))
    assert rows["rounds/train_n"] == [sum(UNEQUAL)] * 2


def test_a_client_without_data(tmp_path):
    """Its only image lies in the public set, by the seed; it takes part with weight 0."""
    from hkd_hpc.data.partition import Labels, Rule, make_partition

    ids = np.repeat(np.arange(4), (1, 60, 50, 89))
    labels = np.arange(200) % 10

    def sizes(seed):
        rule = Rule(clients=4, kind="natural", seed=seed, fraction=0.5, public_fraction=0.3)
        made = make_partition(Labels(labels, labels, 10, client_train=ids), rule)
        return [len(index) for index in made.train]

    seed = next(seed for seed in range(100) if sizes(seed)[0] == 0)
    data = toy.save_data(tmp_path / "data.npz", 200, 40, client_train=ids)
    rows = compare(
        tmp_path,
        (1, 2, 5),
        toy.settings(
            data,
            "data.partition=natural",
            "fed.clients=4",
            "data.fraction=.5",
            "data.public_fraction=.3",
            f"data.partition_seed={seed}",
        ),
    )
    assert [row[0] for row in rows["clients/train_n"]] == [0, 0]
    assert [row[0] for row in rows["clients/status"]] == [2, 2]
    assert rows["rounds/train_n"] == [sum(sizes(seed))] * 2


def test_logging_checkpoints_and_kept_models_change_no_weight(tmp_path, data):
    arguments = toy.settings(data, "fed.rounds=4")
    toy.train_ok(3, *arguments, "--out", tmp_path / "usual")
    toy.train_ok(
        3,
        *arguments,
        "run.evaluate_every=3",
        "run.checkpoint_every=3",
        "run.client_models=false",
        "--out",
        tmp_path / "rarely",
    )
    usual, rarely = toy.rows(tmp_path / "usual"), toy.rows(tmp_path / "rarely")
    assert usual["rounds/weights_sha256"] == rarely["rounds/weights_sha256"]
    assert [value is not None for value in rarely["rounds/global_test_accuracy"]] == [False, False, True, True]
    assert rarely["rounds/global_test_accuracy"][2:] == usual["rounds/global_test_accuracy"][2:]


@pytest.mark.mpi
def test_mpi_and_gloo_give_the_same_bits(tmp_path, data):
    arguments = toy.settings(data, "scheme.name=fedhkd")
    code, out, err = toy.mpirun(3, *arguments, "comm.backend=mpi", "--out", tmp_path / "mpi")
    assert code == 0, out + err
    assert "weights by mpi" in out
    outputs = toy.train_ok(3, *arguments, "comm.backend=gloo", "--out", tmp_path / "gloo")
    assert "weights by gloo" in outputs[0]
    assert toy.rows(tmp_path / "mpi") == toy.rows(tmp_path / "gloo")


CLONE_NEWNS = 0x20000  # of linux/sched.h: mounts of its own


def become_another_machine(boot_id):
    """This process sees another boot id and memory disk than the others, under the same host name."""
    assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    for mount in (
        ("--make-rprivate", "/"),
        ("-t", "tmpfs", "tmpfs", "/dev/shm"),
        ("--bind", boot_id, "/proc/sys/kernel/random/boot_id"),
    ):
        subprocess.run(["mount", *mount], check=True)


@pytest.mark.skipif(
    bool(subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode), reason="mounting is not allowed"
)
def test_machines_of_one_name_share_no_copy_of_the_data(tmp_path, data):
    """As with clones of one image: rank 2 is alone on the second machine."""
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("another boot\n")
    arguments = toy.settings(data, "privacy.secure_sum=true", "run.client_models=false")
    [told, *_] = toy.train_ok(
        3,
        *arguments,
        "--out",
        tmp_path / "two",
        patch=lambda rank: rank == 2 and become_another_machine(boot_id),
    )
    assert "3 ranks on 2 hosts, " in told
    assert f"cpu on {socket.gethostname()}/another boot" in told
    assert "under masks" in told
    assert "all ranks are on one host" not in told
    toy.train_ok(1, *arguments, "--out", tmp_path / "one")
    assert toy.rows(tmp_path / "two") == toy.rows(tmp_path / "one")


def test_each_client_lives_on_one_rank(tmp_path, data, unequal):
    toy.train_ok(3, *natural(unequal), "--out", tmp_path / "unequal")
    # largest first, to the rank with the least work: 64 -> 1, 40 -> 2, 30 -> 2, 17 -> 1, 5 -> 2 (70 against 81)
    assert toy.metrics(tmp_path / "unequal")["clients/rank"].tolist() == [2, 2, 1, 1, 2]
    toy.train_ok(4, *toy.settings(data), "--out", tmp_path / "equal")
    assert toy.metrics(tmp_path / "equal")["clients/rank"].tolist() == [1, 2, 3]


def test_every_client_trains_once_a_round(tmp_path, data):
    toy.train_ok(
        3, *toy.settings(data), "--out", tmp_path / "run", patch=lambda rank: toy.count_training(tmp_path / "log")
    )
    assert toy.trained(tmp_path / "log") == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


def test_a_net_without_counters_in_several_ranks(tmp_path, data):
    """FedAvg with GroupNorm has an empty message."""
    compare(tmp_path, (1, 3), toy.settings(data, "scheme.name=fedavg", "model.norm=group"))


def test_grey_images_of_28_pixels(tmp_path):
    y = np.arange(100) % 10
    data = toy.save_data(
        tmp_path / "grey.npz", 100, 40, x_train=toy.images(y, 1, 28)[:, 0], x_test=toy.images(y[:40], 2, 28)[:, 0]
    )
    compare(tmp_path, (1, 2), toy.settings(data))


def _anonymous_bytes():
    """What this process has in memory of its own, without files; what malloc keeps of freed arrays is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous:"))


def _print_growth_until_the_start(rank):
    """Once this rank has its clients' images and before it trains: print how much its memory has grown, and end.

    Growth of this rank alone: memory that ranks share with the test that forked them, or with each other, would count
    as private whenever another one has just let go of it, or has not yet mapped it.
    """
    from hkd_hpc import run

    before_bytes = _anonymous_bytes()

    def start(part, *_):
        part.comm.at(None, "start")
        print("grown", _anonymous_bytes() - before_bytes)
        part.comm.agree()
        os._exit(0)

    run.start = start


def _grown_bytes(folder, train):
    """Of all ranks of a job whose clients have all of `train` images."""
    path = folder / f"{train}.npz"
    noise = np.random.default_rng(0).integers(0, 256, (train, 3, 32, 32), np.uint8)
    np.savez(path, x_train=noise, y_train=np.arange(train) % 10, x_test=noise[:100], y_test=np.arange(100) % 10)
    results = toy.train(
        3, *toy.settings(path, "fed.clients=2"), "--out", folder / f"run{train}", patch=_print_growth_until_the_start
    )
    lines = [line for result in results for line in result.output.splitlines() if line.startswith("grown")]
    assert len(lines) == 3, results
    return sum(int(line.split()[1]) for line in lines)


def test_the_ranks_hold_each_image_once(tmp_path):
    """18,000 images more are 55 MB more of memory in all ranks together: no rank keeps a second copy."""
    grown = _grown_bytes(tmp_path, 20_000) - _grown_bytes(tmp_path, 2_000)
    assert 0.8 < grown / (18_000 * 3 * 32 * 32) < 1.4
