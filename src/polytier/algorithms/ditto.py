"""Ditto: a personal model beside FedAvg's, pulled to it (Li, Hu, Beirami, Smith 2021).

Minimises, for every device, f_i(v_i) + lambda/2 |v_i - w*|^2 where w* minimises mean_i f_i(w), weighted by samples.

symbol  | field          | shape  | meaning
w       | state          | [1, d] | global model: FedAvg's, it knows nothing of the personal ones
v_i     | device model   | [n, d] | personal model, kept as "model"; starts from the first model of all
eta     | personal_lr    |        | step of v_i (one number, or one a device)
s       | personal_steps |        | steps of v_i a round
lambda  | device_pull    |        | pull of v_i to w; 0 is local training
eta_g   | device_lr      |        | step of a device on its copy of w (one number, or one a device)
r       | device_steps   |        | steps of a device on its copy of w a round

v_i is pulled to w^t as it was received, not to the copy that the device has trained since. The paper lets any solver
make w; this is FedAvg's.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.node import Children, LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.solvers import proximal_sgd


@dataclass(frozen=True)
class Ditto(Algorithm):
    tiers: ClassVar[int | None] = 2
    budget: ClassVar[dict[str, float]] = {"device_steps": 0.5, "personal_steps": 0.5}
    device_lr: Step = parameter(0.01, "eta_g", "step size of a device on the global model", above=0, per="node")
    device_steps: int = parameter(20, "r", "mini-batch steps of a device on the global model a round", least=1)
    personal_lr: Step = parameter(0.01, "eta", "step size of the personal model", above=0, per="node")
    personal_steps: int = parameter(20, "s", "mini-batch steps of the personal model a round", least=1)
    device_pull: float = parameter(1.0, "lambda", "pull of the personal model to the global one", least=0)
    weights: str = parameter("samples", "p_k", "how models are averaged", choices=("samples", "uniform"))

    def server(self, w: Tensor, devices: Children) -> Tensor:
        return devices.solve(w).mean(self.weights)

    def device(self, w: Tensor, local: LocalProblem) -> Tensor:
        eta, lam, eta_g = local.value(self.personal_lr), self.device_pull, local.value(self.device_lr)
        v = local.memory("model", local.initial)
        v = proximal_sgd(local, v, w, eta, lam, self.personal_steps)  # v - eta (grad f(v) + lambda (v - w^t))
        local.keep(model=v)
        for _ in range(self.device_steps):
            # a stream of its own: the personal model draws as that of local training does
            w = w - eta_g * local.grad(w, local.batch(stream="global"))
        return w
