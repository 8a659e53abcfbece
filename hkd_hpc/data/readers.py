"""Raw arrays out of files: CIFAR's pickles (without running them), SVHN's .mat, own files; see also `checks`."""

from __future__ import annotations

import contextlib
import math
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hkd_hpc.common.errors import UsageError
from hkd_hpc.data.checks import check_memory
from hkd_hpc.data.raw import RawData, broken
from hkd_hpc.data.settings import DataSettings
from hkd_hpc.data.tables import check_reader, read_table

if TYPE_CHECKING:
    import h5py

SPLITS = ("train", "test")
REQUIRED_KEYS = ("x_train", "y_train", "x_test", "y_test")
OPTIONAL_KEYS = ("client_train", "client_test")

MEDMNIST = {f"{key}_{split}": f"{split}_{name}" for split in SPLITS for key, name in (("x", "images"), ("y", "labels"))}
PLAIN = (".npz", ".h5")
_MAGIC = {".npz": b"PK", ".h5": b"\x89HDF\r\n\x1a\n", ".parquet": b"PAR1", ".csv": b""}
PICKLED = "holds Python objects (a pickle, which is never loaded)"


# ---------------------------------------------------------------------------------------------- CIFAR


def _encode_latin1(text: str, encoding: str) -> bytes:
    """What `_codecs.encode` does for the one codec that pickled arrays use."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"asks for the codec {encoding!r}")
    return text.encode("latin-1")


_reconstruct: Callable = np.empty(0).__reduce__()[0]  # type: ignore[assignment]  # NumPy declares a str
_ALLOWED: dict[tuple[str, str], Callable] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode_latin1,
}


class ArrayUnpickler(pickle.Unpickler):
    """Reads dicts, lists and numpy arrays; any other name in the pickle is rejected before it is imported."""

    def find_class(self, module: str, name: str) -> Callable:
        """The few callables that rebuild an array."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"asks for {module}.{name}, which no data file needs: it was not run")
        return _ALLOWED[module, name]


