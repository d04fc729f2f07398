"""MFA-Rand and MFA-RR: several models, trained on one pool of devices (Bhuyan, Moharir, Joshi 2022).

Bhuyan, Moharir, Joshi, "Multi-Model Federated Learning with Provable Guarantees", 2022.
https://arxiv.org/abs/2207.04330

M unrelated models share N devices. Each model has its own method, data and loss, and minimises what its method
minimises. In every round each device trains exactly one model (Algorithm 1):

MFA-Rand | every round the devices are divided at random into M groups, and groups and models are matched at random
           (Algorithm 2)
MFA-RR   | the devices are divided at random once in M rounds, a frame; in its u-th round group j trains model
           ((j + u - 2) mod M) + 1, so that every device trains every model once per frame (Algorithm 3)

symbol | field           | shape | meaning
M      | models          |       | the methods by model name; any method of one model, also with teams
       | step            |       | "average": the mean of the models of the group (Algorithm 1);
                                   "proof": their sum divided by N, a step 1/M as long (Eq. 19)
eta_t  | of each method  |       | device_lr as a schedule: beta/(t+gamma) (Theorem 1); in MFA-RR it is constant during
                                   a frame, as in the proof: beta/(B+t//M) with B = 1 + gamma (Theorem 2)
N_s(t) | of the run      |       | the batch size "grow:A/(B+t//M)" with A = (scale of eta) V / (2 E sqrt(beta_1 +
                                   beta_2 G^2)) (Theorem 2)

Rounds and frames are counted from 0 (the printed condition `t mod M = 1` is never true for M = 1). If M does not
divide N, the sizes of the groups differ by at most one. With partial participation the devices that are divided into
groups are drawn in every round (MFA-Rand) or once per frame (MFA-RR). With one model the result is that of its
method, to the bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.algorithm import Algorithm
from polytier.method.children import Children
from polytier.method.parameters import parameter
from polytier.stack.rows import Rows, as_dict, pack, unpack


@dataclass(frozen=True)
class MultiModel(Algorithm):
    models: Mapping[str, Algorithm] = field(default_factory=lambda: {"a": FedAvg(), "b": FedAvg()})
    step: str = parameter(
        "average",
        "",
        "the mean of the group's models (Algorithm 1), or their sum over N (the proof, Eq. 19)",
        choices=("average", "proof"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, method in self.models.items():
            if not isinstance(method, Algorithm) or method.parts():
                raise ValueError(
                    f"model {name!r} needs a method of one model; got {type(method).__name__}; use e.g. FedAvg()"
                )
            if not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"the name of a model may have letters, digits, - and _; got {name!r}; rename it")
        if not self.models:
            raise ValueError("no models are given; name at least one, e.g. models={'a': FedAvg()}")

    def parts(self) -> Mapping[str, Algorithm]:
        return self.models

    def check(self, server: Children) -> list[str]:
        everybody = server.shuffled_devices("groups", 0)
        if len(everybody) < len(self.models):
            raise ValueError(
                f"{len(self.models)} models need at least as many devices per round, one each; there are "
                f"{len(everybody)}: train fewer models, or let more devices take part"
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
        """[devices] the group of each, -1 if it does not take part; [M] the group that trains each model."""
        raise NotImplementedError

    def partition(self, devices: Children, round_: int) -> Tensor:
        """[devices] a random group for each device that takes part in that round, -1 for the others.

        The sizes of the groups differ by at most one.
        """
        order = devices.shuffled_devices("groups", round_)
        group = torch.full((devices.num_devices,), -1)
        group[order] = torch.arange(len(order)) % len(self.models)
        return group

    def global_model(self, state: Rows) -> None:
        return None  # each of the models has its own


def shortened(before: Rows, after: Rows, share: float) -> Rows:
    """The step from `before` to `after`, shortened by the factor `share`; whole numbers are those of `after`."""
    old, new = as_dict(before), as_dict(after)
    steps = {k: old[k] + share * (v - old[k]) if v.is_floating_point() else v for k, v in new.items()}
    return steps if isinstance(after, dict) else steps[""]


@dataclass(frozen=True)
class MFARand(MultiModel):
    """Each model is trained by a random group of the devices, drawn anew in every round.

    Args:
        models: The methods, by name.
        step: How the server combines the models of a group.

    Examples:
        >>> import polytier
        >>> list(polytier.MFARand({"a": polytier.FedAvg(), "b": polytier.PerMFL()}).parts())
        ['a', 'b']
    """

    def groups(self, devices: Children) -> tuple[Tensor, Tensor]:
        return self.partition(devices, devices.round), devices.shared("match", len(self.models)).argsort()


@dataclass(frozen=True)
class MFARR(MultiModel):
    """Groups of devices train the models in turn: in a frame of M rounds every device trains every model once.

    Args:
        models: The methods, by name.
        step: How the server combines the models of a group.

    Examples:
        >>> import polytier
        >>> list(polytier.MFARR({"a": polytier.FedAvg(), "b": polytier.PerMFL()}).parts())
        ['a', 'b']
    """

    @property
    def frame(self) -> int:
        """The number of rounds in a frame, M."""
        return len(self.models)

    def groups(self, devices: Children) -> tuple[Tensor, Tensor]:
        turn = devices.round % self.frame
        group = self.partition(devices, devices.round - turn)
        return group, (torch.arange(self.frame) - turn) % self.frame
