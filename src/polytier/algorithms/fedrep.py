"""FedRep: a shared body and a head per device (Collins, Hassani, Mokhtari, Shakkottai 2021).

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021. https://arxiv.org/abs/2102.07078

Minimises mean_i min_{h_i} f_i(phi, h_i) over the body phi. The head are the parameters whose names match "head.*".

symbol | field      | shape       | meaning
phi    | state      | [1, d]      | the body; the columns of the head are those of the initial model and never change
h_i    |            | [n, d_head] | head of a device, kept as "head"; starts from that of the initial model
q_i    | personal   | [n, d]      | personal model, made when it is needed: the server's body with the device's own head
alpha  | device_lr  |             | step size of a device on head and body (one number, or one per device)
tau    | head_steps |             | steps on the head per round, with the body as it was received
       | body_steps |             | steps on the body per round, with the head just trained
1/rn   | weights    |             | how bodies are averaged

Only the body is sent, in both directions. There is no global model, because no head is shared. A device that has not
taken part has the initial head.

Differs from the paper: Algorithm 1 takes one step on the body, the experiments several; here it is `body_steps`. All
steps are on mini-batches.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polytier._text import listed
from polytier.method.algorithm import Algorithm
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.rows import Rows

HEAD = "head.*"


@dataclass(frozen=True)
class FedRep(Algorithm):
    tiers: ClassVar[int | None] = 2
    budget: ClassVar[dict[str, float]] = {"head_steps": 0.5, "body_steps": 0.5}
    device_lr: Step = parameter(0.01, "alpha", "step size of a device", above=0, per="node")
    head_steps: int = parameter(10, "tau", "mini-batch steps per device and round on the head", least=1)
    body_steps: int = parameter(10, "", "mini-batch steps per device and round on the body", least=1)
    weights: str = parameter("uniform", "1/rn", "how bodies are averaged", choices=("uniform", "samples"))

    def check(self, server: Children) -> list[str]:
        head = server.columns(HEAD)
        if not head.any():
            names = listed(server.parameter_names)
            raise ValueError(
                f"FedRep needs parameters named {HEAD}, got {names}; call the model's last layer `head`, or use FedAvg"
            )
        warning = f"all parameters of the model are named {HEAD}: nothing is shared and every device trains alone; "
        return [warning + "use a model with more layers, e.g. dnn"] if head.all() else []

    def server(self, x: Tensor, devices: Children) -> Tensor:
        body = ~devices.columns(HEAD)
        return x.masked_scatter(body, devices.solve(x[:, body]).mean(self.weights))

    def device(self, phi: Tensor, local: LocalProblem) -> Tensor:
        alpha, head = local.value(self.device_lr), local.columns(HEAD)
        theta = self.joined(local.initial.masked_scatter(~head, phi), local)
        for fixed, steps in ((~head, self.head_steps), (head, self.body_steps)):
            for _ in range(steps):
                theta = theta - alpha * local.grad(theta).masked_fill(fixed, 0)
        local.keep(head=theta[:, head])
        return theta[:, ~head]

    def global_model(self, state: Rows) -> None:
        return None

    def publish(self, state: Rows) -> Rows:
        return state

    def personal(self, x: Rows | None, local: LocalProblem) -> Tensor:
        assert isinstance(x, Tensor)
        return self.joined(x, local)

    def joined(self, x: Tensor, local: LocalProblem) -> Tensor:
        """[n, d] the models x with the head of each device in place of theirs."""
        head = local.columns(HEAD)
        return x.masked_scatter(head, local.memory("head", x[:, head]))
