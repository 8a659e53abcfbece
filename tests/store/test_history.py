"""The record of a run: one row a round, in a real file and back, every accuracy named in full; and what is printed."""

from __future__ import annotations

import math
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from hkd_hpc import config
from hkd_hpc.analysis import metrics
from hkd_hpc.assemble import NOWHERE
from hkd_hpc.console import messages
from hkd_hpc.quarantine import INVALID_WEIGHTS, OK, TOO_FEW_IMAGES
from hkd_hpc.server import Images, RoundResult, Server
from hkd_hpc.state.checkpoint import RoundState
from hkd_hpc.store.growing import GrowingTree
from hkd_hpc.store.history import NAN, History, client_column
from hkd_hpc.store.tree import load_tree, save_tree
from hkd_hpc.worker import report_type

SHA = "ab" * 32


def two_rounds() -> History:
    history = History(3)
    for round, accuracy in ((1, NAN), (2, 0.75)):
        history.append(
            {
                "round": round,
                "wall_s": 1.5 * round,
                "global_test_accuracy": accuracy,
                "global_test_n": 100,
                "local_test_accuracy": 0.5,
                "local_test_n": 20,
                "weights_sha256": SHA,
                "loss/cross_entropy": 1.25,
                "payload_bytes/weights_up": 4_000_000_000_000,
            },
            {"local_test_accuracy": np.array([0.5, NAN, 1.0]), "loss/soft": np.array([NAN, NAN, 0.25])},
        )
    return history


def test_round_trip_through_a_file(tmp_path):
    history = two_rounds()
    save_tree(tmp_path / "metrics.h5", history.tree())
    again = History.from_tree(load_tree(tmp_path / "metrics.h5"), 3)
    assert set(again.rounds) == set(history.rounds)
    assert set(again.clients) == set(history.clients)
    assert len(again) == 2
    for name, values in history.rounds.items():
        assert [type(v) for v in again.rounds[name]] == [type(v) for v in values], name
        np.testing.assert_array_equal(again.rounds[name], values)  # NaN equals NaN here
    for name, rows in history.clients.items():
        np.testing.assert_array_equal(np.stack(again.clients[name]), np.stack(rows))
    again.append(
        {name: values[-1] for name, values in again.rounds.items()},
        {name: rows[-1] for name, rows in again.clients.items()},
    )
    save_tree(tmp_path / "metrics.h5", again.tree())
    assert load_tree(tmp_path / "metrics.h5")["rounds"]["weights_sha256"].tolist() == [SHA] * 3


def test_plain_h5py_sees_rows_and_units(tmp_path):
    save_tree(tmp_path / "metrics.h5", two_rounds().tree())
    with h5py.File(tmp_path / "metrics.h5") as file:
        assert file["rounds/round"][:].tolist() == [1, 2]
        assert file["rounds/round"].dtype.kind == "i"
        assert file["rounds/weights_sha256"].asstr()[:].tolist() == [SHA, SHA]
        assert file["rounds/loss/cross_entropy"].attrs["unit"] == "nat"
        assert file["rounds/payload_bytes/weights_up"].attrs["unit"] == "B"
        assert file["rounds/payload_bytes/weights_up"][1] == 4_000_000_000_000
        assert file["rounds/wall_s"].attrs["unit"] == "s"
        assert file["clients/local_test_accuracy"].shape == (2, 3)
        assert file["clients/local_test_accuracy"].attrs["axes"] == "round, client"
        assert math.isnan(file["clients/local_test_accuracy"][0, 1])


def test_parts_of_the_tables():
    """A table without rows up to there is left out; one with no new rows keeps its columns."""
    history = two_rounds()
    history.finalize()
    history.add_event(round=3, client=1, what="weights rejected", tensor="a", value=NAN)
    assert history.tree(until=history.finalized).keys() == {"rounds", "clients"}
    new = history.tree(since={"rounds": 1, "clients": 1, "events": 1})
    assert new["rounds"]["round"].value.tolist() == [2]
    assert new["clients"]["loss"]["soft"].value.shape == (1, 3)
    assert new["events"].keys() == {"round", "client", "what", "tensor", "value"}
    assert len(new["events"]["what"]) == 0


def test_the_first_rejected_client_of_a_run_can_be_saved(tmp_path):
    """Its event is in the checkpoint's round, and not yet among the rows before."""
    history, rows = two_rounds(), GrowingTree(tmp_path / "rows.hdf5")
    history.finalize()
    for count in (0, 1, 1, 2):
        if count > history.finalized["events"]:
            history.add_event(round=3, client=1, what="weights rejected", tensor="a" * count, value=NAN)
            rows.save({}, lambda since: history.tree(since, history.finalized))  # not yet final
        history.finalize()
        rows.save({}, lambda since: history.tree(since, history.finalized))
        assert len(load_tree(tmp_path / "rows.hdf5").get("events", {"round": []})["round"]) == count


