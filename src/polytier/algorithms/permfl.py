"""PerMFL: a model for every device, every team and the server (Banerjee, Dadras, Yurtsever, Bhuyan 2024).

Banerjee, Dadras, Yurtsever, Bhuyan, "Personalized Multi-tier Federated Learning", 2024.
https://arxiv.org/abs/2407.14251

Minimises over the models of the server, the teams and the devices (Eq. 2)

    mean_i mean_j [ f_ij(theta_ij) + lambda/2 |theta_ij - w_i|^2 + gamma/2 |w_i - x|^2 ]

symbol | field        | shape  | meaning
x      | state        | [1, d] | global model
w_i    | team model   | [m, d] | model of team i, kept as "model"
theta  | device model | [n, d] | personal model, kept as "model"
alpha  | device_lr    |        | step size of a device (one number, or one per device)
eta    | team_lr      |        | step size of a team (one number, one per team, or by tier)
beta   | server_lr    |        | step size of the server
lambda | device_pull  |        | strength of the pull of a device to its team
gamma  | team_pull    |        | strength of the pull of a team to its parent (one number, or by tier)
L      | device_steps |        | mini-batch steps per device and team round
K      | team_rounds  |        | team rounds per round of the server (a number, or by tier)
1/N    | weights      |        | how models are averaged

Every inner node takes the same step, so the method runs on any number of tiers (nested Moreau envelopes). Without
teams it is x <- x - beta lambda (x - mean theta).

Differs from the paper: the steps are those of the paper; trees with more or fewer than three tiers are an extension.
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
class PerMFL(Algorithm):
    any_optimizer: ClassVar[bool] = True
    device_lr: Step = parameter(0.01, "alpha", "step size of a device", above=0, per="node")
    team_lr: Step = parameter(0.03, "eta", "step size of a team", above=0, per="node")
    server_lr: float = parameter(0.6, "beta", "step size of the server", above=0)
    device_pull: float = parameter(0.5, "lambda", "pull of a device's model to its team's", least=0)
    team_pull: Step = parameter(1.5, "gamma", "pull of a team's model to its parent's", least=0, per="tier")
    device_steps: int = parameter(20, "L", "mini-batch steps per device and team round", least=1)
    team_rounds: Step = parameter(10, "K", "team rounds per round of the server", least=1, per="tier")
    weights: str = parameter("uniform", "1/N", "how models are averaged", choices=("uniform", "samples"))

    def server(self, x: Tensor, teams: Children) -> Tensor:
        beta, gamma = self.server_lr, teams.below(self.device_pull, self.team_pull)
        w = teams.solve(x)
        return x - beta * gamma * (x - w.mean(self.weights))  # Eq. 13

    def team(self, x: Tensor, devices: Children) -> Tensor:
        eta, gamma = devices.value(self.team_lr), devices.value(self.team_pull)
        lam = devices.below(self.device_pull, self.team_pull)
        w = x  # w^{t,0} = x^t
        for _ in range(devices.value(self.team_rounds)):
            theta = devices.solve(w)
            w = w - eta * (lam * (w - theta.mean(self.weights)) + gamma * (w - x))  # Eq. 9
        devices.keep(model=w)
        return w

    def device(self, w: Tensor, local: LocalProblem) -> Tensor:
        alpha, lam = local.value(self.device_lr), self.device_pull
        theta = proximal_sgd(local, w, w, alpha, lam, self.device_steps)  # Eq. 4
        local.keep(model=theta)
        return theta
