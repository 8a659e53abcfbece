"""Section `data` of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.common.settings import setting
from hkd_hpc.data.registry import BUNDLED, DEFAULT, OFFICIAL, OWN, SMALLEST_SIDE_PX, SOURCES

_RESIZED = ", ".join(name for name, source in SOURCES.items() if source.resizes)


@dataclass(frozen=True)
class DataSettings:
    """Which images, and how they are partitioned among the clients (data/)."""

    name: str = setting(
        DEFAULT,
        f"data set; {', '.join(BUNDLED)} ships with the package",
        choices=tuple(SOURCES),
        own="module:function",
    )
    dir: str = setting("data", f"folder of the official files of {', '.join(OFFICIAL)}")
    path: str = setting(
        "",
        "; ".join(f"data.name={name}: {SOURCES[name].path_help}" for name in OWN)
        + "; a loader of your own: its one argument, as it is, if given",
    )
    image_size: int | None = setting(
        None,
        f"data.name={_RESIZED}: resize all images to so many pixels square, bilinear; none: they have one size",
        low=8,
        high=4096,
    )
    as_stored: bool = setting(
        False,
        "images keep their size and channels, of which there may be any number; else grey is repeated as RGB, and "
        f"sides below {SMALLEST_SIDE_PX} px get zeros around them",
    )
    normalise: str = setting(
        "fixed",
        "fixed: uint8 images to -1..1, rows as they are, other images are rejected; none: floats as they are; "
        "measured: by mean and standard deviation of the training split, for each channel or column",
        choices=("fixed", "none", "measured"),
    )
    mean: str = setting(
        "",
        "normalise by this mean in place of data.normalise: one number, or one a channel or column with commas "
        "between; of uint8 images, of x / 255",
    )
    std: str = setting("", "the standard deviation that belongs to data.mean")
    image_column: str = setting("", "data.name=hf: the column with the images; none: the one whose feature is Image")
    label_column: str = setting("label", ".csv, .parquet, data.name=hf: the column with the labels")
    split_column: str = setting("", ".csv and .parquet: a column that says train or test")
    client_column: str = setting(
        "", ".csv, .parquet, data.name=hf: a column with client ids, for data.partition=natural"
    )
    test_fraction: float | None = setting(
        None,
        "own data without a test split: this share of each class is held out as one; none: they have one",
        above=0,
        below=1,
    )
    test_seed: int = setting(0, "seed of data.test_fraction; run.seed does not move the test split", low=0)
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
