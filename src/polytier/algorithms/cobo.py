"""CoBo: models that are pulled to those of clients with similar gradients (Hashemi, He, Jaggi 2024).

Hashemi, He, Jaggi, "CoBo: Collaborative Learning via Bilevel Optimization", NeurIPS 2024.
https://arxiv.org/abs/2409.05539

Every client has a model x_i. Minimises

    sum_i f_i(x_i) + rho/2 sum_{i<j} w_ij |x_i - x_j|^2

where each w_ij in [0, 1] maximises w_ij <grad f_i(z_ij), grad f_j(z_ij)> at the midpoint z_ij = (x_i + x_j) / 2.

symbol | field        | shape  | meaning
x_i    | client model | [n, d] | kept as "model"; the server keeps a copy of each
w_ij   | state        |        | weights, 1 at first (simplex: all equal); stored as in `polytier.tree.pair_weights`
eta    | device_lr    |        | step size of a client (one number, or one per device)
rho    | device_pull  |        | strength of the pull to the others; with all weights 1, eta * rho * n must be below 2
gamma  | weight_lr    |        | step size of a weight; with a schedule such as 50/(500+t) weights settle at 0 or 1
W      | domain       |        | "box": w_ij = w_ji in [0, 1]; "simplex": the weights of a client are >= 0 and sum to 1
       | own_weight   |        | simplex: whether a client has a weight w_ii too, which competes with the others and
                                 pulls to nothing; the pair (i, i) is drawn and compared as others are, at z_ii = x_i
       | sampling     |        | probability with which a pair is compared in round t = 1, 2, ...: "constant" 1/n,
                                 "inverse" 1/t, "mixed" 1/n in the first `constant_rounds` rounds and then 1/t, "all" 1
       | clients      |        | "devices" (teams are ignored), or "teams": every team is one client; its model is the
                                 mean of the steps of its devices, its gradient the mean of theirs, by samples

Clients that do not take part in a round keep their model and their weights, are in no sum and are not counted in n.
Clients may join and leave; a new one has weight 1 to all (simplex: the weights of a client are over all clients,
present or not). A client that is in several pairs of a round uses the same mini-batch at all its midpoints. A round
takes O((n + P) d) time, where P is the number of pairs that were ever changed; memory grows with P and not with n^2.

The paper's figure of the language experiment has a weight of each client for itself; its rule is not stated. Here it
is Eq. 4 with j = i, where both gradients are those of one mini-batch: their product is |g_i|^2.

Differs from the paper: the result are the models of the last round, not those of a random one.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.rows import Rows
from polytier.stack.solvers import follow
from polytier.tree.collaboration import Collaboration
from polytier.tree.pair_weights import (
    Weights,
    as_collaboration,
    no_weights,
    sample_pairs,
    started,
    step,
    weighted_differences,
)

HELD = 1 << 24  # numbers of midpoints in memory at once


@dataclass(frozen=True)
class CoBo(Algorithm):
    any_optimizer: ClassVar[bool] = True
    # per round a gradient at the client's own model, and on average about one at midpoints
    budget: ClassVar[dict[str, float]] = {"rounds": 0.5}
    # a client continues from its own model, of which the server has a copy; gradients at midpoints are sent too
    model_fields: ClassVar[tuple[str, ...]] = ()
    device_lr: Step = parameter(0.1, "eta", "step size of a client's model", above=0, per="node")
    device_pull: float = parameter(0.05, "rho", "pull of a client's model to the others", least=0)
    weight_lr: Step = parameter(0.01, "gamma", "step size of the weights", least=0, per="node")
    domain: str = parameter("box", "W", "the set that the weights are projected onto", choices=("box", "simplex"))
    sampling: str = parameter(
        "constant", "", "probability with which a pair is compared", choices=("constant", "inverse", "mixed", "all")
    )
    constant_rounds: int = parameter(80, "", "mixed sampling: first rounds, in which the probability is 1/n", least=0)
    clients: str = parameter("devices", "", "what a client is", choices=("devices", "teams"))
    own_weight: bool = parameter(False, "", "simplex: whether a client has a weight for itself too")

    @property
    def tiers(self) -> int | None:  # type: ignore[override]
        return 2 if self.clients == "devices" else None

    def check(self, server: Children) -> list[str]:
        n = len(server.kids[0])
        if self.clients == "teams" and server.num_tiers == 2:
            raise ValueError('clients = "teams" needs a tree with teams; form some, or use clients = "devices"')
        if self.own_weight and self.domain == "box":
            raise ValueError('own_weight = true needs domain = "simplex": in a box it changes no other weight')
        if self.domain == "simplex" and n < 2:
            raise ValueError('domain = "simplex" needs 2 clients or more, got 1; add some, or use domain = "box"')
        eta = float(server.device_values(self.device_lr).max())
        # the largest eigenvalue of x -> sum_k w_ik (x_i - x_k) with the first weights
        number, what, scaled = (n, "n", ", scaled by 1/n") if self.domain == "box" else (n / (n - 1), "n/(n-1)", "")
        number, what = (1, "1") if self.own_weight else (number, what)
        product, better = eta * self.device_pull * number, f"use device_pull = {1 / (eta * number):.3g}{scaled}"
        warning = f"device_lr * device_pull * {what} = {product:g} with n = {n} clients; models diverge at 2: {better}"
        return [warning] if product >= 2 else []

    def init(self, x: Tensor) -> Weights:
        return no_weights(x)

    def server(self, W: Weights, clients: Children) -> Weights:
        """Round t of Algorithm 1, for the clients that take part (in the paper: all)."""
        n, present = len(clients.kids[0]), clients.draw()[0]
        W = started(W, n, 1.0 if self.domain == "box" else 1 / max(1, n - 1 + self.own_weight))
        if not len(present):
            return W
        x = models(present, clients)  # x_i^t
        W = self.client_selection(W, x, present, clients)  # line 2: W^{t+1}
        pull = weighted_differences(W, x, present)  # sum_k w_ik^{t+1} (x_i^t - x_k^t)
        answers = clients.call("solve", {"pull": pull}, to=present, each=True)  # lines 3-5: Eq. 3, in `device`
        clients.remember("model", answers)  # x_i^{t+1}
        return W

    def client_selection(self, W: Weights, x: Tensor, present: Tensor, clients: Children) -> Weights:
        """The procedure Client-Selection of Algorithm 1; x [m, d] are the models of `present` [m]."""
        i, j = self.draw_pairs(present, clients)  # lines 10 and 11
        products = []
        for a, b in zip(*(pairs.split(max(1, HELD // x.shape[1])) for pairs in (i, j)), strict=True):
            z = x.index_select(0, a).add_(x.index_select(0, b)).div_(2)  # line 12
            g_a, g_b = gradients(z, present[a], present[b], clients)  # line 13
            products.append(g_a.mul_(g_b).sum(1))
        change = clients.value(self.weight_lr) * torch.cat(products)
        return step(W, present[i], present[j], change, self.domain, self.own_weight)  # Eq. 4

    def draw_pairs(self, present: Tensor, clients: Children) -> tuple[Tensor, Tensor]:
        """[P], [P] the pairs that are compared in this round, as positions in `present`."""
        m, t = len(present), clients.round + 1
        constant = self.sampling == "constant" or (self.sampling == "mixed" and t <= self.constant_rounds)
        p = 1.0 if self.sampling == "all" else 1 / m if constant else 1 / t
        a, b = sample_pairs(lambda k: clients.shared("pairs", k), m, p)
        rank = clients.by_name(present)  # which pairs are drawn does not depend on the order of the clients
        own = rank[clients.shared("own", m) < p] if self.own_weight else rank[:0]
        return torch.cat([rank[a], own]), torch.cat([rank[b], own])

    def midpoint(self, z: Tensor, local: LocalProblem) -> Tensor:
        """[n, d] the gradients at the midpoints z; called at a team, the mean over its devices, see `Children.call`."""
        return local.grad(z, local.batch(stream="midpoint"))

    def team(self, sent: Weights, devices: Children) -> Weights:
        x = sent["model"] if "model" in sent else devices.memory("model", devices.initial)
        x = devices.solve({"model": x, "pull": sent["pull"]})["model"].mean("samples")
        if "model" not in sent:  # this team is the client, not a team inside of it
            devices.keep(model=x)
        return {"model": x}

    def device(self, sent: Weights, local: LocalProblem) -> Weights:
        eta, rho = local.value(self.device_lr), self.device_pull
        x = sent["model"] if "model" in sent else local.memory("model", local.initial)
        x = follow(local, x, lambda x: local.grad(x).add_(rho * sent["pull"]), eta, 1)  # Eq. 3
        if "model" not in sent:
            local.keep(model=x)
        return {"model": x}

    def global_model(self, state: Rows) -> None:
        return None

    def personal(self, x: Rows | None, local: LocalProblem) -> Tensor | None:
        return None if self.clients == "teams" else super().personal(x, local)

    def collaboration(self, state: Weights) -> Collaboration | None:  # type: ignore[override]
        return as_collaboration(state)

    def advice_on_groups(self, groups: int, clients: int) -> str:
        if groups == 1 < clients:  # weights start at 1 and have not fallen
            more = "" if self.sampling == "all" else " or sampling=all, which compares all pairs in every round,"
            return f"the weights moved too little: try weight_lr ten times as large{more} or more rounds"
        if groups == clients > 1:  # all weights have fallen, by the noise of mini-batches
            return "the weights moved too far: try weight_lr a tenth as large, a larger batch_size or fewer rounds"
        return ""


def models(present: Tensor, clients: Children) -> Tensor:
    """[m, d] the models of the clients `present` [m], as the server knows them."""
    n = len(clients.kids[0])
    x = clients.recall("model", {"model": clients.initial.expand(n, -1)}).rows["model"]  # type: ignore[index]
    return x if len(present) == n else x[present]


def gradients(z: Tensor, a: Tensor, b: Tensor, clients: Children) -> tuple[Tensor, Tensor]:
    """[P, d], [P, d] the gradients of the clients a [P] and b [P] at z [P, d], each on its own data."""
    # anew: a client uses the same mini-batch for all pairs it is in
    answers = clients.anew().call("midpoint", z.repeat(2, 1), to=torch.cat([a, b]), each=True)
    return answers.rows[: len(a)], answers.rows[len(a) :]  # type: ignore[index]
