"""Which of the ranks that are left on a host says that another has ended: the lowest, unless it stays silent."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from hkd_hpc.comm.control.watch import StartGuard

LINE = "rank 0 ended before it joined the job; 2 of 3 ranks are left on this host"


@pytest.mark.parametrize(
    "rank, waited_s, said", [(1, 6.0, LINE), (1, 5.2, None), (2, 7.0, None), (2, 20.0, None), (2, 27.0, LINE)]
)
def test_the_lowest_rank_that_is_left_says_it(monkeypatch, rank, waited_s, said):
    monkeypatch.setattr(StartGuard, "_ranks_here", lambda self: {1: 101, 2: 102})
    hint = SimpleNamespace(rank=rank, local_size=3, size=3)
    guard = StartGuard(hint, launcher=1, timeout_s=600.0, began_s=time.monotonic() - waited_s)
    assert guard.problem() == said
