"""pFedGP: personalised federated learning with Gaussian processes (Achituve, Shamsian, Navon, Chechik, Fetaya 2021).

All devices share a network phi, their kernel is k(a, b) = exp(-|phi(a) - phi(b)|^2 / 2), and every device has a
Gaussian process of its own over its own samples. The network minimises the mean over the devices of

    -log p(Y | X, phi) / B = (tr Y' A Y / 2 - C/2 log det A) / B + constant,  A = (K + noise I)^-1

for mini-batches X [B, ...] with one-hot labels Y [B, C]: C processes with the same kernel.

symbol | field        | shape  | meaning
phi    | state model  | [1, d] | the network; its features are the module's outputs [B, C] (of mclr: its linear map)
       | device_lr, device_steps, weights | | as in FedAvg, on the objective above
sigma2 | noise        |        | variance of the noise of labels; that of a process is 1
       | inducing     |        | a device predicts from at most so many of its training samples

A device predicts by its posterior mean m [C] and variance v (with the noise) at a sample: softmax(m / v), how likely
each one-hot label is among them all. There is no global model: the network alone predicts nothing.

Differs from the paper: there a tree of binary processes classifies, by Polya-Gamma augmentation, and inducing points,
in the variants that have them, are learned; here labels are regressed on (least squares, in closed form), and what a
device predicts from is spread evenly over its training samples. There features are those of a hidden layer. Kernel and
noise are fixed: the network's last layer scales the features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.node import Children, LocalProblem
from polytier.method.parameters import parameter
from polytier.stack.rows import Rows


@dataclass(frozen=True)
class PFedGP(FedAvg):
    noise: float = parameter(0.1, "sigma2", "variance of the noise of labels", least=1e-6)
    inducing: int = parameter(100, "", "training samples that a device predicts from, at most", least=1)

    def check(self, server: Children) -> list[str]:
        population = server.context.population
        if population.num_classes is None or population.target_shape:
            raise ValueError("pFedGP classifies samples, and these have other targets; give one class a sample")
        return []

    def init(self, x: Tensor) -> Rows:
        return {"model": x}

    def device(self, x: Any, local: LocalProblem) -> Rows:
        theta, lr, l2 = x["model"], local.value(self.device_lr), local.context.objective.l2
        noise = theta.new_full((len(theta),), self.noise)
        for _ in range(self.device_steps):
            g = local.grad(theta, local.batch(), evidence, (noise,))
            theta = theta - lr * (g + l2 * theta)
        return {"model": theta}

    def global_model(self, state: Rows) -> None:
        return None

    def publish(self, state: Rows) -> Rows:
        return state

    def personal(self, x: Any, local: LocalProblem) -> Tensor:
        return x["model"]

    def predict(self, model: Tensor, local: LocalProblem, inputs: Tensor) -> Tensor:
        """[n, B, C] from training data alone; log-probabilities up to a constant."""
        batches, samples = local.context.batches, local.samples.unsqueeze(1)
        count, slot = samples.clamp(max=self.inducing), torch.arange(-(-self.inducing // 16) * 16)  # see `aligned`
        place = batches.federation.bounds[local.rows, :1] + torch.minimum(slot, count - 1) * samples // count
        held = batches.gather(slice(None), place, (slot < count).to(model.dtype), None)
        features, inside, targets = process(local.apply(model, held.x), held.y, held.weight)
        queries = aligned(local.apply(model, inputs).double())
        root = inverse_root(kernel(features, features), inside, self.noise)
        v = root @ torch.where(inside, kernel(features, queries), 0.0)  # [n, slots, B]
        m, variance = v.mT @ (root @ targets), 1 + self.noise - (v * v).sum(-2).unsqueeze(-1)
        return (m / variance)[:, : inputs.shape[1]].to(model.dtype)


def evidence(apply: Callable, row: Tensor, x: Tensor, y: Tensor, weight: Tensor, noise: Tensor) -> Tensor:
    """A loss of one row whose gradient is that of the objective: sum of G * K, where G = d objective / dK is held.

    Autograd of a Cholesky factor solves backwards, and the bits of that depend on where in a stack a matrix lies.
    """
    features, inside, targets = process(apply(row, x), y, weight)
    k = kernel(features, features)
    root = inverse_root(k.detach(), inside, noise.double())
    A = torch.where(inside, root.mT @ root, 0.0)
    alpha = A @ targets
    G = (features.shape[-1] * A - alpha @ alpha.mT) / (2 * inside.sum())
    return (G * k).sum().to(row.dtype)


# -- of one device or of a stack of them, in float64 whatever the run's dtype --------------------------


def process(outputs: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features [.., B, C], which of them do not only pad the batch [.., B, 1], and their one-hot labels [.., B, C]."""
    inside = weight.unsqueeze(-1) > 0
    targets = inside & (y.unsqueeze(-1) == torch.arange(outputs.shape[-1], device=y.device))
    features, inside, targets = (aligned(t.double()) for t in (outputs, inside, targets))
    return features, inside > 0, targets


def aligned(rows: Tensor) -> Tensor:
    """[.., B, C] with zeros up to a multiple of 8 rows: 64 bytes. A product's bits depend on where a matrix starts."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[-2] % 8))


def kernel(a: Tensor, b: Tensor) -> Tensor:
    """[.., A, B]"""
    squared = (a * a).sum(-1).unsqueeze(-1) + (b * b).sum(-1).unsqueeze(-2) - 2 * (a @ b.mT)
    return torch.exp(-squared / 2)


def inverse_root(k: Tensor, inside: Tensor, noise: Any) -> Tensor:
    """R with R' R = (K + noise I)^-1 of what is inside; the rest is that of the identity."""
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    k = torch.where(inside & inside.mT, k + noise * eye, eye)
    return torch.linalg.solve_triangular(torch.linalg.cholesky_ex(k).L, eye, upper=False)
