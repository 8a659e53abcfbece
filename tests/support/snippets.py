"""Python that people read, in a page of the documentation or a notebook, run as they would: cell after cell."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def cells_of_page(path: Path) -> list[str]:
    """Its ```python blocks."""
    return BLOCK.findall(path.read_text(encoding="utf-8"))


def cells_of_notebook(path: Path) -> list[str]:
    """Its cells with code."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run(cells: list[str], name: str) -> list[Any]:
    """Run them in one namespace; what the last line of each gives, shown as a notebook shows it."""
    namespace: dict[str, Any] = {"__name__": name}
    return [shown(value_of(cell, namespace, f"{name}[{number}]")) for number, cell in enumerate(cells, 1)]


def value_of(cell: str, namespace: dict[str, Any], name: str) -> Any:
    """Of its last line, None where that is no expression."""
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    return eval(compile(ast.Expression(last.value), name, "eval"), namespace) if last else None


def shown(value: Any) -> Any:
    """As a notebook would: HTML or a picture where there is any."""
    for form in ("_repr_html_", "_repr_png_"):
        if hasattr(value, form):
            return getattr(value, form)()
    return value
