"""Where the official data sets come from and which files they leave in the data folder, as torchvision has them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Download:
    """One file to fetch; `members` are the (path, md5) that an archive unpacks to; without any it stays itself."""

    url: str
    md5: str
    members: tuple[tuple[str, str], ...] = ()

    @property
    def file_name(self) -> str:
        """The last part of the address."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """(path below the data folder, md5) of everything that stays there."""
        return self.members or ((self.file_name, self.md5),)


OFFICIAL: dict[str, tuple[Download, ...]] = {
    "cifar10": (
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
    "cifar100": (
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
    "svhn": (
        Download("http://ufldl.stanford.edu/housenumbers/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        Download("http://ufldl.stanford.edu/housenumbers/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    ),
}


def needed_files(name: str) -> tuple[str, ...]:
    """Paths below the data folder without which `name` cannot be read."""
    paths = (path for download in OFFICIAL[name] for path, _ in download.files)
    # the class names are unpacked for torchvision's sake; this package never opens them
    return tuple(path for path in paths if not path.endswith("meta"))
