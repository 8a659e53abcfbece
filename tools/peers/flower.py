"""A workload in Flower's simulation, two Ray actors, a CPU each: `python -m tools.peers.flower WORKLOAD IMAGES ROUNDS`.

Its best: nets and images stay in the actors from one client to the next, no evaluation, no dashboard, fused optimiser.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from .workload import CLIENTS, WORKERS, build_net, result, train

app = ClientApp()


@functools.cache
def net_of_actor(workload: str) -> nn.Module:
    """The one net of this process; every client overwrites it."""
    return build_net(workload)


@app.train()
def fit(message: Message, context) -> Message:
    """A client's local epoch."""
    config, client = message.content["config"], context.node_config["partition-id"]
    net = net_of_actor(config["workload"])
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    losses = train(net, client, config["images"], config["server-round"])
    metrics = MetricRecord({"num-examples": config["images"], "losses": losses})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


class Averaging(FedAvg):
    """Federated averaging of all clients that notes when each round ends, and its losses."""

    def __init__(self):
        super().__init__(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
        self.end_s, self.losses = [], []

    def aggregate_train(self, server_round, replies):
        averages = super().aggregate_train(server_round, replies)
        self.end_s.append(time.monotonic())
        done = [reply.content["metrics"] for reply in replies if reply.has_content()]
        self.losses.append([loss for metrics in done for loss in metrics["losses"]])
        return averages


def main(workload: str, images: int, rounds: int) -> None:
    net, strategy, server = build_net(workload), Averaging(), ServerApp()

    @server.main()
    def serve(grid, context) -> None:
        last = strategy.start(
            grid,
            ArrayRecord(net.state_dict()),
            num_rounds=rounds,
            train_config=ConfigRecord({"workload": workload, "images": images}),
        )
        net.load_state_dict(last.arrays.to_torch_state_dict())

    with tempfile.TemporaryDirectory() as folder:
        run_simulation(
            server,
            app,
            CLIENTS,
            backend_config={
                "init_args": {"num_cpus": WORKERS, "_temp_dir": folder},
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )
    print(result(net, strategy.losses, strategy.end_s, "flwr", "ray"))


if __name__ == "__main__":
    from . import flower  # by its name, by which the actors find `fit` too

    flower.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
