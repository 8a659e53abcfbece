"""The data sets, one entry each: its files, its sizes, who reads it. Settings, help, checks and `prepare` follow.

A further data set is an entry here and a reader. Imports the standard library only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Download:
    """One file to fetch; `members` are the (path, md5) that an archive unpacks to; without any it stays itself, in
    `folder` below the data folder.
    """

    url: str
    md5: str
    members: tuple[tuple[str, str], ...] = ()
    folder: str = ""

    @property
    def file_name(self) -> str:
        """The last part of the address."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def path(self) -> str:
        """Below the data folder, where it has no members or somebody put it there."""
        return f"{self.folder}/{self.file_name}" if self.folder else self.file_name

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """(path below the data folder, md5) of everything that stays there."""
        return self.members or ((self.path, self.md5),)


@dataclass(frozen=True)
class Sizes:
    """Inputs of both splits, classes, and the shape and dtype of one input as networks see it.

    shape: of an image (channels, height, width), of a row (columns,), of a sequence (length,).
    dtype: uint8 or float32 of images, float32 of rows, int64 of sequences.
    """

    train: int
    test: int
    classes: int
    shape: tuple[int, ...] = (3, 32, 32)
    dtype: str = "uint8"


@dataclass(frozen=True)
class Source:
    """One data set by name. Its files ship with the package, or lie in data.dir (downloads) or at data.path (own).

    read: module:function of (files, section `data` of the settings), which gives `raw.RawData`.
    sizes: those that are known; of own data, module:function of section `data` gives them.
    """

    name: str
    read: str
    sizes: Sizes | str
    bundled: str = ""  # file beside this one
    downloads: tuple[Download, ...] = ()
    check: str = ""  # own data: module:function of section `data`, UsageError where nothing can be read
    needs: str = ""  # own data: what data.path must be, if it must be given
    path_help: str = ""
    resizes: bool = False  # reads data.image_size
    has_clients: bool = False  # may bring client ids, for data.partition=natural
    read_clients: str = ""  # module:function of data.path, which gives those of the training split alone
    has_columns: bool = False  # reads data.label_column, data.split_column and data.client_column

    @property
    def is_own(self) -> bool:
        """Whether it is the user's own data, at data.path."""
        return bool(self.check)

    @property
    def is_loader(self) -> bool:
        """Whether the user's own code gives it."""
        return ":" in self.name

    @property
    def needed_files(self) -> tuple[str, ...]:
        """Paths below data.dir without which it cannot be read."""
        paths = (path for download in self.downloads for path, _ in download.files)
        # the class names are unpacked for torchvision's sake; this package never opens them
        return tuple(path for path in paths if not path.endswith("meta"))

    def where(self, dir: str | os.PathLike, path: str | os.PathLike) -> Path:
        """The file or folder that messages name."""
        if self.bundled:
            return Path(__file__).with_name(self.bundled)
        return Path(path or ".") if self.is_own else Path(dir)

    def files(self, dir: str | os.PathLike, path: str | os.PathLike) -> list[Path]:
        """What is read: files, or the folder of them."""
        where = self.where(dir, path)
        return [_or_unpacked(where / file) for file in self.needed_files] or [where]


def _or_unpacked(path: Path) -> Path:
    """The file; or, where that alone is there, what somebody unpacked it to: without .gz, or the folder of a .zip."""
    unpacked = path.with_suffix("")
    return unpacked if path.suffix in (".gz", ".zip") and unpacked.exists() and not path.exists() else path


def _mnist(name: str, folder: str, base: str, md5s: tuple[str, str, str, str]) -> Source:
    """MNIST and what has its form: four IDX files of 60,000 + 10,000 images, where torchvision has them too."""
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    downloads = tuple(Download(f"{base}{one}-ubyte.gz", md5, folder=folder) for one, md5 in zip(names, md5s))
    return Source(name, "hkd_hpc.data.idx:read_mnist", Sizes(60_000, 10_000, 10), downloads=downloads)


def _emnist(split: str, train: int, test: int, classes: int) -> Source:
    """One split of EMNIST (Cohen et al. 2017); all are in one zip, which stays packed."""
    url, md5 = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e"
    return Source(
        f"emnist_{split}",
        "hkd_hpc.data.idx:read_emnist",
        Sizes(train, test, classes),
        downloads=(Download(url, md5, folder="EMNIST/raw"),),
    )


