"""DemLearn: groups of similar devices in several levels, formed anew every few rounds (Nguyen et al. 2020).

Nguyen, Pandey, Dang, Huh, Tran, Saad, Hong, "Self-organizing Democratized Learning: Towards Large-scale Distributed
Learning Systems", 2020. https://arxiv.org/abs/2007.03278

The server clusters the devices hierarchically and averages their models in each group of each level. A device solves

    min_w f_i(w) + mu/2 sum_k |w - w^(k)|^2 / N^(k)

where w^(k) is the model of its group of level k and N^(k) is the number of devices in that group. It starts from

    (1 - beta_t) w_i + beta_t sum_k w^(k) / N^(k) / sum_k 1 / N^(k)

symbol | field          | shape       | meaning
w_i    | device model   | [n, d]      | personal model, kept as "model"; the server keeps a copy of each
       | state "groups" | [levels, n] | the group of each device in each level, lowest level first: a row of "models"
w^(k)  | state "models" | [groups, d] | means of the devices' models; the last row is the mean of all, the global model
K      | levels         |             | number of levels: all devices, the two branches of the dendrogram, theirs, ...
tau    | regroup_rounds |             | rounds between two clusterings; the first one is after round 1
       | cluster_by     |             | what is clustered: "models", or "updates", the change in the last round (which
                                        is then sent too)
beta_t | mix, mix_decay |             | beta_t = mix * mix_decay^t in rounds t = 0, 1, ...
mu     | device_pull    |             | strength of the pull to the models of the groups
       | device_lr      |             | step size of a device
       | device_steps   |             | steps per device and round

The pulls to the models of all levels equal one pull to their mean with weights 1 / N^(k); a device receives this mean
and one number. Devices that do not take part count with the last model they sent (before that with the initial
model). Clustering takes O(n^2) time and memory at the server.

From the paper: clustering, the means, the objective and a decreasing beta (DemLearn-P of the first version of the
paper; its DemLearn is mu = 0).
Interpretation: average linkage of Euclidean distances; the mean at the start is normalised; levels are the depths of
the dendrogram; a device that is alone in a group learns from the levels above; how fast beta decreases.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.solvers import proximal_sgd
from polytier.tree.collaboration import Collaboration
from polytier.tree.pair_weights import SHOWN


@dataclass(frozen=True)
class DemLearn(Algorithm):
    tiers: ClassVar[int | None] = 2
    any_optimizer: ClassVar[bool] = True
    model_fields: ClassVar[tuple[str, ...]] = ()  # a device starts from a mix of its own model and the one received
    device_lr: Step = parameter(0.05, "", "step size of a device", above=0, per="node")
    device_steps: int = parameter(20, "", "mini-batch steps per device and round", least=1)
    device_pull: float = parameter(0.002, "mu", "pull of a device's model to those of its groups", least=0)
    levels: int = parameter(4, "K", "levels of groups, the group of all devices included", least=1, most=16)
    regroup_rounds: int = parameter(2, "tau", "rounds between two clusterings", least=1)
    cluster_by: str = parameter("models", "", "what devices are grouped by", choices=("models", "updates"))
    mix: float = parameter(1.0, "beta", "share of the groups' models where a device starts", least=0, most=1)
    mix_decay: float = parameter(0.7, "", "factor of that share from round to round", least=0, most=1)

    def check(self, server: Children) -> list[str]:
        if len(server.kids[0]) < 2:
            raise ValueError("DemLearn groups devices and needs 2 or more; got 1: add some, or use local")
        return []

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {"groups": torch.zeros(self.levels, 0, dtype=torch.int64), "models": x}

    def server(self, state: dict[str, Tensor], devices: Children) -> dict[str, Tensor]:
        groups, n, present = state["groups"], len(devices.kids[0]), devices.draw()[0]
        if not len(present):
            return state
        sent = self.guide(groups, state["models"], present) if groups.numel() else {}
        devices.remember("learned", devices.call("solve", sent, to=present, each=True))
        first = devices.initial.expand(n, -1)
        learned: dict[str, Tensor] = devices.recall("learned", {"models": first, "updates": 0 * first}).rows  # type: ignore
        if not groups.numel() or devices.round % self.regroup_rounds == 0:
            groups = hierarchy(learned[self.cluster_by].numpy(), self.levels)
        models = first.new_zeros(int(groups.max()) + 1, first.shape[1])
        for level in groups:
            models.index_add_(0, level, learned["models"])
        return {"groups": groups, "models": models / groups.flatten().bincount().unsqueeze(1)}

    def guide(self, groups: Tensor, models: Tensor, present: Tensor) -> dict[str, Tensor]:
        """For the devices `present` [m]: the mean of their groups' models by 1 / N^(k), and the pull to it."""
        size = groups.flatten().bincount()[groups[:, present]]
        share = (size > 1).to(models.dtype) / size  # [levels, m]
        total = share.sum(0)
        mean = torch.zeros_like(models[groups[0, present]])
        for level, by in zip(groups[:, present], share / total, strict=True):
            mean += by.unsqueeze(1) * models[level]
        return {"mean": mean, "pull": self.device_pull * total}

    def device(self, sent: dict[str, Tensor], local: LocalProblem) -> dict[str, Tensor]:
        start = anchor = local.memory("model", local.initial)
        pull: Tensor | float = 0.0
        if sent:  # empty before the first clustering
            anchor, pull = sent["mean"], sent["pull"].unsqueeze(1)
            beta = self.mix * self.mix_decay**local.round
            start = (1 - beta) * start + beta * anchor
        w = proximal_sgd(local, start, anchor, local.value(self.device_lr), pull, self.device_steps)
        local.keep(model=w)
        return {"models": w, "updates": w - start} if self.cluster_by == "updates" else {"models": w}

    def global_model(self, state: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return state["models"][-1:]

    def collaboration(self, state: dict[str, Tensor]) -> Collaboration | None:  # type: ignore[override]
        lowest = state["groups"][0]
        return (
            Collaboration.from_dense((lowest.unsqueeze(1) == lowest).double().numpy()) if len(lowest) <= SHOWN else None
        )


def hierarchy(points: np.ndarray, levels: int) -> Tensor:
    """[levels, n] the group of each point [n, d], lowest level first; numbers continue from level to level."""
    from scipy.cluster.hierarchy import linkage, to_tree

    branches: list[list[Any]] = [[to_tree(linkage(points, "average"))]]
    for _ in range(levels - 1):
        parts = ([b] if b.is_leaf() else [b.left, b.right] for b in branches[0])
        branches.insert(0, [branch for pair in parts for branch in pair])
    groups, number = torch.zeros(levels, len(points), dtype=torch.int64), 0
    for level, row in zip(branches, groups, strict=True):
        for branch in level:
            row[branch.pre_order()] = number
            number += 1
    return groups
