"""The notebook of examples/ and the page From Python, run for real: each in one process, cell after cell.

A Jupyter kernel would run the same code in the same order, and ask for eight more packages; what a notebook adds, the
HTML of a cell's last line, is made here too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import snippets
import toy

pytestmark = pytest.mark.slow

NOTEBOOK = toy.PROJECT / "examples/first_steps.ipynb"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_notebook_s_cells_run_and_show_what_they_promise():
    cells = snippets.cells_of_notebook(NOTEBOOK)
    run, rounds, clients, counts, plot, *_, study, table = snippets.run(cells, "first_steps")
    assert "complete" in run
    assert rounds.count("<tr") == 4
    assert clients.count("<tr") == 6
    assert counts.shape == (5, 10)
    assert plot.startswith(b"\x89PNG")
    assert "4 of 4 runs are complete" in study
    assert "fedhkd" in table


def test_the_notebook_is_kept_without_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"]] == []


def test_the_page_s_examples_run(capsys):
    cells = [cell for cell in snippets.cells_of_page(toy.PROJECT / "docs/python.md") if "launch(" not in cell]
    snippets.run(cells, "python_md")  # the notebook launches the same study
    out = capsys.readouterr().out
    assert "/runs/one: complete, 2 rounds>" in out
    assert "fed.round: no such setting; did you mean fed.rounds" in out
    assert out.endswith("['complete']\n")
    assert Path("accuracy.pdf").stat().st_size > 1000
