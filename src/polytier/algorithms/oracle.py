"""Oracle: FedAvg within each true group of devices. A reference for methods that have to find the groups.

A baseline of the CoBo paper (Hashemi, He, Jaggi 2024). Minimises sum_g mean_{i in g} f_i(x_g), means weighted by
samples.

symbol | field           | shape     | meaning
x_g    | state "centres" | [1, k, d] | the model of each group
g      |                 | [n]       | the group of a device, sent with the model in every round and kept as "group"

The other fields are those of FedAvg. The groups are part of the data (`Federation.cluster`). The personal model of a
device is the current model of its group; a device that has not taken part does not know its group and has the initial
model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.stack.rows import Rows


@dataclass(frozen=True)
class Oracle(FedAvg):
    def check(self, server: Children) -> list[str]:
        if server.true_groups is None:
            raise ValueError(
                "Oracle needs the true groups of the devices and these data have none; use the partition "
                "clusters-permuted or clusters-disjoint, or give your .npz a column cluster"
            )
        if server.stale_answers:
            raise ValueError('Oracle averages the answers of the current round only; use absent = "skip"')
        return []

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {"centres": x.unsqueeze(1)}  # one row per group after the first round

    def server(self, state: dict[str, Tensor], devices: Children) -> dict[str, Tensor]:
        group, present = devices.true_groups, devices.draw()[0]
        assert group is not None, "checked before the first round"
        if not len(present):
            return state
        number, of = int(group.max()) + 1, group[present]
        x = state["centres"][0].expand(number, -1)
        answers = devices.call("solve", {"model": x[of], "group": of}, to=present, each=True)
        models = answers.grouped(of, number, {"model": x})["model"]
        return {"centres": models.mean(self.weights).unsqueeze(0)}

    def device(self, sent: dict[str, Tensor], local: LocalProblem) -> dict[str, Tensor]:
        local.keep(group=sent["group"])
        return {"model": super().device(sent["model"], local)}

    def global_model(self, state: Rows) -> None:
        return None

    def publish(self, state: dict[str, Tensor]) -> Tensor:
        return state["centres"]

    def personal(self, x: Tensor, local: LocalProblem) -> Tensor:
        group = local.memory("group", torch.full((len(x),), -1))[:, None, None]
        return torch.where(group[:, 0] < 0, local.initial, x.take_along_dim(group.clamp(min=0), 1).squeeze(1))
