"""Feature skew: each client's images are turned by an angle of its own and get noise of a strength of its own.

A client's angle and strength are functions of (seed, client), the noise of an image of (seed, split, image): no rank,
no order and no share that is held out changes them. Axes: M clients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.rng import stream
from hkd_hpc.data.partition import Partition
from hkd_hpc.data.settings import DataSettings


@dataclass(frozen=True)
class FeatureSkew:
    """What is done to the images of each client.

    Attributes:
        seed: of the noise.
        angle_deg_M: by which they are turned, counter-clockwise.
        noise_std_M: standard deviation of the noise, as a share of the range 0..255.
        owner_N: by split, the client of each image, -1 where it is nobody's.
    """

    seed: int
    angle_deg_M: np.ndarray
    noise_std_M: np.ndarray
    owner_N: dict[str, np.ndarray]

    def changed(self, x_NCHW: np.ndarray, split: str, index: np.ndarray) -> np.ndarray:
        """The images `index` of a split as their clients have them.

        Args:
            x_NCHW: all images of the split, uint8; these stay.
            split: "train" or "test".
            index: (n,), each an image of some client.

        Returns:
            (n,C,H,W) uint8.
        """
        images, owner_n = x_NCHW[index], self.owner_N[split][index]
        for client in np.unique(owner_n):
            own = owner_n == client
            images[own] = turned(images[own], self.angle_deg_M[client])
        for place, std in enumerate(self.noise_std_M[owner_n]):
            if std:
                noise = stream(self.seed, f"skew/noise/{split}", client=int(index[place]))
                images[place] = noisy(images[place], std, noise)
        return images


def skew_of(data: DataSettings, seed: int, partition: Partition, images: dict[str, np.ndarray]) -> FeatureSkew | None:
    """What the settings ask for.

    Args:
        data: section `data`.
        seed: of the partition.
        partition: of the clients as they are, not pooled.
        images: by split, all of them.

    Returns:
        None where they ask for nothing.

    Raises:
        UsageError: the data are no images of 8 bits.
    """
    keys = [key for key in ("client_rotation", "client_noise") if getattr(data, key)]
    if not keys:
        return None
    x_NCHW = images["train"]
    if x_NCHW.ndim != 4 or x_NCHW.dtype != np.uint8:
        raise UsageError(
            f"data.{keys[0]}={getattr(data, keys[0]):g}: changes images of 8 bits; "
            f"data.name={data.name} has {x_NCHW.dtype} of shape {x_NCHW.shape}"
        )
    clients = range(len(partition.train))
    angle_M = [stream(seed, "skew/rotation", client=client).uniform(-1, 1) for client in clients]
    noise_M = [stream(seed, "skew/noise", client=client).random() for client in clients]
    return FeatureSkew(
        seed,
        data.client_rotation * np.array(angle_M),
        data.client_noise * np.array(noise_M),
        {split: _owners(partition, split, len(x)) for split, x in images.items()},
    )


def _owners(partition: Partition, split: str, images: int) -> np.ndarray:
    parts = [partition.train, partition.val] * (split == "train") + [partition.test] * (split == partition.test_split)
    owner_N = np.full(images, -1)
    for part in parts:
        for client, index in enumerate(part):
            owner_N[index] = client
    return owner_N


def turned(x_NCHW: np.ndarray, angle_deg: float) -> np.ndarray:
    """Images turned counter-clockwise about their centres, bilinear, black where nothing was."""
    if not angle_deg:
        return x_NCHW
    from scipy.ndimage import rotate

    return rotate(x_NCHW, angle_deg, axes=(3, 2), reshape=False, order=1)


def noisy(x_CHW: np.ndarray, std: float, noise: np.random.Generator) -> np.ndarray:
    """An image with Gaussian noise of this share of its range 0..255, rounded and cut to it."""
    return np.clip(np.rint(x_CHW + 255 * std * noise.standard_normal(x_CHW.shape)), 0, 255).astype(np.uint8)
