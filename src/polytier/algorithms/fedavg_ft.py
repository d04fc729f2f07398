"""FedAvg + fine-tuning: FedAvg's global model, then a few steps on each device's own training data.

symbol | field      | meaning
x      | state      | [1, d] global model, as in FedAvg
theta  | personal   | [n, d] made from x whenever it is asked for; devices keep nothing
       | tune_lr, tune_steps | the fine-tuning
"""

from dataclasses import dataclass

from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.node import LocalProblem
from polytier.method.parameters import parameter
from polytier.stack.rows import Rows
from polytier.stack.solvers import sgd


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    tune_lr: float = parameter(0.01, "", "step size of the fine-tuning", above=0)
    tune_steps: int = parameter(20, "", "mini-batch steps of the fine-tuning", least=0)

    def publish(self, state: Rows) -> Rows:
        return state

    def personal(self, x: Rows | None, local: LocalProblem) -> Tensor:
        assert isinstance(x, Tensor)
        return sgd(local, x, self.tune_lr, self.tune_steps)
