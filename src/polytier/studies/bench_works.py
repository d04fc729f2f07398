"""The works of `polytier bench` with FedAvg and PerMFL, as a hand-written loop, as bare kernels and in the engine.

All forms start from the same parameters and return those of the global model after some rounds, so that a test can
check that they compute the same. Data are random, because speed does not depend on what is learned. The works with
other methods are in `bench_methods`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polytier.algorithms.fedavg import FedAvg
from polytier.algorithms.permfl import PerMFL
from polytier.data.federation import Federation
from polytier.method.algorithm import Algorithm
from polytier.models.trainable import Trainable
from polytier.models.zoo import make_model
from polytier.runs.loop import Loop, make_loop

CLASSES = 10
ALPHA, ETA, BETA, LAMBDA, GAMMA = 0.01, 0.03, 0.6, 0.5, 1.5  # PerMFL's letters; FedAvg uses alpha only

Parameters = list[Tensor]  # weight, bias, weight, bias, ...


@dataclass(frozen=True)
class Work:
    """A workload: FedAvg on random data, or PerMFL if there are teams. Each device uses its samples batch by batch."""

    model: str
    inputs: tuple[int, ...]  # the shape of a sample; images, with channels, are uint8
    devices: int
    batch: int
    batches: int = 20  # number of batches that a device's samples make up
    steps: int = 20
    teams: int = 0
    team_rounds: int = 1

    @property
    def device_steps(self) -> int:
        """Gradient steps of all devices in a round."""
        return self.devices * self.steps * self.team_rounds

    @property
    def has_kernels(self) -> bool:
        """Whether the model has dense layers only, so that a product over a stack of devices is a single call."""
        return not self.model.startswith("cnn")

    @property
    def algorithm(self) -> Algorithm:
        """The method with the step sizes above."""
        if not self.teams:
            return FedAvg(ALPHA, self.steps)
        return PerMFL(ALPHA, ETA, BETA, LAMBDA, GAMMA, self.steps, self.team_rounds)

    def described(self) -> str:
        """The method and its sizes, as text."""
        method = f"PerMFL, {self.teams} teams of {self.team_rounds} rounds" if self.teams else "FedAvg"
        sizes = "x".join(map(str, self.inputs))
        return f"{method}, {self.model} on {sizes}, {self.devices} devices, {self.steps} steps on {self.batch} samples"

    def module(self) -> nn.Module:
        """A new model with the initial parameters."""
        return make_model(self.model, self.inputs, CLASSES, 0)

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """x [devices, samples, ...] and y [devices, samples]."""
        rng, shape = np.random.default_rng(0), (self.devices, self.batches * self.batch)
        if len(self.inputs) > 1:
            x = rng.integers(0, 256, (*shape, *self.inputs), dtype=np.uint8)
        else:
            x = rng.random((*shape, *self.inputs), dtype=np.float32)
        return x, rng.integers(0, CLASSES, shape)

    def federation(self, x: np.ndarray, y: np.ndarray) -> Federation:
        """The data as a federation."""
        n, samples = y.shape
        owner = np.repeat(np.arange(n), samples)
        team = owner // (n // self.teams) if self.teams else None
        flat = x.reshape(n * samples, *self.inputs)
        return Federation.from_arrays(flat, y.reshape(-1), owner, team, shares=(1, 0, 0), num_classes=CLASSES)

    def engine(self, federation: Federation, workers: int) -> Loop:
        """The run that the engine computes."""
        return make_loop(self.algorithm, federation, self.model, batch_size=self.batch, workers=workers)

    def models(self, loop: Loop) -> Tensor:
        """[1, d] what the run has computed so far: the global model."""
        assert isinstance(loop.state, Tensor)
        return loop.state

    def loop(self, x: np.ndarray, y: np.ndarray) -> HandWritten:
        """The hand-written loop."""
        return HandWritten(self, floats(x), torch.from_numpy(y))

    def bounds(self, x: np.ndarray, y: np.ndarray) -> dict[str, Kernels]:
        """The bare kernels, without and with reading each batch from memory in random order."""
        if not self.has_kernels:
            return {}
        inputs, targets = floats(x), torch.from_numpy(y)
        return {name: Kernels(self, inputs, targets, name == "gathered") for name in ("kernels", "gathered")}


@dataclass(frozen=True)
class TextWork(Work):
    """FedAvg on random tokens; what trains is LoRA."""

    vocabulary: int = 64
    train: str = "lora:rank=4,alpha=32"

    @property
    def has_kernels(self) -> bool:
        """No: attention is not a product over a stack."""
        return False

    def described(self) -> str:
        """The method and its sizes, as text."""
        return f"{super().described()} of tokens, {self.train}"

    def module(self) -> nn.Module:
        """A new model with the initial parameters; those that are frozen need no gradient."""
        return Trainable.parse(self.train).apply(make_model(self.model, self.inputs, self.vocabulary, 0))

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """x and y [devices, samples, T]: token ids, and the next token at each place."""
        shape = (self.devices, self.batches * self.batch, self.inputs[0] + 1)
        ids = np.random.default_rng(0).integers(0, self.vocabulary, shape)
        return ids[..., :-1], ids[..., 1:]

    def federation(self, x: np.ndarray, y: np.ndarray) -> Federation:
        """The data as a federation."""
        n, samples, length = y.shape
        owner, flat = np.repeat(np.arange(n), samples), (n * samples, length)
        tokens = {"shares": (1, 0, 0), "num_classes": self.vocabulary}
        return Federation.from_arrays(x.reshape(flat), y.reshape(flat), owner, **tokens)

    def engine(self, federation: Federation, workers: int) -> Loop:
        """The run that the engine computes."""
        settings: dict[str, Any] = {"batch_size": self.batch, "workers": workers, "train": self.train}
        return make_loop(self.algorithm, federation, self.model, **settings)


WORKS = {
    "common": Work("mclr", (784,), devices=40, batch=32),
    "synthetic": Work("mclr", (60,), devices=100, batch=32),
    "dnn": Work("dnn:100", (784,), devices=40, batch=32),
    "wide": Work("dnn:500x200", (784,), devices=20, batch=20),
    "permfl": Work("mclr", (1, 28, 28), devices=40, batch=124, batches=10, teams=4, team_rounds=10),
    "cnn": Work("cnn-fmnist", (1, 28, 28), devices=8, batch=32, batches=10, steps=10),
    "lora": TextWork("gpt:layers=3,width=128", (32,), devices=8, batch=4, batches=10, steps=10),
    "round": Work("mclr", (784,), devices=40, batch=32, steps=1),
    "teams": Work("mclr", (1, 28, 28), devices=40, batch=124, batches=10, steps=1, teams=4, team_rounds=30),
}


def floats(x: np.ndarray) -> Tensor:
    """The scaled inputs, computed once, as a hand-written loop would do when it loads images."""
    return torch.from_numpy(x).float().div_(255) if x.dtype == np.uint8 else torch.from_numpy(x)


def flat(parameters: Sequence[Tensor]) -> Tensor:
    """The parameters as one row [1, d], as the engine's server keeps them."""
    return torch.cat([p.detach().reshape(1, -1) for p in parameters], 1)


