"""The handwritten digits that come with scikit-learn, as they are and as the scanners of four sites see them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from polytier.data.partition import dirichlet
from polytier.data.sources.source import Source
from polytier.data.teams import blocks

NUM_DIGITS = 10
NUM_SITES = 4  # one for each quarter turn
MIX = 0.5  # parameter of the Dirichlet distribution
FEWEST = 15  # images per device
SITES, NAMES = 0xB3, 0xB4  # random numbers of the sites and of the devices' names of digits have keys of their own


def digits(data_dir: Path | None = None) -> Source:
    """8x8 images of handwritten digits, bundled with scikit-learn: 1,797 samples, 10 classes."""
    places = find_spec("sklearn")
    assert places is not None
    assert places.submodule_search_locations is not None
    # only its file is read: importing scikit-learn takes as long as importing torch
    table = np.loadtxt(Path(places.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    x = (table[:, :-1] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return Source(x, table[:, -1].astype(np.int64), NUM_DIGITS)


def digits_at_sites(data_dir: Path | None = None, num_devices: int = 60, seed: int = 0) -> Source:
    """The bundled digits at four sites that turn them by 0, 1, 2 or 3 quarters; devices of a site differ as well.

    Every image belongs to one device. The sites are the teams. The images of each digit are divided among the devices
    in proportions drawn from Dirichlet(0.5), so that devices differ in their digits and in the number of images: with
    60 devices each has 30 on average. Every other device calls two of the digits by each other's name.
    """
    images = digits(data_dir)
    given = dirichlet(images.y, num_devices, np.random.default_rng([seed, SITES]), alpha=MIX, minimum=FEWEST)
    site = blocks(num_devices, NUM_SITES, "sites")[given.device]
    x = images.x[given.index]
    for turns in range(1, NUM_SITES):
        x[site == turns] = np.rot90(x[site == turns], turns, axes=(2, 3))
    rng = np.random.default_rng([seed, NAMES])
    names = np.tile(np.arange(NUM_DIGITS), (num_devices, 1))  # [devices, digits] what a device calls a digit
    for device in range(1, num_devices, 2):
        pair = rng.choice(NUM_DIGITS, 2, replace=False)
        names[device, pair] = pair[::-1]
    y = names[given.device, images.y[given.index]]
    return Source(x, y, NUM_DIGITS, given.device, site, cluster=site)
