"""FedOpt: FedAvg with an optimiser at the server: FedAvgM, FedAdagrad, FedAdam, FedYogi (Reddi et al. 2021).

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, "Adaptive Federated Optimization", ICLR 2021.
https://arxiv.org/abs/2003.00295
FedAvgM: Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019. https://arxiv.org/abs/1909.06335

Minimises mean_i f_i(x), the mean weighted by samples. The mean change of the devices' models takes the place of a
gradient in the step of the server.

symbol | field          | shape  | meaning
x      | state "model"  | [1, d] | global model, sent to the devices
m      | state "first"  | [1, d] | momentum of the server, 0 at first
v      | state "second" | [1, d] | mean square of the changes, tau^2 at first; not used by "momentum"
eta_l  | device_lr      |        | step size of a device (one number, or one per device)
eta    | server_lr      |        | step size of the server
beta_1 | momentum       |        | share of the old m
beta_2 | decay          |        | share of the old v, for "adam" and "yogi"
tau    | adaptivity     |        | added to the root of v: smaller adapts more
K      | device_steps   |        | mini-batch steps per device and round
       | optimizer      |        | "momentum" (FedAvgM), "adagrad", "adam" or "yogi"
n_k/n  | weights        |        | how changes are averaged

There is no personal model. With optimizer = "momentum", momentum = 0 and server_lr = 1 the method is FedAvg. A round in
which no device takes part changes nothing.

Differs from the paper: a device takes K mini-batch steps instead of a number of epochs.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.rows import Rows
from polytier.stack.solvers import sgd

OPTIMIZERS = ("momentum", "adagrad", "adam", "yogi")


@dataclass(frozen=True)
class FedOpt(Algorithm):
    tiers: ClassVar[int | None] = 2
    any_optimizer: ClassVar[bool] = True
    device_lr: Step = parameter(0.01, "eta_l", "step size of a device", above=0, per="node")
    server_lr: float = parameter(0.01, "eta", "step size of the server", above=0)
    device_steps: int = parameter(20, "K", "mini-batch steps per device and round", least=1)
    optimizer: str = parameter("adam", "", "optimiser of the server", choices=OPTIMIZERS)
    momentum: float = parameter(0.9, "beta_1", "share of the old momentum", least=0, most=1)
    decay: float = parameter(0.99, "beta_2", "share of the old mean square", least=0, most=1)
    adaptivity: float = parameter(0.001, "tau", "added to the root of the mean square", above=0)
    weights: str = parameter("samples", "n_k/n", "how changes are averaged", choices=("samples", "uniform"))

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {"model": x, "first": torch.zeros_like(x), "second": torch.full_like(x, self.adaptivity**2)}

    def server(self, state: dict[str, Tensor], devices: Children) -> dict[str, Tensor]:
        x, m, v = state["model"], state["first"], state["second"]
        sent_up = devices.solve(x)
        if not int(sent_up.count):
            return state
        change = sent_up.mean(self.weights) - x  # Delta_t: Alg. 2, line 10
        if self.optimizer == "momentum":
            m = self.momentum * m + change
            return {"model": x + self.server_lr * m, "first": m, "second": v}
        m = self.momentum * m + (1 - self.momentum) * change  # line 11
        square = change.square()
        if self.optimizer == "adagrad":
            v = v + square  # line 12
        elif self.optimizer == "yogi":
            v = v - (1 - self.decay) * square * torch.sign(v - square)  # line 13
        else:
            v = self.decay * v + (1 - self.decay) * square  # line 14
        return {"model": x + self.server_lr * m / (v.sqrt() + self.adaptivity), "first": m, "second": v}  # line 15

    def device(self, x: Tensor, local: LocalProblem) -> Tensor:
        return sgd(local, x, local.value(self.device_lr), self.device_steps)

    def personal(self, x: Rows | None, local: LocalProblem) -> Tensor | None:
        return None  # all devices use the global model
