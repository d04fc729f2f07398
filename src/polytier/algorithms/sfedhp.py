"""sFedHP: sparse models for every device, every team and the server (Liu, Wang, Shao, Li 2022).

Liu, Wang, Shao, Li, "Sparse Federated Learning with Hierarchical Personalization Models", 2022.
https://arxiv.org/abs/2203.13517

Minimises mean_i mean_j F_ij(w) (Eq. 1-3), where F_ij(w) is the minimum over phi_ij and theta_ij of

    f_ij(theta_ij) + lambda1/2 |theta_ij - phi_ij|^2 + gamma1 s(theta_ij) + lambda2/2 |phi_ij - w|^2 + gamma2 s(w)

and s(x) = rho sum log cosh(x / rho) is a smooth |x|_1 (Eq. 4) with the gradient tanh(x / rho). Teams are the edges of
the paper.

symbol  | field           | shape  | meaning
w       | state           | [1, d] | global model
w_i     | team model      | [m, d] | model of team i, kept as "model"
phi_i   |                 | [m, d] | what team i sends to its devices in a team round
theta   | device model    | [n, d] | personal model, kept as "model"
eta2    | device_lr       |        | step size of a device (one number, or one per device)
eta1    | team_lr         |        | step size of a team (one number, one per team, or by tier)
beta    | server_lr       |        | step size of the server
lambda1 | device_pull     |        | strength of the pull of a device to its team
lambda2 | team_pull       |        | strength of the pull between phi and w of a team (one number, or by tier)
K       | device_steps    |        | steps per device and team round, all on one mini-batch
R       | team_rounds     |        | team rounds per round of the server (a number, or by tier)
gamma1  | device_sparsity |        | weight of s(theta); lowered to `tiny` in a call to a device whose kept model has a
                                     share of non-zeros below `least_nonzeros`, restored when it has more
gamma2  | team_sparsity   |        | weight of s(w); lowered to `tiny` after `sparse_rounds` rounds
rho     | smoothing       |        | scale on which s is rounded near 0
nu      | accuracy        |        | a device stops when |grad H|^2 <= nu (Eq. 9); 0: after K steps
        | threshold       |        | parameters below threshold * rho in absolute value are sent and kept as zeros
        | solver          |        | "nesterov": accelerated steps from phi with momentum k / (k + 3); "plain": without
1/J     | weights         |        | how models are averaged

With gamma1 = gamma2 = 0, the dense setting, no parameter is set to zero. The server keeps its w without setting
parameters to zero. Every inner node takes the step of a team, so the method runs on any number of tiers. Without
teams it is w <- (1 - beta) w + beta mean theta.

Interpretation: the paper does not give the start and the momentum of Nesterov's steps, `tiny`, and what counts as
zero. The step of a team is Eq. 11, without the factor lambda2 that gamma2 has in the lemmas.
Differs from the paper: there all teams work and the server averages S of them; here only the teams that are drawn
work (team_participation="count:S"). Drawn teams and w are the same. The devices of the other teams keep their models,
which decide on gamma1 in their next call.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.solvers import descend


@dataclass(frozen=True)
class SFedHP(Algorithm):
    device_lr: Step = parameter(0.05, "eta2", "step size of a device", above=0, per="node")
    team_lr: Step = parameter(0.05, "eta1", "step size of a team", above=0, per="node")
    server_lr: float = parameter(1.0, "beta", "step size of the server", above=0)
    device_pull: float = parameter(25.0, "lambda1", "pull of a device's model to its team's", above=0)
    team_pull: Step = parameter(25.0, "lambda2", "pull between phi and the model of a team", above=0, per="tier")
    device_steps: int = parameter(5, "K", "steps per device and team round, all on one mini-batch", least=1)
    team_rounds: Step = parameter(20, "R", "team rounds per round of the server", least=1, per="tier")
    device_sparsity: float = parameter(0.001, "gamma1", "weight of a device's smooth |theta|_1", least=0)
    team_sparsity: float = parameter(0.001, "gamma2", "weight of a team's smooth |w|_1", least=0)
    smoothing: float = parameter(6e-5, "rho", "scale on which the smooth |x|_1 is rounded near 0", above=0)
    tiny: float = parameter(1e-6, "", "value to which gamma1 and gamma2 are lowered", least=0)
    least_nonzeros: float = parameter(0.2, "", "share of non-zeros below which gamma1 is tiny", least=0, most=1)
    sparse_rounds: int = parameter(100, "", "rounds after which gamma2 is tiny", least=0)
    threshold: float = parameter(1.0, "", "smaller absolute values are sent and kept as 0, in units of rho", least=0)
    accuracy: float = parameter(0.0, "nu", "|grad H|^2 at which a device stops; 0: after K steps", least=0)
    solver: str = parameter("nesterov", "", "steps with or without Nesterov's momentum", choices=("nesterov", "plain"))
    weights: str = parameter("uniform", "1/J", "how models are averaged", choices=("uniform", "samples"))

    def server(self, w: Tensor, teams: Children) -> Tensor:
        beta, sent_up = self.server_lr, teams.solve(self.cut(w))
        return (1 - beta) * w + beta * sent_up.mean(self.weights)  # Alg. 1

    def team(self, x: Tensor, devices: Children) -> Tensor:
        eta1, lam2 = devices.value(self.team_lr), devices.value(self.team_pull)
        lam1 = devices.below(self.device_pull, self.team_pull)
        gamma2 = self.team_sparsity if devices.round < self.sparse_rounds else min(self.tiny, self.team_sparsity)
        w = phi = x  # phi^{t,0} = w_i^{t,0} = w^t
        for _ in range(devices.value(self.team_rounds)):
            theta = devices.solve(self.cut(phi)).mean(self.weights)
            phi = (lam1 * theta + lam2 * w) / (lam1 + lam2)  # Eq. 10, its mean over the devices
            w = w - eta1 * (lam2 * (w - phi) + gamma2 * self.slope(w))  # Eq. 11
        w = self.cut(w)
        devices.keep(model=w)
        return w

    def device(self, phi: Tensor, local: LocalProblem) -> Tensor:
        lam1, gamma1, held = self.device_pull, self.device_sparsity, local.batch()
        if gamma1:
            nonzeros = (self.cut(local.memory("model", local.initial)) != 0).to(phi.dtype).mean(1, keepdim=True)
            low = phi.new_tensor(min(self.tiny, gamma1))
            gamma1 = torch.where(nonzeros < self.least_nonzeros, low, phi.new_tensor(gamma1))  # [n, 1]

        def gradient(theta: Tensor) -> Tensor:  # of H, Eq. 8
            direction = local.grad(theta, held).add_(theta - phi, alpha=lam1)
            return direction.add_(self.slope(theta).mul_(gamma1)) if self.device_sparsity else direction

        eta2, nesterov = local.value(self.device_lr), self.solver == "nesterov"
        theta = self.cut(descend(gradient, phi, eta2, self.device_steps, nesterov, self.accuracy))
        local.keep(model=theta)
        return theta

    def global_model(self, state: Tensor) -> Tensor:
        return self.cut(state)

    def slope(self, x: Tensor) -> Tensor:
        """The gradient of s, Eq. 4."""
        return (x / self.smoothing).tanh_()

    def cut(self, x: Tensor) -> Tensor:
        """x with small values set to 0; in the dense setting x itself."""
        sparse = self.device_sparsity or self.team_sparsity
        return x.masked_fill(x.abs() < self.threshold * self.smoothing, 0) if sparse else x
