"""Section `data` of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.data.registry import BUNDLED, DEFAULT, OFFICIAL, OWN, SOURCES
from hkd_hpc.settings import setting

_RESIZED = ", ".join(name for name, source in SOURCES.items() if source.resizes)


@dataclass(frozen=True)
class DataSettings:
    """Which images, and how they are partitioned among the clients (data/)."""

    name: str = setting(DEFAULT, f"data set; {', '.join(BUNDLED)} ships with the package", choices=tuple(SOURCES))
    dir: str = setting("data", f"folder of the official files of {', '.join(OFFICIAL)}")
    path: str = setting("", "; ".join(f"data.name={name}: {SOURCES[name].path_help}" for name in OWN))
    image_size: int | None = setting(
        None,
        f"data.name={_RESIZED}: resize all images to so many pixels square, bilinear; none: they have one size",
        low=8,
        high=4096,
    )
    fraction: float = setting(
        0.9, "share of the official training split that all clients together have", above=0, high=1
    )
    public_fraction: float | None = setting(
        None,
        "share of the training split set aside as a public set, for every scheme; "
        "none: as many images as a client trains on, where they fit",
        low=0,
        high=1,
    )
    val_fraction: float = setting(
        0.0, "share of each client's training images held out for validation, stratified by class", low=0, below=1
    )
    partition: str = setting(
        "dirichlet",
        "how it is partitioned; shards: each client a few classes; natural: by the client "
        "ids in the file; quantity: unequal sizes, one class mix; heuristic: as the code released with FedHKD does, "
        "with unequal sizes and repeated images, for comparison only; file: as data.partition_file has it",
        choices=("dirichlet", "iid", "natural", "shards", "quantity", "heuristic", "file"),
    )
    partition_file: str = setting(
        "", "data.partition=file: the .npz or .json that `python -m hkd_hpc.data partition` wrote"
    )
    beta: float = setting(
        0.5,
        "concentration of the Dirichlet class mixes (dirichlet, heuristic) or sizes (quantity); smaller is less IID",
        above=0,
        high=1e9,
    )
    classes_per_client: int = setting(
        2,
        "data.partition=shards: shards of a client, each of one class or across the border of two",
        low=1,
        high=100_000,
    )
    min_images: int | None = setting(
        None,
        "fewest images of a client, local tests included; natural: smaller ones are left out; none: 1, heuristic: 10",
        low=1,
        high=1_000_000,
    )
    client_rotation: float = setting(
        0.0, "each client's images are turned by an angle of its own, drawn from -D..D degrees; 0: not", low=0, high=180
    )
    client_noise: float = setting(
        0.0,
        "each client's images get Gaussian noise of a standard deviation of its own, drawn from 0..S of their range; "
        "0: not",
        low=0,
        high=1,
    )
    partition_seed: int | None = setting(None, "seed of the partition; none: run.seed", low=0)
