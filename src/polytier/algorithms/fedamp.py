"""FedAMP and HeurFedAMP: every device learns most from the devices with similar models (Huang et al. 2021).

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021.
https://arxiv.org/abs/2007.03797

Every device has a model w_i. FedAMP minimises

    sum_i f_i(w_i) + lambda sum_{i<j} A(|w_i - w_j|^2),    A(x) = 1 - exp(-x / sigma)

by a gradient step on A at the server, which gives device i its cloud model u_i, and a proximal step at the device.

symbol         | field           | shape  | meaning
w_i            | device model    | [n, d] | personal model, kept as "model"; the server keeps a copy of each
u_i            | cloud model     | [n, d] | sum_j xi_ij w_j, sent to device i
xi_ij          | state "weights" | [n, n] | the weights of the last round of each device; not kept above 2,000 devices
alpha_k        | attention_lr    |        | FedAMP: step size on A; xi_ij = alpha_k A'(|w_i - w_j|^2), xi_ii: the rest
sigma          | sigma           |        | FedAMP: squared distance at which A' has fallen to 1/e;
                                            HeurFedAMP: see xi_ii
xi_ii          | self_weight     |        | HeurFedAMP: weight of the device's own model; the others share the rest, in
                                            proportion to exp(sigma cos(w_i, w_j))
lambda/alpha_k | device_pull     |        | strength of the pull of a device's model to its cloud model
               | device_lr       |        | step size of the proximal step
               | device_steps    |        | steps per device and round that approximate the proximal step

Devices that do not take part keep their models and are in no cloud model. The server compares all pairs of the
devices that take part: O(n^2 d) time; it holds some rows of weights at a time. Distances are computed from
differences, not from inner products, which is exact also for models that are close to each other.

From the paper: the objective, xi and the proximal step.
Interpretation: the proximal step starts at u_i and is made by SGD.
Differs from the paper: alpha_k is the same in all rounds, and lambda / alpha_k is a separate field. So
attention_lr = 0 is the proximal point method of each device alone, and with device_pull = 0 too it is local training.
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
from polytier.stack.solvers import proximal_sgd
from polytier.tree.collaboration import Collaboration
from polytier.tree.pair_weights import with_weights

HELD = 1 << 24  # weights in memory at once


@dataclass(frozen=True)
class Attentive(Algorithm):
    """The common part of FedAMP and HeurFedAMP, which differ in `attention`."""

    tiers: ClassVar[int | None] = 2
    any_optimizer: ClassVar[bool] = True
    device_lr: Step = parameter(0.01, "", "step size of a device", above=0, per="node")
    device_steps: int = parameter(20, "", "mini-batch steps per device and round", least=1)
    device_pull: float = parameter(1.0, "lambda/alpha_k", "pull of a device's model to its cloud model", least=0)

    def attention(self, rows: Tensor, w: Tensor, own: Tensor) -> Tensor:
        """[r, m] the weights of the models w [m, d] for the devices with models `rows` [r, d]; m > 1.

        They are 0 where `own` [r, m] is True, for the weight of a device's own model.
        """
        raise NotImplementedError

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {"weights": x.new_zeros(0, 0)}

    def server(self, state: dict[str, Tensor], devices: Children) -> dict[str, Tensor]:
        n, present = len(devices.kids[0]), devices.draw()[0]
        if not len(present):
            return state
        w = devices.recall("model", devices.initial.expand(n, -1)).rows[present]  # type: ignore[index]
        m, clouds = len(present), []
        for rows in torch.arange(m).split(max(1, HELD // m)):
            own = rows.unsqueeze(1) == torch.arange(m)
            xi = self.attention(w[rows], w, own) if m > 1 else w.new_zeros(1, 1)
            xi = xi + own * (1 - xi.sum(1, keepdim=True))
            clouds.append(xi @ w)
            state = with_weights(state, n, present[rows], present.expand(len(rows), m), xi)
        devices.remember("model", devices.call("solve", torch.cat(clouds), to=present, each=True))
        return state

    def device(self, u: Tensor, local: LocalProblem) -> Tensor:
        w = proximal_sgd(local, u, u, local.value(self.device_lr), self.device_pull, self.device_steps)
        local.keep(model=w)
        return w

    def global_model(self, state: Rows) -> None:
        return None

    def collaboration(self, state: dict[str, Tensor]) -> Collaboration | None:  # type: ignore[override]
        return Collaboration.from_dense(state["weights"].numpy())


@dataclass(frozen=True)
class FedAMP(Attentive):
    attention_lr: float = parameter(0.1, "alpha_k", "step size of the server on the attention between models", least=0)
    sigma: float = parameter(10.0, "sigma", "squared distance at which the attention has fallen to 1/e", above=0)

    def check(self, server: Children) -> list[str]:
        others = len(server.kids[0]) - 1
        most, better = self.attention_lr / self.sigma * others, f"{self.sigma / max(1, others):.3g}"
        product = f"attention_lr / sigma * {others} other devices = {most:g} is above 1"
        warning = f"{product}: a device's weight of its own model may be negative; use attention_lr = {better}"
        return [warning] if most > 1 else []

    def attention(self, rows: Tensor, w: Tensor, own: Tensor) -> Tensor:
        x = torch.cdist(rows, w, compute_mode="donot_use_mm_for_euclid_dist") ** 2
        return (self.attention_lr / self.sigma * torch.exp(-x / self.sigma)).masked_fill(own, 0)  # alpha_k A'(x)


@dataclass(frozen=True)
class HeurFedAMP(Attentive):
    self_weight: float = parameter(0.5, "xi_ii", "weight of a device's own model", least=0, most=1)
    sigma: float = parameter(10.0, "sigma", "how strongly models of the same direction are preferred", least=0)

    def attention(self, rows: Tensor, w: Tensor, own: Tensor) -> Tensor:
        unit = torch.nn.functional.normalize(w, dim=1)  # a model of all zeros has cosine 0 to the others
        cosine = torch.nn.functional.normalize(rows, dim=1) @ unit.T
        return (1 - self.self_weight) * torch.softmax((self.sigma * cosine).masked_fill(own, -torch.inf), 1)
