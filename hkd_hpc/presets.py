"""Named groups of settings. `--preset NAME` may be repeated; later ones win; files and the command line win over all.

cifar10, cifar100, svhn: the paper's settings (section 4 and appendix A; 10 clients, beta .5). Its other columns are
`fed.clients=20 data.fraction=.2` and `fed.clients=50 data.fraction=.5`.
"""
from __future__ import annotations

_PAPER = {
    "data.fraction": 0.1, "data.beta": 0.5, "data.partition": "dirichlet",
    "fed.clients": 10, "fed.rounds": 50, "fed.participation": 1.0,
    "train.epochs": 5, "train.batch_size": 64, "train.lr": 1e-3, "train.lr_schedule": "halve",
}

PRESETS: dict[str, dict] = {
    "cifar10": {**_PAPER, "data.name": "cifar10", "model.name": "resnet18", "model.latent": 64},
    "cifar100": {**_PAPER, "data.name": "cifar100", "model.name": "resnet18", "model.latent": 64},
    "svhn": {**_PAPER, "data.name": "svhn", "model.name": "shufflenet_v2", "model.latent": 32},
    # what the authors' released training loop did where it differs from the paper's text
    "code-training": {"train.lr_schedule": "constant", "train.clip_norm": 1.1},
}