def test_clients_that_did_not_take_part_are_nan():
    np.testing.assert_array_equal(client_column(5, np.array([3, 0]), np.array([0.5, 7])), [7, NAN, NAN, 0.5, NAN])
    by_class = client_column(3, np.array([2]), np.array([[True, False]]))
    np.testing.assert_array_equal(by_class, [[NAN, NAN], [NAN, NAN], [1, 0]])
    assert by_class.dtype == np.float16


def test_a_run_that_an_older_version_began_gets_new_columns(tmp_path):
    """NaN in the rows that lack them, before and after."""
    save_tree(tmp_path / "metrics.h5", two_rounds().tree())
    history = History.from_tree(load_tree(tmp_path / "metrics.h5"), 3)
    row, client_row = (
        {name: values[-1] for name, values in columns.items()} for columns in (history.rounds, history.clients)
    )
    assert history.nonfinite("global_test_accuracy").tolist() == [False, False]
    history.set_last(global_test_nonfinite=3)
    new = {"global_test_nonfinite": 0, "global_val_nonfinite": 2, "global_test_correct_by_class": [5, 7]}
    new["global_test_undefined"] = "no test images"
    shared = np.ones((3, 2), np.float16)
    history.append(row | new, client_row | {"train_n": np.ones(3), "knowledge_classes": shared})
    save_tree(tmp_path / "metrics.h5", history.tree())
    again = History.from_tree(load_tree(tmp_path / "metrics.h5"), 3)
    np.testing.assert_array_equal(again.column("global_test_nonfinite"), [NAN, 3, 0])
    np.testing.assert_array_equal(again.column("global_val_nonfinite"), [NAN, NAN, 2])
    np.testing.assert_array_equal(again.clients["train_n"], [[NAN] * 3, [NAN] * 3, [1] * 3])
    np.testing.assert_array_equal(again.clients["knowledge_classes"], [shared * NAN, shared * NAN, shared])
    np.testing.assert_array_equal(again.column("global_test_correct_by_class"), [[NAN, NAN], [NAN, NAN], [5, 7]])
    assert again.rounds["global_test_undefined"] == ["", "", "no test images"]
    assert again.nonfinite("global_test_accuracy").tolist() == [False, True, False]
    again.append(row, client_row)  # as where a setting with such columns changed
    np.testing.assert_array_equal(again.column("global_val_nonfinite"), [NAN, NAN, 2, NAN])
    np.testing.assert_array_equal(again.clients["knowledge_classes"][3], shared * NAN)
    np.testing.assert_array_equal(again.column("global_test_correct_by_class")[2:], [[5, 7], [NAN, NAN]])
    assert again.rounds["global_test_undefined"][3] == ""
    assert len(again) == 4


def test_set_last_changes_the_last_row_alone():
    history = two_rounds()
    history.set_last(global_test_accuracy=0.5)
    assert math.isnan(history.rounds["global_test_accuracy"][0])
    assert history.rounds["global_test_accuracy"][1] == 0.5
    assert history.column("global_test_accuracy").tolist()[1] == 0.5
    assert history.column("unknown").tolist() == []


# --- rows as the server makes them

NO_IMAGES = Images(torch.zeros(0, 3, 2, 2), torch.zeros(0))


class Round:
    """A server with three of its four clients sampled: one delivered, one was rejected, one has no data."""

    def __init__(self, toy_net, toy_trainer):
        self.trainer = toy_trainer(toy_net(), "fedhkd")
        settings, images = config.resolve(overrides=["fed.clients=4"]), torch.zeros(6, 3, 2, 2)
        self.server = Server(settings, self.trainer, NOWHERE, Images(images, torch.zeros(6)), NO_IMAGES, {})
        self.wire_bytes = {"weights": 1000, "knowledge_up": 10}
        self.gathered = np.zeros(3, report_type(self.trainer.scheme, 1))
        self.gathered["client"], self.gathered["status"] = [0, 2, 3], [OK, INVALID_WEIGHTS, TOO_FEW_IMAGES]
        self.gathered["train_n"], self.gathered["test_n"] = [30, 0, 0], [10, 10, 0]
        self.gathered["test_correct"] = [7, 1, 0]
        self.gathered["loss"] = [[1.0, 0.5, 0.25], [NAN, NAN, NAN], [0, 0, 0]]
        self.gathered[0]["tensors"]["count_C"] = [20, 0, 10]
        self.gathered[1]["tensors"]["count_C"] = [5, 5, 5]

    def record(self, round: int) -> History:
        message = self.server.combine(round, self.gathered)
        state = RoundState(round, self.trainer.flat.values_V, self.trainer.flat.counters, message, {})
        self.server.record_round(RoundResult(state, self.gathered, self.wire_bytes, {"train": 1.0, "wait": 0.5}, 2.0))
        return self.server.history


