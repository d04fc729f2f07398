"""FedAvg + fine-tuning: the global model of FedAvg, then some steps on each device's own training samples.

A baseline of the CoBo paper (Hashemi, He, Jaggi 2024) and others. Minimises what FedAvg minimises; see fedavg.py for
the citation.

symbol | field      | shape  | meaning
x      | state      | [1, d] | global model, as in FedAvg
theta  | personal   | [n, d] | personal model, made from x when it is needed; devices keep nothing
       | tune_lr    |        | step size of the fine-tuning
       | tune_steps |        | mini-batch steps of the fine-tuning

The other fields are those of FedAvg.
"""

from dataclasses import dataclass

from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.local_problem import LocalProblem
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
