"""Files that come with the package, to read or to change: `hkd slurm copy DIR`, `hkd specs list`.

    python -m hkd_hpc.commands.bundled slurm|specs|examples|docs list|copy [DIR]

slurm: sbatch scripts with their README.md, and site files; specs: those of `hkd sweep launch` and `hkd compare`;
examples: a scheme, a logger and data of one's own, a notebook; docs: the documentation's pages, with their tables.
Exit codes: 0 done, 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import runpy
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from hkd_hpc.common.command import Parser, exit_code, program_of
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.settings import first_paragraph
from hkd_hpc.runtime.paths import path_argument

PACKAGE = Path(__file__).parents[1]
HOOKS = PACKAGE / "docs" / "hooks.py"  # makes the pages whole
ROOT = PACKAGE / "docs" / "root"  # what they include
FOLDERS = {
    "slurm": ("slurm",),
    "specs": ("jobs/specs", "specs"),
    "examples": ("examples",),
    "docs": ("docs",),
}


def files_of(kind: str) -> dict[str, Path]:
    """Every file of a kind, by its name in a copy."""
    roots = [PACKAGE / folder for folder in FOLDERS[kind]]
    return {
        path.relative_to(root).as_posix(): path
        for root in roots
        for path in sorted(root.rglob("*"))
        if path.is_file() and path != HOOKS and ROOT not in path.parents and "__pycache__" not in path.parts
    }


def copy(kind: str, folder: Path) -> list[Path]:
    """The copies, in a folder that is made. UsageError where it has one of the files already, or cannot be written: no
    copy is left then."""
    targets = {folder / name: path for name, path in files_of(kind).items()}
    there = [target for target in targets if target.exists()]
    if there:
        raise UsageError(f"{there[0]}: is there already; name another folder")
    try:
        for target, path in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        if kind == "docs":
            fill(target for target in targets if target.suffix == ".md")
    except OSError as error:
        for target in targets:  # the next attempt would say that they are there already
            with contextlib.suppress(OSError):
                target.unlink()
        raise UsageError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
    return list(targets)


def fill(pages: Iterable[Path]) -> None:
    """Put tables made of declarations, and texts from elsewhere, where the pages leave room for them."""
    whole = runpy.run_path(str(HOOKS))["on_page_markdown"]
    for page in pages:
        page.write_text(whole(page.read_text(encoding="utf-8")), encoding="utf-8")


def parse(arguments: list[str]) -> Namespace:
    """The options, `kind` among them. Raises UsageError; --help ends the process."""
    parser = Parser(prog=program_of("hkd_hpc.commands.bundled"), description=first_paragraph(__doc__))
    parser.add_argument("kind", choices=FOLDERS, help="each has its --help")
    kind = parser.parse_args(arguments[:1]).kind
    of_kind = f"{parser.prog} {kind}"
    parser = Parser(prog=of_kind, description=f"Files to read or to change: {of_kind} copy DIR, {of_kind} list.")
    parser.set_defaults(kind=kind)
    listed = "list: the files' paths, as they lie in the package"
    parser.add_argument("what", choices=("list", "copy"), help=listed).metavar = "list|copy"
    parser.add_argument(
        "folder", nargs="?", type=path_argument, metavar="DIR", help="where copies go; they may be changed"
    )
    return parser.parse_args(arguments[1:])


@exit_code
def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if (options.what == "copy") != bool(options.folder):
        raise UsageError("copy needs a folder: copy DIR" if options.what == "copy" else "list takes no folder")
    found = copy(options.kind, options.folder) if options.folder else files_of(options.kind).values()
    print(*found, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
