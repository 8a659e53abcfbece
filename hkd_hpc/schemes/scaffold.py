"""SCAFFOLD: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.

L = cross-entropy. Client i corrects each gradient g by the control variates c of the server and c_i of its own (its
Algorithm 1), which begin as zero:

    y_i <- y_i - lr (g(y_i) - c_i + c),    c_i+ = mean of g over its K steps,    c <- c + (1 / N) sum_i (c_i+ - c_i)

N: all clients of the federation. That is option II, c_i+ = c_i - c + (w_received - y_i) / (K lr): under plain SGD
without weight decay the two are the same. As the mean of the gradients it makes sense with momentum, weight decay,
clipping and Adam too, where (w_received - y_i) / (K lr) is no gradient; its theory is of plain SGD alone. The global
step is 1; clients are weighted as in all schemes (fed.average; in its paper alike), in c always by 1 / N.
"""

from __future__ import annotations

from hkd_hpc.common.lazy import torch
from hkd_hpc.models.precision import real
from hkd_hpc.schemes.base import About, Scheme


class Scaffold(Scheme):
    """Control variates of the size of the model, on the server and on each client."""

    about = About(
        models_held=4,
        remark="its paper corrects the steps of plain SGD (train.optimizer=sgd); with another optimizer the corrected "
        "gradient is what that one gets",
    )

    def report_shapes(self):
        return {"control_P": (self.info.parameters,)}

    message_shapes = client_state_shapes = report_shapes

    def begin(self, client):
        server_P = client.message["control_P"]
        own_P = client.state.get("control_P", torch.zeros_like(server_P))
        client.cache.update(own_P=own_P, correction_P=server_P - own_P, sum_P=torch.zeros_like(server_P), steps=0)

    def adjust_gradient(self, client):
        cache, flat = client.cache, client.flat
        cache["steps"] += 1
        active = map(flat.active, (flat.grad_P, cache["sum_P"], cache["correction_P"]))
        for gradient, total, correction in zip(*active):  # what lies between is never stepped, and never zeroed
            total.add_(gradient)
            gradient.add_(correction)

    def report(self, client):
        client.state["control_P"] = client.cache["sum_P"] / client.cache["steps"]
        return {"control_P": client.state["control_P"] - client.cache["own_P"]}

    def combine(self, server, reports):
        before_P = server.state.get("control_P", 0.0)
        server.state["control_P"] = before_P + reports["control_P"].sum(0, dtype=torch.float64) / self.info.clients
        return {"control_P": real(server.state["control_P"])}
