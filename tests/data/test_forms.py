"""The forms of own data beside uint8 images: floats, rows, sequences, tables, loaders, and a test split held out."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import toy

from hkd_hpc.common.errors import UsageError
from hkd_hpc.data import checks, content, holdout, normalise, sources
from hkd_hpc.data.registry import Sizes
from hkd_hpc.data.settings import DataSettings
from hkd_hpc.data.sizes import kind_of, sizes_of

LABELS = np.array([0, 1, 2, 0, 1, 2])


def rejection(call, *arguments) -> str:
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def saved(path, x_train, **more) -> str:
    """An .npz of six training inputs and, of the same, three test inputs; `more` in place of these, None for none."""
    arrays = {"x_train": x_train, "y_train": LABELS, "x_test": x_train[:3], "y_test": LABELS[:3], **more}
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return str(path)


def of_file(path, **settings) -> DataSettings:
    return DataSettings("file", path=str(path), **settings)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(3, 2, shape)


# ---- images of floats, of any size and number of channels


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_floats_are_float32_and_repeated_and_padded_as_bytes_are(tmp_path, dtype):
    x = floats(6, 28, 28).astype(dtype)
    data = sources.read(of_file(saved(tmp_path / "a.npz", x), normalise="none"))
    assert (data.x_train.dtype, data.x_train.shape) == (np.float32, (6, 3, 32, 32))
    assert np.array_equal(data.x_train[:, 2, 2:30, 2:30], x.astype(np.float32))
    assert not data.x_train[:, :, :2].any()
    assert (data.mean, data.std) == ((), ())


@pytest.mark.parametrize(
    "shape, seen",
    [
        ((6, 2, 30, 28), (2, 30, 28)),
        ((6, 28, 30, 5), (5, 28, 30)),
        ((6, 28, 28), (1, 28, 28)),
        ((6, 3, 9, 9), (3, 9, 9)),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_as_stored_they_keep_size_and_channels(tmp_path, shape, seen, dtype):
    settings = of_file(saved(tmp_path / "a.npz", floats(*shape).astype(dtype)), as_stored=True, normalise="measured")
    data = sources.read(settings)
    assert (data.x_train.shape, data.x_train.dtype) == ((6, *seen), dtype)
    assert not any("repeated" in remark or "zeros around" in remark for remark in data.remarks)
    assert sizes_of(settings) == Sizes(6, 3, 3, seen, np.dtype(dtype).name)


def test_measured_numbers_by_hand(tmp_path):
    """Channel 0: half 10, half 30; channel 1: constant."""
    x = np.full((6, 2, 4, 4), 51, np.uint8)
    x[:3, 0], x[3:, 0] = 10, 30
    data = sources.read(of_file(saved(tmp_path / "a.npz", x), as_stored=True, normalise="measured"))
    assert data.mean == (float(f"{20 / 255:.6g}"), 0.2)
    assert data.std == (float(f"{10 / 255:.6g}"), 1.0)
    data = sources.read(of_file(saved(tmp_path / "b.npz", x / 1.0), as_stored=True, normalise="measured"))
    assert (data.mean, data.std) == ((20.0, 51.0), (10.0, 1.0))


def test_measured_numbers_do_not_depend_on_the_pieces(monkeypatch):
    x = (1e4 + floats(500, 3, 8, 8)).astype(np.float32)
    whole = normalise.measured(x)
    monkeypatch.setattr(checks, "_PIECE_BYTES", 1)
    assert normalise.measured(x) == whole
    assert whole[0] == pytest.approx(x.astype(np.float64).mean((0, 2, 3)), rel=1e-5)
    assert whole[1] == pytest.approx(x.astype(np.float64).std((0, 2, 3)), rel=1e-5)


def test_given_numbers_are_those_of_each_channel_or_of_all(tmp_path):
    path = saved(tmp_path / "a.npz", floats(6, 3, 32, 32))
    assert sources.read(of_file(path, mean="0.5", std="2")).mean == (0.5, 0.5, 0.5)
    assert sources.read(of_file(path, mean="1, 2,3", std="1,1,4")).std == (1.0, 1.0, 4.0)
    assert "2 numbers; the inputs of" in rejection(sources.read, of_file(path, mean="1,2", std="1,2"))


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(mean="a,b", std="1,1"), "data.mean=a,b: not allowed; data.mean must be numbers with commas between"),
        (dict(mean="1", std="1,1"), "data.mean=1: data.std=1,1 must have as many numbers"),
        (dict(mean="1"), "data.std= must have as many numbers"),
        (dict(mean="1", std="0"), "data.std=0: not allowed; data.std must be numbers > 0"),
        (dict(mean="nan", std="1"), "data.mean=nan: not allowed"),
        (dict(mean="1", std="1", normalise="measured"), "goes with data.normalise=fixed alone"),
    ],
)
def test_numbers_that_cannot_be_meant(settings, words):
    assert words in rejection(normalise.check_given, DataSettings(**settings))


def test_the_hash_of_the_data_does_not_depend_on_their_normalisation(tmp_path):
    path = saved(tmp_path / "a.npz", floats(6, 3, 32, 32))
    hashes = {
        content.load(of_file(path, **how)).sha256 for how in (dict(normalise="measured"), dict(mean="1", std="2"))
    }
    assert len(hashes) == 1


# ---- rows and sequences


def test_rows_and_sequences(tmp_path):
    rows = of_file(saved(tmp_path / "rows.npz", floats(6, 5)))
    data = sources.read(rows)
    assert (data.x_train.shape, data.x_train.dtype, data.remarks) == ((6, 5), np.float32, ())
    assert sizes_of(rows) == Sizes(6, 3, 3, (5,), "float32")
    sequences = of_file(saved(tmp_path / "words.npz", np.arange(42, dtype=np.int16).reshape(6, 7)))
    data = sources.read(sequences)
    assert (data.x_train.shape, data.x_train.dtype) == ((6, 7), np.int64)
    assert sizes_of(sequences) == Sizes(6, 3, 3, (7,), "int64")
    assert (kind_of(rows), kind_of(sequences), kind_of(DataSettings())) == ("rows", "sequences", None)


def test_of_a_damaged_file_nothing_is_known(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK and no more of it")
    assert (kind_of(of_file(tmp_path / "a.npz")), sizes_of(of_file(tmp_path / "a.npz"))) == (None, None)


def nan_at(x: np.ndarray, index) -> np.ndarray:
    x[index] = np.nan
    return x


@pytest.mark.parametrize(
    "x, settings, words",
    [
        (floats(6, 3, 32, 32), {}, "allowed is uint8 (0..255), or floats and data.normalise=measured or none; convert"),
        (nan_at(floats(6, 3, 32, 32), (4, 1)), dict(normalise="none"), "key x_train: input 4 holds NaN, infinity"),
        (nan_at(floats(6, 5), (2, 4)), {}, "key x_train: input 2 holds NaN, infinity or more than a float32 can"),
        (np.full((6, 5), 1e300), {}, "key x_train: input 0 holds NaN, infinity or more than a float32 can"),
        (np.full((6, 5), "a"), {}, "found dtype <U1, where numbers belong; rows (N,F) are floats, sequences"),
        (np.arange(6 * 5).reshape(6, 5) - 1, {}, "found values -1..28, sequences hold integers >= 0"),
        (np.ones((6, 5), np.int64), dict(normalise="measured"), "holds sequences, which nothing normalises"),
        (np.ones((6, 32, 32), np.uint8), dict(normalise="none"), "are uint8; allowed are fixed and measured"),
        (np.ones((6, 4, 32, 32), np.uint8), {}, "is not an image shape; allowed is"),
        (np.ones((6, 8, 32, 8), np.uint8), dict(as_stored=True), "is ambiguous"),
    ],
)
def test_inputs_that_cannot_be_meant(tmp_path, x, settings, words):
    assert words in rejection(sources.read, of_file(saved(tmp_path / "a.npz", x), **settings))


def test_splits_of_two_forms(tmp_path):
    path = saved(tmp_path / "a.npz", floats(6, 5), x_test=np.ones((3, 5), np.int64))
    assert "key x_test: found dtype int64, allowed is one form in both" in rejection(sources.read, of_file(path))


# ---- a test split held out


def test_a_share_of_each_class_is_held_out_whatever_the_seed_of_the_run(tmp_path):
    labels = np.repeat([0, 1, 2], [10, 20, 1])
    x = np.arange(31, dtype=np.float64)[:, None]
    path = saved(tmp_path / "a.npz", x, y_train=labels, x_test=None, y_test=None, client_train=np.arange(31) % 4)
    data = sources.read(of_file(path, test_fraction=0.25))
    assert np.bincount(data.y_test, minlength=3).tolist() == [3, 5, 0]  # 2.5 rounded up, 5, and the last one stays
    both = np.concatenate([data.x_train, data.x_test])[:, 0]
    assert sorted(both.tolist()) == list(range(31))
    assert np.array_equal(data.client_train, data.x_train[:, 0].astype(int) % 4)
    assert data.client_test is None
    again, other = (sources.read(of_file(path, test_fraction=0.25, test_seed=seed)).x_test for seed in (0, 1))
    assert np.array_equal(again, data.x_test)
    assert not np.array_equal(other, data.x_test)
    assert sizes_of(of_file(path, test_fraction=0.25)) == Sizes(23, 8, 3, (1,), "float32")


def test_natural_clients_are_counted_after_the_test_split_is_held_out(tmp_path):
    clients, labels = np.repeat([0, 1], [60, 6]), np.arange(66) % 2
    x = np.arange(66.0)[:, None]
    path = saved(tmp_path / "a.npz", x, y_train=labels, x_test=None, y_test=None, client_train=clients)
    settings = of_file(path, test_fraction=0.5, min_images=6)
    stay = np.bincount(sources.read(settings).client_train)
    assert stay[0] >= 6 > stay[1]
    assert sources.natural_clients(settings) == 1
    assert sources.natural_clients(of_file(path, test_fraction=0.5)) == 2


def test_a_client_keeps_its_last_input():
    data = DataSettings(test_fraction=0.9)
    clients = np.arange(40) // 2
    held = holdout.held_out(np.zeros(40, int), data, "here", clients)
    assert 0 < held.sum() < 36
    assert set(clients[~held]) == set(clients)


def test_two_test_splits_or_none(tmp_path):
    path = saved(tmp_path / "a.npz", floats(6, 5))
    assert "has a test split; leave one of them out" in rejection(sources.read, of_file(path, test_fraction=0.5))
    path = saved(tmp_path / "b.npz", floats(6, 5), x_test=None, y_test=None)
    assert "key x_test, y_test is missing" in rejection(sources.read, of_file(path))
    assert "holds nothing out of" in rejection(sources.read, of_file(path, test_fraction=0.01))


def test_a_folder_of_classes_alone(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(5):
            image.new("RGB", (40, 40), (number * 9, 0, 40)).save(tmp_path / "set" / name / f"{number}.png")
    settings = DataSettings("folder", path=str(tmp_path / "set"), test_fraction=0.4)
    data = sources.read(settings)
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([0, 0, 0, 1, 1, 1], [0, 0, 1, 1])
    assert data.class_names == ("cat", "dog")
    assert sizes_of(settings) == Sizes(6, 4, 2, (3, 40, 40))
    assert "data.test_fraction and DIR/<class>/" in rejection(sources.read, DataSettings("folder", path=settings.path))


# ---- tables


@pytest.fixture
def table():
    """Six rows of two columns of numbers, labels as text, a split and clients with gaps."""
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(
        {
            "age": [30, 41, 52, 63, 74, 85],
            "kind": ["ill", "well", "ill", "well", "well", "ill"],
            "dose": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5],
            "smokes": [True, False, True, False, True, False],
            "part": ["train", "train", "train", "train", "test", "test"],
            "site": [107, 9, 107, 9, 9, 107],
        }
    )


COLUMNS = dict(label_column="kind", split_column="part", client_column="site")


def write(table, path) -> str:
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        pytest.importorskip("pyarrow")
        table.to_parquet(path)
    return str(path)


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_tables(tmp_path, table, ending):
    settings = of_file(write(table, tmp_path / f"a{ending}"), **COLUMNS)
    data = sources.read(settings)
    assert data.x_train.tolist() == [[30, 0.5, 1], [41, 1.5, 0], [52, 2.5, 1], [63, 3.5, 0]]
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([0, 1, 0, 1], [1, 0])
    assert data.class_names == ("ill", "well")
    assert (data.client_train.tolist(), data.client_test.tolist()) == ([107, 9, 107, 9], [9, 107])
    assert sources.natural_clients(settings) == 2
    assert sizes_of(settings) == Sizes(4, 2, 2, (3,), "float32")
    assert kind_of(settings) == "rows"


def test_labels_with_gaps_and_a_test_split_held_out(tmp_path, table):
    table = table.assign(kind=[7, -2, 7, -2, -2, 7]).drop(columns=["part", "site"])
    data = sources.read(of_file(write(table, tmp_path / "a.csv"), label_column="kind", test_fraction=0.34))
    assert data.class_names == ("-2", "7")
    assert (len(data.y_train), sorted(data.y_test)) == (4, [0, 1])


def test_ids_of_a_csv_are_the_texts_that_stand_there(tmp_path):
    """In 200,000 rows pandas would read 01 as 1 in pieces without letters."""
    pytest.importorskip("pandas")
    rows = [f"{number},{number % 3},{('01', '1', '001', '2')[number % 4]}" for number in range(200_000)]
    (tmp_path / "a.csv").write_text("\n".join(["dose,label,site", *rows, "1,0,b", "2,1,None", "3,2,NA"]))
    settings = of_file(tmp_path / "a.csv", client_column="site", test_fraction=0.25)
    data = sources.read(settings)
    assert data.client_names == ("001", "01", "1", "2", "NA", "None", "b")
    assert np.bincount(data.client_train).sum() == len(data.y_train)
    assert data.class_names == ()


@pytest.mark.parametrize(
    "labels, classes",
    [
        ("0 1 2", ()),
        ("00 01 02", ("00", "01", "02")),
        ("NA None nan", ("NA", "None", "nan")),
        ("1 +1 1.0", ("+1", "1", "1.0")),
        ("0; 1; 2", ()),
        (f"{2**64} 1 2", ("1", str(2**64), "2")),
        ("10 9 -1", ("-1", "10", "9")),
    ],
)
def test_labels_of_a_csv(tmp_path, labels, classes):
    pytest.importorskip("pandas")
    rows = [f"{number},{label}" for number, label in enumerate(labels.split(";" if ";" in labels else None) * 4)]
    (tmp_path / "a.csv").write_text("\n".join(["dose,label", *rows]))
    assert sources.read(of_file(tmp_path / "a.csv", test_fraction=0.25)).class_names == classes


@pytest.mark.parametrize(
    "change, words",
    [
        (
            lambda t: t.rename(columns={"kind": "k"}),
            "no column 'kind' (found: age, k, dose, smokes, part, site); data.label",
        ),
        (lambda t: t.assign(age=[30, 41, 52, 63, 74, "old"]), "column age: row 6 holds 'old', where numbers belong"),
        (lambda t: t.assign(dose=[1, 2, None, 4, 5, 6]), "column dose: row 3 holds nothing, where numbers belong"),
        (lambda t: t.assign(kind=["ill", None, "ill", "well", "ill", "ill"]), "column kind: row 2 is empty"),
        (lambda t: t.assign(part=["train"] * 5 + ["val"]), "holds 'val'; allowed are train and test"),
        (lambda t: t.assign(kind="ill"), "found 1 class, at least 2 are needed"),
        (lambda t: t.assign(kind=["ill", "well"] * 2 + ["dead"] * 2), "label dead never occurs in y_train"),
        (lambda t: t.assign(site=[1, 1, 1, 1, 2, 1]), "client 2 never occurs in client_train"),
        (lambda t: t[["kind", "part", "site"]], "holds no row of numbers"),
    ],
)
def test_tables_that_cannot_be_meant(tmp_path, table, change, words):
    path = write(change(table), tmp_path / "a.csv")
    message = rejection(sources.read, of_file(path, **COLUMNS))
    assert words in message
    assert path in message


@pytest.mark.parametrize(
    "head, row, words",
    [
        ("label,dose,label", "{0},1.5,{0}", "two columns are called 'label'; rename one of them"),
        ("dose,dose,label", "1,2,{0}", "two columns are called 'dose'"),
        (",dose,label", "{1},1.5,{0}", "column 1 has no name; name it, or leave it out (pandas writes one of row num"),
        ("dose,age,label", "{1},1.5,40,{0}", "Expected 3 fields in line 2, saw 4"),
    ],
)
def test_a_csv_whose_columns_have_no_names_of_their_own(tmp_path, head, row, words):
    """pandas would rename the second of two, and take the first of a row that is too long for its name."""
    pytest.importorskip("pandas")
    lines = [head, *(row.format("ab"[number % 2], number) for number in range(8))]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    assert words in rejection(sources.read, of_file(tmp_path / "a.csv", test_fraction=0.5))


def test_dates_are_no_numbers(tmp_path, table):
    pandas = pytest.importorskip("pandas")
    path = write(table.assign(age=pandas.date_range("2020-01-02", periods=6)), tmp_path / "a.parquet")
    told = rejection(sources.read, of_file(path, **COLUMNS))
    assert "column age: row 1 holds '2020-01-02 00:00:00', where numbers belong" in told


def test_without_what_reads_it_a_line_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("a,label\n1,2\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs pandas, which is not installed here: pip install 'hkd_hpc[tables]'" in rejection(
        sources.check_present, of_file(tmp_path / "a.csv")
    )


# ---- loaders

LOADERS = """
from types import SimpleNamespace
import numpy as np
import torch
from torch.utils.data import TensorDataset

