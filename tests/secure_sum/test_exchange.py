"""Masked sums between real ranks: what travels, and whole runs with the bits of unmasked ones."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest
import torch
import toy

from hkd_hpc.comm import World
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.config import resolve
from hkd_hpc.protection.masking import require_enough_clients
from hkd_hpc.secure_sum.exchange import SecureSum
from tools.forked_ranks import run_rank_values, run_ranks

RANK_OF = [1, 1, 2, 2, 3, 3]  # of each client
LENGTHS = [40_001, 1]
MOST = 2**53 // len(RANK_OF)
DELIVERING = ([0, 1, 2, 3, 4, 5], [0, 2, 3, 4], [0, 1, 4, 5])  # one after the other


def plain_of(client: int, length: int) -> np.ndarray:
    """Whole numbers in float64, small ones and the largest."""
    random = np.random.default_rng(client)
    numbers = random.integers(-1000, 1000, length).astype(np.float64)
    numbers[: length // 2] = random.integers(-MOST, MOST, length // 2)
    return numbers


def in_pieces(numbers: np.ndarray, size: int = 1 << 14):
    return iter(torch.from_numpy(numbers.copy()).split(size))


def with_sums(rank, action, *arguments):
    """What each forked rank does: open the world, connect, act."""
    with World.open(timeout_s=60) as world:
        comm = world.connect(device="cpu")
        action(SecureSum(comm, RANK_OF, ["small"] * len(RANK_OF)), *arguments)


def sum_all(sums: SecureSum, folder) -> None:
    """Three cohorts, two sums each; what goes to the transport and what comes out are kept as files."""
    comm, transport, handed = sums.comm, sums.comm._sum, []

    def noting(piece: torch.Tensor) -> None:
        handed.append(piece.clone())
        transport(piece)

    comm._sum = noting
    for turn, delivering in enumerate(DELIVERING):
        sums.agree_on_keys(turn, range(len(RANK_OF)))
        here = [client for client in delivering if RANK_OF[client] == comm.rank]
        sums.make_masks(LENGTHS, here)
        plain = [sum((plain_of(client, length) for client in here), np.zeros(length)) for length in LENGTHS]
        for own in plain:
            sums.add_masked(in_pieces(own))
        sums.unmask(turn, delivering if comm.rank == 0 else [])
        assert sums._party._shares == {}  # nobody can rebuild a key any more
        for number, own in enumerate(plain):
            handed.clear()
            found = [piece.clone() for piece in sums.summed(len(own))]
            if comm.rank:
                name = folder / f"{turn}_{number}_{comm.rank}.npz"
                np.savez(name, sent=torch.cat(handed), summed=torch.cat(found), plain=own)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """By (turn, number of the sum, rank): what was sent, summed, and plain."""
    folder = tmp_path_factory.mktemp("sums")
    run_rank_values(4, with_sums, sum_all, folder)
    keys = [tuple(map(int, path.stem.split("_"))) for path in folder.iterdir()]
    return {key: dict(np.load(folder / f"{'_'.join(map(str, key))}.npz")) for key in keys}


@pytest.mark.parametrize("turn", range(len(DELIVERING)))
@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_the_sum_is_exact_whoever_drops_out(files, turn, number):
    """Nobody, one on each of two ranks, and both on one rank; in every rank that delivers."""
    expected = sum(plain_of(client, LENGTHS[number]) for client in DELIVERING[turn])
    for rank in (1, 2, 3):  # a rank without a client that delivers gets the sum too
        found = files[turn, number, rank]["summed"]
        assert found.dtype == np.float64
        assert found.tobytes() == expected.tobytes()


@pytest.fixture(scope="module")
def sent(files):
    """(6, numbers): what each rank handed over in the cohorts in which all three deliver, the plain numbers beside."""
    each = [files[turn, 0, rank] for turn in (0, 1) for rank in (1, 2, 3)]
    return np.stack([one["sent"] for one in each]), np.stack([one["plain"] for one in each])


def test_what_is_handed_to_the_transport_shows_no_plain_number(sent):
    sent_N, plain_N = sent
    assert sent_N.dtype == np.int64
    assert not (sent_N == plain_N.astype(np.int64)).any()


def test_it_is_uniform(sent):
    """Chi-square of the highest and the lowest byte, 255 degrees of freedom: 400 is 6 standard deviations above."""
    for row in sent[0]:
        for byte in row.view(np.uint8).reshape(-1, 8)[:, [0, 7]].T:
            expected = len(byte) / 256
            assert ((np.bincount(byte, minlength=256) - expected) ** 2 / expected).sum() < 400


def test_it_does_not_correlate_with_the_plain_numbers_nor_with_other_ranks_nor_rounds(sent):
    """Of 40,001 numbers: .033 is 6.6 standard deviations. Each pair of three ranks and two rounds."""
    rows = np.concatenate([sent[0].astype(np.float64), sent[1]])
    correlation = np.corrcoef(rows)[:6]
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 0.033


def test_masks_differ_from_round_to_round(sent):
    masks = sent[0] - sent[1].astype(np.int64)
    assert len(np.unique(masks)) == masks.size


# ---- what is rejected


def unmask_with(sums: SecureSum, delivering, told_wrong_on: int) -> None:
    """One rank hears of another set than rank 0 sent."""
    sums.agree_on_keys(4, range(len(RANK_OF)))
    sums.make_masks(LENGTHS, [client for client, rank in enumerate(RANK_OF) if rank == sums.comm.rank])
    broadcast = sums.comm.broadcast

    def changed(block, kind):
        broadcast(block, kind)
        if sums.comm.rank == told_wrong_on:
            block[-1] ^= 1

    sums.comm.broadcast = changed
    with pytest.raises(RunError) as error:
        sums.unmask(4, delivering)
    print(error.value)
    sums.comm.agree()  # none leaves before all have said it


def test_ranks_that_are_told_different_things_all_reject_it():
    outputs = run_rank_values(4, with_sums, unmask_with, range(6), 1)
    text = "round 4: the ranks were told different things of who delivers to the masked sum\n"
    assert outputs == [text] * 4


def test_too_few_that_deliver_are_rejected_on_all_ranks():
    outputs = run_rank_values(4, with_sums, unmask_with, [0, 2, 5], 9)
    assert {output.partition(";")[0] for output in outputs} == {
        "round 4: 3 of 6 clients deliver, and privacy.secure_sum needs 4"
    }


def change_a_share(sums: SecureSum) -> None:
    """Rank 0, who routes the sealed shares, changes one."""
    gather = sums.comm.gather

    def changed(block, kind):
        blocks = gather(block, kind)
        if blocks is not None and blocks.shape[1] > 64:  # no public keys
            blocks[3, 5] ^= 1
        return blocks

    sums.comm.gather = changed
    sums.agree_on_keys(1, range(len(RANK_OF)))


def test_a_share_that_rank_0_changes_ends_the_job_with_one_line():
    results = run_ranks(4, with_sums, change_a_share)
    assert [result.exit_code for result in results] == [1] * 4
    output = "".join(result.output for result in results)
    assert output.count("hkd_hpc: ") == 1
    assert "the shares of party 3's key that party 1 got were changed on their way" in output


# ---- whole runs

RUN = (
    *("fed.clients=10", "fed.rounds=2", "fed.drop_rate=0.2", "run.client_models=false", "scheme.name=fedhkd"),
    "train.batchnorm=reestimate",
)
MASKED = "privacy.secure_sum=true"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz", 160, 40)


def arguments(data, folder, *more):
    return [*toy.settings(data, *RUN, *more), "--out", folder]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, data):
    """A run without masks, in one process: all rows but times and bytes."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    toy.train_ok(1, *arguments(data, folder))
    return toy.rows(folder)


