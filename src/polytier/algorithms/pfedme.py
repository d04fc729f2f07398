"""pFedMe: a personal model per device by Moreau envelopes (T. Dinh, Tran, Nguyen 2020).

T. Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.
https://arxiv.org/abs/2006.08848

Minimises mean_i F_i(x), F_i(x) = min_theta [ f_i(theta) + lambda/2 |theta - x|^2 ].

symbol  | field        | shape  | meaning
w       | state        | [1, d] | global model
w_i     | local model  | [n, d] | what a device sends to the server; not its personal model
theta_i | device model | [n, d] | personal model, kept as "model"
        | device_lr    |        | step size of the inner solver (one number, or one per device)
eta     | local_lr     |        | step size of w_i (one number, or one per device)
beta    | server_lr    |        | step size of the server
lambda  | device_pull  |        | strength of the pull of theta_i to w_i
K       | device_steps |        | inner steps, all on one mini-batch
R       | local_rounds |        | local rounds per device and round of the server
1/S     | weights      |        | how models are averaged

Differs from the paper: there all devices update and the server averages a sample of them; here only the devices that
take part update.

PerMFL with one device per team, gamma -> 0 and beta gamma equal to beta of pFedMe is the same method on full
gradients (pFedMe uses one mini-batch for its K steps, PerMFL draws a new one for each).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.solvers import proximal_sgd


@dataclass(frozen=True)
class PFedMe(Algorithm):
    tiers: ClassVar[int | None] = 2
    any_optimizer: ClassVar[bool] = True
    device_lr: Step = parameter(0.01, "", "step size of the inner solver", above=0, per="node")
    local_lr: Step = parameter(0.01, "eta", "step size of a device's local model", above=0, per="node")
    server_lr: float = parameter(1.0, "beta", "step size of the server", above=0)
    device_pull: float = parameter(15.0, "lambda", "pull of the personal model to the local one", least=0)
    device_steps: int = parameter(5, "K", "inner steps on one mini-batch", least=1)
    local_rounds: int = parameter(20, "R", "local rounds per device and round", least=1)
    weights: str = parameter("uniform", "1/S", "how models are averaged", choices=("uniform", "samples"))

    def server(self, w: Tensor, devices: Children) -> Tensor:
        beta, sent_up = self.server_lr, devices.solve(w)
        return w - beta * (w - sent_up.mean(self.weights))  # (1 - beta) w + beta mean w_i

    def device(self, w: Tensor, local: LocalProblem) -> Tensor:
        eta, lam = local.value(self.local_lr), self.device_pull
        theta = w
        for _ in range(self.local_rounds):
            held = local.batch()
            theta = proximal_sgd(local, w, w, local.value(self.device_lr), lam, self.device_steps, held)
            w = w - eta * lam * (w - theta)  # Alg. 1, line 8
        local.keep(model=theta)
        return w
