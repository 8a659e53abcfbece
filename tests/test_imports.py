"""What import-linter (pyproject.toml) cannot say: it knows packages from elsewhere only by their first name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import toy

COMM = toy.PROJECT / "hkd_hpc/comm"
FILES = [path for path in (toy.PROJECT / "hkd_hpc").rglob("*.py") if COMM not in path.parents]


def imported(path: Path) -> set[str]:
    """Dotted names of all that a file imports, wherever in it: at the top, late, or for types alone."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def is_collective(name: str) -> bool:
    return name.startswith(("mpi4py", "torch.distributed"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(toy.PROJECT)))
def test_collectives_live_in_comm_alone(path):
    assert [name for name in imported(path) if is_collective(name)] == []
    assert "torch.distributed" not in path.read_text()  # as an attribute of torch


def test_the_transports_do_import_them():
    found = {name.split(".")[0] for path in COMM.rglob("*.py") for name in imported(path) if is_collective(name)}
    assert found == {"mpi4py", "torch"}
