"""APFL: a mixture of a device's own model and the global one, and how much of each (Deng, Kamani, Mahdavi 2020).

Minimises mean_i f_i(w) over w, and for every device f_i(alpha_i v_i + (1 - alpha_i) w) over v_i and alpha_i in [0, 1].

symbol  | field        | shape  | meaning
w       | state        | [1, d] | global model: FedAvg's; w_i is a device's copy in a round
v_i     | own          | [n, d] | a device's own part, kept at the device; starts from the first model of all
alpha_i | alpha        | [n, 1] | share of v_i, kept at the device; the field is what it starts from
v_bar_i | device model | [n, d] | alpha_i v_i + (1 - alpha_i) w_i, the personal model, kept as "model"
eta     | device_lr    |        | step of w_i, v_i and alpha_i (one number, or one a device)
tau     | device_steps |        | steps a round
        | adaptive     |        | whether alpha_i is learned

A step has one mini-batch for both gradients. With alpha = 1 that is not adaptive it is local training; the global
model is always that of FedAvg with the same weights.

A reading: the paper writes the step of v_i as eta grad_v f_i(v_bar_i), which by the chain rule is eta alpha_i times the
gradient at v_bar_i; this is built. (Code that leaves the factor out takes longer steps.) alpha_i moves in every step.
Differs from the paper: the personal model is mixed with the device's own w_i after its last step, as in the algorithm's
loop; the paper's output mixes with the mean of the w_i and averages over the steps.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.node import Children, LocalProblem
from polytier.method.parameters import Step, parameter


@dataclass(frozen=True)
class APFL(Algorithm):
    tiers: ClassVar[int | None] = 2
    budget: ClassVar[dict[str, float]] = {"device_steps": 0.5}  # two gradients a step
    device_lr: Step = parameter(0.01, "eta", "step size of a device", above=0, per="node")
    device_steps: int = parameter(20, "tau", "mini-batch steps of a device a round", least=1)
    alpha: float = parameter(0.5, "alpha", "share of a device's own model in its personal one", least=0, most=1)
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
