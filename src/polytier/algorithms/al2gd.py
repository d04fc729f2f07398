"""AL2GD: loopless local gradient descent with known clusters (Lyu, Hanzely, Kolar 2022; L2GD: Hanzely, Richtarik 2020).

Every device has a model, pulled to the mean of its team (its known cluster) and to the mean of all. With teams of one
size it minimises

    mean_i [ f_i(x_i) + lambda_1/2 |x_i - c_i|^2 + lambda_2/2 |x_i - g|^2 ]

with c_i the mean of the team of i and g the mean of the teams' means. Each step is by a coin that all nodes share:

    local step      | 1 - p_team - p_server | x_i <- x_i - alpha / (1 - p_team - p_server) grad f_i(x_i)
    pull to team    | p_team                | x_i <- x_i - alpha lambda_1 / p_team (x_i - c_i)
    pull to server  | p_server              | x_i <- x_i - alpha lambda_2 / p_server (x_i - g)

symbol    | field        | shape  | meaning
x_i       | device model | [n, d] | kept as "model"
c         | team model   | [m, d] | mean of the team's devices when it was last asked for; kept as "model"
g         | state        | [1, d] | global model: mean of the teams' means when it was last asked for
alpha     | device_lr    |        | eta / n of the papers: one number, so that pulls keep the means
lambda_1  | device_pull  |        | pull to the team's mean
lambda_2  | server_pull  |        | pull to the mean of all
          | p_team, p_server |    | how likely a step is a pull to the team's, to the server's mean
          | steps        |        | coins in a round of the server

Pulls keep the means, so a run of pulls asks for the models once: a row up, and down the means that it pulls to. Local
steps send nothing, and pulls to teams nothing between team and server. On a flat tree (L2GD) p_team is 0.
Asynchrony is participation, drawn once a round: who is absent keeps its model and joins later; a team without anybody
is in no mean. With p_team = p_server = 0 it is local training.

Certain: L2GD's coin and scaled steps; pulls within and between known clusters. A reading: a coin of three sides.
Differs from the paper: there each cluster may communicate on its own; here all share the coin.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.call import Clock
from polytier.method.node import Children, LocalProblem, Node
from polytier.method.parameters import parameter
from polytier.stack.rows import Rows
from polytier.stack.solvers import sgd


@dataclass(frozen=True)
class AL2GD(Algorithm):
    budget: ClassVar[dict[str, float]] = {"steps": 1.0}  # pulls count as steps
    model_fields: ClassVar[tuple[str, ...]] = ()  # devices are sent means to pull to, never the model they go on from
    device_lr: float = parameter(0.01, "alpha", "step size of a device", above=0)
    device_pull: float = parameter(1.0, "lambda_1", "pull of a device's model to its team's mean", least=0)
    server_pull: float = parameter(1.0, "lambda_2", "pull of a device's model to the mean of all", least=0)
    p_team: float = parameter(0.1, "p_1", "probability of a pull to the team's mean", least=0, most=1)
    p_server: float = parameter(0.1, "p_2", "probability of a pull to the mean of all", least=0, most=1)
    steps: int = parameter(20, "", "steps in a round, each by a coin", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p_team + self.p_server >= 1:
            raise ValueError(
                f"p_team + p_server = {self.p_team + self.p_server:g} leaves no local steps; "
                "their sum must be below 1: try p_team = 0.1 and p_server = 0.1"
            )

    def check(self, server: Children) -> list[str]:
        leaf = server.context.topology.leaf
        if leaf == 1 and self.p_team > 0:
            raise ValueError(f"p_team = {self.p_team:g} needs a tree with teams; form some, or use p_team = 0")
        if leaf > 2:
            raise ValueError(f"AL2GD knows one tier of teams; got {leaf - 1}: use a tree of 2 or 3 tiers")
        to_team, to_server = self.rates
        named = {"device_lr * device_pull / p_team": to_team, "device_lr * server_pull / p_server": to_server}
        return [
            f"{k} = {v:g}; pulls overshoot and diverge at 2: lower device_lr or raise the probability"
            for k, v in named.items()
            if v >= 2
        ]

    @property
    def rates(self) -> tuple[float, float]:
        """The share of the way to the team's and to the server's mean that one pull goes."""
        a, b = self.device_lr * self.device_pull, self.device_lr * self.server_pull
        return a / self.p_team if self.p_team else 0.0, b / self.p_server if self.p_server else 0.0

    def coins(self, node: Node) -> list[tuple[int, list[bool]]]:
        """The round's steps as runs: number of local steps, then pulls (True: to the server's mean)."""
        runs: list[tuple[int, list[bool]]] = [(0, [])]
        for u in node.shared("coin", self.steps).tolist():
            local, pulls = runs[-1]
            if u < self.p_team + self.p_server:
                pulls.append(u >= self.p_team)
            elif pulls:
                runs.append((1, []))
            else:
                runs[-1] = (local + 1, pulls)
        return runs

    def run(self, sent: dict[str, Tensor], node: Node) -> tuple[int, list[bool]]:
        """The run that a message is about."""
        return self.coins(node)[int(sent["run"][0])]

    def pulled(self, x: Tensor, c: Tensor, g: Tensor, pulls: list[bool]) -> Tensor:
        """x [n, d] after pulls to the means c of its team, which pulls to g move too, and g of all, which stays."""
        to_team, to_server = self.rates
        for to_all in pulls:
            x = x - to_server * (x - g) if to_all else x - to_team * (x - c)
            c = c - to_server * (c - g) if to_all else c
        return x

    def server(self, g: Tensor, below: Children) -> Tensor:
        flat, present = below.context.topology.leaf == 1, there(below, 0, below.ids)[0]
        if not flat:
            present = present[there(below, 1, present)[1].unique()]  # teams with somebody
        for k, (_, pulls) in enumerate(self.coins(below)):
            sent = {"run": torch.full((1,), k)}
            answers = below.call("solve", sent, to=present)
            if any(pulls):
                g = answers.mean(empty=g)
                below.call("pull" if flat else "hand_on", {**sent, "server": g}, to=present)
        return g

    def team(self, sent: dict[str, Tensor], devices: Children) -> Rows:
        pulls, present = self.run(sent, devices)[1], there(devices, 1, devices.ids)[0]
        answers = devices.call("solve", sent, to=present)
        if not pulls:
            return {}
        c = answers.mean()
        devices.keep(model=c)
        if any(pulls):
            return c  # the server's mean is needed first
        devices.call("pull", {**sent, "team": c}, to=present)
        return {}

    def hand_on(self, sent: dict[str, Tensor], devices: Children) -> Rows:
        pulls, c = self.run(sent, devices)[1], devices.memory("model", devices.initial)
        devices.call("pull", sent if all(pulls) else {**sent, "team": c}, to=there(devices, 1, devices.ids)[0])
        devices.keep(model=self.pulled(c, c, sent["server"], pulls))
        return {}

    def device(self, sent: dict[str, Tensor], local: LocalProblem) -> Rows:
        steps, pulls = self.run(sent, local)
        x = local.memory("model", local.initial)
        x = sgd(local, x, self.device_lr / (1 - (self.p_team + self.p_server)), steps)
        local.keep(model=x)
        return x if pulls else {}

    def pull(self, sent: dict[str, Tensor], local: LocalProblem) -> Rows:
        pulls, x = self.run(sent, local)[1], local.memory("model", local.initial)
        # a mean that was not sent is not pulled to
        local.keep(model=self.pulled(x, sent.get("team", x), sent.get("server", x), pulls))
        return {}


def there(node: Children, tier: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Children of a tier's nodes `ids` that take part this round, whichever call this is; their parents' places."""
    return Children(node.context, tier, ids, Clock(node.round), node.quiet, node.only).draw()
