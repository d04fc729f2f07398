"""The works of `polytier bench` with CoBo and MFA-RR, whose rounds are short: a hand-written loop, and the engine.

Both start from the same parameters and return the models after some rounds, so that a test can check that they compute
the same. There are no bare kernels: pairs and groups change in every round, so there is no fixed stack of devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from polytier.algorithms.cobo import CoBo
from polytier.algorithms.fedavg import FedAvg
from polytier.algorithms.multimodel import MFARR
from polytier.data.federation import Federation
from polytier.data.synthetic import tridiagonal
from polytier.models.zoo import make_model
from polytier.runs.loop import Loop, make_loop
from polytier.studies.bench_works import CLASSES, State, copied, mean

ETA, RHO, GAMMA = 0.1, 0.05, 0.01  # CoBo's letters: steps of models, pull, steps of weights
LR = 0.1  # of MFA


@dataclass(frozen=True)
class CoBoWork:
    """CoBo on random data: one step per client and round, and gradients at the midpoints of random pairs of clients."""

    devices: int
    model: str = "dnn:100"
    inputs: tuple[int, ...] = (784,)
    batch: int = 64
    batches: int = 10

    @property
    def device_steps(self) -> int:
        """Gradients in a round: one per client and, on average, two for each of (n - 1) / 2 pairs."""
        return 2 * self.devices - 1

    @property
    def pull(self) -> float:
        """The strength of the pull, which has to fall with the number of clients."""
        return RHO * 8 / self.devices

    def described(self) -> str:
        """The method and its sizes, as text."""
        return f"CoBo, {self.model} on {self.inputs[0]}, {self.devices} clients, one step on {self.batch} samples"

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """x [clients, samples, features] and y [clients, samples]."""
        rng, shape = np.random.default_rng(0), (self.devices, self.batches * self.batch)
        return rng.random((*shape, *self.inputs), dtype=np.float32), rng.integers(0, CLASSES, shape)

    def federation(self, x: np.ndarray, y: np.ndarray) -> Federation:
        """The data as a federation."""
        owner = np.repeat(np.arange(self.devices), y.shape[1])
        flat = x.reshape(len(owner), *self.inputs)
        return Federation.from_arrays(flat, y.reshape(-1), owner, shares=(1, 0, 0), num_classes=CLASSES)

    def engine(self, federation: Federation, workers: int) -> Loop:
        """The run that the engine computes."""
        method = CoBo(ETA, self.pull, GAMMA)
        return make_loop(method, federation, self.model, batch_size=self.batch, workers=workers)

    def models(self, loop: Loop) -> Tensor:
        """[clients, d] what the run has computed so far: the models of the clients."""
        context, everyone = loop.context, torch.arange(self.devices)
        return context.memory.read(1, "model", everyone, context.objective.initial.expand(self.devices, -1))

    def loop(self, x: np.ndarray, y: np.ndarray) -> CoBoByHand:
        """The hand-written loop."""
        return CoBoByHand(self, torch.from_numpy(x), torch.from_numpy(y))

    def bounds(self, x: np.ndarray, y: np.ndarray) -> dict:
        """There are none."""
        return {}


class CoBoByHand:
    """CoBo as a hand-written loop: one module serves all clients, whose models are the rows of a matrix."""

    def __init__(self, work: CoBoWork, x: Tensor, y: Tensor) -> None:
        self.work, self.x, self.y = work, x, y
        self.model, self.criterion = make_model(work.model, work.inputs, CLASSES, 0), nn.CrossEntropyLoss()
        self.models = parameters_to_vector(self.model.parameters()).detach().repeat(work.devices, 1)
        self.weights = torch.ones(work.devices, work.devices)
        self.round = 0

    def run(self, rounds: int) -> Tensor:
        """Compute rounds; returns the models [clients, d]."""
        for _ in range(rounds):
            self.compare(self.pairs())
            pull = self.weights.sum(1, keepdim=True) * self.models - self.weights @ self.models
            gradients = torch.stack([self.gradient(c, self.models[c], self.batch()) for c in range(self.work.devices)])
            self.models = self.models - ETA * (gradients + self.work.pull * pull)
            self.round += 1
        return self.models

    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of clients that are compared in this round, each with probability 1/n."""
        n = self.work.devices
        every = list(combinations(range(n), 2))
        return [pair for pair, drawn in zip(every, (torch.rand(len(every)) < 1 / n).tolist(), strict=True) if drawn]

    def compare(self, pairs: list[tuple[int, int]]) -> None:
        """Change the weights of the pairs; a client uses the same samples at all its midpoints."""
        samples = [self.batch() for _ in range(self.work.devices)]
        for a, b in pairs:
            middle = (self.models[a] + self.models[b]) / 2
            product = self.gradient(a, middle, samples[a]) @ self.gradient(b, middle, samples[b])
            self.weights[a, b] = self.weights[b, a] = (self.weights[a, b] + GAMMA * product).clamp(0, 1)

    def batch(self) -> Tensor:
        """The places of the samples of a mini-batch."""
        return torch.randperm(self.x.shape[1])[: self.work.batch]

    def gradient(self, c: int, row: Tensor, samples: Tensor) -> Tensor:
        """The gradient of client c at a model, as one vector."""
        vector_to_parameters(row, self.model.parameters())
        loss = self.criterion(self.model(self.x[c, samples]), self.y[c, samples])
        return parameters_to_vector(torch.autograd.grad(loss, list(self.model.parameters())))