def run_engine(loop: Loop, rounds: int) -> None:
    """Run rounds without evaluation."""
    for _ in range(rounds):
        loop.step()


# -- a hand-written loop -------------------------------------------------------------------------------

State = dict[str, Tensor]


class HandWritten:
    """The works as a hand-written loop over devices.

    One module serves all devices: each loads its state with load_state_dict, takes steps with torch.optim.SGD, and
    gathers its batches from a new random permutation per epoch.
    """

    def __init__(self, work: Work, x: Tensor, y: Tensor) -> None:
        self.work, self.x, self.y = work, x, y
        self.model, self.criterion = work.module(), nn.CrossEntropyLoss()
        self.state = copied(self.model)

    def run(self, rounds: int) -> Tensor:
        """Compute rounds; returns the global model [1, d]."""
        for _ in range(rounds):
            self.state = self.permfl_round(self.state) if self.work.teams else self.fedavg_round(self.state)
        return flat(list(self.state.values()))

    def fedavg_round(self, x: State) -> State:
        """One round of FedAvg."""
        return mean([self.device(c, x) for c in range(self.work.devices)])

    def permfl_round(self, x: State) -> State:
        """One round of PerMFL."""
        teams, size = [], self.work.devices // self.work.teams
        for first in range(0, self.work.devices, size):
            w = x
            for _ in range(self.work.team_rounds):
                theta = mean([self.device(c, w, LAMBDA) for c in range(first, first + size)])
                w = {k: w[k] - ETA * (LAMBDA * (w[k] - theta[k]) + GAMMA * (w[k] - x[k])) for k in w}
            teams.append(w)
        w = mean(teams)
        return {k: x[k] - BETA * GAMMA * (x[k] - w[k]) for k in x}

    def device(self, c: int, start: State, pull: float = 0.0) -> State:
        """The local steps of device c, with a pull towards `start`."""
        work, model = self.work, self.model
        model.load_state_dict(start, strict=False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=ALPHA)
        order = torch.randperm(self.x.shape[1])
        for s in range(work.steps):
            k = s % work.batches
            if s and k == 0:
                order = torch.randperm(self.x.shape[1])
            i = order[k * work.batch : (k + 1) * work.batch]
            optimizer.zero_grad()
            outputs, targets = model(self.x[c, i]), self.y[c, i]
            self.criterion(outputs if targets.ndim == 1 else outputs.flatten(0, 1), targets.flatten()).backward()
            if pull:
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        assert p.grad is not None
                        p.grad += pull * (p - start[name])
            optimizer.step()
        return copied(model)


