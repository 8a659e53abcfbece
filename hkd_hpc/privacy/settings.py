"""Section `privacy` of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.common.settings import setting

MECHANISMS = ("scheme", "off", "paper", "vector")
CLIPS = ("off", "box", "l2")
MODES = SIMULATION, RELEASE = ("simulation", "release")
EXTRACTORS = TRAINED, RECEIVED = ("trained", "received")
ADJACENCIES = ("image", "label", "client")


@dataclass(frozen=True)
class PrivacySettings:
    """What is clipped and gets noise before it leaves a client (privacy/); by default only what the scheme does."""

    mechanism: str = setting(
        "scheme",
        "noise on mean features, of schemes that report them; scheme: as the scheme's own settings say; off; paper: "
        "coordinates clipped to +-bound, for the sensitivity of one of them; vector: L2 norm clipped to bound, for "
        "that of the whole vector",
        choices=MECHANISMS,
    )
    clip: str | None = setting(
        None,
        "how each image's feature is clipped; off; box: coordinates to +-bound; l2: norm to bound; none: as the "
        "mechanism says",
        choices=CLIPS,
    )
    bound: float = setting(3.0, "bound of a feature's coordinates (zeta), or of its L2 norm (C)", above=0, high=1e6)
    multiplier: float = setting(
        7.0, "noise multiplier: standard deviation / sensitivity, which is 2 bound / N of a class", low=0, high=1e6
    )
    predictions: bool = setting(
        False, "noise on mean soft predictions too, of the same multiplier: std multiplier sqrt(2) / N"
    )
    counts: float = setting(
        0.0,
        "noise multiplier of the counts: std counts sqrt(2); what is shared is decided on the noisy ones; 0: none",
        low=0,
        high=1e6,
    )
    extractor: str = setting(
        TRAINED,
        "whose features and predictions a client reports; trained: its own model's, after training; received: the "
        "global model's that it began with",
        choices=EXTRACTORS,
    )
    update_clip: float = setting(
        0.0, "largest L2 norm S of a client's change of the weights; 0: not clipped", low=0, high=1e30
    )
    update_multiplier: float = setting(
        0.0,
        "noise multiplier of the sum of the clipped changes: std update_multiplier 2 S; 0: no noise",
        low=0,
        high=1e6,
    )
    mode: str = setting(
        SIMULATION,
        "where noise comes from; simulation: a stream of the seed, which protects nobody; release: the operating "
        "system's entropy, so that no run of the seed has the same",
        choices=MODES,
    )
    adjacency: str = setting(
        "image",
        "what neighbouring data differ in; image: one image, replaced by one of the same label; label: by any; client: "
        "all data of a client",
        choices=ADJACENCIES,
    )
    epsilon: float | None = setting(
        None,
        "epsilon of the whole release at privacy.delta: all multipliers are scaled so that the planned rounds meet it; "
        "none: not",
        above=0,
        high=1e6,
    )
    delta: float = setting(1e-5, "delta of every epsilon", above=0, below=1)
    budget: float | None = setting(
        None, "epsilon of the whole release that no round may exceed: the run ends before; none: not", above=0, high=1e6
    )
    secure_sum: bool = setting(
        False, "masks on the weights that ranks send: rank 0 and the transport see their sum alone"
    )
