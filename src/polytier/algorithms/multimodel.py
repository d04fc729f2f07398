"""Several models on one pool of devices: MFA-Rand and MFA-RR (Bhuyan, Moharir, Joshi 2022).

M unrelated models, each with its own method, data and loss, share N devices. In every round each device trains
exactly one of them (Algorithm 1):

MFA-Rand | a fresh random partition into M groups every round, matched to the models at random (Algorithm 2)
MFA-RR   | a fresh partition every M rounds, a frame; in its u-th round group j trains model
           ((j + u - 2) mod M) + 1, so that every device trains every model once a frame (Algorithm 3)

symbol | field  | meaning
M      | models | the methods, by name; any of them, also with teams
eta_t  | device_lr of a method, as a schedule: beta/(t+gamma) (Theorem 1); in MFA-RR it keeps its value for a frame,
         as in the proof: beta/(B+t//M) with B = 1 + gamma (Theorem 2)
N_s(t) | the batch size "grow:A/(B+t//M)", A = eta's scale V / (2 E sqrt(beta_1 + beta_2 G^2)) (Theorem 2)

Rounds and frames count from 0 (the printed `t mod M = 1` never comes for M = 1). Where M does not divide N group
sizes differ by at most one. With partial participation the devices that are shared out are drawn each round
(MFA-Rand) or once a frame (MFA-RR). One model alone is that model's method, to the bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.algorithm import Algorithm
from polytier.method.node import Children
from polytier.method.parameters import parameter
from polytier.stack.rows import Rows, as_dict, pack, unpack


@dataclass(frozen=True)
class MultiModel(Algorithm):
    models: Mapping[str, Algorithm] = field(default_factory=lambda: {"a": FedAvg(), "b": FedAvg()})
    step: str = parameter(
        "average", "", "the mean of the group's models (Algorithm 1), or their sum over N (the proof, Eq. 19)",
        choices=("average", "proof"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, method in self.models.items():
            if not isinstance(method, Algorithm) or method.parts():
                raise ValueError(f"model {name!r} needs a method of one model; got {type(method).__name__}")
            if not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"a model's name is made of letters, digits, - and _; got {name!r}")
        if not self.models:
            raise ValueError("there are no models to train; name at least one")

    def parts(self) -> Mapping[str, Algorithm]:
        return self.models

    def check(self, server: Children) -> list[str]:
        everybody = server.shuffled_devices("groups", 0)
        if len(everybody) < len(self.models):
            raise ValueError(
                f"{len(self.models)} models need at least as many devices a round, one each; there are "
                f"{len(everybody)}: train fewer models, or have more devices take part"
            )
        only = torch.ones(len(everybody), dtype=torch.bool)
        return [text for name, method in self.models.items() for text in method.check(server.scoped(name, only))]

    def init(self, x: Rows) -> Rows:
        first = as_dict(x)
        return {k: v for name, method in self.models.items() for k, v in pack(name, method.init(first[name])).items()}

    def server(self, state: Any, devices: Children) -> Rows:
        group, match = self.groups(devices)
        result = {}
        for m, (name, method) in enumerate(self.models.items()):
            only = group == match[m]
            before = unpack(name, state)
            after = method.server(before, devices.scoped(name, only))
            if self.step == "proof":
                after = shortened(before, after, int(only.sum()) / int((group >= 0).sum()))
            result |= pack(name, after)
        return result

    def groups(self, devices: Children) -> tuple[Tensor, Tensor]:
        """[devices] the group of each, -1 for those that do not take part; [M] the group that trains each model."""
        raise NotImplementedError

    def partition(self, devices: Children, round_: int) -> Tensor:
        """[devices] a random group of those that take part in that round; sizes differ by at most one."""
        order = devices.shuffled_devices("groups", round_)
        group = torch.full((devices.num_devices,), -1)
        group[order] = torch.arange(len(order)) % len(self.models)
        return group

    def global_model(self, state: Rows) -> None:
        return None  # each model has its own


def shortened(before: Rows, after: Rows, share: float) -> Rows:
    """The same step, `share` as long."""
    old, new = as_dict(before), as_dict(after)
    steps = {k: old[k] + share * (v - old[k]) if v.is_floating_point() else v for k, v in new.items()}
    return steps if isinstance(after, dict) else steps[""]


@dataclass(frozen=True)
class MFARand(MultiModel):
    def groups(self, devices: Children) -> tuple[Tensor, Tensor]:
        return self.partition(devices, devices.round), devices.shared("match", len(self.models)).argsort()


@dataclass(frozen=True)
class MFARR(MultiModel):
    @property
    def frame(self) -> int:
        return len(self.models)

    def groups(self, devices: Children) -> tuple[Tensor, Tensor]:
        turn = devices.round % self.frame
        group = self.partition(devices, devices.round - turn)
        return group, (torch.arange(self.frame) - turn) % self.frame
