"""How much memory there is, and how much of it the gradient of a model takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polytier.stack.objective import Objective


class Counted(TorchDispatchMode):
    """Counts the bytes of all new tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.total += leaf.numel() * leaf.element_size()
        return found


def bytes_of_gradient(objective: Objective, x: Tensor, y: Tensor) -> int:
    """Bytes of all values on the way to the gradient of one row on one sample, besides the row and its gradient.

    A graph holds them all while it is traced; when it runs, those that are used no more are freed.

    Args:
        objective: The objective.
        x, y: [1, ...] the inputs and the target of a sample.
    """
    weight = torch.ones(1, dtype=objective.dtype, device=x.device)
    key = (torch.zeros(1, dtype=torch.int64, device=x.device),) if objective.dropouts else ()
    counted = Counted()
    with counted:
        objective._eager("grad", None, [objective.initial.to(objective.device), x, y, weight, *key])
    return max(0, counted.total - 3 * objective.initial.nbytes)


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
