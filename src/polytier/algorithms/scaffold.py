"""SCAFFOLD: FedAvg with control variates that correct the local steps (Karimireddy et al. 2020).

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020. https://arxiv.org/abs/1910.06378

Minimises mean_i f_i(x), all devices weighted equally. The controls c_i and c estimate the gradients of f_i and of
their mean; local steps are corrected by the difference, so that devices do not drift to their own optima.

symbol | field           | shape  | meaning
x      | state "model"   | [1, d] | global model, sent to the devices
c      | state "control" | [1, d] | control of the server, 0 at first, sent to the devices
y_i    |                 | [n, d] | local model, sent to the server
c_i    |                 | [n, d] | control of a device, kept as "control", 0 at first; its change is sent
eta_l  | device_lr       |        | step size of a device (one number, or one per device)
eta_g  | server_lr       |        | step size of the server
K      | device_steps    |        | mini-batch steps per device and round
       | option          |        | how c_i is updated: "I" from a gradient at x on a separate mini-batch, "II" from the
                                    local steps, without another gradient

N is the number of registered devices, S are those that take part. Means are uniform, as in the paper: only then is c
the mean of all c_i. With identical devices that all take part, and full gradients, the method is FedAvg.

Differs from the paper: option I uses a mini-batch gradient; with a batch size of all samples it is the full one.
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


@dataclass(frozen=True)
class SCAFFOLD(Algorithm):
    tiers: ClassVar[int | None] = 2
    device_lr: Step = parameter(0.01, "eta_l", "step size of a device", above=0, per="node")
    server_lr: float = parameter(1.0, "eta_g", "step size of the server", above=0)
    device_steps: int = parameter(20, "K", "mini-batch steps per device and round", least=1)
    option: str = parameter("II", "", "how a device updates its control", choices=("I", "II"))

    def check(self, server: Children) -> list[str]:
        if server.stale_answers:
            raise ValueError('SCAFFOLD would count a stale change of a control again; use absent = "skip"')
        return []

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {"model": x, "control": torch.zeros_like(x)}

    def server(self, state: dict[str, Tensor], devices: Children) -> dict[str, Tensor]:
        x, c, sent_up = state["model"], state["control"], devices.solve(state)
        mean, share = sent_up.mean(), int(sent_up.count) / len(devices.kids[0])  # |S|/N; with 0 nothing changes
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
        return None  # all devices use the global model
