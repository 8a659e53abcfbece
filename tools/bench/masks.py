"""What masks on the weights cost (bench.masks [--quick]): privacy.secure_sum of ten clients, on 3 and on 11 ranks.

Beside the exchange without masks, in turns in the same processes: the small network's weights, and as many as workload
J has. A masked exchange is the sum of what is masked already and the way back to the mean; all steps are that and what
comes before: keys and shares, masks and the numbers under them (for which a rank does not wait for slower ones), and
the agreement on who delivers. On fewer cores than ranks all of it shares them as the exchange does: only ratios count.
Exit code 0: everything was measured, whatever the verdicts; 1: something crashed; 2: wrong arguments.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import numpy as np

from hkd_hpc.common.command import Parser, exit_code
from hkd_hpc.common.errors import RunError
from hkd_hpc.common.settings import first_paragraph

from .processes import BenchError, finish, start_mpi
from .table import Line, heading, table

CLIENTS = 10


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    floats: tuple[int, ...] = (102_378, 11_219_594)  # of the small network, of workload J
    ranks: tuple[int, ...] = (3, 11)
    repeats: int = 5


QUICK = Sizes((5_000,), (3,), 1)


def lines(floats: int, ranks: int, repeats: int) -> list[Line]:
    """Of one number of floats and ranks."""
    output = finish(start_mpi(ranks, "-m", f"{__package__}.masked_exchange", str(floats), str(repeats)))
    try:
        seconds = {name: np.array(values) for name, values in json.loads(output.splitlines()[-1]).items()}
    except (ValueError, IndexError):
        raise BenchError(f"masked_exchange on {ranks} ranks: no result\n{output[-2000:]}") from None
    where = f"{floats:,} floats, {ranks} ranks"
    whole = sum(seconds[step] for step in ("keys", "masks", "take", "unmask", "masked"))
    return [
        Line(f"{where}: masked exchange / plain", tuple(seconds["masked"] / seconds["plain"]), 1.10),
        Line(f"{where}: all steps / plain exchange", tuple(whole / seconds["plain"])),
        *(
            Line(f"{where}: {text}", tuple(1e3 * seconds[step] / by), None, "ms")
            for step, text, by in (
                ("plain", "plain exchange", 1),
                ("keys", "keys and shares, by client", CLIENTS),
                ("masks", "masks, by client", CLIENTS),
                ("take", "numbers under masks", 1),
                ("unmask", "who delivers", 1),
                ("dropped", "who delivers, one of them dropped out", 1),
            )
        ),
    ]


@exit_code
def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    parser = Parser(prog=f"python -m {__package__}.masks", description=first_paragraph(__doc__))
    parser.add_argument("--quick", action="store_true", help="a smoke test: tiny sizes, the numbers mean nothing")
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else Sizes()
    try:
        found = [
            line for floats in sizes.floats for ranks in sizes.ranks for line in lines(floats, ranks, sizes.repeats)
        ]
    except BenchError as error:
        raise RunError(str(error)) from None
    print(heading(options.quick))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
