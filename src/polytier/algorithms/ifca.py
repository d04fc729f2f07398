"""IFCA: k models; every device trains the one with the lowest loss on its data (Ghosh et al. 2020).

Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020.
https://arxiv.org/abs/2006.04088

Minimises sum_i min_j f_i(theta_j), the sum weighted by samples. The server averages the models of the devices that
chose the same one (the option "model averaging" of the paper).

symbol  | field           | shape     | meaning
theta_j | state "centres" | [1, k, d] | the k models; all are sent to every device
        | state "choice"  | [n]       | the model that each device chose last, -1 if it has not taken part
k       | num_clusters    |           | number of models; with 1 it is FedAvg
        | spread          |           | the first model is the initial one; the others are the initial one plus uniform
                                        random numbers in [-spread, spread]
alpha   | device_lr       |           | step size of a device (one number, or one per device)
L       | device_steps    |           | mini-batch steps per device and round
        | weights         |           | how the models of a cluster are averaged

A device chooses by its loss on all its training samples; of equal losses the first one is chosen. Its personal model is
the one of the current models that it would choose. A model that no device chose stays as it is. Above 1,000 devices
no collaboration matrix is recorded, as it would have n^2 / k pairs in every recorded round.

Differs from the paper: there the first models are drawn independently at random; here they are near the initial
model.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import parameter
from polytier.stack.rows import Rows
from polytier.stack.solvers import sgd
from polytier.tree.collaboration import Collaboration

RECORDED = 1000  # largest number of devices whose pairs are recorded: half a million pairs with two clusters


@dataclass(frozen=True)
class IFCA(FedAvg):
    model_fields: ClassVar[tuple[str, ...]] = ("model",)  # the choice is not a model
    num_clusters: int = parameter(2, "k", "number of models", least=1)
    spread: float = parameter(0.05, "", "largest difference of the first models from the initial one", above=0)

    def check(self, server: Children) -> list[str]:
        n, k = len(server.kids[0]), self.num_clusters
        if k > n:
            raise ValueError(f"num_clusters = {k} is more than the {n} devices; use at most {n}")
        if server.stale_answers:
            raise ValueError('IFCA would average stale models of earlier choices; use absent = "skip"')
        warning = f"{n} devices are more than {RECORDED}: IFCA records no collaboration matrix"
        return [warning] if n > RECORDED else []

    def init(self, x: Tensor) -> dict[str, Tensor]:
        centres = x.unsqueeze(1).repeat(1, self.num_clusters, 1)  # all but the first are moved in the first round
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
        if not 0 < n <= RECORDED:
            return None
        same = (choice[:, None] == choice) & (choice >= 0) & ~np.eye(n, dtype=bool)
        pairs = np.argwhere(same)
        return Collaboration(np.arange(n), np.zeros(n), pairs, np.ones(len(pairs)))


def best(centres: Tensor, local: LocalProblem) -> tuple[Tensor, Tensor]:
    """[n, d], [n] of the models `centres` [n, k, d] the one with the lowest training loss, and its number."""
    data = local.full()
    choice = torch.stack([local.loss(x, data) for x in centres.unbind(1)], 1).argmin(1)
    return chosen(centres, choice), choice


def chosen(centres: Tensor, choice: Tensor) -> Tensor:
    """[n, d] one centre of each of centres [n, k, d]."""
    return centres.take_along_dim(choice[:, None, None], 1).squeeze(1)
