"""Validation weights: devices mix models by their loss on their own validation samples (Wagner, Fan, Jaggi 2024).

Wagner, Fan, Jaggi, "Personalized Collaborative Fine-Tuning for On-Device Large Language Models", COLM 2024, the
variant by validation performance. https://openreview.net/forum?id=bwo3GVsgOv

In a round every device trains its own model by f_i, receives models of other devices, and mixes:

    w_ij = softmax_j(-loss_i(theta_j) / temperature),    theta_i <- sum_j w_ij theta_j

over itself and its candidates j, where loss_i is the loss on all validation samples of device i.

symbol  | field           | shape  | meaning
theta_i | device model    | [n, d] | personal model after mixing, kept as "model"
w_ij    | state "weights" | [n, n] | the weights of the last round of each device; not kept above 2,000 devices
k       | candidates      |        | models that a device receives per round; 0: those of all devices that take part
        | temperature     |        | small: only the best model counts; large: the plain mean
        | device_lr       |        | step size of the local training (one number, or one per device)
        | device_steps    |        | mini-batch steps per device and round

The server forwards models: a device receives k models (k d numbers) and returns its weights. With fewer candidates
than devices, those that take part are placed on a circle in a new random order in every round, and each receives the
models of the k next ones. With all candidates a round transfers and computes O(n^2 d); only some are in memory at a
time. The validation samples choose the weights, so results should be judged on test samples.

From the paper: weights by the loss on a device's own validation samples, normalised over clients, after local steps.
Interpretation: the softmax.
Differs from the paper: whole models are mixed, not LoRA updates of a common base.
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
from polytier.stack.solvers import sgd
from polytier.tree.collaboration import Collaboration
from polytier.tree.pair_weights import with_weights

HELD = 1 << 24  # numbers of candidate models in memory at once


@dataclass(frozen=True)
class ValidationWeights(Algorithm):
    tiers: ClassVar[int | None] = 2
    any_optimizer: ClassVar[bool] = True
    model_fields: ClassVar[tuple[str, ...]] = ()  # a device continues from its own model and receives none
    device_lr: Step = parameter(0.01, "", "step size of a device", above=0, per="node")
    device_steps: int = parameter(20, "", "mini-batch steps per device and round", least=1)
    temperature: float = parameter(1.0, "", "temperature of the softmax: large values make equal weights", above=0)
    candidates: int = parameter(0, "k", "models that a device receives per round; 0: all", least=0)

    def check(self, server: Children) -> list[str]:
        samples = server.device_samples("validation")
        without = int((samples == 0).sum())
        if without:
            raise ValueError(
                f"{without} of {len(samples)} devices have no validation samples, which determine the weights; "
                "make some with --split 3:1:1, and leave out devices with few samples"
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
        """[m, k] for each of `present` [m] the positions in `present` of those whose models it receives."""
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
        """[n, 1 + k] the weights of a device's own model and of its candidates [n, k, d]; keeps the mixed model."""
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
