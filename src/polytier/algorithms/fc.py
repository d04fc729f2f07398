"""FC: federated clustering by thresholded distances of momenta (Werner, He, Karimireddy, Jordan, Jaggi 2023).

"Provably personalized and robust federated learning". Every client has a model x_i and steps along the mean of the
momenta that are near its own. Minimises sum_i f_i(x_i), clients of a cluster being near each other's optimum.

symbol | field          | shape  | meaning
x_i    | device model   | [n, d] | personal model, kept as "model"
m_i    |                | [n, d] | momentum, kept as "momentum", 0 at first; the server has a copy of the last of each
v_i    |                | [n, d] | the centre of the momenta around m_i, sent down
eta    | device_lr      |        | step of a client (one number, or one a device)
alpha  | 1 - momentum   |        | share of the new gradient in m_i
tau_i  | nearest        |        | distance from v_i to that many nearest momenta, its own among them at first;
                                   0: as many as its true group has, where the data say so
       | cluster_rounds |        | rounds of the clustering
pairs  | state          | [P]    | who was within tau_i in the last one, i * n + j
known  | state          | [n]    | who took part so far: their last momenta count, whether they are there or not

With nearest = 1 it is local training with momentum. A round of the server takes time O(n^2 (n + d)) and holds all n^2
products of momenta, from which the distances come; its state holds n * nearest pairs. Who is near shows groups while
models move; at their optima all momenta are 0.

Readings: of the paper's methods this is the one with momenta, each at its client's own model, and with every client as
the centre of its own cluster. The paper leaves tau open; by rank, renewed in every clustering round, is what "given
the true sizes of the clusters" is taken to mean. Differs from the paper: there everybody takes part.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.node import Children, LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.rows import Rows
from polytier.tree.collaboration import Collaboration

HELD = 1 << 24  # numbers that are worked on at once


@dataclass(frozen=True)
class FC(Algorithm):
    tiers: ClassVar[int | None] = 2
    model_fields: ClassVar[tuple[str, ...]] = ()  # momenta are sent up, no models
    budget: ClassVar[dict[str, float]] = {"rounds": 1.0}
    device_lr: Step = parameter(0.05, "eta", "step size of a client's model", above=0, per="node")
    momentum: float = parameter(0.9, "1 - alpha", "share of the old in a new momentum", least=0, most=0.999)
    nearest: int = parameter(0, "", "momenta in a client's centre; 0: as many as its true group has", least=0)
    cluster_rounds: int = parameter(5, "", "rounds of the clustering", least=1)

    def check(self, server: Children) -> list[str]:
        n = len(server.kids[0])
        if not self.nearest and server.context.true_groups(server.tier + 1) is None:
            raise ValueError(
                f"nearest = 0 takes the sizes of the true groups and these data have none; give nearest, from 1 to {n}"
            )
        more = f"nearest = {self.nearest} is more than the {n} clients: all are near each other"
        return [more] if self.nearest > n else []

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {"known": torch.zeros(0, dtype=torch.bool), "pairs": torch.zeros(0, dtype=torch.int64)}

    def server(self, state: dict[str, Tensor], clients: Children) -> dict[str, Tensor]:
        n, present = len(clients.kids[0]), clients.draw()[0]
        if not len(present):
            return state
        known = state["known"] if len(state["known"]) else torch.zeros(n, dtype=torch.bool)
        known = known.index_fill(0, present, True)
        who = known.nonzero().squeeze(1)
        clients.remember("momentum", clients.call("descent", {}, to=present))
        m: Any = clients.recall("momentum", clients.initial.expand(n, -1)).rows
        m = m[who]
        gram, number = products(m), self.number(who, clients)
        centres, pairs = [], [state["pairs"][~torch.isin(state["pairs"] // n, present)]]
        for part in present.split(max(1, HELD // len(who))):
            share, near = cluster(torch.searchsorted(who, part), gram, number[part], self.cluster_rounds)
            i, j = near.nonzero(as_tuple=True)
            i, j = part[i], who[j]
            centres.append(share.to(m.dtype) @ m)
            pairs.append((i * n + j)[i != j])
        clients.call("solve", torch.cat(centres), to=present, each=True)
        return {"known": known, "pairs": torch.cat(pairs).sort().values}

    def number(self, who: Tensor, clients: Children) -> Tensor:
        """[n] how many of `who` are near each client."""
        n = len(clients.kids[0])
        if self.nearest:
            return torch.full((n,), min(self.nearest, len(who)))
        true: Any = clients.context.true_groups(clients.tier + 1)
        group = torch.from_numpy(np.unique(true, return_inverse=True)[1])
        return group[who].bincount(minlength=n)[group]

    def descent(self, sent: Rows, local: LocalProblem) -> Tensor:
        x = local.memory("model", local.initial)
        old, g = local.memory("momentum", torch.zeros_like(x)), local.grad(x)
        m = (1 - self.momentum) * g + self.momentum * old
        local.keep(momentum=m)
        return m

    def device(self, v: Tensor, local: LocalProblem) -> Rows:
        local.keep(model=local.memory("model", local.initial) - local.value(self.device_lr) * v)
        return {}

    def global_model(self, state: Rows) -> None:
        return None

    def collaboration(self, state: dict[str, Tensor]) -> Collaboration | None:  # type: ignore[override]
        pairs, n = state["pairs"].numpy(), len(state["known"])  # 0 before the first round
        pairs = np.stack([pairs // max(n, 1), pairs % max(n, 1)], 1)
        return Collaboration(np.arange(n), np.zeros(n), pairs, np.ones(len(pairs))) if n else None


def products(m: Tensor) -> Tensor:
    """[N, N] <m_i, m_j>, in float64: distances are what is left of these."""
    gram = torch.zeros(len(m), len(m), dtype=torch.float64)
    for piece in m.split(max(1, HELD // len(m)), 1):
        gram.addmm_(piece.double(), piece.double().T)
    return gram


def cluster(own: Tensor, gram: Tensor, number: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """[c, N] the shares of all momenta in the centres v that start at those of `own` [c], and who was near at last."""
    num = len(gram)
    share = torch.nn.functional.one_hot(own, num).double()
    near = share > 0
    for _ in range(rounds):
        product = share @ gram  # <v_i, m_j>
        distance = (share * product).sum(1, keepdim=True) - 2 * product + gram.diagonal()  # |v_i - m_j|^2
        distance = distance.clamp(min=0)
        near = distance <= distance.sort(1).values.gather(1, number.unsqueeze(1) - 1)  # tau_i^2
        # v <- mean_j (m_j if it is near, else v), as a change of v: exactly none where it is alone
        share = share + (near.double() - near.sum(1, keepdim=True) * share) / num
    return share, near
