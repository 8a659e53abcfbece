"""Loggers by themselves: what stands in their files, what a resumed run adds, and that no failure gets out."""

from __future__ import annotations

import csv
import json
import resource

import pytest

from hkd_hpc import export, loggers
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.stop import FROM_OUTSIDE
from hkd_hpc.loggers.base import Logger, numbers_of
from hkd_hpc.loggers.files import CsvLogger, JsonLinesLogger
from hkd_hpc.loggers.guarded import Loggers
from hkd_hpc.loggers.tensorboard import TensorBoardLogger
from tools.synthetic_runs import write_run

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


def test_a_module_that_leaves_when_it_is_imported_is_wrong_input(tmp_path, monkeypatch):
    (tmp_path / "leaving_logger.py").write_text("import sys\nsys.exit(5)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError) as told:
        loggers.classes_of(["leaving_logger:Any"])
    assert str(told.value) == (
        "run.loggers=leaving_logger:Any: importing leaving_logger failed: SystemExit: 5 "
        f"({tmp_path}/leaving_logger.py, line 2)"
    )


def test_a_package_that_is_not_installed_is_told_in_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(TensorBoardLogger, "needs", "no_such_package")
    with pytest.raises(UsageError, match=r"pip install 'hkd_hpc\[no_such_package\]'"):
        loggers.classes_of(["tensorboard"])
    write_run(tmp_path / "one", [], [0.1], [0.1])
    assert export.main([str(tmp_path / "one"), "--tensorboard", str(tmp_path / "tb")]) == 2
    assert capsys.readouterr().err == (
        "hkd_hpc: --tensorboard: no_such_package is not installed; pip install 'hkd_hpc[no_such_package]'\n"
    )
    assert not (tmp_path / "tb").exists()


def test_the_numbers_of_a_row_are_its_columns_of_one_number():
    row = {"round": 3, "weights_sha256": "ab", "wall_s": 1.5, "train_n": 4, "by_class": [1.0, 2.0], "loss/soft": NAN}
    assert list(numbers_of(row)) == ["wall_s", "train_n", "loss/soft"]
    assert list(numbers_of(dict(sorted(row.items())))) == ["wall_s", "train_n", "loss/soft"]  # as a file has them


# ---- text files


def test_csv_by_hand(tmp_path):
    logger = CsvLogger(tmp_path)
    logger.log_round(1, values(0.5))
    logger.log_round(2, values(NAN, 2.25))
    logger.log_round(3, values(float("inf"), 2.25))
    text = "round,wall_s,global_test_accuracy\n1,2.0,0.5\n2,2.25,\n3,2.25,inf\n"
    assert (tmp_path / "rounds.csv").read_text() == text


@pytest.mark.parametrize("begun", [0, 2])
def test_a_column_that_begins_later_has_its_place_in_the_csv(tmp_path, begun):
    """As where a run resumes with privacy.update_clip=1; `begun`: the rounds of an earlier process."""
    logger = CsvLogger(tmp_path)
    logger.begin([(round, values(0.5)) for round in range(1, begun + 1)])
    for round in range(begun + 1, 3):
        logger.log_round(round, values(0.5))
    logger.log_round(3, {"clients_clipped": 4, **values(NAN)})
    logger.log_round(4, {"clients_clipped": NAN, **values(0.25)})
    assert (tmp_path / "rounds.csv").read_text() == (
        "round,wall_s,global_test_accuracy,clients_clipped\n1,2.0,0.5,\n2,2.0,0.5,\n3,2.0,,4\n4,2.0,0.25,\n"
    )


def test_jsonl_by_hand(tmp_path):
    logger = JsonLinesLogger(tmp_path)
    logger.log_round(1, values(0.5))
    logger.log_round(2, values(NAN))
    assert (tmp_path / "rounds.jsonl").read_text().splitlines() == [
        '{"round": 1, "wall_s": 2.0, "global_test_accuracy": 0.5}',
        '{"round": 2, "wall_s": 2.0, "global_test_accuracy": null}',
    ]


@pytest.fixture(params=[CsvLogger, JsonLinesLogger, TensorBoardLogger])
def make(request):
    return request.param


def accuracies_in(folder) -> list[tuple[int, float]]:
    """Round and accuracy of what the logger of the folder wrote."""
    if (folder / "rounds.csv").exists():
        lines = list(csv.DictReader((folder / "rounds.csv").read_text().splitlines()))
    elif (folder / "rounds.jsonl").exists():
        lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    else:
        scalars = read_events(folder).Scalars("global_test_accuracy")
        lines = [{"round": event.step, "global_test_accuracy": event.value} for event in scalars]
    return [(int(line["round"]), float(line["global_test_accuracy"])) for line in lines]


def file_in(folder):
    """The one file there."""
    [path] = folder.iterdir()
    return path


def log_rounds(make, folder, given: int, upto: int) -> None:
    """A process that resumes after round `given` and ends, without a word, after round `upto`."""
    run = Loggers({"it": make}, folder, rows(given), pytest.fail)
    for row in rows(upto)[given:]:
        run.log_round(row)


def without_the_middle(content: bytes) -> bytes:
    return content[: len(content) // 3] + content[len(content) // 2 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content,
        lambda content: content[:-5],
        lambda content: content + content[len(content) // 2 :],
        without_the_middle,
        lambda content: b"",
        lambda content: b"\xff\x00\n" + content,
    ],
    ids=["whole", "torn", "doubled", "without the middle", "empty", "no text"],
)
def test_whatever_became_of_the_file_a_resumed_run_has_each_round_once(tmp_path, make, damage):
    log_rounds(make, tmp_path, 0, 4)
    path = file_in(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    log_rounds(make, tmp_path, 3, 5)
    assert accuracies_in(tmp_path) == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5), (5, 0.625)]
    file_in(tmp_path)


