"""The public set: how many training images are put aside for it, and whether a scheme that needs it gets any."""

from __future__ import annotations

import math

from hkd_hpc.config import Config
from hkd_hpc.data.partition import floor
from hkd_hpc.errors import UsageError


def fraction(config: Config, images: int) -> float:
    """Its share of the training split of so many images: as set, else as many as a client trains on, where they fit."""
    given = config.data.public_fraction
    return fitting_public_images(config, images) / images if given is None else given


def check(config: Config, images: int) -> None:
    """UsageError, with the number that would fit, where the set is empty."""
    if floor(fraction(config, images) * images) < 1:
        raise UsageError(
            f"scheme.name={config.scheme.name}: needs public images, but there are none; "
            + how_to_get_public_images(config, images)
        )


def fitting_public_images(config: Config, images: int) -> int:
    """As many as a client trains on, three quarters of its share, if so many are left over; else none.

    Images for validation count as trained on: the public set, and so the clients' images, do not depend on them.
    """
    if config.data.partition == "natural":
        return 0
    dealt = floor(config.data.fraction * images / config.fed.clients)
    return trained_of(dealt) if images - config.fed.clients * dealt >= trained_of(dealt) else 0


def trained_of(dealt: int) -> int:
    """Of a client's images, those that are not held out for its local test."""
    return dealt - floor(dealt * 0.25)


def how_to_get_public_images(config: Config, images: int) -> str:
    """Which numbers would leave two public images or more, where settings leave none."""
    data, clients = config.data, config.fed.clients
    room = int(1e4 * (1 - data.fraction) + 1e-6) / 1e4  # rounded down, so that it fits
    most = most_with_public_images(clients, images)
    if data.public_fraction is None and data.partition != "natural" and most:
        return (
            f"data.fraction={data.fraction:g} leaves too few images over, "
            f"data.fraction of at most {most:g} leaves enough"
        )
    if room * images >= 2:
        return f"data.public_fraction must be above 0, at most {room:g} fits beside data.fraction"
    return f"data.fraction={data.fraction:g} leaves none over; both fit as data.fraction=0.9 data.public_fraction=0.1"


def most_with_public_images(clients: int, images: int) -> float:
    """The largest data.fraction, to four digits, beside which the default public set has its images; 0: there is
    none.
    """
    dealt = int(images / (clients + 0.75))
    while dealt and clients * dealt + trained_of(dealt) > images:
        dealt -= 1
    return min(1.0, (math.ceil(1e4 * (dealt + 1) * clients / images - 1e-6) - 1) / 1e4) if dealt >= 2 else 0.0