@pytest.fixture(scope="module")
def masked(tmp_path_factory, data):
    """On 11 ranks, one for each client: (its folder, what rank 0 printed)."""
    folder = tmp_path_factory.mktemp("masked") / "run"
    return folder, toy.train_ok(11, *arguments(data, folder, MASKED))[0]


def test_a_masked_run_on_11_ranks_has_the_bits_of_an_unmasked_one(masked, plain):
    assert toy.rows(masked[0]) == plain


def test_some_clients_had_dropped_out(plain):
    """As the draw of this seed has it: else the tests here would show less than they say."""
    assert [sum(value is None for value in row) for row in plain["clients/local_test_accuracy"]] == [1, 2]


def test_a_masked_run_says_what_it_protects(masked):
    assert "privacy.secure_sum: weights are summed under masks, rank 0 sees their sum alone" in masked[1]
    assert "all ranks are on one host, whose owner can read them all" in masked[1]
    assert "every rank reads the data of all clients" in masked[1]


def test_in_one_process_it_says_that_it_protects_nothing(tmp_path, data, plain):
    [output] = toy.train_ok(1, *arguments(data, tmp_path / "run", MASKED))
    assert "privacy.secure_sum protects nothing here: all clients are in one process" in output
    assert toy.rows(tmp_path / "run") == plain


