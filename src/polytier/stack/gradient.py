"""The gradient of a function as `torch.func.grad` computes it, without what that imports when it is first called.

`torch.func.grad` imports torch._dynamo to switch off compiled autograd, which takes as long as importing torch. Nothing
that has not imported torch._dynamo can have switched it on, so the same steps are made here without that import. They
are the same operations, so the bits are the same. With another version of torch, whose internal functions have other
names, `grad` is `torch.func.grad`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad as grad_of_torch

try:
    from torch._functorch.eager_transforms import (
        _create_differentiable,
        _undo_create_differentiable,
        _wrap_all_tensors,
        grad_increment_nesting,
    )
except ImportError:
    grad_increment_nesting = None


def grad(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The gradient of a scalar function with respect to its first argument.

    Examples:
        >>> import torch
        >>> grad(lambda a, b: (a * a * b).sum())(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
        tensor([ 2., 12.])
    """
    nesting = grad_increment_nesting
    if nesting is None or "torch._dynamo" in sys.modules:
        return grad_of_torch(function)

    def gradient(*inputs: Tensor) -> Tensor:
        with nesting() as level, torch.enable_grad():
            first, *others = _wrap_all_tensors(inputs, level)
            first = _create_differentiable(first, level)
            value = function(first, *others)
            if value.requires_grad:
                (found,) = torch.autograd.grad([value], [first], create_graph=True, allow_unused=True)
            else:
                found = None
            return _undo_create_differentiable(torch.zeros_like(first) if found is None else found, level)

    return gradient
