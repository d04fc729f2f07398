"""FedBN: FedAvg with batch normalisation layers that stay at the devices (Li, Jiang, Zhang, Kamp, Dou 2021).

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
https://arxiv.org/abs/2102.07623

Minimises mean_i f_i(x, b_i) over the shared parameters x, weighted by samples, and the layers b_i of each device.

symbol | field    | shape  | meaning
x      | state    | [1, d] | shared parameters; the columns of layers that stay at home are those of the initial model
b_i    |          |        | parameters and running statistics of a device whose names match "*bn*"
       | personal | [n, d] | personal model, made when it is needed: x with b_i

The other fields are those of FedAvg. `--local-layers PATTERN` chooses other layers, of any kind. There is no global
model. A device that has not taken part has the initial layers.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.local_problem import LocalProblem
from polytier.stack.rows import Rows


@dataclass(frozen=True)
class FedBN(FedAvg):
    local_layers: ClassVar[str] = "*bn*"

    def global_model(self, state: Rows) -> None:
        return None

    def publish(self, state: Rows) -> Rows:
        return state

    def personal(self, x: Rows | None, local: LocalProblem) -> Tensor:
        assert isinstance(x, Tensor)
        return x  # with the layers of each device, as in training
