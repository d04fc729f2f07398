"""AL2GD: a model per device, pulled to the mean of its team and to the mean of all (Lyu, Hanzely, Kolar 2022).

Lyu, Hanzely, Kolar, "Personalized Federated Learning with Multiple Known Clusters", 2022.
https://arxiv.org/abs/2204.13619
Without teams it is L2GD: Hanzely, Richtarik, "Federated Learning of a Mixture of Global and Local Models", 2020.
https://arxiv.org/abs/2002.05516

The teams are the known clusters. If all teams have the same size, it minimises

    mean_i [ f_i(x_i) + lambda_1/2 |x_i - c_i|^2 + lambda_2/2 |x_i - g|^2 ]

where c_i is the mean of the models in the team of device i, and g is the mean of the team means. A round has `steps`
steps. The kind of each step is drawn at random; all nodes use the same draw:

    kind           | probability           | step
    local          | 1 - p_team - p_server | x_i <- x_i - alpha / (1 - p_team - p_server) grad f_i(x_i)
    pull to team   | p_team                | x_i <- x_i - alpha lambda_1 / p_team (x_i - c_i)
    pull to server | p_server              | x_i <- x_i - alpha lambda_2 / p_server (x_i - g)

symbol   | field        | shape  | meaning
x_i      | device model | [n, d] | personal model, kept as "model"
c        | team model   | [m, d] | mean of the team's devices, computed when it is needed; kept as "model"
g        | state        | [1, d] | global model: mean of the team means, computed when it is needed
alpha    | device_lr    |        | step size, eta / n of the papers; one number, so that pulls do not change the means
lambda_1 | device_pull  |        | strength of the pull to the team mean
lambda_2 | server_pull  |        | strength of the pull to the mean of all
p_1      | p_team       |        | probability that a step is a pull to the team mean
p_2      | p_server     |        | probability that a step is a pull to the mean of all
         | steps        |        | steps per round of the server

Communication: a pull to c leaves c and g unchanged; a pull to g leaves g unchanged and moves c by a known amount. So
devices send their models once for any number of consecutive pulls, and receive the means that these pulls need. Local
steps send nothing, and pulls to the team send nothing between teams and the server.

Participation is drawn once per round and takes the place of asynchrony: a device that does not take part keeps its
model, and a team none of whose devices takes part is in no mean. A tree without teams needs p_team = 0. With
p_team = p_server = 0 the method is local training.

From the papers: the random choice of steps and their scaling; pulls within and between known clusters.
Interpretation: one draw with three outcomes per step.
Differs from the paper: there each cluster may communicate by itself; here all nodes use the same draw.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.method.node import Node
from polytier.method.parameters import parameter
from polytier.stack.rows import Rows
from polytier.stack.solvers import sgd


@dataclass(frozen=True)
class AL2GD(Algorithm):
    any_optimizer: ClassVar[bool] = True
    budget: ClassVar[dict[str, float]] = {"steps": 1.0}  # pulls are counted as steps too
    model_fields: ClassVar[tuple[str, ...]] = ()  # devices receive means, never the model from which they continue
    device_lr: float = parameter(0.01, "alpha", "step size of a device", above=0)
    device_pull: float = parameter(1.0, "lambda_1", "pull of a device's model to the team mean", least=0)
    server_pull: float = parameter(1.0, "lambda_2", "pull of a device's model to the mean of all", least=0)
    p_team: float = parameter(0.1, "p_1", "probability that a step is a pull to the team mean", least=0, most=1)
    p_server: float = parameter(0.1, "p_2", "probability that a step is a pull to the mean of all", least=0, most=1)
    steps: int = parameter(20, "", "steps per round, local ones and pulls", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p_team + self.p_server >= 1:
            raise ValueError(
                f"p_team + p_server = {self.p_team + self.p_server:g} leaves no local steps; "
                "their sum must be below 1: try p_team = 0.1 and p_server = 0.1"
            )

    def check(self, server: Children) -> list[str]:
        if server.num_tiers == 2 and self.p_team > 0:
            raise ValueError(f"p_team = {self.p_team:g} needs a tree with teams; form some, or use p_team = 0")
        if server.num_tiers > 3:
            raise ValueError(f"AL2GD takes one tier of teams; got {server.num_tiers - 2}: use a tree of 2 or 3 tiers")
        to_team, to_server = self.rates
        named = {"device_lr * device_pull / p_team": to_team, "device_lr * server_pull / p_server": to_server}
        return [
            f"{k} = {v:g}; pulls diverge at 2 and above: lower device_lr or raise the probability"
            for k, v in named.items()
            if v >= 2
        ]

    @property
    def rates(self) -> tuple[float, float]:
        """The fraction of the distance to the team mean, and to the mean of all, that one pull moves."""
        a, b = self.device_lr * self.device_pull, self.device_lr * self.server_pull
        return a / self.p_team if self.p_team else 0.0, b / self.p_server if self.p_server else 0.0

    def coins(self, node: Node) -> list[tuple[int, list[bool]]]:
        """The steps of the round as runs: a number of local steps, then pulls (True: to the mean of all)."""
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
        """The run of steps that a message is about."""
        return self.coins(node)[int(sent["run"][0])]

    def pulled(self, x: Tensor, c: Tensor, g: Tensor, pulls: list[bool]) -> Tensor:
        """[n, d] the models x after `pulls` to the team means c and to the mean of all g; pulls to g move c too."""
        to_team, to_server = self.rates
        for to_all in pulls:
            x = x - to_server * (x - g) if to_all else x - to_team * (x - c)
            c = c - to_server * (c - g) if to_all else c
        return x

    def server(self, g: Tensor, below: Children) -> Tensor:
        (present, _), *tiers = below.participants()
        for _, team in tiers:
            present = present[team.unique()]  # teams with at least one device that takes part
        for k, (_, pulls) in enumerate(self.coins(below)):
            sent = {"run": torch.full((1,), k)}
            answers = below.call("solve", sent, to=present)
            if any(pulls):
                g = answers.mean(empty=g)
                below.call("pull" if below.num_tiers == 2 else "hand_on", {**sent, "server": g}, to=present)
        return g

    def team(self, sent: dict[str, Tensor], devices: Children) -> Rows:
        pulls, present = self.run(sent, devices)[1], devices.participants()[0][0]
        answers = devices.call("solve", sent, to=present)
        if not pulls:
            return {}
        c = answers.mean()
        devices.keep(model=c)
        if any(pulls):
            return c  # the mean of all is needed first
        devices.call("pull", {**sent, "team": c}, to=present)
        return {}

    def hand_on(self, sent: dict[str, Tensor], devices: Children) -> Rows:
        """Send the mean of all to the devices of these teams, and move the team means by the same pulls."""
        pulls, c = self.run(sent, devices)[1], devices.memory("model", devices.initial)
        devices.call("pull", sent if all(pulls) else {**sent, "team": c}, to=devices.participants()[0][0])
        devices.keep(model=self.pulled(c, c, sent["server"], pulls))
        return {}

    def device(self, sent: dict[str, Tensor], local: LocalProblem) -> Rows:
        steps, pulls = self.run(sent, local)
        x = local.memory("model", local.initial)
        x = sgd(local, x, self.device_lr / (1 - (self.p_team + self.p_server)), steps)
        local.keep(model=x)
        return x if pulls else {}

    def pull(self, sent: dict[str, Tensor], local: LocalProblem) -> Rows:
        """Pull the models of these devices to the means that were sent."""
        pulls, x = self.run(sent, local)[1], local.memory("model", local.initial)
        # a mean that was not sent is not used by these pulls
        local.keep(model=self.pulled(x, sent.get("team", x), sent.get("server", x), pulls))
        return {}
