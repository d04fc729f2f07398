"""Local training: every device trains alone. The baseline for all methods with collaboration.

Minimises f_i(theta_i) for every device. Devices receive an empty message per round and send nothing.

symbol | field        | shape  | meaning
theta  | device model | [n, d] | personal model, kept as "model"
alpha  | device_lr    |        | step size of a device (one number, or one per device)
L      | device_steps |        | mini-batch steps per device and round
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.rows import Rows
from polytier.stack.solvers import sgd


@dataclass(frozen=True)
class LocalTraining(Algorithm):
    tiers: ClassVar[int | None] = 2
    any_optimizer: ClassVar[bool] = True
    device_lr: Step = parameter(0.01, "alpha", "step size of a device", above=0, per="node")
    device_steps: int = parameter(20, "L", "mini-batch steps per device and round", least=1)

    def server(self, state: Tensor, devices: Children) -> Tensor:
        devices.solve({})  # an empty message: devices only have to run
        return state

    def device(self, x: Rows, local: LocalProblem) -> Rows:
        theta = local.memory("model", local.initial)
        local.keep(model=sgd(local, theta, local.value(self.device_lr), self.device_steps))
        return {}

    def global_model(self, state: Rows) -> None:
        return None
