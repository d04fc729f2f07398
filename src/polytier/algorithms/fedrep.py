"""FedRep: a shared representation and a head for every device (Collins, Hassani, Mokhtari, Shakkottai 2021).

Minimises mean_i min_{h_i} f_i(phi, h_i) over the body phi; the head is what is called "head.*" in the model.

symbol  | field        | shape        | meaning
phi     | state        | [1, d]       | the body; its head's columns are those of the first model and never change
h_i     | head         | [n, d_head]  | kept at the device; starts from the first model's
q_i     | personal     | [n, d]       | the server's body with the device's own head, made whenever it is asked for
alpha   | device_lr    |              | step of a device on head and body (one number, or one a device)
tau     | head_steps   |              | steps on the head a round, with the body as it was received
        | body_steps   |              | steps on the body a round, with the head just trained

Only the body travels, in both directions. There is no global model: nobody has a head for all.

Differs from the paper: its Algorithm 1 takes one step on the body, its experiments more; here it is `body_steps`. Both
kinds of steps are on mini-batches. A device that has not taken part yet has the first head.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.node import Children, LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.rows import Rows

HEAD = "head.*"


@dataclass(frozen=True)
class FedRep(Algorithm):
    tiers: ClassVar[int | None] = 2
    budget: ClassVar[dict[str, float]] = {"head_steps": 0.5, "body_steps": 0.5}
    device_lr: Step = parameter(0.01, "alpha", "step size of a device", above=0, per="node")
    head_steps: int = parameter(10, "tau", "mini-batch steps of a device on its head a round", least=1)
    body_steps: int = parameter(10, "", "mini-batch steps of a device on the body a round", least=1)
    weights: str = parameter("uniform", "1/rn", "how bodies are averaged", choices=("uniform", "samples"))

    def check(self, server: Children) -> list[str]:
        head = server.columns(HEAD)
        if not head.any():
            names = ", ".join(server.parameter_names)
            raise ValueError(
                f"FedRep needs parameters named {HEAD}, got {names}; call the model's last layer `head`, or use FedAvg"
            )
        alone = f"all parameters of the model are named {HEAD}: nothing is shared and every device trains alone; "
        return [alone + "use a model with a body, e.g. dnn"] if head.all() else []

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
        """x [n, d] with each device's own head."""
        head = local.columns(HEAD)
        return x.masked_scatter(head, local.memory("head", x[:, head]))
