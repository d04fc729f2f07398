"""How much memory there is, and how much of it the gradient of a model takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polytier.stack.gradient import grad
from polytier.stack.objective import Objective

SLACK = 0.01


class Live(TorchDispatchMode):
    """Follows how many bytes of the tensors that operations return exist at a time.

    Attributes:
        most: The largest number so far, less at most `SLACK` of it: not every operation looks at all tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = self._bound = 0  # the bound is that of the bytes that exist now
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}  # by address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and (place := leaf.untyped_storage().data_ptr()) not in given:
                self._bound += leaf.untyped_storage().nbytes()
                self._live[place] = StorageWeakRef(leaf.untyped_storage()), leaf.untyped_storage().nbytes()
        if self._bound > (1 + SLACK) * self.most:
            self._live = {place: each for place, each in self._live.items() if not each[0].expired()}
            self._bound = sum(size for _, size in self._live.values())
            self.most = max(self.most, self._bound)
        return found


def bytes_per_sample(objective: Objective, x: Tensor, y: Tensor) -> int:
    """Bytes by which the values on the way to the gradient of one row grow with each sample.

    Those that exist at a time count. While a graph is traced, torch keeps what the gradient of the gradient would need;
    afterwards it needs about half.

    Args:
        objective: The objective.
        x, y: [1, ...] the inputs and the target of a sample.
    """
    one, two = (bytes_of_gradient(objective, torch.cat([x] * k), torch.cat([y] * k)) for k in (1, 2))
    return max(0, two - one)


def bytes_of_gradient(objective: Objective, x: Tensor, y: Tensor) -> int:
    """The most bytes that exist at a time on the way to the gradient of one row on samples [B, ...]."""
    weight = torch.full((len(x),), 1 / len(x), dtype=objective.dtype, device=x.device)
    key = (torch.arange(len(x), device=x.device),) if objective.dropouts else ()
    inputs, live = [objective.initial.to(objective.device), x, y, weight, *key], Live()
    with live:
        if objective.batching == "eager":
            objective._eager("grad", None, inputs)
        else:
            grad(objective._function("grad", None))(*inputs)
    return live.most


def physical_memory() -> int | None:
    """Memory in bytes that this process may use; None if the system does not report it."""
    try:
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    try:
        return min(have, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return have