X, Y = np.arange(30.0).reshape(6, 5), np.array([0, 1, 2, 0, 1, 2])
arrays = lambda: dict(x_train=X, y_train=Y, x_test=X[:3], y_test=Y[:3])

def load():
    return arrays()

def scaled(path):
    return {**arrays(), "x_train": X * float(path.rpartition("/")[2])}

class Loader:
    def __init__(self):
        vars(self).update(arrays())
        self.client_train = ["a", "b"] * 3

def datasets():
    x, y = torch.tensor(X), torch.tensor(Y)
    return TensorDataset(x, y), TensorDataset(x[:3], y[:3])

def one():
    return [[(torch.tensor(x), str(y), "c") for x, y in zip(X, Y)]]

def of_pandas():
    import pandas
    y = pandas.Series([str(y) for y in Y])
    sites = np.array(["a", "b"] * 3, dtype=object)
    return {**arrays(), "y_train": y.array, "y_test": y[:3], "client_train": sites, "client_test": sites[:3]}

mixed = lambda: {**arrays(), "client_train": np.array(["a", None] * 3, dtype=object)}
nothing = lambda: None
number = 3
no_test = lambda: dict(x_train=X, y_train=Y)
text = lambda: {**arrays(), "x_train": [["a"] * 5] * 6}
ragged = lambda: {**arrays(), "x_train": [[1], [2, 3]]}
short = lambda: {**arrays(), "y_train": Y[:4]}
items = lambda: ([(X[i % 2 : 3], 1) for i in range(3)], [(X, 1)])
three = lambda: (1, 2, 3)
two_dicts = lambda: (arrays(), arrays())
labels = lambda: ([(x, Y) for x in X], [(x, Y) for x in X])
empty = lambda: ([], [])

