"""A run for other programs: trained models as plain state dicts, rounds and clients as CSV, rounds for TensorBoard.

    python -m hkd_hpc.export RUN --out global.pt [--client I]
    python -m hkd_hpc.export RUN --csv DIR --tensorboard DIR

`.pt` loads with torch.load(path, weights_only=True), `.safetensors` with the safetensors package. The global model is
that of the newest good checkpoint; a client's own model is that of the last round, after its local training.
"""

from __future__ import annotations

import io
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hkd_hpc import loggers
from hkd_hpc.analysis.metrics import in_order
from hkd_hpc.command import Parser, exit_code, program_of
from hkd_hpc.console import messages
from hkd_hpc.errors import RunError, UsageError
from hkd_hpc.lazy import torch
from hkd_hpc.loggers.base import Round, numbers_of
from hkd_hpc.loggers.files import csv_line
from hkd_hpc.privacy import ledger, releases
from hkd_hpc.results import Run, load
from hkd_hpc.results.models import read_inputs, read_model
from hkd_hpc.runtime.paths import path_argument
from hkd_hpc.settings import first_paragraph
from hkd_hpc.store.atomic import replace_file, replace_text

KINDS = {"out": "file", "csv": "folder", "tensorboard": "folder"}  # of what is written, by option


@exit_code
def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: its words; None: those of this process.

    Returns:
        0 done; 2 wrong input, or the file cannot be written: one line says which.
    """
    parser = Parser(prog=program_of("hkd_hpc.export"), description=first_paragraph(__doc__))
    parser.add_argument("run", type=path_argument, help="the run's folder")
    parser.add_argument("--out", type=path_argument, metavar="FILE.pt|FILE.safetensors", help="the model")
    parser.add_argument("--client", type=int, metavar="I", help="with --out: client I's own model, not the global one")
    parser.add_argument("--architecture", default="", metavar="NAME", help="with --out: of unequal models, which one")
    parser.add_argument("--force", action="store_true", help="write over what is there")
    parser.add_argument("--csv", type=path_argument, metavar="DIR", help="write rounds.csv and clients.csv there")
    parser.add_argument(
        "--tensorboard", type=path_argument, metavar="DIR", help="write the rounds for TensorBoard there"
    )
    options = parser.parse_args(arguments)
    try:
        for line in exported(options):
            messages.say(line)
    except RunError as error:  # a file that cannot be read or written was named
        raise UsageError(str(error)) from None
    return 0


def exported(options: Namespace) -> Iterator[str]:
    """Write what was asked for; a line for each file or folder. Raises UsageError, RunError."""
    run = options.run
    if not (options.out or options.csv or options.tensorboard):
        raise UsageError("nothing to export; say what with --out FILE.pt, --csv DIR or --tensorboard DIR")
    targets = {name: getattr(options, name) for name in KINDS if getattr(options, name)}
    there = {name: files_there(name, target) for name, target in targets.items()}
    for name, paths in there.items():
        if paths and not options.force:
            raise UsageError(
                f"--{name} {paths[0]}: is there already; name another {KINDS[name]}, or add --force to write over it"
            )
    for name, target in targets.items():
        if name == "out":
            yield export_model(run, target, options.client, options.architecture)
        else:
            yield export_rounds(run, name, target, there[name])


def files_there(name: str, target: Path) -> list[Path]:
    """What an export would write over, or mix with."""
    if name == "tensorboard":
        return sorted(target.glob("*tfevents*"))
    paths = [target] if name == "out" else [target / "rounds.csv", target / "clients.csv"]
    return [path for path in paths if path.exists()]


def export_model(run: Path, out: Path, client: int | None, architecture: str = "") -> str:
    """Write one model; what was written, for people."""
    arrays = read_model(run, client, architecture)
    write_model(out, arrays)
    told = f"{out}: {len(arrays)} tensors, {sum(a.size for a in arrays.values()):,} numbers"
    return f"{told}{normalised_text(run)}"


def normalised_text(run: Path) -> str:
    """By which mean and standard deviation the run normalised its inputs, which no state dict says; else empty."""
    inputs = read_inputs(run)
    if not inputs.mean:
        return ""
    mean, std = (",".join(f"{value:g}" for value in values) for values in (inputs.mean, inputs.std))
    return f"; its inputs{' / 255' * (inputs.dtype == 'uint8')} are normalised by mean {mean} and deviation {std}"


# --- tables


def export_rounds(path: Path, name: str, folder: Path, older: list[Path]) -> str:
    """Hand all rounds of a run to a logger (loggers.REGISTRY), in place of older files; what was written."""
    run = load(path)
    run.require()
    if not len(run):
        raise UsageError(f"{path}: has no round to export yet")
    [make] = loggers.classes_of([name], "--").values()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        logger = make(folder)
        logger.begin(rounds_of(run))
        if name == "csv":
            replace_text(folder / "clients.csv", clients_text(run))
        for old in set(older) - {folder / "clients.csv", logger.path}:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror or error}); name another folder") from None
    return f"{folder}: {len(run)} rounds"


def rounds_of(run: Run) -> list[Round]:
    """All rounds of a run, as a logger takes them."""
    columns = {name: column.tolist() for name, column in run.round_columns.items()}
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    return [(row["round"], numbers_of(row)) for row in rows]


def clients_text(run: Run) -> str:
    """The clients' table as CSV: a line for each round and client; of a column of classes (or of kinds of what is
    released) one for each class (kind).
    """
    columns: dict[str, np.ndarray] = {}
    for name in in_order(run.client_columns):
        values = run.client_columns[name]
        by_part = np.moveaxis(values, -1, 0) if values.ndim == 3 else ()
        names = releases.KINDS if name in ledger.COLUMNS else range(len(by_part))
        columns |= {f"{name}/{part}": column for part, column in zip(names, by_part)} or {name: values}
    lines = [csv_line(["round", "client", *columns])]
    for round, *rows in zip(run.round_columns["round"], *columns.values()):
        lines += [csv_line([round, client, *row]) for client, row in enumerate(zip(*rows))]
    return "".join(lines)


# --- models


def write_model(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a state dict: the whole file or none.

    Args:
        path: ends in .pt or .safetensors.
        arrays: by name.

    Raises:
        UsageError: another suffix, or safetensors is not installed.
        RunError: the file cannot be written.
    """
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    if path.suffix == ".pt":
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        content = buffer.getvalue()
    elif path.suffix == ".safetensors":
        content = safetensors_of(tensors)
    else:
        raise UsageError(f"--out {path}: the name must end in .pt or .safetensors")
    replace_file(path, lambda temporary: temporary.write_bytes(content))


def safetensors_of(tensors: dict) -> bytes:
    """The content of a .safetensors file.

    Args:
        tensors: by name.

    Returns:
        Its bytes.

    Raises:
        UsageError: safetensors is not installed.
    """
    try:
        from safetensors.torch import save
    except ImportError:
        raise UsageError(
            "safetensors is not installed; pip install safetensors, or choose a name ending in .pt"
        ) from None
    return save(tensors)


if __name__ == "__main__":
    sys.exit(main())
