"""Reading data: the official layouts, own files, every kind of bad input, and the copy that a node's ranks share."""

from __future__ import annotations

import fcntl
import os
import pickle
import stat
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest

from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.data import checks, readers, share, sources
from hkd_hpc.data.registry import OFFICIAL, SOURCES
from hkd_hpc.data.settings import DataSettings
from hkd_hpc.data.sizes import sizes_of

KEYS = ("x_train", "y_train", "x_test", "y_test")


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def check_present(name, dir, path) -> None:
    sources.check_present(DataSettings(name, dir, path))


def write_pickle(path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))


def write_cifar10(folder) -> list[np.ndarray]:
    """Five batches of 4 images and a test batch of 10; returns the (N,3072) arrays."""
    batches = [pixels(4, 3072) + np.uint8(i) for i in range(5)] + [pixels(10, 3072)]
    for i in range(5):
        labels = [(4 * i + j) % 10 for j in range(4)]
        write_pickle(
            folder / f"cifar-10-batches-py/data_batch_{i + 1}",
            {
                "batch_label": f"training batch {i + 1} of 5",
                "labels": labels,
                "data": batches[i],
                "filenames": ["a.png"] * 4,
            },
        )
    write_pickle(folder / "cifar-10-batches-py/test_batch", {"labels": list(range(10)), "data": batches[5]})
    return batches


def own(**changes) -> dict[str, np.ndarray]:
    arrays = dict(
        x_train=pixels(6, 28, 28),
        y_train=np.array([0, 1, 2, 0, 1, 2]),
        x_test=pixels(3, 28, 28),
        y_test=np.array([2, 1, 0]),
    )
    return {key: value for key, value in (arrays | changes).items() if value is not None}


def save(path, arrays: dict) -> str:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        with h5py.File(path, "w") as file:
            for key, value in arrays.items():
                file[key] = value
    return str(path)


def rejection(call, *arguments) -> str:
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- bundled and official


def test_fmnist_is_bundled_with_its_licence():
    data = sources.load("fmnist", "", "")
    assert data.x_train.shape == (5000, 3, 32, 32)
    assert data.x_test.shape == (1000, 3, 32, 32)
    assert np.bincount(data.y_train).tolist() == [500] * 10
    assert np.bincount(data.y_test).tolist() == [100] * 10
    assert data.classes == 10
    assert data.x_train.dtype == np.uint8
    assert data.y_train.dtype == np.int64
    assert not data.x_train[:, :, :2].any()
    assert not data.x_train[..., -2:].any()
    assert data.x_train[:, 0].any()
    assert np.array_equal(data.x_train[:, 0], data.x_train[:, 2])
    folder = os.path.dirname(sources.__file__)
    assert os.path.getsize(f"{folder}/fmnist.h5") < 3_000_000
    assert "Copyright (c) 2017 Zalando SE" in open(f"{folder}/FASHION_MNIST_LICENSE.txt").read()


def test_cifar10_official_layout(tmp_path):
    batches = write_cifar10(tmp_path)
    data = sources.load("cifar10", tmp_path, "")
    assert data.classes == 10
    assert data.y_train.tolist() == list(range(10)) * 2
    assert data.y_test.tolist() == list(range(10))
    assert np.array_equal(data.x_train, np.concatenate(batches[:5]).reshape(20, 3, 32, 32))
    assert data.x_train[7, 2, 31, 30] == batches[1][3, 2 * 1024 + 31 * 32 + 30]
    assert data.x_train.flags.c_contiguous
    assert data.x_test.flags.c_contiguous


def test_cifar100_reads_fine_labels(tmp_path):
    for split in ("train", "test"):
        write_pickle(
            tmp_path / "cifar-100-python" / split,
            {"fine_labels": list(range(100)), "coarse_labels": [0] * 100, "data": pixels(100, 3072)},
        )
    data = sources.load("cifar100", tmp_path, "")
    assert data.classes == 100
    assert data.y_train.tolist() == list(range(100))
    write_pickle(tmp_path / "cifar-100-python/test", {"labels": list(range(100)), "data": pixels(100, 3072)})
    assert "fine_labels" in rejection(sources.load, "cifar100", tmp_path, "")


def test_pickle_as_python_2_wrote_it(tmp_path):
    """Byte strings (opcodes U and T), as in the official files: keys, file names and the array's raw bytes."""
    array = np.arange(250, 250 + 6, dtype=np.int64).astype(np.uint8)
    text = (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x02K\x03\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x06" + array.tobytes() + b"tbU\x06labels](K\x07K\x01eu."
    )
    (tmp_path / "batch").write_bytes(text)
    content = readers.unpickle(tmp_path / "batch")
    assert content["labels"] == [7, 1]
    assert content["data"].tolist() == [[250, 251, 252], [253, 254, 255]]


