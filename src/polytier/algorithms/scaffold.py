"""SCAFFOLD: stochastic controlled averaging for federated learning (Karimireddy et al. 2020).

Minimises mean_i f_i(x), every device alike. Controls c_i and c estimate the gradients of f_i and of the mean; local
steps are corrected by their difference, so that devices do not drift to their own optima.

symbol | field        | shape  | meaning
x, c   | state        | [1, d] | global model "model" and the server's control "control"; both are sent to the devices
y_i    |              | [n, d] | local model, sent up
c_i    |              | [n, d] | control of a device, kept as "control", 0 at first; its change is sent up
eta_l  | device_lr    |        | step of a device (one number, or one a device)
eta_g  | server_lr    |        | step of the server
K      | device_steps |        | mini-batch steps a round
option |              |        | how c_i is renewed: "I" from a gradient at x on a mini-batch of its own, "II" from
                                  the local steps, at no extra cost

N counts all registered devices, S those that take part. Means are uniform, as in the paper: c is the mean of all c_i
only then. With identical devices that all take part and full gradients it is FedAvg.

Differs from the paper: option I is a mini-batch gradient; with a batch size of all samples it is the full one.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.node import Children, LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.rows import Rows


@dataclass(frozen=True)
class SCAFFOLD(Algorithm):
    tiers: ClassVar[int | None] = 2
    device_lr: Step = parameter(0.01, "eta_l", "step size of a device", above=0, per="node")
    server_lr: float = parameter(1.0, "eta_g", "step size of the server", above=0)
    device_steps: int = parameter(20, "K", "mini-batch steps of a device a round", least=1)
    option: str = parameter("II", "", "how a device renews its control", choices=("I", "II"))

    def check(self, server: Children) -> list[str]:
        if server.stale_answers:
            raise ValueError('SCAFFOLD would count the same change of a control again; use absent = "skip"')
        return []

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {"model": x, "control": torch.zeros_like(x)}

    def server(self, state: dict[str, Tensor], devices: Children) -> dict[str, Tensor]:
        x, c, sent_up = state["model"], state["control"], devices.solve(state)
        mean, share = sent_up.mean(), int(sent_up.count) / len(devices.kids[0])  # |S|/N; 0 changes nothing
        x = x + self.server_lr * (mean["model"] - x)  # Alg. 1, line 17
        c = c + share * mean["control"]  # line 17
        return {"model": x, "control": c}

    def device(self, sent: dict[str, Tensor], local: LocalProblem) -> dict[str, Tensor]:
        x, c, lr = sent["model"], sent["control"], local.value(self.device_lr)
        own = local.memory("control", torch.zeros_like(c))
        y = x
        for _ in range(self.device_steps):
            y = y - lr * (local.grad(y) - own + c)  # line 10
        if self.option == "I":
            new = local.grad(x, local.batch(stream="control"))  # line 12 (i)
        else:
            new = own - c + (x - y) / (self.device_steps * lr)  # line 12 (ii)
        local.keep(control=new)
        return {"model": y, "control": new - own}

    def personal(self, x: Rows | None, local: LocalProblem) -> None:
        return None  # one model for all
