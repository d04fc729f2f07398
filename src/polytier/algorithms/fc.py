"""FC: every client averages the momenta that are near its own (Werner, He, Karimireddy, Jordan, Jaggi 2023).

Werner, He, Karimireddy, Jordan, Jaggi, "Provably Personalized and Robust Federated Learning", 2023.
https://arxiv.org/abs/2306.08393

Minimises sum_i f_i(x_i), for clients in clusters: those of a cluster have optima near each other. In each round the
server clusters the momenta of the clients by distance, and every client steps along the centre of its cluster.

symbol | field          | shape  | meaning
x_i    | device model   | [n, d] | personal model, kept as "model"
m_i    |                | [n, d] | momentum, kept as "momentum", 0 at first; the server keeps a copy of the last of each
v_i    |                | [n, d] | centre of the momenta around m_i, sent to the client
eta    | device_lr      |        | step size of a client (one number, or one per device)
alpha  | 1 - momentum   |        | share of the new gradient in m_i
tau_i  | nearest        |        | threshold: the distance from v_i to so many of the nearest momenta, at first m_i
                                   itself among them; 0: as many as the true group of the client has
       | cluster_rounds |        | iterations of the clustering per round
pairs  | state          | [P]    | the pairs within tau_i in the last iteration, as i * n + j
known  | state          | [n]    | clients that have taken part: their last momenta count, also when they are absent

With nearest = 1 it is local training with momentum. A round takes O(n^2 (n + d)) time at the server, which holds all
n^2 inner products of momenta; the state holds n * nearest pairs. Distances between momenta are meaningful only while
models change; at the optima all momenta are 0.

Interpretation: of the methods in the paper this is the one with momenta, each computed at the client's own model,
with every client as the centre of its own cluster. The paper leaves tau open; here it is set by rank, in every
iteration, as "given the true sizes of the clusters" suggests.
Differs from the paper: there all clients take part in every round.
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
from polytier.stack.rows import Rows
from polytier.tree.collaboration import Collaboration

HELD = 1 << 24  # numbers in memory at once


@dataclass(frozen=True)
class FC(Algorithm):
    tiers: ClassVar[int | None] = 2
    model_fields: ClassVar[tuple[str, ...]] = ()  # momenta are sent up, not models
    budget: ClassVar[dict[str, float]] = {"rounds": 1.0}
    device_lr: Step = parameter(0.05, "eta", "step size of a client's model", above=0, per="node")
    momentum: float = parameter(0.9, "1 - alpha", "share of the old momentum in the new one", least=0, most=0.999)
    nearest: int = parameter(0, "", "momenta within a client's threshold; 0: as many as its true group has", least=0)
    cluster_rounds: int = parameter(5, "", "iterations of the clustering per round", least=1)

    def check(self, server: Children) -> list[str]:
        n = len(server.kids[0])
        if not self.nearest and server.true_groups is None:
            raise ValueError(
                f"nearest = 0 uses the sizes of the true groups and these data have none; give nearest, from 1 to {n}"
            )
        warning = f"nearest = {self.nearest} is more than the {n} clients: all are in one cluster; use at most {n}"
        return [warning] if self.nearest > n else []

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
        """[n] how many of `who` are within the threshold of each client."""
        n = len(clients.kids[0])
        if self.nearest:
            return torch.full((n,), min(self.nearest, len(who)))
        group = clients.true_groups
        assert group is not None, "checked before the first round"
        return group[who].bincount(minlength=n)[group]

    def descent(self, sent: Rows, local: LocalProblem) -> Tensor:
        """[n, d] the momenta m_i, updated with a new gradient."""
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
    """[N, N] inner products <m_i, m_j>, in float64, because distances are small differences of them."""
    gram = torch.zeros(len(m), len(m), dtype=torch.float64)
    for piece in m.split(max(1, HELD // len(m)), 1):
        gram.addmm_(piece.double(), piece.double().T)
    return gram


def cluster(own: Tensor, gram: Tensor, number: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Cluster N momenta around c centres.

    Args:
        own: [c] the momentum that each centre starts from.
        gram: [N, N] inner products of the momenta.
        number: [c] how many momenta are within the threshold of each centre.
        rounds: iterations.

    Returns:
        [c, N] the shares of the momenta in each centre, and [c, N] bool, which were within the threshold at last.
    """
    num = len(gram)
    share = torch.nn.functional.one_hot(own, num).double()
    near = share > 0
    for _ in range(rounds):
        product = share @ gram  # <v_i, m_j>
        distance = (share * product).sum(1, keepdim=True) - 2 * product + gram.diagonal()  # |v_i - m_j|^2
        distance = distance.clamp(min=0)
        near = distance <= distance.sort(1).values.gather(1, number.unsqueeze(1) - 1)  # tau_i^2
        # v <- mean_j (m_j if it is near, else v), written as a change of v, which is exactly 0 for a centre alone
        share = share + (near.double() - near.sum(1, keepdim=True) * share) / num
    return share, near
