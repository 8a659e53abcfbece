"""`python -m hkd_hpc.data show | partition`: which images each client gets under some settings, before any training.

`show` prints it, and draws it with --out; `partition` writes it to a file, for other frameworks or data.partition=file.
Settings are those of a training: presets, a file, section.key=value.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hkd_hpc import config as config_module
from hkd_hpc.analysis.distances import total_variation_M
from hkd_hpc.analysis.tables import aligned
from hkd_hpc.common.command import Parser, program_of
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import Config
from hkd_hpc.data import assigned, content, partition_file
from hkd_hpc.data.partition import Partition
from hkd_hpc.data.skew import FeatureSkew, skew_of
from hkd_hpc.data.sources import DataSet
from hkd_hpc.figures.catalogue import of_partition
from hkd_hpc.figures.files import check_picture, write_picture
from hkd_hpc.overview.plan import SHOWN_CLASSES, class_lines, data_line, partition_text
from hkd_hpc.runtime.paths import path_argument


@dataclass(frozen=True)
class Shown:
    """A partition, and what it is of.

    Attributes:
        config: the settings.
        dataset: the data.
        partition: who has which of them.
        skew: what is done to the clients' images, if anything.
    """

    config: Config
    dataset: DataSet
    partition: Partition
    skew: FeatureSkew | None

    @property
    def tree(self) -> dict[str, Any]:
        """As metrics.h5 has it in /partition."""
        return assigned.as_tree(self.partition, self.dataset)


def main(argv: Sequence[str]) -> int:
    """Run `show` or `partition`, the first of `argv`; 0. Raises UsageError, RunError."""
    command, *rest = argv
    options = _parser(command).parse_intermixed_args(rest)
    (show if command == "show" else export)(options)
    return 0


def _parser(command: str) -> Parser:
    parser = Parser(prog=f"{program_of('hkd_hpc.data')} {command}", description=__doc__, allow_abbrev=False)
    parser.add_argument("--preset", action="append", default=[], metavar="P", help="named settings, as of a training")
    parser.add_argument("--config", metavar="FILE", help="settings from a TOML file, or from the config.json of a run")
    if command == "show":
        parser.add_argument("--out", type=path_argument, metavar="FILE.png|.pdf|.svg", help="draw it there")
    else:
        parser.add_argument("--out", type=path_argument, metavar="FILE.npz|.json", required=True, help="write it there")
        parser.add_argument("--force", action="store_true", help="write over what is there")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="settings, over everything else")
    return parser


def show(options: Namespace) -> None:
    """Print the partition, and draw it where asked to."""
    if options.out:
        check_picture(options.out)
    shown = look(options.preset, options.config, options.settings)
    if options.out:
        write_picture(of_partition(shown.config.partition_seed, shown.tree), options.out)
    for line in [*lines(shown), *[f"{options.out}: clients x classes"] * bool(options.out)]:
        print(line)


def export(options: Namespace) -> None:
    """Write the partition to a file."""
    partition_file.check_ending(options.out, "--out ")
    if not options.out.parent.is_dir():
        raise UsageError(f"--out {options.out}: there is no folder {options.out.parent}")
    if options.out.exists() and not options.force:
        raise UsageError(f"--out {options.out}: is there already; name another file, or add --force to write over it")
    shown = look(options.preset, options.config, options.settings)
    tree = assigned.exported(shown.config.to_json(), shown.partition, shown.dataset)
    partition_file.write(options.out, tree)
    print(f"{options.out}: {shown.config.fed.clients} clients, partition {shown.partition.sha256[:16]}")


def look(presets: Sequence[str], file: str | None, settings: Sequence[str]) -> Shown:
    """Read the data and partition them as a training with these settings would. Raises UsageError."""
    asked, soft = config_module.collect(presets, file, settings)
    config = config_module.absolute_paths(config_module.from_values(asked, soft))
    config = config_module.with_clients_of_data(config, asked)
    dataset = content.load(config.data)
    seed = config.partition_seed
    partition = assigned.partition_of(config.data, config.fed.clients, seed, dataset)
    images = {"train": dataset.x_train, "test": dataset.x_test}
    return Shown(config, dataset, partition, skew_of(config.data, seed, partition, images))


# ---- what is printed


def lines(shown: Shown) -> Iterator[str]:
    """Who has what, how large clients are, and how far from each other."""
    config, tree = shown.config, shown.tree
    yield (
        f"{config.data.name}: {config.fed.clients} clients, {partition_text(config.data)}, "
        f"partition's seed {config.partition_seed}"
    )
    yield from [f"data: {line}" for line in (*shown.dataset.remarks, shown.partition.remark) if line]
    yield data_line(tree)
    yield from class_lines(tree)
    yield f"partition {shown.partition.sha256[:16]}: training images per client and class"
    yield from aligned(_to_the_right(list(_rows(shown, tree))))
    yield from _summary(tree["train_count"])


def _rows(shown: Shown, tree: Mapping[str, Any]) -> Iterator[list[str]]:
    """The table's head, and a row for each client."""
    count_MC = tree["train_count"]
    classes = min(count_MC.shape[1], SHOWN_CLASSES)
    extra = _extra_columns(shown)
    names = [*map(str, range(classes)), *["..."] * (count_MC.shape[1] > classes)]
    yield ["client", "train", "val", "test", *names, "distance", *extra]
    vals, tests = np.diff(tree["val_offset"]), np.diff(tree["test_offset"])
    for client, distance in enumerate(total_variation_M(count_MC)):
        counts = [*map(str, count_MC[client, :classes]), *["..."] * (count_MC.shape[1] > classes)]
        sizes = map(str, (client, count_MC[client].sum(), vals[client], tests[client]))
        yield [*sizes, *counts, f"{distance:.3f}", *(column[client] for column in extra.values())]


def _to_the_right(rows: list[list[str]]) -> list[list[str]]:
    """Numbers, and what stands above them, end below each other."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        [text if rows[0][place] == "name" else text.rjust(widths[place]) for place, text in enumerate(row)]
        for row in rows
    ]


def _extra_columns(shown: Shown) -> dict[str, Sequence[str]]:
    """What not every partition has: the angle and noise of each client, and its name."""
    found: dict[str, Sequence[str]] = {}
    if shown.skew and shown.skew.angle_deg_M.any():
        found["turned"] = [f"{angle:.1f}" for angle in shown.skew.angle_deg_M]
    if shown.skew and shown.skew.noise_std_M.any():
        found["noise"] = [f"{std:.3f}" for std in shown.skew.noise_std_M]
    return found | ({"name": shown.partition.names} if shown.partition.names else {})


def _summary(count_MC: np.ndarray) -> Iterator[str]:
    size_M, distance_M = count_MC.sum(1), total_variation_M(count_MC)
    yield f"training images of a client: {size_M.min()} to {size_M.max()}, median {np.median(size_M):g}"
    yield (
        f"distance of a client's class mix from that of all: mean {np.nanmean(distance_M):.3f}, "
        f"largest {np.nanmax(distance_M):.3f} (total variation: 0 the same mix, 1 no class in common)"
    )