def raises():
    return {}["x"]

def leaves():
    raise SystemExit(0)
"""


@pytest.fixture
def loaders(tmp_path, monkeypatch):
    toy.write_module(tmp_path, "loaders_of_test", LOADERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name, **more: DataSettings(f"loaders_of_test:{name}", **more)


@pytest.mark.parametrize("name", ["load", "Loader", "datasets"])
def test_loaders_give_arrays_or_datasets(loaders, name):
    data = sources.read(loaders(name))
    assert np.array_equal(data.x_train, np.arange(30).reshape(6, 5))
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([0, 1, 2, 0, 1, 2], [0, 1, 2])
    assert data.client_names == (("a", "b") if name == "Loader" else ())


def test_texts_of_pandas_are_labels_and_clients(loaders):
    pytest.importorskip("pandas")
    data = sources.read(loaders("of_pandas"))
    assert (data.y_train.tolist(), data.y_test.tolist()) == (LABELS.tolist(), [0, 1, 2])
    assert (data.class_names, data.client_names) == (("0", "1", "2"), ("a", "b"))


def test_a_loader_gets_data_path_and_may_leave_the_test_split_to_us(loaders):
    assert sources.read(loaders("scaled", path="/x/2")).x_train.sum() == 870
    data = sources.read(loaders("one", test_fraction=0.5))
    assert data.class_names == ("0", "1", "2")
    assert data.client_names == ("c",)
    assert sizes_of(loaders("one", test_fraction=0.5)) == Sizes(3, 3, 3, (5,), "float32")
    assert sources.natural_clients(loaders("one", test_fraction=0.5)) == 1
    assert content.load(loaders("load")).sha256 == content.load(loaders("datasets")).sha256


@pytest.mark.parametrize(
    "name, words",
    [
        ("absent", "module loaders_of_test has no absent"),
        ("nothing", "gave a NoneType without x_train, y_train, x_test, y_test; it must give arrays by name"),
        ("number", "is a int; it must be a function or class that gives arrays"),
        ("no_test", "has no test split; data.test_fraction=0.2 holds one out"),
        ("text", "key x_train: found dtype <U1, where numbers belong"),
        ("ragged", "x_train: cannot be made an array"),
        ("mixed", "client_train: is a ndarray of Python objects; it must be one array of numbers, or of texts for l"),
        ("short", "key y_train: found shape (4,), allowed is (6,)"),
        ("items", "train dataset: item 1 is float64 (2, 5), item 0 is float64 (3, 5); all must be alike"),
        ("three", "gave 3 of int, int, int; it must give arrays by name"),
        ("two_dicts", "gave 2 of dict, dict; it must give arrays by name"),
        ("labels", "item 0 is a tuple, not (x, y) or (x, y, client)"),
        ("empty", "train dataset: is empty"),
        ("raises", "in raises: return {}[\"x\"]: KeyError: 'x'"),
        ("leaves", "in leaves: raise SystemExit(0): SystemExit: 0"),
    ],
)
def test_loaders_that_give_nonsense(loaders, name, words):
    message = rejection(sources.read, loaders(name))
    assert message.startswith(f"data.name=loaders_of_test:{name}: ")
    assert words in message


def test_a_loader_is_looked_for_without_being_run(tmp_path, monkeypatch):
    toy.write_module(tmp_path, "never_imported", "raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    sources.check_present(DataSettings("never_imported:load"))
    assert "is it on PYTHONPATH?" in rejection(sources.check_present, DataSettings("no_such_module_x:load"))


def test_attributes_of_any_object_will_do():
    from hkd_hpc.data.own import arrays_of

    x = np.ones((2, 2))
    found = arrays_of(SimpleNamespace(x_train=x, y_train=[0, 1], x_test=x, y_test=[0, 1], other=1), "here")
    assert sorted(found) == ["x_test", "x_train", "y_test", "y_train"]


def test_each_item_of_a_dataset_is_read_once():
    from hkd_hpc.data.own import arrays_of

    class Counted(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    read: list[int] = []
    items = Counted([(np.ones(2), label) for label in (0, 1, 0)])
    assert arrays_of([items], "mine")["y_train"].tolist() == [0, 1, 0]
    assert read == [0, 1, 2]
