"""pFedBayes: personalised federated learning via variational Bayesian inference (Zhang, Li, Li, Guo, Shao 2022).

Every device has a Gaussian q_i over the weights, every weight by itself, and the server one, w. They minimise

    mean_i F_i(w),  F_i(w) = min_{q_i} E_{theta ~ q_i} f_i(theta) + zeta / n_i KL(q_i || w)

(the paper's objective divided by n_i: its loss is a sum over the samples, f_i is their mean).

symbol     | field             | shape  | meaning
w          | state model, rho  | [1, d] | global Gaussian: means, and rho, where deviations are log(1 + exp(rho))
w_i        | local copy        | [n, d] | what a device moves towards its q_i and sends up
q_i        | device model, rho | [n, d] | personal Gaussian; its means are the personal model
eta_1      | device_lr         |        | step of q_i
eta_2      | global_lr         |        | step of w_i; both steps times zeta / (n_i deviation^2) must stay below 2
beta       | server_lr         |        | step of the server
zeta       |                   |        | weight of the KL term; 0: devices train alone
R          | device_steps      |        | steps of q_i and w_i in turn, each on a fresh mini-batch
K          | num_samples       |        | draws of the weights a step, all on its mini-batch
n_i        |                   |        | training samples of the device
           | prior_deviation   |        | the deviation that all weights start with

A reading, not certain: q_i goes on from round to round (from w when a device first takes part); w_i moves after q_i.
Differs from the paper: a device predicts by the means of q_i, not by an average over draws of its weights.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.node import Children, LocalProblem
from polytier.method.parameters import Step, parameter

Gaussian = dict[str, Tensor]  # model, rho


@dataclass(frozen=True)
class PFedBayes(Algorithm):
    tiers: ClassVar[int | None] = 2
    model_fields: ClassVar[tuple[str, ...]] = ("model", "rho")  # both are parameters of the global Gaussian
    device_lr: Step = parameter(0.01, "eta_1", "step size of a device's Gaussian", above=0, per="node")
    global_lr: Step = parameter(0.01, "eta_2", "step size of a device's copy of the global one", above=0, per="node")
    server_lr: float = parameter(1.0, "beta", "step size of the server", above=0)
    zeta: float = parameter(1.0, "zeta", "weight of the divergence from the global Gaussian", least=0)
    device_steps: int = parameter(20, "R", "mini-batch steps of a device a round", least=1)
    num_samples: int = parameter(1, "K", "draws of the weights a step", least=1)
    prior_deviation: float = parameter(0.1, "", "deviation of the weights at the start", above=0)

    def check(self, server: Children) -> list[str]:
        context = server.context
        devices = LocalProblem(context, context.topology.leaf, torch.arange(server.num_devices), server.clock)
        curvature = self.zeta / (devices.samples.unsqueeze(1) * self.prior_deviation**2)  # of KL in the means
        steps = {"device_lr": self.device_lr, "global_lr": self.global_lr}
        products = {name: float((devices.value(field) * curvature).max()) for name, field in steps.items()}
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
        """Of E f(mean + deviation * noise), estimated on one mini-batch by `num_samples` draws of the noise."""
        batch, deviation = local.batch(), softplus(q["rho"])
        total = {k: torch.zeros_like(v) for k, v in q.items()}
        for draw in range(self.num_samples):
            noise = normal(local, f"noise {step} {draw}", deviation)
            g = local.grad(q["model"] + deviation * noise, batch)
            total = {"model": total["model"] + g, "rho": total["rho"] + g * noise * slope(deviation)}
        return {k: v / self.num_samples for k, v in total.items()}


def normal(local: LocalProblem, purpose: str, like: Tensor) -> Tensor:
    """[n, d] normal draws of each device, by Box and Muller."""
    u = local.uniform(purpose, 2 * like.shape[1])
    radius, angle = (-2 * torch.log1p(-u[:, ::2])).sqrt(), 2 * math.pi * u[:, 1::2]
    return (radius * angle.cos()).to(like.dtype)


def softplus(rho: Tensor) -> Tensor:
    # not F.softplus: its bits depend on where in a stack a number is
    return rho.clamp(min=0) + torch.log1p(torch.exp(-rho.abs()))


def slope(deviation: Tensor) -> Tensor:
    """d deviation / d rho = 1 / (1 + exp(-rho))."""
    return -torch.expm1(-deviation)


def divergence(q: Gaussian, w: Gaussian) -> Gaussian:
    """The gradient of KL(q || w) = sum log(s_w / s_q) + (s_q^2 + (m_q - m_w)^2) / (2 s_w^2) - 1/2."""
    apart, s_q, s_w = q["model"] - w["model"], softplus(q["rho"]), softplus(w["rho"])
    return {
        "q_model": apart / s_w**2,
        "w_model": -apart / s_w**2,
        "q_rho": (s_q / s_w**2 - 1 / s_q) * slope(s_q),
        "w_rho": (1 / s_w - (s_q**2 + apart**2) / s_w**3) * slope(s_w),
    }
