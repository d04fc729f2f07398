"""Local: every device trains alone; nothing travels. What any collaboration has to beat.

symbol | field        | meaning
theta  | device model | [n, d], kept as "model"
alpha  | device_lr    | step of a device
L      | device_steps | mini-batch steps a round
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.node import Children, LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.rows import Rows
from polytier.stack.solvers import sgd


@dataclass(frozen=True)
class LocalTraining(Algorithm):
    tiers: ClassVar[int | None] = 2
    device_lr: Step = parameter(0.01, "alpha", "step size of a device", above=0, per="node")
    device_steps: int = parameter(20, "L", "mini-batch steps of a device a round", least=1)

    def server(self, state: Tensor, devices: Children) -> Tensor:
        devices.solve({})  # an empty message: go on
        return state

    def device(self, x: Rows, local: LocalProblem) -> Rows:
        theta = local.memory("model", local.initial)
        local.keep(model=sgd(local, theta, local.value(self.device_lr), self.device_steps))
        return {}

    def global_model(self, state: Rows) -> None:
        return None
