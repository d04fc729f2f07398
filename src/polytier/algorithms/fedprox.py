"""FedProx: FedAvg with a local objective that is pulled to the global model (Li et al. 2020).

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020.
https://arxiv.org/abs/1812.06127

Each device minimises f_i(theta) + mu/2 |theta - x|^2 approximately; the server averages as in FedAvg.

symbol | field       | shape  | meaning
x      | state       | [1, d] | global model
mu     | device_pull |        | strength of the pull of a device to the global model; 0 is FedAvg

The other fields are those of FedAvg. Differs from the paper: all devices take the same number of steps.
"""

from dataclasses import dataclass

from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import parameter
from polytier.stack.solvers import proximal_sgd


@dataclass(frozen=True)
class FedProx(FedAvg):
    device_pull: float = parameter(0.001, "mu", "pull of a device's model to the global one", least=0)

    def device(self, x: Tensor, local: LocalProblem) -> Tensor:
        return proximal_sgd(local, x, x, local.value(self.device_lr), self.device_pull, self.device_steps)