def test_a_logger_that_was_off_for_a_process_has_its_rounds_too(tmp_path, make):
    log_rounds(make, tmp_path, 0, 2)
    log_rounds(make, tmp_path, 4, 5)
    assert [round for round, _ in accuracies_in(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_process_that_starts_over_begins_an_empty_file(tmp_path, make):
    log_rounds(make, tmp_path, 0, 2)
    log_rounds(make, tmp_path, 0, 1)
    assert accuracies_in(tmp_path) == [(1, 0.125)]


@pytest.fixture
def file_size_limit():
    """Sets how long a file may become, as a full disk does. Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_rounds_that_a_full_disk_does_not_take_come_with_the_next(tmp_path, make, file_size_limit):
    warnings: list[str] = []
    run = Loggers({"it": make}, tmp_path, rows(1), warnings.append)
    path = file_in(tmp_path)
    before = path.read_bytes()
    file_size_limit(len(before) + 3)
    run.log_round(rows(2)[1])
    run.log_round(rows(3)[2])
    assert path.read_bytes() == before
    file_size_limit(resource.RLIM_INFINITY)
    run.log_round(rows(4)[3])
    assert accuracies_in(tmp_path) == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]
    assert len(warnings) == 1


def test_a_file_that_cannot_be_begun_comes_later_and_leaves_nothing(tmp_path, make, file_size_limit):
    warnings: list[str] = []
    file_size_limit(10)
    run = Loggers({"it": make}, tmp_path, rows(2), warnings.append)
    assert list(tmp_path.iterdir()) == []
    file_size_limit(resource.RLIM_INFINITY)
    run.log_round(rows(3)[2])
    assert [round for round, _ in accuracies_in(tmp_path)] == [1, 2, 3]
    assert len(warnings) == 1


# ---- TensorBoard


def read_events(folder):
    """TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_reads_each_number_at_its_round(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.begin([])
    logger.log_round(1, values(0.5, wall_s=3))
    logger.log_round(2, values(NAN, wall_s=4))
    logger.log_round(3, values(0.75, wall_s=5))
    logger.close()
    events = read_events(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("global_test_accuracy")] == [(1, 0.5), (3, 0.75)]
    walls = events.Scalars("wall_s")
    assert round(walls[2].wall_time - walls[0].wall_time) == 9


def test_tensorboard_leaves_the_event_files_of_others(tmp_path):
    other = tmp_path / "events.out.tfevents.1.host"
    other.touch()
    log_rounds(TensorBoardLogger, tmp_path, 0, 1)
    log_rounds(TensorBoardLogger, tmp_path, 1, 2)
    assert other.exists()


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


class OfItsOwn(BaseException):
    """No Exception."""


@pytest.mark.parametrize(
    "failure, told",
    [
        (ValueError("a\nb"), "ValueError: a b"),
        (SystemExit(3), "SystemExit: 3"),
        (OfItsOwn("enough"), "test_loggers.OfItsOwn: enough"),
    ],
)
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


@pytest.mark.parametrize("came", FROM_OUTSIDE)
def test_ctrl_c_and_sigterm_within_a_logger_end_the_run(tmp_path, monkeypatch, came):
    monkeypatch.setattr(Failing, "failure", came())
    with pytest.raises(came):
        Loggers({"failing": Failing}, tmp_path, [], pytest.fail).log_round(rows(1)[0])


def test_without_loggers_there_is_no_folder(tmp_path):
    Loggers({}, tmp_path / "loggers", rows(2), pytest.fail).log_round(rows(1)[0])
    assert not (tmp_path / "loggers").exists()