@dataclass(frozen=True)
class MFAWork:
    """MFA-RR with FedAvg on the strongly convex problem of its paper (float64, one sample per device)."""

    devices: int = 24
    num_models: int = 12
    steps: int = 5

    @property
    def device_steps(self) -> int:
        """Gradient steps of all devices in a round; each device trains one model."""
        return self.devices * self.steps

    def described(self) -> str:
        """The method and its sizes, as text."""
        return f"MFA-RR, {self.num_models} models, tridiagonal problem, {self.devices} devices, {self.steps} steps"

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """A [devices, d, d] and b [devices, d] of each device's problem."""
        problem = tridiagonal(self.devices)
        return problem.x.numpy(), problem.y.numpy()

    def federation(self, x: np.ndarray, y: np.ndarray) -> Federation:
        """The data as a federation."""
        return tridiagonal(self.devices)

    def engine(self, federation: Federation, workers: int) -> Loop:
        """The run that the engine computes."""
        methods = {f"model{k}": FedAvg(LR, self.steps, "uniform") for k in range(self.num_models)}
        return make_loop(MFARR(methods), federation, "quadratic", batch_size=1, dtype="float64", workers=workers)

    def models(self, loop: Loop) -> Tensor:
        """[models, d] what the run has computed so far: the global models."""
        assert isinstance(loop.state, dict)
        return torch.cat(list(loop.state.values()))

    def loop(self, x: np.ndarray, y: np.ndarray) -> MFAByHand:
        """The hand-written loop."""
        return MFAByHand(self, torch.from_numpy(x), torch.from_numpy(y))

    def bounds(self, x: np.ndarray, y: np.ndarray) -> dict:
        """There are none."""
        return {}


class Chain(nn.Module):
    """1/2 theta'A theta - b'theta, as one would write it for a single device."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(d, dtype=torch.float64))

    def forward(self, A: Tensor, b: Tensor) -> Tensor:
        return self.theta @ (0.5 * (A @ self.theta) - b)


class MFAByHand:
    """MFA-RR as a hand-written loop over models and devices, with torch.optim.SGD."""

    def __init__(self, work: MFAWork, A: Tensor, b: Tensor) -> None:
        self.work, self.A, self.b = work, A, b
        self.model = Chain(A.shape[-1])
        self.states: list[State] = [copied(self.model) for _ in range(work.num_models)]
        self.round = 0
        self.order: list[int] = []

    def run(self, rounds: int) -> Tensor:
        """Compute rounds; returns the models [models, d]."""
        for _ in range(rounds):
            groups = self.groups()
            pairs = zip(self.states, groups, strict=True)
            self.states = [mean([self.device(c, state) for c in group]) for state, group in pairs]
            self.round += 1
        return torch.stack([state["theta"] for state in self.states])

    def groups(self) -> list[list[int]]:
        """The devices that train each model: divided at random once in M rounds, then in turn."""
        m = self.work.num_models
        turn = self.round % m
        if turn == 0:
            self.order = torch.randperm(self.work.devices).tolist()
        return [self.order[(k - turn) % m :: m] for k in range(m)]

    def device(self, c: int, start: State) -> State:
        """The local steps of device c."""
        self.model.load_state_dict(start)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        for _ in range(self.work.steps):
            optimizer.zero_grad()
            self.model(self.A[c], self.b[c]).backward()
            optimizer.step()
        return copied(self.model)


METHOD_WORKS = {"cobo": CoBoWork(8), "cobo80": CoBoWork(80), "mfa": MFAWork()}