def test_svhn_official_layout(tmp_path):
    from scipy.io import savemat

    train, test = pixels(32, 32, 3, 12), pixels(32, 32, 3, 10)
    savemat(tmp_path / "train_32x32.mat", {"X": train, "y": np.array([*range(1, 11), 10, 1], np.uint8)[:, None]})
    savemat(tmp_path / "test_32x32.mat", {"X": test, "y": np.arange(1, 11, dtype=np.uint8)[:, None]})
    data = sources.load("svhn", tmp_path, "")
    assert data.y_train.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 1]
    assert data.classes == 10
    assert data.x_train.shape == (12, 3, 32, 32)
    assert data.x_train.flags.c_contiguous
    assert np.array_equal(data.x_test[4, 1], test[:, :, 1, 4])
    whole = (tmp_path / "test_32x32.mat").read_bytes()
    (tmp_path / "test_32x32.mat").write_bytes(whole[: len(whole) // 2])
    assert "test_32x32.mat: truncated" in rejection(sources.load, "svhn", tmp_path, "")


def test_svhn_without_scipy_says_how_to_get_it(tmp_path, monkeypatch):
    for name in ("train", "test"):
        (tmp_path / f"{name}_32x32.mat").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert "pip install scipy" in rejection(sources.load, "svhn", tmp_path, "")


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [os.system, os.mkdir, eval, getattr, np.load, np.save])
def test_a_malicious_pickle_is_rejected_and_not_run(tmp_path, function):
    write_cifar10(tmp_path)
    victim = tmp_path / "victim"
    argument = f"touch {victim}" if function is os.system else str(victim)
    write_pickle(tmp_path / "cifar-10-batches-py/data_batch_3", {"data": Evil(function, argument), "labels": []})
    message = rejection(sources.load, "cifar10", tmp_path, "")
    assert "data_batch_3" in message
    assert "was not run" in message
    assert not victim.exists()


def test_a_pickle_may_not_choose_a_codec(tmp_path):
    import _codecs

    write_pickle(tmp_path / "batch", {"data": Evil(_codecs.encode, "x", "rot13")})
    assert "codec" in rejection(readers.unpickle, tmp_path / "batch")


@pytest.mark.parametrize("content", [b"", b"\x80\x02", b"not a pickle", pickle.dumps([1, 2], protocol=2)])
def test_broken_pickles(tmp_path, content):
    (tmp_path / "batch").write_bytes(content)
    assert "batch: truncated or not what its name says" in rejection(readers.unpickle, tmp_path / "batch")


def test_truncated_cifar_and_wrong_shapes(tmp_path):
    write_cifar10(tmp_path)
    batch = tmp_path / "cifar-10-batches-py/data_batch_2"
    batch.write_bytes(batch.read_bytes()[:-500])
    assert "data_batch_2: truncated" in rejection(sources.load, "cifar10", tmp_path, "")
    for bad in (
        {"data": pixels(4, 3071), "labels": [0] * 4},
        {"data": pixels(4, 3072).astype(float), "labels": [0] * 4},
        {"data": pixels(4, 3072), "labels": ["cat"] * 4},
        {"labels": [0] * 4},
        {"data": pixels(4, 3072)},
    ):
        write_pickle(batch, bad)
        assert "data_batch_2" in rejection(sources.load, "cifar10", tmp_path, "")
    write_pickle(batch, {"data": pixels(4, 3072), "labels": [0, 1, 2]})
    assert "key y_train: found shape (19,), allowed is (20,)" in rejection(sources.load, "cifar10", tmp_path, "")


def test_cifar10_with_the_classes_of_another_set(tmp_path):
    write_cifar10(tmp_path)
    write_pickle(tmp_path / "cifar-10-batches-py/data_batch_1", {"data": pixels(4, 3072), "labels": [10, 10, 2, 3]})
    write_pickle(tmp_path / "cifar-10-batches-py/data_batch_5", {"data": pixels(4, 3072), "labels": [0, 1, 10, 9]})
    assert "found 11 classes, cifar10 has 10" in rejection(sources.load, "cifar10", tmp_path, "")


@pytest.mark.parametrize("name", OFFICIAL)
def test_missing_official_data_gives_the_exact_command(tmp_path, name):
    folder = tmp_path / "my data"
    for call in (check_present, sources.load):
        assert f"python -m hkd_hpc.data prepare {name} --dir '{folder}'" in rejection(call, name, folder, "")


def test_one_missing_or_empty_official_file_is_named(tmp_path):
    write_cifar10(tmp_path)
    check_present("cifar10", tmp_path, "")
    (tmp_path / "cifar-10-batches-py/data_batch_4").write_bytes(b"")
    assert "data_batch_4 is missing" in rejection(check_present, "cifar10", tmp_path, "")


def test_unknown_name():
    assert "data.name='imagenet': allowed are fmnist, cifar10" in rejection(check_present, "imagenet", "", "")


def test_checking_imports_nothing_heavy(tmp_path):
    code = (
        "import sys\nfrom hkd_hpc.data import sources, share, partition, prepare\n"
        "from hkd_hpc.data.settings import DataSettings\nfrom hkd_hpc.common.errors import UsageError\n"
        f"try: sources.check_present(DataSettings('cifar10', {str(tmp_path)!r}))\n"
        "except UsageError: print('rejected')\n"
        "print([m for m in ('torch', 'mpi4py', 'scipy', 'h5py') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "rejected\n[]\n"


# ---- own files


@pytest.mark.parametrize("ending", [".npz", ".h5"])
def test_own_file_grey_is_padded_and_repeated(tmp_path, ending):
    arrays = own(client_train=np.array([5, 5, 9, 9, 7, 7]), client_test=np.array([9, 5, 5]))
    path = save(tmp_path / f"mine{ending}", arrays)
    check_present("file", "", path)
    data = sources.load("file", "", path)
    assert (data.name, data.classes) == ("file", 3)
    assert data.x_train.shape == (6, 3, 32, 32)
    assert np.array_equal(data.x_train[:, 1, 2:30, 2:30], arrays["x_train"])
    assert data.x_train.sum() == 3 * arrays["x_train"].sum(dtype=np.int64)
    assert data.y_test.tolist() == [2, 1, 0]
    assert data.client_train.tolist() == [5, 5, 9, 9, 7, 7]
    assert data.client_test.tolist() == [9, 5, 5]
    assert data.client_test.dtype == np.int64


@pytest.mark.parametrize(
    "shape, full",
    [
        ((4, 28, 28), (4, 3, 32, 32)),
        ((4, 28, 28, 1), (4, 3, 32, 32)),
        ((4, 1, 28, 28), (4, 3, 32, 32)),
        ((4, 32, 32, 3), (4, 3, 32, 32)),
        ((4, 3, 32, 32), (4, 3, 32, 32)),
        ((4, 40, 50, 3), (4, 3, 40, 50)),
        ((4, 40, 20), (4, 3, 40, 32)),
        ((4, 3, 33, 31), (4, 3, 33, 32)),
        ((4, 1, 1), (4, 3, 32, 32)),
    ],
)
def test_image_shapes(shape, full):
    raw = pixels(*shape)
    images = checks.to_images(raw, "here")
    assert images.shape == full
    assert images.flags.c_contiguous
    assert images.dtype == np.uint8
    times = 1 if 3 in (shape[1], shape[-1]) and len(shape) == 4 else 3
    assert images.sum(dtype=np.int64) == times * raw.sum(dtype=np.int64)


def test_odd_padding_and_channel_order():
    raw = np.arange(2 * 3 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3, 3)
    assert "ambiguous" in rejection(checks.to_images, raw, "here")
    images = checks.to_images(pixels(1, 31, 29, 3) | 1, "here")
    assert not images[0, 0, 0, 0]
    assert images[0, 0, :31, 1:30].all()
    assert not images[0, 0, 31].any()
    hwc = pixels(2, 32, 32, 3)
    assert np.array_equal(checks.to_images(hwc, "here")[1, 2], hwc[1, :, :, 2])


def test_images_that_are_right_are_not_copied():
    raw = pixels(4, 3, 32, 32)
    assert np.shares_memory(checks.to_images(raw, "here"), raw)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(x_train=None), ["key x_train is missing", "optional: client_train, client_test"]),
        (dict(y_test=None, x_test=None), ["key x_test, y_test is missing"]),
        (
            dict(x_train=pixels(6, 28, 28) / 255),
            ["key x_train", "float64", "uint8", "(x * 255).round().astype('uint8')"],
        ),
        (dict(x_test=np.full((3, 28, 28), np.nan)), ["key x_test", "float64 with NaN", "allowed is uint8"]),
        (dict(x_train=pixels(6, 28, 28).astype(np.int64)), ["key x_train", "int64", "x.astype('uint8')"]),
        (dict(x_train=pixels(0, 28, 28), y_train=np.array([], int)), ["key x_train", "holds no image"]),
        (dict(x_test=pixels(0, 28, 28), y_test=np.array([], int)), ["key x_test", "holds no image"]),
        (dict(x_train=pixels(6, 784)), ["key x_train", "(6, 784)", "not an image shape", "(N,H,W)"]),
        (dict(x_train=pixels(6, 28, 28, 4)), ["(6, 28, 28, 4)", "not an image shape"]),
        (dict(x_test=pixels(3, 40, 40)), ["key x_test", "(1, 40, 40)", "(1, 28, 28)"]),
        (dict(y_train=np.array([0, 1, 2, 0, 1])), ["key y_train", "(5,)", "(6,)"]),
        (dict(y_train=np.array([[0], [1], [2], [0], [1], [2]])), ["key y_train", "(6, 1)", "(6,)"]),
        (dict(y_train=np.array([0, 1, 2, 0, 1, -1])), ["key y_train", "-1..2", ">= 0"]),
        (dict(y_train=np.array([0, 1, 2, 0, 1, 2.0])), ["key y_train", "float64", "astype('int64')"]),
        (dict(y_test=np.array([0, 1, np.nan])), ["key y_test", "float64 with NaN", "integers"]),
        (dict(y_train=np.array([True, False] * 3)), ["key y_train", "bool"]),
        (dict(y_train=np.array([0, 1, 3, 0, 1, 3]), y_test=np.array([0, 1, 3])), ["up to 3 but none is 2"]),
        (dict(y_train=np.array([1, 2, 3, 1, 2, 3]), y_test=np.array([1, 2, 3])), ["none is 0"]),
        (dict(y_train=np.array([0, 1, 2, 0, 1, 2**62])), ["none is 3"]),
        (dict(y_test=np.array([0, 1, 3])), ["key y_test", "label 3 never occurs in y_train"]),
        (dict(y_train=np.zeros(6, int), y_test=np.zeros(3, int)), ["at least 2"]),
        (dict(client_train=np.arange(5)), ["key client_train", "(5,)", "(6,)"]),
        (dict(client_train=np.zeros(6)), ["key client_train", "float64"]),
        (dict(client_test=np.arange(3)), ["client_test without client_train"]),
        (
            dict(client_train=np.array([0, 0, 1, 1, 2, 2]), client_test=np.array([0, 4, 7])),
            ["client 4, 7 never occurs"],
        ),
    ],
)
@pytest.mark.parametrize("ending", [".npz", ".h5"])
def test_bad_own_files(tmp_path, changes, words, ending):
    path = save(tmp_path / f"mine{ending}", own(**changes))
    message = rejection(sources.load, "file", "", path)
    assert path in message, message
    assert all(word in message for word in words), message


