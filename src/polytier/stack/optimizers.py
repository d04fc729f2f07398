"""Local optimisers: how a device turns the gradients of its own objective into steps.

name         | step of theta along the direction g, with step size lr
sgd          | theta <- theta - lr g
momentum:MU  | v <- MU v + g; theta <- theta - lr v
adamw        | Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR 2019; as `torch.optim.AdamW`

All start from zero. The state (v, or the two moments of AdamW) lasts for one call of a solver; with `:keep` each device
keeps it from call to call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polytier._errors import unknown
from polytier._text import bind

State = dict[str, Tensor]  # rows [n, ...] by name
EPSILON = 1e-8  # of AdamW, added to the root of the second moment
ALLOWED = ("sgd", "momentum:0.9", "adamw", "adamw:beta1=0.9,beta2=0.999,decay=0.01")


def descended(theta: Tensor, direction: Tensor, lr: Any, state: State) -> Tensor:
    """The step of sgd, theta - lr * direction."""
    change = direction * lr
    return torch.sub(theta, change, out=change)


@dataclass(frozen=True)
class LocalOptimizer:
    """The optimiser of the devices; `parse` makes one.

    Args:
        text: What `parse` read.
        start: From rows [n, d], the state before the first step.
        step: (theta, direction, lr, state) -> theta after the step; the state is changed.
        keep: Whether devices keep the state from call to call.

    Examples:
        >>> import torch
        >>> momentum = LocalOptimizer.parse("momentum:0.5")
        >>> theta = torch.zeros(1, 2)
        >>> state = momentum.start(theta)
        >>> for _ in range(2):
        ...     theta = momentum.step(theta, torch.ones(1, 2), 0.1, state)
        >>> theta
        tensor([[-0.2500, -0.2500]])
    """

    text: str = "sgd"
    start: Callable[[Tensor], State] = field(default=lambda theta: {}, repr=False, compare=False)
    step: Callable[[Tensor, Tensor, Any, State], Tensor] = field(default=descended, repr=False, compare=False)
    keep: bool = False

    @classmethod
    def parse(cls, text: str) -> LocalOptimizer:
        """Read `NAME`, `NAME:ARGUMENTS` or one of these with `:keep` at its end.

        Raises:
            ValueError: The name is unknown or an argument is not allowed.
        """
        plain = text.strip()
        keep = plain.endswith(":keep")
        plain = plain.removesuffix(":keep")
        if plain.partition(":")[0] not in OPTIMIZERS:
            raise unknown("optimizer", plain, ALLOWED)
        name, make, arguments = bind(plain, OPTIMIZERS, "optimizer")
        if name == "sgd":
            if keep:
                raise ValueError("sgd has no state to keep; use sgd, or momentum:0.9:keep or adamw:keep")
            return cls()
        start, step = make(**arguments)
        return cls(text.strip(), start, step, keep)

    def __reduce__(self) -> tuple:
        """Pickle the text: other processes make the functions anew."""
        return LocalOptimizer.parse, (self.text,)

    @property
    def plain(self) -> bool:
        """Whether this is stochastic gradient descent."""
        return self.text == "sgd"


def sgd() -> tuple[()]:
    """The default of `LocalOptimizer`."""
    return ()


def momentum(*, mu: float = 0.9) -> tuple[Callable, Callable]:
    """Heavy-ball momentum, as `torch.optim.SGD(momentum=mu)`."""
    in_range("mu", mu)

    def start(theta: Tensor) -> State:
        return {"v": torch.zeros_like(theta)}

    def step(theta: Tensor, direction: Tensor, lr: Any, state: State) -> Tensor:
        state["v"] = state["v"] * mu + direction
        return theta - lr * state["v"]

    return start, step


def adamw(*, beta1: float = 0.9, beta2: float = 0.999, decay: float = 0.01) -> tuple[Callable, Callable]:
    """AdamW, with the defaults of torch.

    Products and sums are rounded one by one: fused operations round otherwise at the end of a tensor, and the bits of
    a row would depend on the tile.
    """
    in_range("beta1", beta1)
    in_range("beta2", beta2)
    if decay < 0:
        raise ValueError(f"decay of adamw is 0 or more; got {decay:g}")

    def start(theta: Tensor) -> State:
        ones = theta.new_ones(len(theta), 1)
        moments = {"m": torch.zeros_like(theta), "v": torch.zeros_like(theta)}
        return {**moments, "beta1_t": ones, "beta2_t": ones.clone()}  # beta^t after t steps

    def step(theta: Tensor, direction: Tensor, lr: Any, state: State) -> Tensor:
        state["beta1_t"], state["beta2_t"] = state["beta1_t"] * beta1, state["beta2_t"] * beta2
        state["m"] = state["m"] * beta1 + direction * (1 - beta1)
        state["v"] = state["v"] * beta2 + direction * direction * (1 - beta2)
        root = (state["v"] / (1 - state["beta2_t"])).sqrt_().add_(EPSILON)
        change = state["m"] / (1 - state["beta1_t"]) / root
        return theta * (1 - lr * decay) - change * lr

    return start, step


def in_range(name: str, value: float) -> None:
    """Raise an error if a factor is not in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} of the optimizer is at least 0 and below 1; got {value:g}; try {name}=0.9")


OPTIMIZERS: dict[str, Callable] = {"sgd": sgd, "momentum": momentum, "adamw": adamw}
