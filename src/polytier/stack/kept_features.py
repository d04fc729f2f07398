"""The inputs of a federation replaced by features (see `polytier.stack.features`), computed once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from polytier._text import size
from polytier.data.federation import Federation, Origin
from polytier.stack.dropout import check_dropout
from polytier.stack.features import WITHOUT, Boundary, find_boundary
from polytier.stack.held import physical_memory
from polytier.stack.objective import Objective

log = logging.getLogger("polytier")
BLOCK = 32  # samples of a device in one forward pass; the last bits of features depend on it


def features_of(federation: Federation, objective: Objective) -> Federation:
    """The data with features as inputs.

    The samples of a device are computed in blocks of their own, so that features do not depend on other devices.

    Raises:
        ValueError: The model has no fixed features (see `find_boundary`), or they do not fit into memory.
    """
    few = federation.x[:2] if len(federation.x) > 1 else torch.zeros(2, *federation.x.shape[1:]).to(federation.x)
    few = federation.inputs(few, objective.dtype).to(objective.device)
    with one_thread():
        check_dropout(objective.module, few[:1])
        boundary = objective.boundary or find_boundary(objective.module, [*objective.names, *objective.norms], few)
        one = boundary.features(objective.module, few[:1])[0]
        need, have = len(federation.x) * one.nbytes, physical_memory()
        if have is not None and need > have:
            raise ValueError(
                f"the features of {len(federation.x):,} samples need {size(need)} of memory; available: {size(have)}; "
                f"use fewer samples, {WITHOUT}"
            )
        found = torch.empty(len(federation.x), *one.shape, dtype=one.dtype)
        for start, end in blocks(federation):
            inputs = federation.inputs(federation.x[start:end], objective.dtype).to(objective.device)
            found[start:end] = boundary.features(objective.module, inputs)
    log.info(
        "features of shape %s before %s are kept in place of samples of shape %s: %s",
        *(tuple(one.shape), boundary.entry, tuple(federation.x.shape[1:]), size(need)),
    )
    return as_features(federation, found, boundary)


def as_features(federation: Federation, features: Tensor, boundary: Boundary) -> Federation:
    """The federation with these inputs."""
    origin = Origin(
        shape=tuple(federation.x.shape[1:]),
        dtype=federation.x.dtype,
        scale=federation.scale,
        shift=federation.shift,
        tokens=federation.is_tokens,
        fingerprint=federation.fingerprint,
        boundary=boundary,
    )
    return replace(federation, x=features, scale=None, shift=None, origin=origin)


def blocks(federation: Federation) -> Iterator[tuple[int, int]]:
    """Where blocks of at most `BLOCK` samples of one device start and end."""
    for first, *_, last in federation.bounds.tolist() if len(federation.x) else ():  # a server has no samples
        yield from ((start, min(start + BLOCK, last)) for start in range(first, last, BLOCK))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one torch thread, so that results do not depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
