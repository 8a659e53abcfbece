"""The worked example of CONTRIBUTING.md: it is what is printed there, it is short, it runs, and it does what it
says.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import toy
from federation import Federation, same_model, save_images, settings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/my_scheme.py"
NAME = "examples.my_scheme:MyScheme"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    """As when the command is given in the project's folder."""
    monkeypatch.syspath_prepend(str(ROOT))


def test_it_is_printed_whole_and_has_fewer_than_forty_lines():
    text = EXAMPLE.read_text()
    assert f"```python\n{text}```" in (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) < 40


def test_without_its_adjustment_it_is_fedavg_bit_for_bit(data):
    for own, reference in zip(Federation(data, NAME, "scheme.tau=0").play(3), Federation(data, "fedavg").play(3)):
        assert same_model(own, reference)


def test_loss_by_hand(data):
    """z + tau (log(own + 1) - log(all + 1)), from round 2 on; counts of all clients from the message."""
    run = Federation(data, NAME, "scheme.tau=0.5")
    run.play(1)
    counts = [np.bincount(client.y_train.numpy(), minlength=10) for client in run.clients]
    assert run.message["count_C"].tolist() == sum(counts).tolist()
    seen, original = [], run.scheme.loss

    def noted(client, batch):
        _, logits = run.net(batch.x_BCHW)
        seen.append(
            (client.id, logits.detach().double().numpy(), batch.y_B.numpy(), original(client, batch)["cross_entropy"])
        )
        return original(client, batch)

    run.scheme.loss = noted
    run.play(1)
    client, logits, labels, value = seen[-1]
    logits = logits + 0.5 * (np.log(counts[client] + 1) - np.log(sum(counts) + 1))
    log_soft = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert value.item() == pytest.approx(-log_soft[np.arange(len(labels)), labels].mean(), rel=1e-5)


@pytest.mark.mpi
def test_its_command_runs_on_ranks_and_resumes_to_the_same_bits(data, tmp_path):
    arguments = settings(data, NAME, "fed.rounds=2")
    code, out, err = toy.mpirun(2, *arguments, "--out", tmp_path / "ranks", cwd=ROOT)
    assert code == 0, err
    toy.train_ok(1, *arguments, "--out", tmp_path / "one")
    assert toy.rows(tmp_path / "ranks") == toy.rows(tmp_path / "one")
    assert f"{NAME} on file: 3 clients" in out


def test_a_wrong_setting_of_it_is_rejected_like_any_other(data, tmp_path):
    (result,) = toy.train(1, *settings(data, NAME, "scheme.tau=-1"), "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert "scheme.tau=-1: not allowed; scheme.tau must be a number >= 0 and <= 100" in result.output
