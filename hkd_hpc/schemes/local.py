"""Control: no federation. Each client trains its own model on its own images, from the common initial weights on.

Optimiser, learning rate, epochs and rounds are those of every scheme; a "round" exchanges nothing. A scheme whose
personal models are not better than these is not worth its federation.
"""

from __future__ import annotations

from hkd_hpc.schemes.base import About, Scheme


class Local(Scheme):
    """Every client for itself."""

    shares_weights = False
    cuda_graph_safe = True
    about = About(
        remark="nothing is exchanged; global is the plain mean of the clients' own models, which no client ever gets"
    )
