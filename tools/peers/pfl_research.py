"""In pfl-research's simulator: `torchrun --nproc-per-node 2 -m tools.peers.pfl_research WORKLOAD IMAGES ROUNDS`.

Its best: tensors in memory, no evaluation of users after the first round, clients of equal size not weighted, fused
optimisers on both sides. The library averages parameters alone; BatchNorm's statistics are added to them here.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import distributed, nn

from .workload import BATCH, CLIENTS, LR, averaged, build_net, load, new_optimizer, order, result

NEVER = 10**9  # the first round is always evaluated


class Net(nn.Module):
    """The workload's net with the two methods that pfl-research asks of one. `losses`: of this worker's steps."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net
        self.losses: list[torch.Tensor] = []

    def loss(self, x, y):
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(loss.detach())
        return loss

    def metrics(self, x, y) -> dict:
        return {}


class Model(PyTorchModel):
    """A model whose running statistics are averaged like its parameters."""

    def __init__(self, module: Net):
        state = averaged(module)
        super().__init__(module, new_optimizer, torch.optim.SGD([*module.parameters(), *module.buffers()], lr=1.0))
        self._variable_map.update((name, tensor) for name, tensor in module.named_buffers() if name in state)


class Averaging(FederatedAveraging):
    """Federated averaging of clients that shuffle their images in each round."""

    def train_one_user(self, initial_model_state, model, user_dataset, central_context):
        x, y = user_dataset.raw_data
        index = order(user_dataset.user_id, len(y), central_context.current_central_iteration + 1)
        shuffled = PyTorchTensorDataset((x[index], y[index]), user_id=user_dataset.user_id)
        return super().train_one_user(initial_model_state, model, shuffled, central_context)


class Watch(TrainingProcessCallback):
    """Notes when each round ends, and its losses."""

    def __init__(self):
        self.end_s, self.losses = [], []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.end_s.append(time.monotonic())
        self.losses.append([float(loss) for loss in model.pytorch_model.losses])
        model.pytorch_model.losses.clear()
        return False, Metrics()


def main(workload: str, images: int, rounds: int) -> None:
    np.random.seed(0)  # all workers must draw alike
    watch, model = Watch(), Model(Net(build_net(workload)))
    clients = FederatedDataset(
        lambda client: PyTorchTensorDataset(load(client, images), user_id=client),
        get_user_sampler("minimize_reuse", list(range(CLIENTS))),
    )
    Averaging().run(
        NNAlgorithmParams(rounds, evaluation_frequency=NEVER, train_cohort_size=CLIENTS, val_cohort_size=0),
        SimulatedBackend(clients, clients),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        callbacks=[watch],
        send_metrics_to_platform=False,
    )
    of_workers: list[list[list[float]]] = [[]] * distributed.get_world_size()
    distributed.all_gather_object(of_workers, watch.losses)
    if distributed.get_rank() == 0:
        losses = [[loss for of_worker in of_round for loss in of_worker] for of_round in zip(*of_workers)]
        print(result(model.pytorch_model, losses, watch.end_s, "pfl"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