def test_numbers_of_a_row(toy_net, toy_trainer):
    """Only the client that delivered counts. It shares 2 classes of 3, latent 4: up 2 (4 + 3 + 1), down 2 (4 + 3)."""
    history, flat = (made := Round(toy_net, toy_trainer)).record(1), made.trainer.flat
    row = {name: values[0] for name, values in history.rounds.items()}
    assert (row["local_test_accuracy"], row["local_test_n"], row["train_n"]) == (0.7, 10, 30)
    assert (row["clients_sampled"], row["clients_refused"]) == (3, 1)
    assert [row[f"loss/{term}"] for term in ("cross_entropy", "soft", "feature")] == [1.0, 0.5, 0.25]
    assert row["payload_bytes/weights_up"] == 4 * flat.payload_floats
    assert row["payload_bytes/weights_down"] == 3 * 4 * flat.payload_floats
    assert row["payload_bytes/knowledge_up"] == 4 * 16
    assert row["payload_bytes/knowledge_down"] == 3 * 4 * 14
    np.testing.assert_array_equal(history.clients["local_test_accuracy"][0], [0.7, NAN, NAN, NAN])
    np.testing.assert_array_equal(history.clients["loss/cross_entropy"][0], [1.0, NAN, NAN, NAN])
    np.testing.assert_array_equal(history.clients["status"][0], [OK, NAN, INVALID_WEIGHTS, TOO_FEW_IMAGES])
    np.testing.assert_array_equal(history.clients["train_n"][0], [30, NAN, 0, 0])
    np.testing.assert_array_equal(history.clients["knowledge_classes"][0], [[1, 0, 1], *[[NAN] * 3] * 3])
    assert row["noise_std"] == pytest.approx((42 / 20 + 42 / 10) / 2, rel=1e-6)


def test_bytes_on_the_wire_are_those_of_the_round(toy_net, toy_trainer):
    made = Round(toy_net, toy_trainer)
    made.record(1)
    made.wire_bytes = {"weights": 2500, "knowledge_up": 20}
    history = made.record(2)
    assert history.rounds["wire_bytes/weights"] == [1000, 1500]
    assert history.rounds["wire_bytes/knowledge_up"] == [10, 10]


def test_every_column_has_one_value_a_round(toy_net, toy_trainer):
    """The clients' states travel on the rounds that are saved only, so that this kind of bytes appears late."""
    made = Round(toy_net, toy_trainer)
    made.record(1)
    made.wire_bytes = {"weights": 2000, "knowledge_up": 20, "state": 500}
    history = made.record(2)
    assert {name: len(values) for name, values in history.rounds.items() if len(values) != 2} == {}
    assert history.rounds["wire_bytes/state"][-1] == 500


def test_every_accuracy_says_model_data_moment_and_n(toy_net, toy_trainer, tmp_path):
    save_tree(tmp_path / "metrics.h5", Round(toy_net, toy_trainer).record(1).tree())
    with h5py.File(tmp_path / "metrics.h5") as file:
        found = [(group, name) for group in ("rounds", "clients") for name in file[group] if "accuracy" in name]
        assert len(found) == 11
        for group, name in found:
            assert {"unit", "model", "data", "moment", "clients"} <= set(file[group][name].attrs), (group, name)
            n = f"{'_'.join(name.split('_')[:2])}_n"
            assert name.startswith("global_val") or n in file["clients" if "val" in name else group]
            model = "global" if name.startswith("global") else "personalised"
            assert file[group][name].attrs["model"].startswith(model)


# --- what is printed


def test_progress_line():
    history = History(1)
    history.append(
        {
            "round": 3,
            "loss/cross_entropy": 1.23456,
            "loss/soft": 0.01,
            "local_test_accuracy": 0.8125,
            "global_test_accuracy": NAN,
            "wall_s": 12.34,
            "seconds/evaluate_and_save": 3.0,
        },
        {},
    )
    clock = messages.Clock(10)
    line = messages.progress_line(history, clock, ("cross_entropy", "soft"))
    assert line.startswith("round  3/10  loss cross_entropy 1.2346 soft 0.0100  |  local 0.812  global -  |  15.3 s, ")
    assert line.endswith(" left")
    assert line.isprintable()


