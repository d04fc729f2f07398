"""Per-FedAvg: a global model that one step adapts well to each device (Fallah, Mokhtari, Ozdaglar 2020).

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning: A Meta-Learning Approach", 2020.
https://arxiv.org/abs/2002.07948

Minimises mean_i F_i(w), F_i(w) = f_i(w - alpha grad f_i(w)), whose gradient is (I - alpha H_i(w)) grad f_i(w~_i) with
w~_i = w - alpha grad f_i(w) and the Hessian H_i of f_i.

symbol  | field        | shape  | meaning
w       | state        | [1, d] | global model
theta_i | personal     | [n, d] | personal model, made from w when it is needed, by `adapt_steps` steps on training data
beta    | device_lr    |        | step size of a device on F_i (one number, or one per device)
alpha   | inner_lr     |        | step size inside F_i and of the personal models; 0 is FedAvg
tau     | device_steps |        | steps per device and round
delta   | hessian_step |        | step of the central difference of gradients that approximates H_i d
        | variant      |        | "first-order": H_i is taken as 0; "hessian-free": by two more gradients
        | adapt_steps  |        | steps from the global model to a personal one
n_k/n   | weights      |        | how models are averaged

A step draws its mini-batches D, D', D'' independently and takes 2 gradients (first-order) or 4 (hessian-free).

Differs from the paper: the mean is weighted by samples, as in FedAvg; there it is plain (weights = "uniform"). The
exact gradient, with second derivatives, is not implemented; "hessian-free" is the paper's own approximation of it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.rows import Rows
from polytier.stack.solvers import sgd


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    any_optimizer: ClassVar[bool] = False
    budget: ClassVar[dict[str, float]] = {"device_steps": 0.5}  # two gradients per step
    inner_lr: Step = parameter(0.01, "alpha", "step size inside the objective", least=0, per="node")
    variant: str = parameter("first-order", "", "approximation of the Hessian", choices=("first-order", "hessian-free"))
    hessian_step: float = parameter(0.001, "delta", "step of the difference of gradients (hessian-free)", above=0)
    adapt_steps: int = parameter(1, "", "steps from the global model to a personal one", least=1)

    def device(self, x: Tensor, local: LocalProblem) -> Tensor:
        beta, alpha, delta = local.value(self.device_lr), local.value(self.inner_lr), self.hessian_step
        w = x
        for _ in range(self.device_steps):
            inner = w - alpha * local.grad(w, local.batch(stream="inner"))  # w~, on D
            d = local.grad(inner)  # on D', the mini-batches of FedAvg, so that alpha = 0 is FedAvg to the bit
            if self.variant == "hessian-free":
                held = local.batch(stream="hessian")  # D''
                product = (local.grad(w + delta * d, held) - local.grad(w - delta * d, held)) / (2 * delta)  # H d
                d = d - alpha * product
            w = w - beta * d
        return w

    def publish(self, state: Rows) -> Rows:
        return state

    def personal(self, x: Rows | None, local: LocalProblem) -> Tensor:
        assert isinstance(x, Tensor)
        return sgd(local, x, local.value(self.inner_lr), self.adapt_steps)
