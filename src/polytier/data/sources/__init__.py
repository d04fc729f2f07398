"""Where samples come from: public data sets in their own file formats, and generated data.

A source only reads; which device gets which sample is decided in `partition.py`. The official training and test sets
are merged, as the papers do: each device splits its own samples into training and test.
"""

from __future__ import annotations

from collections.abc import Callable

from polytier.data.sources.celeba import celeba
from polytier.data.sources.cifar import cifar_10, cifar_100
from polytier.data.sources.digits import digits, digits_at_sites
from polytier.data.sources.files import default_dir
from polytier.data.sources.generated import (
    clustered_quadratics,
    quadratic_devices,
    synthetic_devices,
    tridiagonal_devices,
)
from polytier.data.sources.idx import emnist_byclass, emnist_digits, fashion_mnist, mnist
from polytier.data.sources.leaf import leaf
from polytier.data.sources.sentences import sentences
from polytier.data.sources.source import Source
from polytier.data.sources.text import text

__all__ = ["GENERATED", "SOURCES", "Source", "default_dir"]

# functions (data_dir, num_devices, seed, *, own arguments)
GENERATED: dict[str, Callable[..., Source]] = {
    "digits-sites": digits_at_sites,
    "sentences": sentences,
    "synthetic": synthetic_devices,
    "quadratics": quadratic_devices,
    "tridiagonal": tridiagonal_devices,
    "quadratic-clusters": clustered_quadratics,
}
# all sources by name: those of GENERATED, and functions (data_dir, *, own arguments)
SOURCES: dict[str, Callable[..., Source]] = {
    "digits": digits,
    **GENERATED,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "emnist-digits": emnist_digits,
    "emnist-byclass": emnist_byclass,
    "cifar-10": cifar_10,
    "cifar-100": cifar_100,
    "celeba": celeba,
    "leaf": leaf,
    "text": text,
}