def test_time_left_counts_the_rounds_of_this_process(monkeypatch):
    """Resumed at round 5 of 10: 2 rounds in 40 s, so the other 4 take 80 s."""
    now = iter([0.0, 20.0, 40.0])
    monkeypatch.setattr(messages, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    clock = messages.Clock(10)
    assert clock.left_s(5) == 100.0
    assert clock.left_s(6) == 80.0


@pytest.mark.parametrize(
    "values, last, mean_last_5, best",
    [
        ([0.1, 0.9, 0.2, 0.3, 0.4, 0.5, 0.6], 0.6, 0.4, 0.9),
        ([0.5], 0.5, 0.5, 0.5),
        ([NAN, 0.2, NAN, 0.4], 0.4, 0.3, 0.4),
        ([0.9, NAN, 0.1, NAN, 0.2, NAN, 0.3, NAN, 0.4, NAN, 0.5], 0.5, 0.3, 0.9),  # the last five that were tested
        ([NAN], NAN, NAN, NAN),
        ([], NAN, NAN, NAN),
    ],
)
def test_a_column_is_summarised(values, last, mean_last_5, best):
    summarised = metrics.summarise(np.array(values, dtype=float))
    assert summarised == pytest.approx({"last": last, "mean_last_5": mean_last_5, "oracle": best}, nan_ok=True)


@pytest.mark.parametrize(
    "values, nonfinite, last, mean_last_5, best",
    [
        ([0.2, NAN, 0.4], [0, 1, 0], 0.4, NAN, 0.4),  # a round of the last five has no accuracy
        (
            [NAN, NAN, 0.2, NAN, 0.4, 0.4, 0.4, 0.6],
            [0, 1, 0, 0, 0, 0, 0, 0],
            0.6,
            0.4,
            0.6,
        ),  # one before them, and two without a test
        ([0.9, NAN], [0, 1], NAN, NAN, 0.9),
        ([NAN], [1], NAN, NAN, NAN),
    ],
)
def test_summaries_of_rounds_without_finite_predictions(values, nonfinite, last, mean_last_5, best):
    summarised = metrics.summarise(np.array(values), np.array(nonfinite, bool))
    assert summarised == pytest.approx({"last": last, "mean_last_5": mean_last_5, "oracle": best}, nan_ok=True)


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0, "0.0 s"),
        (12.34, "12.3 s"),
        (59.9, "59.9 s"),
        (60, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.9, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (12_000, "3 h 20 min"),
    ],
)
def test_seconds_for_people(seconds, text):
    assert messages.seconds_text(seconds) == text


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (44_878_376, "44.9 MB"), (5e9, "5.0 GB"), (7e12, "7000.0 GB")],
)
def test_bytes_for_people(count, text):
    assert messages.bytes_text(count) == text


def test_summary_table_is_plain_text():
    history = two_rounds()
    summarised = {
        f"{name}_{kind}": NAN if "_val_" in name else 0.5
        for name in (metric.name for metric in metrics.SUMMARISED)
        for kind in ("last", "mean_last_5", "oracle")
    }
    summary = summarised | {
        "global_test_accuracy_batchnorm_reestimated": 0.625,
        "global_on_local_test_accuracy": NAN,
        "warnings": "in 1 of 2 rounds: nothing known",
        "remark": "",
        "batchnorm": "reestimate",
        "reproducible": "",
        "changes": "",
    }
    folder = SimpleNamespace(
        path="runs/a", metrics_path="runs/a/metrics.h5", checkpoints=lambda: [(2, "runs/a/checkpoints/round_0002.h5")]
    )
    baselines = {"local_majority": 0.4, "global_majority": 0.1, "chance": 0.1}
    unequal = messages.summary_table(history, summary, baselines, folder, "small")
    assert "python -m hkd_hpc.export runs/a --out global.pt --architecture small" in unequal
    text = messages.summary_table(history, summary, baselines, folder)
    assert text.endswith("python -m hkd_hpc.export runs/a --out global.pt")
    assert all(line.isprintable() for line in text.split("\n"))
    for word in (
        "last round",
        "mean last 2",
        "best",
        "0.625",
        "0.400 / 0.100",
        "chance",
        "runs/a/metrics.h5",
        "round_0002.h5",
        "weights_up 4000.0 GB",
        "not a result",
        "worst tenth",
        "global (re-estimated BatchNorm)",
        "WARNING in 1 of 2 rounds: nothing known",
    ):
        assert word in text, word
    assert "validation" not in text
    assert "remark" not in text
    assert "fine-tuned" not in text
