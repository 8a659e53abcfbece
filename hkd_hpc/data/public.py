"""The public set: how many training images are put aside for it, and whether a scheme that needs it gets any."""

from __future__ import annotations

import math

from hkd_hpc.common.errors import UsageError
from hkd_hpc.data.partition import floor
from hkd_hpc.data.settings import DataSettings


def fraction(data: DataSettings, clients: int, images: int) -> float:
    """Its share of the training split of so many images: as set, else as many as a client trains on, where they fit."""
    given = data.public_fraction
    return fitting_public_images(data, clients, images) / images if given is None else given


def check(scheme: str, data: DataSettings, clients: int, images: int) -> None:
    """For a scheme that needs the set: UsageError, with the number that would fit, where the set is empty."""
    if floor(fraction(data, clients, images) * images) < 1:
        raise UsageError(
            f"scheme.name={scheme}: needs public images, but there are none; "
            + how_to_get_public_images(data, clients, images)
        )


def fitting_public_images(data: DataSettings, clients: int, images: int) -> int:
    """As many as a client trains on, three quarters of its share, if so many are left over; else none.

    Images for validation count as trained on: the public set, and so the clients' images, do not depend on them.
    """
    if data.partition == "natural":
        return 0
    owned = floor(data.fraction * images / clients)
    return trained_of(owned) if images - clients * owned >= trained_of(owned) else 0


def trained_of(owned: int) -> int:
    """Of a client's images, those that are not held out for its local test."""
    return owned - floor(owned * 0.25)


def how_to_get_public_images(data: DataSettings, clients: int, images: int) -> str:
    """Which numbers would leave two public images or more, where settings leave none."""
    left = int(1e4 * (1 - data.fraction) + 1e-6) / 1e4  # rounded down, so that it fits
    most = most_with_public_images(clients, images)
    if data.public_fraction is None and data.partition != "natural" and most:
        return (
            f"data.fraction={data.fraction:g} leaves too few images over, "
            f"data.fraction of at most {most:g} leaves enough"
        )
    if left * images >= 2:
        return f"data.public_fraction must be above 0, at most {left:g} fits beside data.fraction"
    return f"data.fraction={data.fraction:g} leaves none over; both fit as data.fraction=0.9 data.public_fraction=0.1"


def most_with_public_images(clients: int, images: int) -> float:
    """The largest data.fraction, to four digits, beside which the default public set has its images; 0: there is
    none.
    """
    owned = int(images / (clients + 0.75))
    while owned and clients * owned + trained_of(owned) > images:
        owned -= 1
    return min(1.0, (math.ceil(1e4 * (owned + 1) * clients / images - 1e-6) - 1) / 1e4) if owned >= 2 else 0.0