def unpickle(path: Path) -> dict:
    """The dict in an official pickle file; UsageError if it is broken or asks for anything but arrays."""
    try:
        with open(path, "rb") as file:
            content = ArrayUnpickler(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise broken(path, error) from error
    if not isinstance(content, dict):
        raise broken(path, f"holds a {type(content).__name__}, a dict is expected")
    return content


def _cifar_batch(path: Path, label_key: str) -> tuple[np.ndarray, np.ndarray]:
    content = unpickle(path)
    pixels, labels = content.get("data"), content.get(label_key)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
        raise broken(path, "key data: a uint8 array of shape (N, 3072) is expected")
    try:
        return pixels.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise broken(path, f"key {label_key}: a list of integers is expected") from error


def read_cifar(files: list[Path], data: DataSettings) -> RawData:
    """Images (N,3,32,32) uint8 and labels (N,), of CIFAR100 the fine ones, of the python pickles: the training files in
    their order, last the test split."""
    label_key = {"cifar10": "labels", "cifar100": "fine_labels"}[data.name]
    *batches, (x_test, y_test) = (_cifar_batch(path, label_key) for path in files)
    x_train = batches[0][0] if len(batches) == 1 else np.concatenate([pixels for pixels, _ in batches])
    y_train = np.concatenate([labels for _, labels in batches])
    return RawData(dict(x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test))


# ---------------------------------------------------------------------------------------------- SVHN


def _svhn_split(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise UsageError("data.name=svhn needs scipy, which is not installed here: pip install scipy") from error
    try:
        content = loadmat(path, variable_names=["X", "y"])
        pixels, labels = content["X"], content["y"].ravel()
    except Exception as error:  # a damaged .mat can raise anything
        raise broken(path, error) from error
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3) or labels.dtype.kind not in "iu":
        raise broken(path, f"X: uint8 of shape (32, 32, 3, N) is expected, found {pixels.dtype} {pixels.shape}")
    # the files call the digit 0 "10"
    return pixels.transpose(3, 2, 0, 1), np.where(labels == 10, 0, labels).astype(np.int64)


def read_svhn(files: list[Path], _: DataSettings) -> RawData:
    """Images (N,3,32,32) uint8 and labels 0..9 (N,) of SVHN's cropped digits, from its training and its test file."""
    (x_train, y_train), (x_test, y_test) = map(_svhn_split, files)
    return RawData(dict(x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test))


# ---------------------------------------------------------------------------------------------- own files


def check_keys(path: Path, found: list[str], data: DataSettings) -> None:
    """UsageError if a key that every data file needs is not among `found`; data.test_fraction makes those of a test
    split."""
    has_test = data.test_fraction is None
    missing = [key for key in REQUIRED_KEYS if key not in found and (has_test or key.endswith("train"))]
    if missing:
        raise UsageError(
            f"{path}: key {', '.join(missing)} is missing (found: {', '.join(sorted(found)) or 'none'}); "
            f"needed: {', '.join(REQUIRED_KEYS)}; optional: {', '.join(OPTIONAL_KEYS)}"
        )


def npz_keys(path: Path) -> list[str]:
    """The names of the arrays in an .npz, from its directory alone."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name[: -len(".npy")] for name in archive.namelist() if name.endswith(".npy")]
    except Exception as error:  # a damaged directory can raise anything
        raise broken(path, error) from error


@contextlib.contextmanager
def open_h5(path: Path) -> Iterator[h5py.File]:
    """An HDF5 file to read, through a Python file: HDF5 then asks for no lock, which not every file system has."""
    import h5py

    with open(path, "rb") as raw, h5py.File(raw, "r") as file:
        yield file


def npz_names(path: Path) -> dict[str, str]:
    """{key: the array's name in the .npz}: the same, or MedMNIST's, whose files are read as they are downloaded."""
    found = npz_keys(path)
    keys = {name: key for key, name in MEDMNIST.items()} if MEDMNIST["x_train"] in found else {}
    return {keys.get(name, name): name for name in found}


def _read_npz(path: Path, data: DataSettings) -> RawData:
    names = npz_names(path)
    check_keys(path, list(names), data)
    wanted, remarks = _known(list(names))
    with zipfile.ZipFile(path) as archive:
        stored_bytes = {key: archive.getinfo(f"{names[key]}.npy").file_size for key in wanted}
        check_memory(path, sum(stored_bytes.values()))
        for key in wanted:
            _check_npy_head(archive, path, names[key], stored_bytes[key])
    with np.load(path, allow_pickle=False) as archive:
        arrays = {key: archive[names[key]] for key in wanted}
    for key, array in arrays.items():
        if names[key] != key and array.shape[1:] == (1,):  # MedMNIST's labels stand in a column
            arrays[key] = array[:, 0]
    return RawData(arrays, (), remarks)


def _known(keys: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """(the keys that are read, a remark on those that are not)."""
    wanted = [key for key in REQUIRED_KEYS + OPTIONAL_KEYS if key in keys]
    others = sorted({*keys} - {*wanted})
    return wanted, (f"not read: key {', '.join(others)}",) if others else ()


def _check_npy_head(archive: zipfile.ZipFile, path: Path, key: str, stored_bytes: int) -> None:
    """UsageError unless the array that a member announces has the size of what is stored: NumPy allocates it
    first.
    """
    with archive.open(f"{key}.npy") as member:
        if np.lib.format.read_magic(member) != (1, 0):
            raise UsageError(f"{path}: key {key}: is no plain array; save it with numpy.savez")
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
        announced_bytes = member.tell() + math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        form = "images must have one size" if key.startswith("x_") else "as numbers, or names as text"
        raise UsageError(f"{path}: key {key}: {PICKLED}; save the plain array numpy.array({key}.tolist()); {form}")
    if announced_bytes != stored_bytes:
        raise broken(path, f"key {key}: {stored_bytes} bytes are there, {announced_bytes} are announced")


def _read_h5(path: Path, data: DataSettings) -> RawData:
    import h5py

    with open_h5(path) as file:
        own = [key for key in file if isinstance(file.get(key, getlink=True), h5py.HardLink)]
        keys = [key for key in own if isinstance(file.get(key), h5py.Dataset)]
        check_keys(path, keys, data)
        wanted, remarks = _known(keys)
        found = {key: file[key] for key in wanted}
        elsewhere = [key for key, array in found.items() if array.external or array.is_virtual]
        if elsewhere:
            raise UsageError(f"{path}: key {elsewhere[0]}: lies in other files; store the array itself")
        check_memory(
            path, sum(array.size * array.dtype.itemsize for array in found.values() if array.shape is not None)
        )
        return RawData({key: _read_dataset(array, f"{path}: key {key}") for key, array in found.items()}, (), remarks)


def _read_dataset(array: h5py.Dataset, where: str) -> np.ndarray:
    """As an array without Python objects; UsageError for what HDF5 stores with a length for each entry, texts aside."""
    import h5py

    raw = np.asarray(array[()])
    if not raw.dtype.hasobject:
        return raw
    if h5py.check_string_dtype(array.dtype):
        return np.array(raw.tolist(), np.bytes_).reshape(raw.shape)
    raise UsageError(f"{where}: holds entries that each have a length of their own; store one array of numbers")


def check_file(data: DataSettings) -> None:
    """UsageError unless there is a file of a form that is read, with the keys it needs; reads its head at most."""
    if not data.path:
        raise UsageError("data.name=file needs data.path=FILE (.npz, .h5, .csv or .parquet)")
    file = Path(data.path)
    if file.suffix not in _MAGIC:
        raise UsageError(
            f"data.path={file}: found the ending {file.suffix!r}, allowed are .npz and .h5, .csv and .parquet"
        )
    if not file.is_file():
        raise UsageError(f"data.path={file}: {'is not a file' if file.exists() else 'there is no such file'}")
    magic = _MAGIC[file.suffix]
    if _head(file, len(magic)) != magic:
        raise broken(file, f"does not begin as an {file.suffix} file does")
    if file.suffix == ".npz":
        check_keys(file, list(npz_names(file)), data)
    if file.suffix not in PLAIN:
        check_reader(file)


def _head(file: Path, length: int) -> bytes:
    try:
        with open(file, "rb") as stream:
            return stream.read(length)
    except OSError as error:
        raise UsageError(f"data.path={file}: cannot be opened ({error.strerror})") from error


def read_file(files: list[Path], data: DataSettings) -> RawData:
    """The arrays of one file as stored; UsageError if the file is broken, or a key or column is missing."""
    [path] = files
    read = {".npz": _read_npz, ".h5": _read_h5}.get(path.suffix, read_table)
    try:
        return read(path, data)
    except UsageError:
        raise
    except Exception as error:  # zip, zlib, npy headers and HDF5 each raise their own
        raise broken(path, error) from error


def read_clients(path: Path) -> np.ndarray | None:
    """The ids (N,) of `client_train` alone, None where the file has none; UsageError if it is broken."""
    try:
        if path.suffix == ".npz":
            if "client_train" not in npz_keys(path):
                return None
            with zipfile.ZipFile(path) as archive:
                _check_npy_head(archive, path, "client_train", archive.getinfo("client_train.npy").file_size)
            with np.load(path, allow_pickle=False) as archive:
                return archive["client_train"]
        with open_h5(path) as file:
            return _read_dataset(file["client_train"], f"{path}: key client_train") if "client_train" in file else None
    except UsageError:
        raise
    except Exception as error:
        raise broken(path, error) from error
