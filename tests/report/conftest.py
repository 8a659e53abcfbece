"""The report of a small study, made once."""

from __future__ import annotations

import pytest
from small_study import EVIL, write_broken, write_restless, write_study

from hkd_hpc.report.__main__ import main


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """The folder of the study."""
    root = write_study(tmp_path_factory.mktemp("report") / f"study {EVIL.replace('/', '')}")
    write_restless(root)
    write_broken(root)
    return root


@pytest.fixture(scope="session")
def report(study):
    """The path of its report."""
    out = study.parent / "report.html"
    assert main([str(study), "--out", str(out)]) == 0
    return out
