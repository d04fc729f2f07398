"""Hierarchical FedAvg (HierFAVG, Liu et al. 2020; h-SGD, Wang et al. 2022).

Each team runs a few rounds of FedAvg with its devices before the server averages the teams; the
same at every inner tier.

symbol | field        | shape  | meaning
x      | state        | [1, d] | global model
w_i    | team model   | [m, d] | kept as "model"
alpha  | device_lr    |        | step of a device
L      | device_steps |        | mini-batch steps in a team round (kappa_1 of HierFAVG)
K      | team_rounds  |        | team rounds in a round of the server (kappa_2); a number, or by tier
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.node import Children
from polytier.method.parameters import Step, parameter


@dataclass(frozen=True)
class HierFedAvg(FedAvg):
    tiers: ClassVar[int | None] = None
    team_rounds: Step = parameter(10, "K", "rounds of a team in a round of the server", least=1, per="tier")

    def team(self, x: Tensor, devices: Children) -> Tensor:
        w = x
        for _ in range(devices.value(self.team_rounds)):
            w = devices.solve(w).mean(self.weights)
        devices.keep(model=w)
        return w
