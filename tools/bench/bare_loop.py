"""A plain PyTorch training loop, nothing federated: what the training of a round costs at the least without tricks.

`python -m tools.bench.bare_loop WORKLOAD IMAGES`. Each line "fedavg 0,1 1" on stdin (the first word is ignored) trains
those clients for so many epochs one after the other and answers with the seconds of CPU. Uses only torch and
torchvision.
"""

import sys
import time

import torch
import torch.nn.functional as F
import torchvision
from torch import nn


def build(workload: str) -> nn.Module:
    """J: ResNet18, latent 64. S: ShuffleNetV2 x1.0, latent 32. Both with one linear classifier for 10 classes."""
    if workload == "J":
        return nn.Sequential(torchvision.models.resnet18(num_classes=64), nn.Linear(64, 10))
    return nn.Sequential(torchvision.models.shufflenet_v2_x1_0(num_classes=32), nn.Linear(32, 10))


def make_images(client: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random uint8 images and labels: what they show makes no difference to the time."""
    random = torch.Generator().manual_seed(client)
    x = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=random)
    return x, torch.randint(0, 10, (count,), generator=random)


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int) -> None:
    """Adam with defaults, new for each client; the last short batch is kept."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    net.train()
    for _ in range(epochs):
        for index in torch.randperm(len(x), device=x.device).split(64):
            batch = (x[index].float() / 255 - 0.5) / 0.5
            optimizer.zero_grad()
            F.cross_entropy(net(batch), y[index]).backward()
            optimizer.step()


def main(workload: str, images: int) -> None:
    torch.set_num_threads(1)
    net = build(workload)
    for line in sys.stdin:
        _, clients, epochs = line.split()
        data = [make_images(int(client), images) for client in clients.split(",")]
        start = time.process_time()
        for x, y in data:
            train(net, x, y, int(epochs))
        print(time.process_time() - start, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
