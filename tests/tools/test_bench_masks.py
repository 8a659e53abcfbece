"""The steps of bench_masks between real ranks, and its table."""

from __future__ import annotations

import json

from hkd_hpc.comm import World
from tools.bench import masks as bench_masks
from tools.bench.masked_exchange import MaskedExchange
from tools.forked_ranks import run_rank_values


def all_steps(rank: int) -> None:
    """As `measure` takes them, once with all clients, once without the first."""
    with World.open(timeout_s=60) as world:
        exchange = MaskedExchange(world.connect(device="cpu"), 1000)
        for exchange.dropped in (set(), {0}):
            for step in (
                exchange.plain,
                exchange.keys,
                exchange.masks,
                exchange.take,
                exchange.unmask,
                exchange.masked,
            ):
                exchange.mean_V.zero_()
                step()
            exchange.check()


def test_every_step_runs_and_the_mean_is_right():
    assert run_rank_values(3, all_steps) == [""] * 3


def test_lines_of_the_table_by_hand(monkeypatch):
    """Two repeats: .3 / .2 and .33 / .3; all steps .01 + .05 + .02 + .3 = .38 of .2, .41 of .3."""
    seconds = {
        "plain": [0.2, 0.3],
        "keys": [0.01] * 2,
        "masks": [0.05] * 2,
        "unmask": [0.02] * 2,
        "dropped": [0.1] * 2,
        "take": [0.0] * 2,
    }
    output = f"a warning\n{json.dumps({**seconds, 'masked': [0.3, 0.33]})}\n"
    monkeypatch.setattr(bench_masks, "start_mpi", lambda *arguments: arguments)
    monkeypatch.setattr(bench_masks, "finish", lambda arguments: output)
    found = {line.title: [round(value, 6) for value in line.values] for line in bench_masks.lines(7, 3, 2)}
    assert found == {
        "7 floats, 3 ranks: masked exchange / plain": [1.5, 1.1],
        "7 floats, 3 ranks: all steps / plain exchange": [1.9, 1.366667],
        "7 floats, 3 ranks: plain exchange": [200.0, 300.0],
        "7 floats, 3 ranks: keys and shares, by client": [1.0, 1.0],
        "7 floats, 3 ranks: masks, by client": [5.0, 5.0],
        "7 floats, 3 ranks: numbers under masks": [0.0, 0.0],
        "7 floats, 3 ranks: who delivers": [20.0, 20.0],
        "7 floats, 3 ranks: who delivers, one of them dropped out": [100.0, 100.0],
    }