def copied(model: nn.Module) -> State:
    """A copy of those parameters of the model that train."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def mean(states: list[State]) -> State:
    """The mean of each parameter over several states."""
    return {k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]}


# -- the bare kernels ----------------------------------------------------------------------------------


class Kernels:
    """The works as bare kernels: products, activations, softmax and updates of stacks of devices, in place.

    Data are stored in batches, without autograd or bookkeeping. A stack has `tile` devices; all its steps run before
    the next stack starts. With `gathered`, each batch is first copied from samples in random order: samples are
    shuffled, so every implementation has to read each batch once from where its samples happen to be.
    """

    def __init__(self, work: Work, x: Tensor, y: Tensor, gathered: bool = False) -> None:
        self.work, self.tile, self.pull = work, work.devices, LAMBDA if work.teams else 0.0
        self.x = x.view(work.devices, work.batches, work.batch, -1)
        self.onehot = nn.functional.one_hot(y, CLASSES).float().view(*self.x.shape[:3], CLASSES)
        self.places = None  # [devices, batches, batch] the place of each sample in `samples`
        if gathered:
            size, first = x.shape[1], torch.arange(work.devices).unsqueeze(1) * x.shape[1]
            place = torch.stack([torch.randperm(size) for _ in range(work.devices)]) + first
            self.samples = torch.empty(x.numel() // self.x.shape[3], self.x.shape[3])
            self.samples[place.flatten()] = self.x.flatten(0, 2)
            self.places = place.view(self.x.shape[:3])
        self.state: Parameters = [p.detach().clone() for p in work.module().parameters()]

    def tiles(self) -> list[int]:
        """The tile sizes to try: the divisors of the number of devices."""
        return [size for size in range(1, self.work.devices + 1) if self.work.devices % size == 0]

    def run(self, rounds: int) -> Tensor:
        """Compute rounds; returns the global model [1, d]."""
        for _ in range(rounds):
            self.state = self.permfl_round(self.state) if self.work.teams else self.fedavg_round(self.state)
        return flat(self.state)

    def fedavg_round(self, x: Parameters) -> Parameters:
        """One round of FedAvg."""
        theta = self.devices([p.expand(self.work.devices, *p.shape) for p in x])
        return [p.mean(0) for p in theta]

    def permfl_round(self, x: Parameters) -> Parameters:
        """One round of PerMFL."""
        m, size = self.work.teams, self.work.devices // self.work.teams
        w = [p.expand(m, *p.shape) for p in x]
        for _ in range(self.work.team_rounds):
            theta = self.devices([p.repeat_interleave(size, 0) for p in w])
            means = [p.view(m, size, *p.shape[1:]).mean(1) for p in theta]
            w = [a - ETA * (LAMBDA * (a - t) + GAMMA * (a - p)) for a, t, p in zip(w, means, x, strict=True)]
        return [p - BETA * GAMMA * (p - a.mean(0)) for p, a in zip(x, w, strict=True)]

    def devices(self, start: Parameters) -> Parameters:
        """All local steps of all devices, which start from the stacks `start`."""
        tiles = [slice(k, k + self.tile) for k in range(0, self.work.devices, self.tile)]
        ends = [self.solve([p[t] for p in start], t) for t in tiles]
        return [torch.cat(parts) for parts in zip(*ends, strict=True)]

    def batches(self, tile: slice) -> list[Callable[[], Tensor]]:
        """For each batch of a stack of devices: a function that returns it, [n, batch, in]."""
        if self.places is None:
            return [lambda x=x: x for x in self.x[tile].unbind(1)]
        copy = torch.empty_like(self.x[tile][:, 0])
        flat = copy.flatten(0, 1)

        def gather(index: Tensor) -> Tensor:
            torch.index_select(self.samples, 0, index, out=flat)
            return copy

        return [partial(gather, index.flatten()) for index in self.places[tile].unbind(1)]

    def solve(self, start: Parameters, tile: slice) -> Parameters:
        """All local steps of one stack of devices."""
        theta = [p.clone(memory_format=torch.contiguous_format) for p in start]
        weights, biases = theta[0::2], [b.unsqueeze(1) for b in theta[1::2]]  # [n, out, in], [n, 1, out]
        scale, last = -ALPHA / self.work.batch, len(weights) - 1
        batches, onehot = self.batches(tile), self.onehot[tile]
        outputs = [torch.empty(len(onehot), self.work.batch, w.shape[1]) for w in weights]
        errors = [torch.empty_like(z) for z in outputs]
        for s in range(self.work.steps):
            layers = [batches[s % self.work.batches](), *outputs[:-1]]  # inputs of each layer, [n, batch, in]
            for k, (w, b) in enumerate(zip(weights, biases, strict=True)):
                torch.baddbmm(b, layers[k], w.transpose(1, 2), out=outputs[k])
                if k < last:
                    outputs[k].relu_()
            torch.softmax(outputs[last], 2, out=errors[last]).sub_(onehot[:, s % self.work.batches])
            for k in range(last, 0, -1):
                back = torch.bmm(errors[k], weights[k], out=errors[k - 1])
                torch.ops.aten.threshold_backward.grad_input(back, outputs[k - 1], 0, grad_input=back)
            if self.pull:  # the gradient is already computed, so theta may move towards its anchor
                for p, anchor in zip(theta, start, strict=True):
                    p.lerp_(anchor, ALPHA * self.pull)
            for w, b, error, h in zip(weights, biases, errors, layers, strict=True):
                w.baddbmm_(error.transpose(1, 2), h, alpha=scale)
                b.add_(error.sum(1, keepdim=True), alpha=scale)
        return theta