def test_a_masked_run_that_is_resumed_on_3_ranks_has_the_same_bits(tmp_path, masked, plain):
    folder = tmp_path / "run"
    shutil.copytree(masked[0], folder)
    (folder / "checkpoints/round_0002.h5").unlink()
    toy.train_ok(3, "--resume", "--out", folder)
    assert toy.rows(folder) == plain


@pytest.mark.mpi
def test_under_mpirun(tmp_path, data, plain):
    code, _, errors = toy.mpirun(3, *arguments(data, tmp_path / "run", MASKED))
    assert (code, errors) == (0, errors)
    assert toy.rows(tmp_path / "run") == plain


def test_too_few_survivors_end_the_job_with_one_line(tmp_path, data):
    results = toy.train(3, *arguments(data, tmp_path / "run", MASKED, "fed.drop_rate=0.9"))
    [line] = toy.our_lines(result.output for result in results)
    assert [result.exit_code for result in results] == [1, 1, 1]
    assert "clients deliver, and privacy.secure_sum needs 6; more clients a round" in line
    assert list((tmp_path / "run").glob("checkpoints/*")) == []


@pytest.mark.parametrize("more", [[], ["train.batchnorm=average"]], ids=["each round", "the end"])
def test_statistics_of_too_few_are_not_summed(tmp_path, data, more):
    """Those of the clients of rank 1, half of all, are beyond the limit: the sum would be of five others."""

    def patch(rank):
        from hkd_hpc.models import evaluate

        original = evaluate.reestimate_batch_norm

        def measured(net, x_uint8):
            original(net, x_uint8)
            net.extractor.stage1[1].running_var[0] = 1e6

        if rank == 1:
            evaluate.reestimate_batch_norm = measured

    results = toy.train(3, *arguments(data, tmp_path / "run", MASKED, "fed.drop_rate=0", *more), patch=patch)
    assert [result.exit_code for result in results] == [1, 1, 1]
    [line] = toy.our_lines(result.output for result in results)
    assert line.endswith(
        "BatchNorm's statistics within +-65,536, measured with the global weights: 5 of 10 clients deliver, and "
        "privacy.secure_sum needs 6; the warnings say which do not. Nothing of them was sent"
    )


@pytest.mark.parametrize(
    "more, text",
    [
        (["run.client_models=true"], "privacy.secure_sum=true: run.client_models=true sends each client's own model"),
        (["fed.participation=0.2"], "2 of fed.clients=10 clients a round (fed.participation=0.2), and a sum of fewer"),
        (["scheme.name=moon"], "with scheme.name=moon and train.batchnorm=reestimate a client's previous goes to"),
        (["train.batchnorm=local"], "with scheme.name=fedhkd and train.batchnorm=local a client's"),
        (["scheme.name=central"], "with scheme.name=central and train.batchnorm=reestimate a client's model goes to"),
    ],
)
def test_what_would_make_it_void_is_rejected(tmp_path, data, more, text):
    [result] = toy.train(1, *arguments(data, tmp_path / "run", MASKED, *more))
    [line] = toy.our_lines([result.output])
    assert result.exit_code == 2
    assert text in line


def test_an_architecture_of_two_clients_is_rejected():
    """Ten clients, five names assigned in turn: two clients have the second architecture."""
    asked = resolve(overrides=["model.names=small,shufflenet_v2,small,small,small", MASKED, "run.client_models=false"])
    member_of = [asked.model.member_of(client) for client in range(10)]
    with pytest.raises(UsageError, match="2 of fed.clients=10 clients with shufflenet_v2, and a sum of fewer than 3"):
        require_enough_clients(asked, list(range(10)), member_of)


def test_without_cryptography_one_line_says_what_to_install(tmp_path, data):
    [result] = toy.train(
        1, *arguments(data, tmp_path / "run", MASKED), patch=lambda rank: sys.modules.update(cryptography=None)
    )
    assert result.exit_code == 2
    assert toy.our_lines([result.output]) == [
        "hkd_hpc: privacy.secure_sum=true: cryptography is not installed; pip install 'hkd_hpc[privacy]'"
    ]
