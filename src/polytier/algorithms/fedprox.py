"""FedProx (Li et al. 2020): FedAvg whose local objective is f_i(theta) + mu/2 |theta - x|^2.

symbol | field       | meaning
mu     | device_pull | pull of a device to the global model; 0 is FedAvg
others | as in FedAvg
"""

from dataclasses import dataclass

from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.node import LocalProblem
from polytier.method.parameters import parameter
from polytier.stack.solvers import proximal_sgd


@dataclass(frozen=True)
class FedProx(FedAvg):
    device_pull: float = parameter(0.001, "mu", "pull of a device's model to the global one", least=0)

    def device(self, x: Tensor, local: LocalProblem) -> Tensor:
        return proximal_sgd(local, x, x, local.value(self.device_lr), self.device_pull, self.device_steps)
