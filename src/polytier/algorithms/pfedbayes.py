"""pFedBayes: a Gaussian over the weights of every device, by variational inference (Zhang, Li, Li, Guo, Shao 2022).

Zhang, Li, Li, Guo, Shao, "Personalized Federated Learning via Variational Bayesian Inference", ICML 2022.
https://arxiv.org/abs/2206.07977

Every device has a Gaussian q_i over the weights, with independent components, and the server has one, w. Minimises

    mean_i F_i(w),  F_i(w) = min_{q_i} E_{theta ~ q_i} f_i(theta) + zeta / n_i KL(q_i || w)

This is the objective of the paper divided by n_i: its loss is a sum over the samples, f_i is their mean.

symbol | field             | shape  | meaning
w      | state             | [1, d] | global Gaussian: means "model" and "rho", with deviations log(1 + exp(rho))
w_i    | local copy        | [n, d] | copy of w that a device moves towards its q_i and sends to the server
q_i    | device model, rho | [n, d] | personal Gaussian, kept as "model" and "rho"; its means are the personal model
eta_1  | device_lr         |        | step size of q_i (one number, or one per device)
eta_2  | global_lr         |        | step size of w_i; both step sizes times zeta / (n_i deviation^2) must be below 2
beta   | server_lr         |        | step size of the server
zeta   | zeta              |        | weight of the KL term; with 0 every device trains alone
R      | device_steps      |        | steps per device and round: on a new mini-batch one of q_i, then one of w_i
K      | num_samples       |        | draws of the weights per step, all on the mini-batch of the step
n_i    |                   |        | number of training samples of the device
       | prior_deviation   |        | deviation of all weights at the start

Interpretation: q_i is kept from round to round (it starts from w when a device first takes part); w_i moves after
q_i.
Differs from the paper: a device predicts with the means of q_i, not with an average over draws of the weights.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import Step, parameter

Gaussian = dict[str, Tensor]  # [n, d] each: the means "model", and "rho" with deviations softplus(rho)


@dataclass(frozen=True)
class PFedBayes(Algorithm):
    tiers: ClassVar[int | None] = 2
    model_fields: ClassVar[tuple[str, ...]] = ("model", "rho")  # both are parameters of the global Gaussian
    device_lr: Step = parameter(0.01, "eta_1", "step size of a device's Gaussian", above=0, per="node")
    global_lr: Step = parameter(0.01, "eta_2", "step size of a device's copy of the global one", above=0, per="node")
    server_lr: float = parameter(1.0, "beta", "step size of the server", above=0)
    zeta: float = parameter(1.0, "zeta", "weight of the divergence from the global Gaussian", least=0)
    device_steps: int = parameter(20, "R", "mini-batch steps per device and round", least=1)
    num_samples: int = parameter(1, "K", "draws of the weights per step", least=1)
    prior_deviation: float = parameter(0.1, "", "deviation of the weights at the start", above=0)

    def check(self, server: Children) -> list[str]:
        curvature = self.zeta / (server.device_samples() * self.prior_deviation**2)  # of KL in the means
        steps = {"device_lr": self.device_lr, "global_lr": self.global_lr}
        products = {name: float((server.device_values(field) * curvature).max()) for name, field in steps.items()}
        return [
            f"{name} * zeta / (n prior_deviation^2) = {p:.3g} at some device; "
            f"means diverge at 2: use a smaller {name} or zeta, or a larger prior_deviation"
            for name, p in products.items()
            if p >= 2
        ]

    def init(self, x: Tensor) -> Gaussian:
        s = self.prior_deviation
        return {"model": x, "rho": torch.full_like(x, s + math.log(-math.expm1(-s)))}  # log(exp(s) - 1)

    def server(self, w: Gaussian, devices: Children) -> Gaussian:  # type: ignore[override]
        mean = devices.solve(w).mean()
        return {k: v - self.server_lr * (v - mean[k]) for k, v in w.items()}  # (1 - beta) w + beta mean w_i

    def device(self, w: Gaussian, local: LocalProblem) -> Gaussian:  # type: ignore[override]
        pull = self.zeta / local.samples.unsqueeze(1).to(local.device, w["model"].dtype)
        q = {k: local.memory(k, v) for k, v in w.items()}
        for step in range(self.device_steps):
            g, kl = self.expected_grad(q, step, local), divergence(q, w)
            q = {k: v - local.value(self.device_lr) * (g[k] + pull * kl[f"q_{k}"]) for k, v in q.items()}
            kl = divergence(q, w)
            w = {k: v - local.value(self.global_lr) * pull * kl[f"w_{k}"] for k, v in w.items()}
        local.keep(**q)
        return w

    def expected_grad(self, q: Gaussian, step: int, local: LocalProblem) -> Gaussian:
        """Gradient of E f(mean + deviation * noise), estimated on one mini-batch by `num_samples` draws of noise."""
        batch, deviation = local.batch(), softplus(q["rho"])
        total = {k: torch.zeros_like(v) for k, v in q.items()}
        for draw in range(self.num_samples):
            noise = normal(local, f"noise {step} {draw}", deviation)
            g = local.grad(q["model"] + deviation * noise, batch)
            total = {"model": total["model"] + g, "rho": total["rho"] + g * noise * slope(deviation)}
        return {k: v / self.num_samples for k, v in total.items()}


def normal(local: LocalProblem, purpose: str, like: Tensor) -> Tensor:
    """[n, d] standard normal random numbers of each device, by the Box-Muller transform; `like` is [n, d]."""
    u = local.uniform(purpose, 2 * like.shape[1])
    radius, angle = (-2 * torch.log1p(-u[:, ::2])).sqrt(), 2 * math.pi * u[:, 1::2]
    return (radius * angle.cos()).to(like.dtype)


def softplus(rho: Tensor) -> Tensor:
    """log(1 + exp(rho)). Not F.softplus: its last bits depend on the position of a number in the tensor."""
    return rho.clamp(min=0) + torch.log1p(torch.exp(-rho.abs()))


def slope(deviation: Tensor) -> Tensor:
    """d deviation / d rho = 1 / (1 + exp(-rho))."""
    return -torch.expm1(-deviation)


def divergence(q: Gaussian, w: Gaussian) -> Gaussian:
    """Gradients of KL(q || w) = sum log(s_w / s_q) + (s_q^2 + (m_q - m_w)^2) / (2 s_w^2) - 1/2."""
    apart, s_q, s_w = q["model"] - w["model"], softplus(q["rho"]), softplus(w["rho"])
    return {
        "q_model": apart / s_w**2,
        "w_model": -apart / s_w**2,
        "q_rho": (s_q / s_w**2 - 1 / s_q) * slope(s_q),
        "w_rho": (1 / s_w - (s_q**2 + apart**2) / s_w**3) * slope(s_w),
    }
