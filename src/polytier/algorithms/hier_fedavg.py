"""Hierarchical FedAvg: every team runs rounds of FedAvg, then the server averages the teams (Liu et al. 2020).

HierFAVG: Liu, Zhang, Song, Letaief, "Client-Edge-Cloud Hierarchical Federated Learning", ICC 2020.
https://arxiv.org/abs/1905.06641
h-SGD: Wang, Wang, Chen, Ji, "Demystifying Why Local Aggregation Helps: Convergence Analysis of Hierarchical SGD",
AAAI 2022. https://arxiv.org/abs/2010.12998

Minimises what FedAvg minimises, mean_i f_i(x). With several tiers of teams, every tier runs rounds of the tier below.

symbol | field        | shape  | meaning
x      | state        | [1, d] | global model
w_i    | team model   | [m, d] | kept as "model"
alpha  | device_lr    |        | step size of a device (one number, or one per device)
L      | device_steps |        | mini-batch steps per device and team round (kappa_1 of HierFAVG)
K      | team_rounds  |        | team rounds per round of the server (kappa_2 of HierFAVG); a number, or by tier
       | weights      |        | how models are averaged

There is no personal model.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.children import Children
from polytier.method.parameters import Step, parameter


@dataclass(frozen=True)
class HierFedAvg(FedAvg):
    tiers: ClassVar[int | None] = None
    team_rounds: Step = parameter(10, "K", "team rounds per round of the server", least=1, per="tier")

    def team(self, x: Tensor, devices: Children) -> Tensor:
        w = x
        for _ in range(devices.value(self.team_rounds)):
            w = devices.solve(w).mean(self.weights)
        devices.keep(model=w)
        return w
