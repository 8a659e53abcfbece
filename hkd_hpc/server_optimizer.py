"""Server optimizers: what the server makes of the averaged update (Reddi et al., Adaptive Federated Optimization, ICLR
2021, Algorithm 2; avgm: Hsu et al., 2019).

With x the global weights of a round and D = mean of what the clients trained from them - x:

    avgm:   m <- beta m + D                        x <- x + lr m
    adam:   m <- beta m + (1 - beta) D             x <- x + lr m / (sqrt(v) + tau)
            v <- v + (1 - beta2) (D^2 - v)
    yogi:   as adam, but v <- v - (1 - beta2) D^2 sign(v - D^2)

m = 0 and v = tau^2 at first, without bias correction. BatchNorm's statistics have no update: they are averaged only.

Every rank computes it of the same mean, so that nothing more travels. Each operation is rounded by itself (no fused
multiply-add), which IEEE 754 leaves no choice in: all ranks hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hkd_hpc.aggregate import CHUNK, GlobalStep
from hkd_hpc.config import FedSettings

DEFAULT_LR = {"avgm": 1.0, "adam": 0.01, "yogi": 0.01}


class ServerOptimizer(GlobalStep):
    """Steps the global weights along the averaged update.

    Args:
        fed: which one, and its numbers.
        parameters: trainable floats of the model, P.
        device: where they are.

    Attributes:
        state: what it keeps from round to round, by name: vectors of P floats.
    """

    def __init__(self, fed: FedSettings, parameters: int, device: torch.device | str = "cpu"):
        self.lr = DEFAULT_LR[fed.server_optimizer] if fed.server_lr is None else fed.server_lr
        self.beta, self.beta2, self.tau = fed.server_momentum, fed.server_beta2, fed.server_epsilon
        rules: dict[str, Callable[..., torch.Tensor]] = {"avgm": self._avgm, "adam": self._adam, "yogi": self._yogi}
        self.rule = rules[fed.server_optimizer]
        self.state = {"momentum": torch.zeros(parameters, device=device)}
        if fed.server_optimizer != "avgm":
            self.state["square"] = torch.full((parameters,), self.tau**2, device=device)

    def step(self, received_P: torch.Tensor, weights_P: torch.Tensor, share: float = 1.0) -> None:
        """As every global step; its papers do not ask for the share."""
        size = CHUNK if weights_P.device.type == "cpu" else max(len(weights_P), 1)
        vectors = (received_P, weights_P, *self.state.values())
        for received, weights, *state in zip(*(vector.split(size) for vector in vectors)):
            step = self.rule(weights.sub_(received), *state)
            torch.add(received, step, out=weights)

    # --- the step of an update D, on one piece of each vector

    def _avgm(self, update: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum.mul_(self.beta).add_(update) * self.lr

    def _adam(self, update: torch.Tensor, momentum: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        square.add_((update.square() - square).mul_(1 - self.beta2))
        return self._scaled(update, momentum, square)

    def _yogi(self, update: torch.Tensor, momentum: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        new = update.square()
        square.sub_((square - new).sign_().mul_(new).mul_(1 - self.beta2))
        return self._scaled(update, momentum, square)

    def _scaled(self, update: torch.Tensor, momentum: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        momentum.mul_(self.beta).add_(update * (1 - self.beta))
        return (momentum * self.lr).div_(square.sqrt().add_(self.tau))
