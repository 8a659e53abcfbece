"""Loggers by themselves: what stands in their files, what a resumed run adds, and that no failure gets out."""

from __future__ import annotations

import pytest

from hkd_hpc import loggers
from hkd_hpc.errors import UsageError
from hkd_hpc.loggers.base import Logger, numbers_of
from hkd_hpc.loggers.files import CsvLogger, JsonLinesLogger
from hkd_hpc.loggers.guarded import Loggers
from hkd_hpc.loggers.tensorboard import TensorBoardLogger

NAN = float("nan")


def values(accuracy: float, wall_s: float = 2.0) -> dict[str, float]:
    return {"wall_s": wall_s, "global_test_accuracy": accuracy}


def rows(count: int) -> list[dict[str, float]]:
    """Of rounds 1 to `count`: accuracies .125, .25, ..., and a text that no logger gets."""
    return [{"round": round, "warning": "", **values(0.125 * round)} for round in range(1, count + 1)]


class Noting(Logger):
    """Notes what it gets."""

    seen: list = []

    def log_round(self, round, values):
        self.seen.append((round, dict(values)))


class Failing(Logger):
    """Fails as its class says, in each round."""

    failure: BaseException = ValueError("first\nsecond")

    def log_round(self, round, values):
        raise self.failure


# ---- names


def test_names_stand_with_commas_between_and_count_once():
    assert loggers.names_of("csv, jsonl,csv,my.module:Mine") == ["csv", "jsonl", "my.module:Mine"]
    assert loggers.names_of("") == []


@pytest.mark.parametrize(
    "text, message",
    [
        ("csv,tensorbord", "run.loggers=tensorbord: no such logger; did you mean tensorboard?"),
        ("w", "run.loggers=w: no such logger; there are tensorboard, csv, jsonl, or your own as module:Class"),
    ],
)
def test_a_name_that_is_none_is_told(text, message):
    with pytest.raises(UsageError) as told:
        loggers.names_of(text)
    assert str(told.value) == message


def test_a_class_without_the_method_is_no_logger():
    with pytest.raises(UsageError, match=r"run\.loggers=json:JSONDecoder: is no logger; it needs a method log_round\("):
        loggers.classes_of(["json:JSONDecoder"])


def test_a_package_that_is_not_installed_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(TensorBoardLogger, "needs", "no_such_package")
    with pytest.raises(UsageError, match=r"pip install 'hkd_hpc\[no_such_package\]'"):
        loggers.classes_of(["tensorboard"])


def test_the_numbers_of_a_row_are_its_columns_of_one_number():
    row = {"round": 3, "weights_sha256": "ab", "wall_s": 1.5, "train_n": 4, "by_class": [1.0, 2.0], "loss/soft": NAN}
    assert list(numbers_of(row)) == ["wall_s", "train_n", "loss/soft"]


# ---- text files


def test_csv_by_hand(tmp_path):
    logger = CsvLogger(tmp_path)
    logger.log_round(1, values(0.5))
    logger.log_round(2, values(NAN, 2.25))
    assert (tmp_path / "rounds.csv").read_text() == "round,wall_s,global_test_accuracy\n1,2.0,0.5\n2,2.25,\n"


def test_jsonl_by_hand(tmp_path):
    logger = JsonLinesLogger(tmp_path)
    logger.log_round(1, values(0.5))
    logger.log_round(2, values(NAN))
    assert (tmp_path / "rounds.jsonl").read_text().splitlines() == [
        '{"round": 1, "wall_s": 2.0, "global_test_accuracy": 0.5}',
        '{"round": 2, "wall_s": 2.0, "global_test_accuracy": null}',
    ]


@pytest.mark.parametrize("make", [CsvLogger, JsonLinesLogger])
def test_a_resumed_run_drops_the_rounds_that_come_again_and_half_a_line(tmp_path, make):
    first = make(tmp_path)
    for round in (1, 2, 3, 4):
        first.log_round(round, values(0.125 * round))
    with open(first.path, "a") as file:
        file.write("5, 2.")
    again = make(tmp_path, after_round=2)
    assert again.logged == 2
    again.log_round(3, values(0.75))
    accuracies = [float(row["global_test_accuracy"]) for row in again.parse(first.path.read_text())]
    assert accuracies == [0.125, 0.25, 0.75]


