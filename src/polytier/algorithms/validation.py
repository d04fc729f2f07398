"""Validation-based weights: devices mix in whose models do well on their own validation samples.

Wagner, Fan, Jaggi 2024, "Personalized collaborative fine-tuning for on-device large language models", the scheme by
validation performance. In a round every device trains its own model, gets the models of others, and mixes:

    w_ij = softmax_j(-loss_i(theta_j) / temperature),    theta_i <- sum_j w_ij theta_j

over itself and its candidates j, where loss_i is measured on all validation samples of device i.

symbol  | field           | shape  | meaning
theta_i | device model    | [n, d] | kept as "model": after mixing
w_ij    | state "weights" | [n, n] | those of each device's last round; not kept above 2,000 devices
k       | candidates      |        | models a device gets in a round; 0: those of all who take part
        | temperature     |        | small: only the best model; large: the plain mean
        | device_lr, device_steps | | step and number of steps of the local training

The server relays: a device gets k models (k d numbers) and answers its weights. With fewer candidates than devices,
those who take part stand in a random circle, new in every round, and each gets the k next. With all of them a round
moves and computes O(n^2 d); few are under way at once. Validation samples choose weights here: judge on test samples.

Certain: trust by the loss on own validation samples, normalised over clients, after local steps. A reading: softmax.
Differs from the paper: whole models are mixed, not LoRA updates on a common base.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polytier.method.algorithm import Algorithm
from polytier.method.node import Children, LocalProblem
from polytier.method.parameters import Step, parameter
from polytier.stack.rows import Rows
from polytier.stack.solvers import sgd
from polytier.tree.collaboration import Collaboration
from polytier.tree.pair_weights import with_weights

HELD = 1 << 24  # numbers of candidates that are under way at once


@dataclass(frozen=True)
class ValidationWeights(Algorithm):
    tiers: ClassVar[int | None] = 2
    device_lr: Step = parameter(0.01, "", "step size of a device", above=0, per="node")
    device_steps: int = parameter(20, "", "mini-batch steps of a device a round", least=1)
    temperature: float = parameter(1.0, "", "how even the weights are", above=0)
    candidates: int = parameter(0, "k", "models a device gets in a round; 0: all", least=0)

    def check(self, server: Children) -> list[str]:
        population = server.context.population
        without = int((population.count("validation") == 0).sum())
        if without:
            raise ValueError(
                f"{without} of {len(population)} devices have no validation samples, by which models are weighted; "
                "cut some off with --split 3:1:1, and leave out devices with few samples"
            )
        return []

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {"weights": x.new_zeros(0, 0)}

    def server(self, state: dict[str, Tensor], devices: Children) -> dict[str, Tensor]:
        n, present = len(devices.kids[0]), devices.draw()[0]
        if not len(present):
            return state
        theta: Tensor = devices.call("solve", {}, to=present).rows["model"]  # type: ignore[index]
        others, w = self.draw_candidates(present, devices), []
        size = max(1, HELD // max(1, others.shape[1] * theta.shape[1]))
        for to, whom in zip(present.split(size), others.split(size), strict=True):
            w.append(devices.call("mix", theta[whom], to=to, each=True).rows)
        return with_weights(state, n, present, torch.cat([present.unsqueeze(1), present[others]], 1), torch.cat(w))

    def draw_candidates(self, present: Tensor, devices: Children) -> Tensor:
        """[m, k] for each of `present` the places there of those whose models it gets."""
        m = len(present)
        k = min(self.candidates or m, m - 1)
        circle = devices.by_name(present)[devices.shared("candidates", m).argsort()]
        place = circle.argsort()
        return circle[(place.unsqueeze(1) + torch.arange(1, k + 1)) % m]

    def device(self, sent: Rows, local: LocalProblem) -> dict[str, Tensor]:
        theta = local.memory("model", local.initial)
        theta = sgd(local, theta, local.value(self.device_lr), self.device_steps)
        local.keep(model=theta)
        return {"model": theta}

    def mix(self, candidates: Tensor, local: LocalProblem) -> Tensor:
        models = [local.memory("model", local.initial), *candidates.unbind(1)]
        held = local.full("validation")
        losses = torch.stack([local.loss(theta, held) for theta in models], 1)
        w = torch.softmax(-losses / self.temperature, 1)
        mixed = torch.zeros_like(models[0])
        for k, theta in enumerate(models):
            mixed += w[:, k : k + 1] * theta
        local.keep(model=mixed)
        return w

    def global_model(self, state: Rows) -> None:
        return None

    def collaboration(self, state: dict[str, Tensor]) -> Collaboration | None:  # type: ignore[override]
        return Collaboration.from_dense(state["weights"].numpy())
