"""Named groups of settings. `--preset NAME` may be repeated; later ones win; files and the command line win over all.

cifar10, cifar100, svhn: the paper's settings (section 4 and appendix A; 10 clients, beta .5). Its other columns are
`fed.clients=20 data.fraction=.2` and `fed.clients=50 data.fraction=.5`.

repaired: FedHKD with nu relative to 1 / classes: a class is shared by the clients that have at least the share of it
that equal classes would give. With the paper's absolute .25 next to nothing is shared on CIFAR100, or at beta 5.

fedprox-code: the effective mu of the FedHKD authors' code, which multiplies by its weight of .1 twice.

fedgen-paper: FedGen as in its own paper rather than in its code (see schemes/fedgen.py).

code-training: what the FedHKD authors' published training loop does where it differs from their paper.

code-S, code-H: that, their partition, and their FedHKD: S at the submission, behind the published tables, with the
wrong sign; H in October 2023 and since. lam reaches FedMD and FedProto as well. What they do and these do not: a client
trains on knowledge that an earlier client wrote in the same round; knowledge leaves out a random remainder of a batch;
S is in float64 and passes each batch twice, so that BatchNorm's momentum acts twice.

privacy-off, privacy-paper, privacy-vector: the mechanism for class means of features (privacy.mechanism).

moon-paper: MOON on CIFAR-10 as in its own paper (section 4.1) and code: optimizer, augmentation, network, rounds.

fedavg-paper: FedAvg on CIFAR-10 as in its own paper (section 3): clients, batches, decay by round. What of both differs
stands in docs/training.md.
"""

from __future__ import annotations

_PAPER = {
    "data.fraction": 0.1,
    "data.beta": 0.5,
    "data.partition": "dirichlet",
    "fed.clients": 10,
    "fed.rounds": 50,
    "fed.participation": 1.0,
    "train.epochs": 5,
    "train.batch_size": 64,
    "train.lr": 1e-3,
    "train.lr_schedule": "halve",
}

_CODE_TRAINING = {
    "train.lr_schedule": "constant",
    "train.clip_norm": 1.1,
    "train.drop_last": True,
    "fed.average": "uniform",
}

_CODE = {
    **_CODE_TRAINING,
    "data.partition": "heuristic",
    "data.beta": 0.5,
    "scheme.nu": 0.0,
    "scheme.noise": "code",
    "scheme.aggregation": "last",
    "scheme.feature_loss": "mse",
    "scheme.public_batchnorm": "train",
}

PRESETS: dict[str, dict] = {
    "cifar10": {**_PAPER, "data.name": "cifar10", "model.name": "resnet18", "model.latent": 64},
    "cifar100": {**_PAPER, "data.name": "cifar100", "model.name": "resnet18", "model.latent": 64},
    "svhn": {**_PAPER, "data.name": "svhn", "model.name": "shufflenet_v2", "model.latent": 32},
    "repaired": {"scheme.nu_rule": "relative", "scheme.nu": 1.0},
    "fedprox-code": {"scheme.name": "fedprox", "scheme.mu": 0.01},
    "fedgen-paper": {
        "scheme.name": "fedgen",
        "scheme.form": "paper",
        "scheme.alpha": 1.0,
        "scheme.beta": 0.0,
        "scheme.decay": 1.0,
    },
    "moon-paper": {
        "data.name": "cifar10",
        "data.fraction": 1.0,
        "data.partition": "dirichlet",
        "data.beta": 0.5,
        "data.mean": "0.49137255,0.48235294,0.44666667",  # 125.3, 123.0, 113.9 of 255
        "data.std": "0.24705882,0.24352941,0.26156863",  # 63.0, 62.1, 66.7
        "fed.clients": 10,
        "fed.rounds": 100,
        "fed.participation": 1.0,
        "train.epochs": 10,
        "train.batch_size": 64,
        "train.drop_last": True,
        "train.optimizer": "sgd",
        "train.lr": 0.01,
        "train.lr_schedule": "constant",
        "train.momentum": 0.9,
        "train.weight_decay": 1e-5,
        "train.augment": "crop_flip_reflect",
        "model.name": "moon_cnn",
        "model.latent": 256,
        "scheme.name": "moon",
        "scheme.mu": 5.0,
        "scheme.tau": 0.5,
    },
    "fedavg-paper": {
        "data.name": "cifar10",
        "data.fraction": 1.0,
        "data.partition": "iid",
        "fed.clients": 100,
        "fed.rounds": 2000,
        "fed.participation": 0.1,
        "train.epochs": 5,
        "train.batch_size": 50,
        "train.optimizer": "sgd",
        "train.lr": 0.1,
        "train.lr_schedule": "exponential",
        "train.lr_factor": 0.99,
        "train.augment": "crop_flip",
        "scheme.name": "fedavg",
    },
    "privacy-off": {"privacy.mechanism": "off"},
    "privacy-paper": {"privacy.mechanism": "paper"},
    "privacy-vector": {"privacy.mechanism": "vector"},
    "code-training": _CODE_TRAINING,
    "code-S": {**_CODE, "scheme.lam": 0.1, "scheme.gamma": 0.1, "scheme.soft_loss": "kl_wrong_sign"},
    "code-H": {**_CODE, "scheme.lam": 0.05, "scheme.gamma": 0.05, "scheme.soft_loss": "kl"},
}