SOURCES = {
    source.name: source
    for source in (
        Source("fmnist", "hkd_hpc.data.readers:read_file", Sizes(5_000, 1_000, 10), bundled="fmnist.h5"),
        Source(
            "cifar10",
            "hkd_hpc.data.readers:read_cifar",
            Sizes(50_000, 10_000, 10),
            downloads=(
                Download(
                    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                    "c58f30108f718f92721af3b95e74349a",
                    (
                        ("cifar-10-batches-py/data_batch_1", "c99cafc152244af753f735de768cd75f"),
                        ("cifar-10-batches-py/data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
                        ("cifar-10-batches-py/data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
                        ("cifar-10-batches-py/data_batch_4", "634d18415352ddfa80567beed471001a"),
                        ("cifar-10-batches-py/data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
                        ("cifar-10-batches-py/test_batch", "40351d587109b95175f43aff81a1287e"),
                        ("cifar-10-batches-py/batches.meta", "5ff9c542aee3614f3951f8cda6e48888"),
                    ),
                ),
            ),
        ),
        Source(
            "cifar100",
            "hkd_hpc.data.readers:read_cifar",
            Sizes(50_000, 10_000, 100),
            downloads=(
                Download(
                    "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
                    "eb9058c3a382ffc7106e4002c42a8d85",
                    (
                        ("cifar-100-python/train", "16019d7e3df5f24257cddd939b257f8d"),
                        ("cifar-100-python/test", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
                        ("cifar-100-python/meta", "7973b15100ade9c7d40fb424638fde48"),
                    ),
                ),
            ),
        ),
        Source(
            "svhn",
            "hkd_hpc.data.readers:read_svhn",
            Sizes(73_257, 26_032, 10),
            downloads=(
                Download("http://ufldl.stanford.edu/housenumbers/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
                Download("http://ufldl.stanford.edu/housenumbers/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
            ),
        ),
        _mnist(
            "mnist",
            "MNIST/raw",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        ),
        _mnist(
            "fashion_mnist",
            "FashionMNIST/raw",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
        _emnist("byclass", 697_932, 116_323, 62),
        _emnist("bymerge", 697_932, 116_323, 47),
        _emnist("balanced", 112_800, 18_800, 47),
        _emnist("letters", 124_800, 20_800, 26),
        _emnist("digits", 240_000, 40_000, 10),
        _emnist("mnist", 60_000, 10_000, 10),
        Source(
            "tinyimagenet",
            "hkd_hpc.data.tinyimagenet:read_tinyimagenet",
            Sizes(100_000, 10_000, 200, (3, 64, 64)),
            downloads=(
                Download("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),
            ),
        ),
        Source(
            "file",
            "hkd_hpc.data.readers:read_file",
            "hkd_hpc.data.sizes:of_file",
            check="hkd_hpc.data.readers:check_file",
            needs="data.path=P, an .npz, .h5, .csv or .parquet file",
            path_help="an .npz or .h5 with x_train y_train x_test y_test, a .csv or .parquet of rows",
            has_clients=True,
            read_clients="hkd_hpc.data.readers:read_clients",
            has_columns=True,
        ),
        Source(
            "folder",
            "hkd_hpc.data.folder:read_folder",
            "hkd_hpc.data.sizes:of_folder",
            check="hkd_hpc.data.folder:find_classes",
            needs="data.path=DIR with DIR/train/<class>/ and DIR/test/<class>/",
            path_help="a folder with images in train/<class>/ and test/<class>/",
            resizes=True,
        ),
        Source(
            "leaf",
            "hkd_hpc.data.leaf:read_leaf",
            "hkd_hpc.data.sizes:of_loaded",
            check="hkd_hpc.data.leaf:check_leaf",
            needs="data.path=DIR with LEAF's DIR/train/*.json and DIR/test/*.json",
            path_help="a folder of LEAF's with train/*.json and test/*.json",
            has_clients=True,
            read_clients="hkd_hpc.data.leaf:read_users",
        ),
        Source(
            "hf",
            "hkd_hpc.data.hf:read_hf",
            "hkd_hpc.data.sizes:of_loaded",
            check="hkd_hpc.data.hf:check_path",
            needs="data.path=DIR, a folder that save_to_disk of Hugging Face's datasets wrote",
            path_help="a folder that save_to_disk of Hugging Face's datasets wrote",
            resizes=True,
            has_clients=True,
            has_columns=True,
        ),
    )
}
SMALLEST_SIDE_PX = 32  # of images as networks see them, unless data.as_stored
DEFAULT = "fmnist"
OFFICIAL = tuple(name for name, source in SOURCES.items() if source.downloads)
BUNDLED = tuple(name for name, source in SOURCES.items() if source.bundled)
OWN = tuple(name for name, source in SOURCES.items() if source.is_own)


def find_source(name: str) -> Source | None:
    """The entry of a data set, or of a loader of one's own (module:function); None where there is none."""
    return own_loader(name) if ":" in name else SOURCES.get(name)


def own_loader(name: str) -> Source:
    """Data that a function or class of the user's own gives."""
    return Source(
        name,
        "hkd_hpc.data.own:read_own",
        "hkd_hpc.data.sizes:of_loaded",
        check="hkd_hpc.data.own:check_own",
        has_clients=True,
    )
