"""FedAvg: local SGD from the global model, then the mean of the models (McMahan et al. 2017).

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017. https://arxiv.org/abs/1602.05629

Minimises mean_i f_i(x), the mean weighted by samples.

symbol | field        | shape  | meaning
x      | state        | [1, d] | global model
alpha  | device_lr    |        | step size of a device (one number, or one per device)
L      | device_steps |        | mini-batch steps per device and round
n_k/n  | weights      |        | how models are averaged

There is no personal model. Differs from the paper: a device takes L mini-batch steps instead of a number of epochs.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.rows import Rows
from polytier.stack.solvers import sgd


@dataclass(frozen=True)
class FedAvg(Algorithm):
    tiers: ClassVar[int | None] = 2
    any_optimizer: ClassVar[bool] = True
    device_lr: Step = parameter(0.01, "alpha", "step size of a device", above=0, per="node")
    device_steps: int = parameter(20, "L", "mini-batch steps per device and round", least=1)
    weights: str = parameter("samples", "n_k/n", "how models are averaged", choices=("samples", "uniform"))

    def server(self, x: Tensor, devices: Children) -> Tensor:
        return devices.solve(x).mean(self.weights)

    def device(self, x: Tensor, local: LocalProblem) -> Tensor:
        return sgd(local, x, local.value(self.device_lr), self.device_steps)

    def personal(self, x: Rows | None, local: LocalProblem) -> Tensor | None:
        return None  # all devices use the global model
