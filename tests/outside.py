"""A method, a model, a transform, a codec and an engine from outside the package, by its public names alone."""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn

from polytier import Algorithm, Codec, Step, make_engine, parameter


@dataclass(frozen=True)
class Averaging(Algorithm):
    """FedAvg that also sends up how many steps were taken, which is no model."""

    tiers: ClassVar[int | None] = 2
    model_fields: ClassVar[tuple[str, ...]] = ("weights",)
    device_lr: Step = parameter(0.1, "", "step size of a device", above=0, per="node")

    def init(self, x: Any) -> Any:
        return {"weights": x}

    def server(self, x: Any, devices: Any) -> Any:
        return {"weights": devices.solve(x)["weights"].mean("samples", empty=x["weights"])}

    def device(self, x: Any, local: Any) -> Any:
        theta = x["weights"]
        for _ in range(2):
            theta = theta - local.value(self.device_lr) * local.grad(theta)
        local.keep(model=theta)
        return {"weights": theta, "steps": torch.full((len(theta),), 2.0, dtype=theta.dtype)}

    def global_model(self, state: Any) -> Any:
        return state["weights"]


class Halved:
    """A transform: half the change."""

    def __call__(self, change, node_keys, clock):
        return change / 2


class Whole(Codec):
    """A codec of changes: whole thousandths, in two bytes each."""

    name, change = "thousandths", True

    def encode(self, row):
        return (row * 1000).round().to(torch.int16).numpy().tobytes()

    def decode(self, message, like):
        if len(message) != 2 * like.numel():
            raise ValueError("this is no row of thousandths")
        return torch.frombuffer(bytearray(message), dtype=torch.int16).reshape(like.shape).to(like.dtype) / 1000


class Counting:
    """An engine that computes by another one and counts the calls of each tier."""

    remote = False
    calls: dict[int, int]

    def __init__(self, context, **settings):
        self.engine, self.calls = make_engine("stacked", context, **settings), {}
        self.workers, self.tiles = self.engine.workers, self.engine.tiles

    def deliver(self, call):
        if not call.quiet:
            self.calls[call.tier] = self.calls.get(call.tier, 0) + 1
        return self.engine.deliver(call)

    def use_workers(self, workers):
        self.engine.use_workers(workers)

    def close(self):
        self.engine.close()


def small_net(inputs, classes):
    """A model by `outside:small_net`."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(inputs), 4), nn.Tanh(), nn.Linear(4, classes))
