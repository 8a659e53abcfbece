"""Control: all data in one place. One model is trained on the training images of all clients together.

Optimiser, learning rate, epochs and rounds are those of every scheme; its images are exactly those that the clients of
a federation with the same settings train on, and its local test is all of their local tests. What a global model of any
scheme can hope for.
"""

from __future__ import annotations

from hkd_hpc.schemes.base import About, Scheme


class Central(Scheme):
    """One client that has everything."""

    shares_weights = False
    pools_data = True
    cuda_graph_safe = True
    about = About(
        remark="the images of all clients were trained on in one place, so there are no clients to sample, to average "
        "or to fine-tune on; local is the one model on all local tests together"
    )
