"""Ditto: a personal model per device beside the global model of FedAvg, pulled to it (Li, Hu, Beirami, Smith 2021).

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.
https://arxiv.org/abs/2012.04221

Minimises, for every device, f_i(v_i) + lambda/2 |v_i - w*|^2, where w* minimises mean_i f_i(w), weighted by samples.

symbol | field          | shape  | meaning
w      | state          | [1, d] | global model, that of FedAvg; personal models do not influence it
v_i    | device model   | [n, d] | personal model, kept as "model"; starts from the initial model
eta    | personal_lr    |        | step size of v_i (one number, or one per device)
s      | personal_steps |        | steps of v_i per round
lambda | device_pull    |        | strength of the pull of v_i to w; 0 is local training
eta_g  | device_lr      |        | step size of a device on its copy of w (one number, or one per device)
r      | device_steps   |        | steps of a device on its copy of w per round
p_k    | weights        |        | how models are averaged

v_i is pulled to w^t as the device received it, not to the copy that it trains. The paper allows any solver for w;
here it is FedAvg.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.solvers import follow, proximal_sgd


@dataclass(frozen=True)
class Ditto(Algorithm):
    tiers: ClassVar[int | None] = 2
    any_optimizer: ClassVar[bool] = True
    budget: ClassVar[dict[str, float]] = {"device_steps": 0.5, "personal_steps": 0.5}
    device_lr: Step = parameter(0.01, "eta_g", "step size of a device on the global model", above=0, per="node")
    device_steps: int = parameter(20, "r", "mini-batch steps per device and round on the global model", least=1)
    personal_lr: Step = parameter(0.01, "eta", "step size of the personal model", above=0, per="node")
    personal_steps: int = parameter(20, "s", "mini-batch steps per device and round on the personal model", least=1)
    device_pull: float = parameter(1.0, "lambda", "pull of the personal model to the global one", least=0)
    weights: str = parameter("samples", "p_k", "how models are averaged", choices=("samples", "uniform"))

    def server(self, w: Tensor, devices: Children) -> Tensor:
        return devices.solve(w).mean(self.weights)

    def device(self, w: Tensor, local: LocalProblem) -> Tensor:
        eta, lam, eta_g = local.value(self.personal_lr), self.device_pull, local.value(self.device_lr)
        v = local.memory("model", local.initial)
        v = proximal_sgd(local, v, w, eta, lam, self.personal_steps)  # v - eta (grad f(v) + lambda (v - w^t))
        local.keep(model=v)
        # a separate stream, so that the personal model uses the same mini-batches as local training
        return follow(
            local, w, lambda w: local.grad(w, local.batch(stream="global")), eta_g, self.device_steps, "global"
        )