GREY = np.concatenate([np.arange(0, 256), np.arange(0, 256, 2)])[: 6 * 8 * 8].astype(np.uint8).reshape(6, 8, 8)


def follow(message: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Do what an error says, word for word, with the array or both arrays that it speaks of."""
    expression = message.rpartition(" with ")[2]
    letter = "x" if "key x_" in message else "y"
    alone = message.partition("key ")[2].partition(":")[0] if "convert this key alone" in message else ""
    return arrays | {
        key: eval(expression, {letter: arrays[key], "np": np})
        for key in ([alone] if alone else (f"{letter}_train", f"{letter}_test"))
    }


@pytest.mark.parametrize(
    "stored",
    [
        GREY.astype(np.uint16) * 257,
        GREY.astype(np.int16) * 128 - 16384,
        GREY.astype(np.int16),
        GREY.astype(np.int64) * 1000,
        GREY.astype(np.uint64) * 2**50,
        GREY.astype(">u2"),
        (GREY.astype(np.int16) - 128).astype(np.int8),
        GREY / 255,
        GREY.astype(np.float32) / 255,
        (GREY / 255).astype(np.float16),
        GREY.astype(float),
        GREY / 127.5 - 1,
        GREY.astype(np.float32) * 257,
    ],
    ids=lambda stored: f"{stored.dtype}-{stored.max()}",
)
@pytest.mark.parametrize("half", [1, 2])
def test_following_the_advice_on_images_gives_the_right_ones(tmp_path, stored, half):
    """Training and test images keep one scale, also where one of them has not the full range (`half`: grey 0 to
    127).
    """
    low = GREY // half
    test = {1: stored, 2: np.take(stored.reshape(-1), low.astype(int)).reshape(stored.shape)}[half]
    arrays = own(x_train=stored, x_test=test[:3])
    message = rejection(sources.load, "file", "", save(tmp_path / "mine.npz", arrays))
    data = sources.load("file", "", save(tmp_path / "mine.npz", follow(message, arrays)))
    for split, right in (("train", GREY), ("test", low[:3])):
        assert abs(getattr(data, f"x_{split}")[:, 0, 12:20, 12:20].astype(int) - right).max() <= (
            stored.dtype == np.float16
        )


@pytest.mark.parametrize("key", ["x_train", "x_test"])
@pytest.mark.parametrize(
    "stored", [GREY / 255, GREY.astype(float), GREY.astype(np.uint16) * 257], ids=["1.0", "255.0", "65535"]
)
def test_images_that_are_right_already_stay_when_the_advice_is_followed(tmp_path, key, stored):
    arrays = own(x_train=GREY, x_test=GREY) | {"y_test": np.array([0, 1, 2, 0, 1, 2]), key: stored}
    message = rejection(sources.load, "file", "", save(tmp_path / "mine.npz", arrays))
    data = sources.load("file", "", save(tmp_path / "mine.npz", follow(message, arrays)))
    for images in (data.x_train, data.x_test):
        assert np.array_equal(images[:, 0, 12:20, 12:20], GREY)


def test_images_of_two_other_types_are_each_converted_by_their_own_advice(tmp_path):
    arrays = own(x_train=GREY.astype(np.uint16) * 257, x_test=GREY / 255) | {"y_test": np.array([0, 1, 2, 0, 1, 2])}
    for _ in range(2):
        arrays = follow(rejection(sources.load, "file", "", save(tmp_path / "mine.npz", arrays)), arrays)
    data = sources.load("file", "", save(tmp_path / "mine.npz", arrays))
    for images in (data.x_train, data.x_test):
        assert np.array_equal(images[:, 0, 12:20, 12:20], GREY)


@pytest.mark.parametrize("stored", [GREY > 99, (GREY > 99).astype(np.int32), (GREY > 99).astype(float)])
def test_following_the_advice_on_masks_gives_black_and_white(tmp_path, stored):
    arrays = own(x_train=stored, x_test=stored[:3])
    message = rejection(sources.load, "file", "", save(tmp_path / "mine.npz", arrays))
    data = sources.load("file", "", save(tmp_path / "mine.npz", follow(message, arrays)))
    assert np.array_equal(data.x_train[:, 0, 12:20, 12:20], np.where(GREY > 99, 255, 0))


def test_what_no_expression_can_mend_gets_none(tmp_path):
    for changes, words in [
        (dict(x_train=np.full((6, 8, 8), "a")), "dtype <U1, allowed is uint8 (0..255)"),
        (dict(x_train=GREY * 1j), "complex128, allowed is uint8 (0..255)"),
        (
            dict(x_train=np.where(GREY, GREY / 255, np.inf)),
            "with infinity, allowed is uint8 (0..255); mend the images that hold it, or leave them out",
        ),
        (dict(y_train=np.arange(6) / 2), "float64 with 0.5, allowed are integers or names"),
        (
            dict(y_train=np.array([0, 1, 2, 0, 1, np.nan])),
            "NaN, allowed are integers or names; leave out the images without one",
        ),
    ]:
        assert rejection(sources.load, "file", "", save(tmp_path / "mine.npz", own(**changes))).endswith(words)


ONE_HOT = np.eye(2)[[1, 0] * 3]


@pytest.mark.parametrize(
    "labels",
    [
        np.array([1.0, 0, 1, 0, 1, 0]),
        np.array([True, False] * 3),
        np.array([[1], [0]] * 3),
        ONE_HOT,
        ONE_HOT.astype(np.uint8),
        ONE_HOT.astype(bool),
    ],
)
def test_following_the_advice_on_labels_gives_the_right_ones(tmp_path, labels):
    arrays = own(y_train=labels, y_test=labels[:3])
    message = rejection(sources.load, "file", "", save(tmp_path / "mine.npz", arrays))
    data = sources.load("file", "", save(tmp_path / "mine.npz", follow(message, arrays)))
    assert data.y_train.tolist() == [1, 0, 1, 0, 1, 0]
    assert data.y_test.tolist() == [1, 0, 1]


@pytest.mark.parametrize("key", ["x_train", "y_train", "client_train"])
def test_following_the_advice_on_python_objects_gives_the_right_array(tmp_path, key):
    arrays = own(
        y_train=np.array(["cat", "ant", "dog"] * 2), y_test=np.array(["dog", "ant", "ant"]), client_train=np.arange(6)
    )
    objects = np.empty(6, object)
    objects[:] = list(arrays[key])
    message = rejection(sources.load, "file", "", save(tmp_path / "mine.npz", arrays | {key: objects}))
    assert f"key {key}: holds Python objects (a pickle, which is never loaded)" in message
    assert "truncated" not in message
    plain = eval(message.partition("save the plain array ")[2].partition(";")[0], {key: objects, "numpy": np})
    data = sources.load("file", "", save(tmp_path / "mine.npz", arrays | {key: plain}))
    assert data.y_train.tolist() == [1, 0, 2] * 2
    assert np.array_equal(data.x_train[:, 1, 2:30, 2:30], arrays["x_train"])
    assert data.client_train.tolist() == list(range(6))
    assert data.class_names == ("ant", "cat", "dog")


@pytest.mark.parametrize(
    "key, values", [("client_train", ["a", "", "b", " ", "a", "b"]), ("y_train", ["a", "b", "", "a", "b", "a"])]
)
def test_empty_names_are_rejected(tmp_path, key, values):
    message = rejection(
        sources.load,
        "file",
        "",
        save(
            tmp_path / "mine.npz",
            own(y_test=np.array(["a", "b", "a"])) | {"y_train": np.array(["a", "b"] * 3), key: np.array(values)},
        ),
    )
    empty = sum(not value.strip() for value in values)
    assert message.endswith(f"key {key}: {empty} of 6 images have an empty name; name them, or leave these images out")


def test_pieces_of_unequal_length_in_an_h5_are_told(tmp_path):
    with h5py.File(tmp_path / "mine.h5", "w") as file:
        for name, array in own(x_train=None).items():
            file[name] = array
        file.create_dataset("x_train", (6,), h5py.vlen_dtype(np.uint8))[:] = [np.zeros(n, np.uint8) for n in range(6)]
    assert "key x_train: holds entries that each have a length of their own" in rejection(
        sources.load, "file", "", tmp_path / "mine.h5"
    )


# ---- names


LABELS, WRITERS = ["zebra", "ant", "Öl", "ant", "zebra", "Öl"], ["w b", "wa", "w b", "wç", "wa", "wa"]


def named(ending: str, kind: str) -> dict:
    """Labels and client ids as text: NumPy's or UTF-8 bytes of fixed length, or (.h5 only) HDF5's text."""
    texts = dict(y_train=LABELS, y_test=["Öl", "ant", "ant"], client_train=WRITERS, client_test=["wç", "wa", "wa"])
    if kind == "text" and ending == ".h5":
        return own(**texts)
    return own(
        **{
            key: np.char.encode(np.array(text), "utf-8") if kind == "bytes" else np.array(text)
            for key, text in texts.items()
        }
    )


@pytest.mark.parametrize("ending", [".npz", ".h5"])
@pytest.mark.parametrize("kind", ["text", "bytes"])
def test_labels_and_clients_may_be_names(tmp_path, ending, kind):
    """Numbered in the order of their characters: "ant" < "zebra" < "Öl", "w b" < "wa" < "wç"."""
    path = save(tmp_path / f"mine{ending}", named(ending, kind))
    data = sources.load("file", "", path)
    assert data.class_names == ("ant", "zebra", "Öl")
    assert data.client_names == ("w b", "wa", "wç")
    assert data.classes == 3
    assert data.y_train.tolist() == [1, 0, 2, 0, 1, 2]
    assert data.y_test.tolist() == [2, 0, 0]
    assert data.client_train.tolist() == [0, 1, 0, 2, 1, 1]
    assert data.client_test.tolist() == [2, 1, 1]
    assert data.y_train.dtype == np.int64
    assert sources.natural_clients(DataSettings("file", path=path)) == 3
    assert sizes_of(DataSettings("file", path=path)).classes == 3
    copy = share.attach(shared := share.publish(data))
    os.unlink(shared)
    assert (copy.class_names, copy.client_names, copy.remarks) == (data.class_names, data.client_names, data.remarks)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(y_test=np.array(["a", "fox", "b"])), ["key y_test: label fox never occurs in y_train"]),
        (dict(y_test=np.array([0, 1, 1])), ["key y_train holds <U1 and y_test int64; allowed are names in both"]),
        (
            dict(client_train=np.array(["p", "q"] * 3), client_test=np.array(["p", "r", "q"])),
            ["client r never occurs in client_train"],
        ),
        (dict(y_train=np.array([b"a", b"\xff"] * 3)), ["key y_train: holds bytes that are no UTF-8 text"]),
        (dict(y_train=np.array([["a"], ["b"]] * 3)), ["key y_train", "(6, 1)", "(6,)"]),
        (dict(y_train=np.array(["a"] * 6), y_test=np.array(["a"] * 3)), ["at least 2"]),
    ],
)
def test_names_that_do_not_fit(tmp_path, changes, words):
    arrays = own(**{"y_train": np.array(["a", "b"] * 3), "y_test": np.array(["a", "b", "b"]), **changes})
    message = rejection(sources.load, "file", "", save(tmp_path / "mine.npz", arrays))
    assert all(word in message for word in words), message


def test_names_are_shown_without_control_characters():
    assert checks.numbered(np.array(["a\nb", "c\x1b[2J", "d\ud800"]), None, "here", "y")[2] == (
        "a\\nb",
        "c\\x1b[2J",
        "d\\ud800",
    )


def test_what_is_not_read_changed_or_degenerate_is_told(tmp_path):
    x_train, x_test = pixels(6, 3, 40, 40), pixels(3, 3, 40, 40)
    assert sources.load("file", "", save(tmp_path / "a.npz", own(x_train=x_train, x_test=x_test))).remarks == ()
    x_train[0], x_train[1], x_train[2] = 7, 0, np.arange(3)[:, None, None]
    x_train[1, :, 5] = 1
    for name in ("a.npz", "a.h5"):
        path = save(tmp_path / name, own(x_train=x_train, x_test=x_test, x_val=pixels(2, 40, 40), y_val=np.arange(2)))
        assert sources.load("file", "", path).remarks == (
            "not read: key x_val, y_val",
            f"of 6 train images 2 are constant and 1 have two values only (all values: 0..{x_train.max()})",
        )
    grey = own(x_train=pixels(6, 28, 40), x_test=pixels(3, 28, 40))
    assert sources.load("file", "", save(tmp_path / "b.npz", grey)).remarks == (
        "grey images repeated as RGB",
        "images of 40 x 28 px with zeros around them to 40 x 32",
    )


def test_natural_clients_are_counted(tmp_path):
    for ending in (".npz", ".h5"):
        path = save(tmp_path / f"mine{ending}", own(client_train=np.array([9, 2, 9, 400, 2, 9])))
        assert sources.natural_clients(DataSettings("file", path=path)) == 3
        assert "key client_train is missing" in rejection(
            sources.natural_clients, DataSettings("file", path=save(tmp_path / f"none{ending}", own()))
        )


def test_npz_with_pickled_objects_is_rejected_and_not_run(tmp_path):
    victim = tmp_path / "victim"
    arrays = own(y_test=np.array([Evil(os.mkdir, str(victim))] * 3, dtype=object))
    np.savez(tmp_path / "mine.npz", **arrays)
    assert "mine.npz" in rejection(sources.load, "file", "", tmp_path / "mine.npz")
    assert not victim.exists()


@pytest.mark.parametrize("ending", [".npz", ".h5"])
@pytest.mark.parametrize("keep", [0.1, 0.6, 0.97])
def test_truncated_own_files(tmp_path, ending, keep):
    path = tmp_path / f"mine{ending}"
    save(path, own())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    assert f"{path}: truncated or not what its name says" in rejection(sources.load, "file", "", path)


def test_corrupted_npz(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez_compressed(path, **own())
    whole = bytearray(path.read_bytes())
    whole[300:400] = bytes(100)
    path.write_bytes(whole)
    assert "truncated or not" in rejection(sources.load, "file", "", path)


def test_what_is_wrong_with_data_path(tmp_path):
    def said(path) -> str:
        return rejection(check_present, "file", "", path)

    assert "needs data.path=FILE" in said("")
    assert "needs data.path=FILE" in said(None)
    assert "allowed are .npz and .h5" in said(tmp_path / "mine.tsv")
    assert "there is no such file" in said(tmp_path / "mine.npz")
    (tmp_path / "folder.npz").mkdir()
    assert "is not a file" in said(tmp_path / "folder.npz")
    for name in ("a.npz", "a.h5"):
        (tmp_path / name).write_bytes(b"hello, this is text")
        assert "does not begin as" in said(tmp_path / name)
    np.savez(tmp_path / "b.npz", x_train=pixels(1, 28, 28))
    assert "key y_train, x_test, y_test is missing (found: x_train)" in said(tmp_path / "b.npz")
    with zipfile.ZipFile(tmp_path / "c.npz", "w"):
        pass
    assert "found: none" in said(tmp_path / "c.npz")


def test_no_lock_is_asked_for(tmp_path):
    """HDF5 locks what it opens by name, which fails where the file system has no locks or somebody holds one."""
    path = save(tmp_path / "mine.h5", own())
    for name, file in (("file", path), ("fmnist", SOURCES["fmnist"].where("", ""))):
        with open(file, "rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert sources.load(name, "", path).classes == {"file": 3, "fmnist": 10}[name]
            assert sizes_of(DataSettings(name, path=path)) is not None


def test_h5_group_in_place_of_an_array(tmp_path):
    with h5py.File(tmp_path / "mine.h5", "w") as file:
        for key, value in own(x_train=None).items():
            file[key] = value
        file.create_group("x_train")
    assert "key x_train is missing" in rejection(sources.load, "file", "", tmp_path / "mine.h5")


@pytest.mark.parametrize(
    "test_shape, words",
    [
        ((32, 32), r"found images of (1, 32, 32), allowed is x_train's (1, 28, 28)"),
        ((28, 28, 3), r"found images of (3, 28, 28), allowed is x_train's (1, 28, 28)"),
        ((28, 30), "(1, 28, 30)"),
    ],
)
def test_test_images_of_another_shape_are_rejected_though_padding_would_make_them_alike(tmp_path, test_shape, words):
    path = save(tmp_path / "mine.npz", own(x_test=pixels(3, *test_shape)))
    assert words in rejection(sources.load, "file", "", path)


# ---- the shared copy


def test_publish_and_attach(tmp_path):
    data = sources.load("file", "", save(tmp_path / "mine.npz", own(client_train=np.arange(6))))
    path = share.publish(data)
    try:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        copy = share.attach(path)
    finally:
        os.unlink(path)
    assert (copy.name, copy.classes, copy.client_test) == ("file", 3, None)
    for key in (*KEYS, "client_train"):
        array = getattr(copy, key)
        assert np.array_equal(array, getattr(data, key))
        assert array.dtype == getattr(data, key).dtype
        assert not array.flags.writeable
        assert array.flags.c_contiguous
        assert array.ctypes.data % 64 == 0
    with pytest.raises(ValueError):
        copy.x_train[0] = 0


def test_another_process_sees_the_same_and_the_file_may_go(tmp_path):
    data = sources.load("fmnist", "", "")
    path = share.publish(data)
    code = (
        "import os, sys\nfrom hkd_hpc.data import share\ndata = share.attach(sys.argv[1])\nos.unlink(sys.argv[1])\n"
        "print(int(data.x_train.sum(dtype='i8')), int(data.y_test.sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(data.x_train.sum(dtype=np.int64)), "4500"]
    assert not os.path.exists(path)


def test_a_full_shared_memory_falls_back_to_the_temporary_folder(tmp_path, monkeypatch):
    data = sources.load("file", "", save(tmp_path / "mine.npz", own()))
    almost_full = os.statvfs_result((4096, 4096, 10, 10, 10, 10, 10, 10, 0, 255))
    monkeypatch.setattr(share.os, "statvfs", lambda folder: almost_full)
    monkeypatch.setattr(share.tempfile, "tempdir", str(tmp_path / "spare"))
    (tmp_path / "spare").mkdir()
    assert share.publish(data).startswith(str(tmp_path / "spare"))


def test_an_old_copy_that_a_killed_job_left_is_removed(tmp_path, monkeypatch):
    """A young one may be another job's that is starting; what is not ours stays."""
    monkeypatch.setattr(share.tempfile, "tempdir", str(tmp_path))
    for name in ("hkd_hpc-data-old", "hkd_hpc-data-young", "others"):
        (tmp_path / name).write_bytes(b"x")
        if name != "hkd_hpc-data-young":
            os.utime(tmp_path / name, (1e9, 1e9))
    os.unlink(share.publish(sources.load("file", "", save(tmp_path / "mine.npz", own()))))
    assert {path.name for path in tmp_path.iterdir()} == {"hkd_hpc-data-young", "others", "mine.npz"}


def test_no_space_anywhere_leaves_nothing(tmp_path):
    code = (
        "import resource, signal, sys, tempfile\nfrom hkd_hpc.data import share, sources\n"
        "from hkd_hpc.common.errors import RunError\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "data = sources.load('fmnist', '', '')\nresource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))\n"
        "share._folders_with_space = lambda size: [sys.argv[1]]\n"
        "try: share.publish(data)\nexcept RunError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "no space for the 18 MB of fmnist" in done.stdout
    assert "TMPDIR" in done.stdout
    assert os.listdir(tmp_path) == []


def test_attach_rejects_what_is_no_shared_copy(tmp_path):
    data = sources.load("file", "", save(tmp_path / "mine.npz", own()))
    path = share.publish(data)
    whole = open(path, "rb").read()
    os.unlink(path)
    for content in (b"", b"x" * 1000, whole[:40], whole[:5000]):
        (tmp_path / "copy").write_bytes(content)
        with pytest.raises(RunError, match="shared copy"):
            share.attach(tmp_path / "copy")
    with pytest.raises(RunError):
        share.attach(tmp_path / "nothing")
