"""APFL: a personal model that mixes a local and the global model (Deng, Kamani, Mahdavi 2020).

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020. https://arxiv.org/abs/2003.13461

Minimises mean_i f_i(w) over w and, for every device, f_i(alpha_i v_i + (1 - alpha_i) w) over v_i and over alpha_i in
[0, 1].

symbol  | field        | shape  | meaning
w       | state        | [1, d] | global model, that of FedAvg; w_i is the copy that a device trains during a round
v_i     |              | [n, d] | local model, kept as "own"; starts from the initial model
alpha_i | alpha        | [n, 1] | share of v_i, kept as "alpha"; the field is its first value
v_bar_i | device model | [n, d] | personal model alpha_i v_i + (1 - alpha_i) w_i, kept as "model"
eta     | device_lr    |        | step size of w_i, v_i and alpha_i (one number, or one per device)
tau     | device_steps |        | steps per round
        | adaptive     |        | whether alpha_i is learned
1/K     | weights      |        | how models are averaged

Both gradients of a step use the same mini-batch. With alpha = 1 and adaptive = false the method is local training;
its global model is always that of FedAvg with the same weights.

Interpretation: the paper writes the step of v_i as eta grad_v f_i(v_bar_i), which by the chain rule is eta alpha_i
times the gradient at v_bar_i; this is implemented. (Code that leaves out the factor takes longer steps.) alpha_i
changes in every step.
Differs from the paper: the personal model is mixed with the device's own w_i after its last step, as in the loop of
the paper's algorithm; the output of the paper mixes with the mean of the w_i and averages over the steps.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import Step, parameter


@dataclass(frozen=True)
class APFL(Algorithm):
    tiers: ClassVar[int | None] = 2
    budget: ClassVar[dict[str, float]] = {"device_steps": 0.5}  # two gradients per step
    device_lr: Step = parameter(0.01, "eta", "step size of a device", above=0, per="node")
    device_steps: int = parameter(20, "tau", "mini-batch steps per device and round", least=1)
    alpha: float = parameter(0.5, "alpha", "share of the local model in the personal model, at first", least=0, most=1)
    adaptive: bool = parameter(True, "", "whether each device learns its alpha")
    weights: str = parameter("uniform", "1/K", "how models are averaged", choices=("uniform", "samples"))

    def server(self, w: Tensor, devices: Children) -> Tensor:
        return devices.solve(w).mean(self.weights)

    def device(self, w: Tensor, local: LocalProblem) -> Tensor:
        eta, v = local.value(self.device_lr), local.memory("own", local.initial)
        alpha = local.memory("alpha", w.new_full((len(w), 1), self.alpha))
        mixed = alpha * v + (1 - alpha) * w
        for _ in range(self.device_steps):
            batch = local.batch()
            of_mixed, apart = local.grad(mixed, batch), v - w
            w = w - eta * local.grad(w, batch)
            v = v - eta * (alpha * of_mixed)  # grad_v f(v_bar)
            if self.adaptive:
                alpha = (alpha - eta * (apart * of_mixed).sum(1, keepdim=True)).clamp(0, 1)  # grad_alpha f(v_bar)
            mixed = alpha * v + (1 - alpha) * w
        local.keep(model=mixed, own=v, alpha=alpha)
        return w