def test_a_column_that_a_later_version_adds_is_empty_before(tmp_path):
    CsvLogger(tmp_path).log_round(1, {"wall_s": 2.0})
    CsvLogger(tmp_path, after_round=1).log_round(2, values(0.5))
    assert (tmp_path / "rounds.csv").read_text() == "round,wall_s,global_test_accuracy\n1,2.0,\n2,2.0,0.5\n"


# ---- TensorBoard


def read_events(folder):
    """TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_reads_each_number_at_its_round(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_round(1, values(0.5, wall_s=3))
    logger.log_round(2, values(NAN, wall_s=4))
    logger.log_round(3, values(0.75, wall_s=5))
    logger.close()
    events = read_events(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("global_test_accuracy")] == [(1, 0.5), (3, 0.75)]
    walls = events.Scalars("wall_s")
    assert round(walls[2].wall_time - walls[0].wall_time) == 9


def test_tensorboard_hides_what_a_resumed_run_gives_again(tmp_path):
    first = TensorBoardLogger(tmp_path)
    for round in (1, 2, 3):
        first.log_round(round, values(0.125 * round))
    first.close()
    again = TensorBoardLogger(tmp_path, after_round=1)
    again.log_round(2, values(0.75))
    again.close()
    found = [(event.step, event.value) for event in read_events(tmp_path).Scalars("global_test_accuracy")]
    assert found == [(1, 0.125), (2, 0.75)]


# ---- all together


def test_rounds_that_a_logger_lacks_are_given_first(tmp_path, monkeypatch):
    monkeypatch.setattr(Noting, "seen", [])
    CsvLogger(tmp_path).log_round(1, values(0.125))
    all_of_them = Loggers({"csv": CsvLogger, "noting": Noting}, tmp_path, rows(3), warn=pytest.fail)
    all_of_them.log_round(rows(4)[3])
    all_of_them.close()
    lines = (tmp_path / "rounds.csv").read_text().splitlines()[1:]
    assert lines == ["1,2.0,0.125", "2,2.0,0.25", "3,2.0,0.375", "4,2.0,0.5"]
    assert Noting.seen == [(4, values(0.5))]


@pytest.mark.parametrize("failure, told", [(ValueError("a\nb"), "ValueError: a b"), (SystemExit(3), "SystemExit: 3")])
def test_what_a_logger_raises_is_told_once_and_goes_no_further(tmp_path, monkeypatch, failure, told):
    monkeypatch.setattr(Failing, "failure", failure)
    monkeypatch.setattr(Noting, "seen", [])
    warnings: list[str] = []
    both = Loggers({"failing": Failing, "noting": Noting}, tmp_path, [], warnings.append)
    for row in rows(3):
        both.log_round(row)
    assert len(warnings) == 1
    assert f"failed with {told}; the run goes on without it" in warnings[0]
    assert warnings[0].startswith(f"run.loggers=failing: {__file__}:")
    assert [round for round, _ in Noting.seen] == [1, 2, 3]


def test_a_logger_that_cannot_be_made_is_left_out(tmp_path):
    warnings: list[str] = []
    (tmp_path / "file").touch()
    Loggers({"csv": CsvLogger}, tmp_path / "file", [], warnings.append).log_round(rows(1)[0])
    assert len(warnings) == 1
    assert "FileExistsError" in warnings[0]


def test_ctrl_c_within_a_logger_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Failing, "failure", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Loggers({"failing": Failing}, tmp_path, [], pytest.fail).log_round(rows(1)[0])


def test_without_loggers_there_is_no_folder(tmp_path):
    Loggers({}, tmp_path / "loggers", rows(2), pytest.fail).log_round(rows(1)[0])
    assert not (tmp_path / "loggers").exists()
