"""IFCA: an efficient framework for clustered federated learning (Ghosh, Chung, Yin, Ramchandran 2020).

k models; every device takes the one that fits its training data best, trains it, and the server averages those who
took the same. Minimises sum_i min_j f_i(x_j), the sum weighted by samples.

symbol  | field         | shape     | meaning
theta_j | state         | [1, k, d] | the models, "centres"; all are sent to every device
        | state         | [n]       | "choice": what each device took last, -1 if it never took part
k       | num_clusters  |           | number of models; with 1 it is FedAvg
        | spread        |           | the first centre is the initial model, the others that plus uniform draws from
                                      [-spread, spread] for each parameter
alpha   | device_lr     |           | step of a device
L       | device_steps  |           | mini-batch steps a round
        | weights       |           | how the models of a cluster are averaged

A device's choice is by its loss on all training data, ties to the first; so is its personal model, from the last
centres. A centre that nobody took stays. This is the paper's model averaging. Above 1,000 devices who listens to whom
is not told: it is n^2 / k pairs a round that is kept.

Differs from the paper: it asks for good initial centres and draws them at random; here they are near the initial model.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.node import Children, LocalProblem
from polytier.method.parameters import parameter
from polytier.stack.rows import Rows
from polytier.stack.solvers import sgd
from polytier.tree.collaboration import Collaboration

TOLD = 1000  # devices; half a million pairs with two clusters


@dataclass(frozen=True)
class IFCA(FedAvg):
    model_fields: ClassVar[tuple[str, ...]] = ("model",)  # the choice is no model
    num_clusters: int = parameter(2, "k", "number of models", least=1)
    spread: float = parameter(0.05, "", "how far the first centres are from the initial model", above=0)

    def check(self, server: Children) -> list[str]:
        n, k = len(server.kids[0]), self.num_clusters
        if k > n:
            raise ValueError(f"num_clusters = {k} is more than the {n} devices; use at most {n}")
        if server.context.absent == "stale":
            raise ValueError('IFCA averages models of this round\'s choices alone; use absent = "skip"')
        told = f"{n} devices are more than {TOLD}: IFCA does not tell who listens to whom"
        return [told] if n > TOLD else []

    def init(self, x: Tensor) -> dict[str, Tensor]:
        centres = x.unsqueeze(1).repeat(1, self.num_clusters, 1)  # drawn apart in the first round
        return {"centres": centres, "choice": torch.zeros(0, dtype=torch.int64)}

    def server(self, state: dict[str, Tensor], devices: Children) -> dict[str, Tensor]:
        centres, choice = state["centres"], state["choice"]
        if not len(choice):
            choice = torch.full((len(devices.kids[0]),), -1)
            first, others = centres.split([1, self.num_clusters - 1], 1)
            apart = (2 * devices.shared("centres", others.numel()) - 1).to(others.dtype).reshape(others.shape)
            centres = torch.cat([first, others + self.spread * apart], 1)
        answers = devices.call("solve", {"centres": centres})
        if len(answers.ids):
            taken = answers.rows["choice"]  # type: ignore[index]
            models = answers.grouped(taken, self.num_clusters, {"model": centres[0]})["model"]
            centres = models.mean(self.weights).unsqueeze(0)  # Alg. 1, option model averaging
            choice = choice.index_copy(0, answers.ids, taken)
        return {"centres": centres, "choice": choice}

    def device(self, sent: dict[str, Tensor], local: LocalProblem) -> dict[str, Tensor]:
        x, choice = best(sent["centres"], local)
        return {"model": sgd(local, x, local.value(self.device_lr), self.device_steps), "choice": choice}

    def reference(self, field: str, sent: dict[str, Tensor], answer: dict[str, Tensor]) -> Tensor:
        return chosen(sent["centres"], answer["choice"])

    def global_model(self, state: Rows) -> None:
        return None

    def publish(self, state: dict[str, Tensor]) -> Tensor:
        return state["centres"]

    def personal(self, x: Tensor, local: LocalProblem) -> Tensor:
        return best(x, local)[0]

    def collaboration(self, state: dict[str, Tensor]) -> Collaboration | None:  # type: ignore[override]
        choice = state["choice"].numpy()
        n = len(choice)  # 0 before the first round
        if not 0 < n <= TOLD:
            return None
        same = (choice[:, None] == choice) & (choice >= 0) & ~np.eye(n, dtype=bool)
        pairs = np.argwhere(same)
        return Collaboration(np.arange(n), np.zeros(n), pairs, np.ones(len(pairs)))


def best(centres: Tensor, local: LocalProblem) -> tuple[Tensor, Tensor]:
    """[n, d], [n] the centre of least training loss, and its number; centres [n, k, d]."""
    data = local.full()
    choice = torch.stack([local.loss(x, data) for x in centres.unbind(1)], 1).argmin(1)
    return chosen(centres, choice), choice


def chosen(centres: Tensor, choice: Tensor) -> Tensor:
    """[n, d] one centre of each of centres [n, k, d]."""
    return centres.take_along_dim(choice[:, None, None], 1).squeeze(1)
