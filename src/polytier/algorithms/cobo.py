"""CoBo: collaborative learning via bilevel optimisation (Hashemi, He, Jaggi 2024).

Every client has a model x_i, trained with a pull to those whose gradients agree with its own. Minimises

    sum_i f_i(x_i) + rho/2 sum_{i<j} w_ij |x_i - x_j|^2

where each w_ij in [0, 1] maximises w_ij <grad f_i(z_ij), grad f_j(z_ij)> at the midpoint z_ij = (x_i + x_j) / 2.

symbol  | field        | shape  | meaning
x_i     | client model | [n, d] | kept as "model"; the server has a copy of each
w_ij    | state        |        | one (simplex: 1 / (n - 1)) and what was learned since; see `init`
eta     | device_lr    |        | step of a client (one number, or one a device)
rho     | device_pull  |        | pull to the others; with all weights one, eta * rho * n must stay below 2
gamma   | weight_lr    |        | step of a weight; a schedule such as 50/(500+t) settles which weights are 0 and 1
domain  |              |        | "box": w_ij = w_ji in [0, 1]; "simplex": each client's weights are >= 0 and sum to one
clients |              |        | "devices" (teams are ignored), or "teams": every team is one client, its model
                                  the mean of its devices' steps, its gradient the mean of theirs, by samples

Each round every pair of the clients that take part is drawn with probability 1/n ("constant"), 1/t ("inverse"; rounds
t = 1, 2, ..), 1/n for the first `constant_rounds` rounds and then 1/t ("mixed"), or one ("all"). Those who do not take
part keep model and weights, are in nobody's sum and not in n: clients may come and go, and a new one has weight one
(simplex: rows are over all clients, there or not). A client that is in several pairs of a round uses one mini-batch
for their midpoints. A round takes time O((n + pairs that ever changed) d), and memory grows with these pairs, not with
n^2.

Differs from the paper: ends with the last round's models, not with those of a random one.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.node import Children, LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.rows import Rows
from polytier.tree.collaboration import Collaboration
from polytier.tree.pair_weights import Weights, pull, skip, step

HELD = 1 << 24  # numbers of midpoints that are under way at once


@dataclass(frozen=True)
class CoBo(Algorithm):
    budget: ClassVar[dict[str, float]] = {"rounds": 0.5}  # a gradient of its own a round, and about one at midpoints
    # a client goes on from its own model, of which the server has what was sent up; gradients at midpoints are sent too
    model_fields: ClassVar[tuple[str, ...]] = ()
    device_lr: Step = parameter(0.1, "eta", "step size of a client's model", above=0, per="node")
    device_pull: float = parameter(0.05, "rho", "pull of a client's model to those it listens to", least=0)
    weight_lr: Step = parameter(0.01, "gamma", "step size of the weights", least=0, per="node")
    domain: str = parameter("box", "W", "where weights live", choices=("box", "simplex"))
    sampling: str = parameter(
        "constant", "", "how likely a pair is drawn", choices=("constant", "inverse", "mixed", "all")
    )
    constant_rounds: int = parameter(80, "", "rounds of mixed sampling that draw pairs with 1/n", least=0)
    clients: str = parameter("devices", "", "who has a model", choices=("devices", "teams"))

    @property
    def tiers(self) -> int | None:  # type: ignore[override]
        return 2 if self.clients == "devices" else None

    def check(self, server: Children) -> list[str]:
        context, leaf, n = server.context, server.context.topology.leaf, len(server.kids[0])
        if self.clients == "teams" and leaf == 1:
            raise ValueError('clients = "teams" needs a tree with teams; form some, or use clients = "devices"')
        if self.domain == "simplex" and n < 2:
            raise ValueError('domain = "simplex" needs 2 clients or more, got 1; add some, or use domain = "box"')
        devices = LocalProblem(context, leaf, torch.arange(server.num_devices), server.clock)
        eta = float(torch.as_tensor(devices.value(self.device_lr)).max())
        # the largest eigenvalue of x -> sum_k w_ik (x_i - x_k) with the first weights, and how it is told
        number, what, scaled = (n, "n", ", scaled by 1/n") if self.domain == "box" else (n / (n - 1), "n/(n-1)", "")
        product, better = eta * self.device_pull * number, f"use device_pull = {1 / (eta * number):.3g}{scaled}"
        told = f"device_lr * device_pull * {what} = {product:g} with n = {n} clients; models diverge at 2: {better}"
        return [told] if product >= 2 else []

    def init(self, x: Tensor) -> Weights:
        """base [n]: w_ij of pairs never learned, by row; weights [P] of the other pairs, sorted by i * n + j [P]."""
        return {"base": x.new_zeros(0), "pairs": torch.zeros(0, dtype=torch.int64), "weights": x.new_zeros(0)}

    def server(self, state: Weights, clients: Children) -> Weights:
        n, present = len(clients.kids[0]), clients.draw()[0]
        if not len(state["base"]):
            state = {**state, "base": clients.initial.new_full((n,), 1.0 if self.domain == "box" else 1 / (n - 1))}
        if not len(present):
            return state
        x = clients.recall("model", {"model": clients.initial.expand(n, -1)}).rows["model"]  # type: ignore[index]
        x = x if len(present) == n else x[present]
        i, j = self.draw_pairs(present, clients)
        change = clients.value(self.weight_lr) * alignment(x, i, j, present, clients)
        state = step(state, present[i], present[j], change, self.domain)  # Eq. 4
        moved = clients.call("solve", {"pull": pull(state, x, present)}, to=present, each=True)
        clients.remember("model", moved)
        return state

    def draw_pairs(self, present: Tensor, clients: Children) -> tuple[Tensor, Tensor]:
        """Positions in `present` of those that are compared this round."""
        m, t = len(present), clients.round + 1
        constant = self.sampling == "constant" or (self.sampling == "mixed" and t <= self.constant_rounds)
        p = 1.0 if self.sampling == "all" else 1 / m if constant else 1 / t
        slot = skip(lambda k: clients.shared("pairs", k), m * (m - 1) // 2, p)
        b = ((1 + (1 + 8 * slot.double()).sqrt()) / 2).long()  # (0, 1), (0, 2), (1, 2), (0, 3), ..
        a = slot - b * (b - 1) // 2
        rank = clients.by_name(present)
        return rank[a], rank[b]

    def midpoint(self, z: Tensor, local: LocalProblem) -> Tensor:
        return local.grad(z, local.batch(stream="midpoint"))  # a team's is the mean of its devices'

    def team(self, sent: Weights, devices: Children) -> Weights:
        x = sent["model"] if "model" in sent else devices.memory("model", devices.initial)
        x = devices.solve({"model": x, "pull": sent["pull"]})["model"].mean("samples")
        if "model" not in sent:  # the client itself, and not a team within it
            devices.keep(model=x)
        return {"model": x}

    def device(self, sent: Weights, local: LocalProblem) -> Weights:
        eta, rho = local.value(self.device_lr), self.device_pull
        x = sent["model"] if "model" in sent else local.memory("model", local.initial)
        x = x - eta * (local.grad(x) + rho * sent["pull"])  # Eq. 3
        if "model" not in sent:
            local.keep(model=x)
        return {"model": x}

    def global_model(self, state: Rows) -> None:
        return None

    def personal(self, x: Rows | None, local: LocalProblem) -> Tensor | None:
        return None if self.clients == "teams" else super().personal(x, local)

    def collaboration(self, state: Weights) -> Collaboration | None:  # type: ignore[override]
        base, pairs, weights = (state[k].numpy().copy() for k in ("base", "pairs", "weights"))  # a run keeps it
        n = len(base)  # 0 before the first round
        return Collaboration(np.arange(n), base, np.stack([pairs // n, pairs % n], 1), weights) if n else None


def alignment(x: Tensor, i: Tensor, j: Tensor, present: Tensor, clients: Children) -> Tensor:
    """[pairs] <g_i, g_j>, each client's gradient at the midpoint on its own data."""
    products = []
    for a, b in zip(*(t.split(max(1, HELD // x.shape[1])) for t in (i, j)), strict=True):
        z = ((x[a] + x[b]) / 2).repeat(2, 1)
        g = clients.anew().call("midpoint", z, to=present[torch.cat([a, b])], each=True).rows
        products.append((g[: len(a)] * g[len(a) :]).sum(1))  # type: ignore[index]
    return torch.cat(products)
