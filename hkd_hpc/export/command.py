"""A run for other programs: trained models as plain state dicts, rounds and clients as CSV, rounds for TensorBoard.

    python -m hkd_hpc.export RUN --out global.pt [--client I]
    python -m hkd_hpc.export RUN --csv DIR --tensorboard DIR

`.pt` loads with torch.load(path, weights_only=True), `.safetensors` with the safetensors package. The global model is
that of the newest good checkpoint; a client's own model is that of the last round, after its local training.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from hkd_hpc.common.command import Parser, exit_code, program_of
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.common.settings import first_paragraph
from hkd_hpc.console import messages
from hkd_hpc.export.models import export_model
from hkd_hpc.export.tables import export_rounds
from hkd_hpc.runtime.paths import path_argument

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
    if not options.out and (options.client is not None or options.architecture):
        raise UsageError("--client and --architecture say which model; name its file with --out FILE.pt")
    targets = {name: getattr(options, name) for name in KINDS if getattr(options, name)}
    there = {name: files_there(name, target) for name, target in targets.items()}
    for name, paths in there.items():
        if paths and not options.force:
            more = f", and {len(paths) - 1} more" if len(paths) > 1 else ""
            raise UsageError(
                f"--{name} {paths[0]}: is there already{more}; name another {KINDS[name]}, or add --force to write "
                f"over {'them' if more else 'it'}"
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
