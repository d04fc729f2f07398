"""pFedGP: a shared network and a Gaussian process per device (Achituve, Shamsian, Navon, Chechik, Fetaya 2021).

Achituve, Shamsian, Navon, Chechik, Fetaya, "Personalized Federated Learning with Gaussian Processes", NeurIPS 2021.
https://arxiv.org/abs/2106.15482

All devices share a network phi. Every device has a Gaussian process over its own samples with the kernel
k(a, b) = exp(-|phi(a) - phi(b)|^2 / 2). The network minimises the mean over the devices of

    -log p(Y | X, phi) / B = (tr Y' A Y / 2 - C/2 log det A) / B + constant,  A = (K + noise I)^-1

for mini-batches X [B, ...] with one-hot labels Y [B, C]: C processes with the same kernel.

symbol | field        | shape  | meaning
phi    | state        | [1, d] | the network, as "model"; its features are the outputs of the module, [B, C]
alpha  | device_lr    |        | step size of a device (one number, or one per device)
L      | device_steps |        | mini-batch steps per device and round
n_k/n  | weights      |        | how networks are averaged
sigma2 | noise        |        | variance of the noise of the labels; the variance of a process is 1
       | inducing     |        | largest number of training samples that a device predicts from

A device predicts from its posterior mean m [C] and variance v (including the noise) at a sample: softmax(m / v), the
probability of each one-hot label among all of them. There is no global model: the network alone predicts nothing.

Differs from the paper: there a tree of binary processes classifies, by Polya-Gamma augmentation; here labels are
regressed (least squares, in closed form). There inducing points, in the variants that have them, are learned; here
the samples that a device predicts from are spread evenly over its training samples. There features are those of a
hidden layer. Kernel and noise are fixed: the last layer of the network scales the features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from polytier.algorithms.fedavg import FedAvg
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.method.parameters import parameter
from polytier.stack.rows import Rows


@dataclass(frozen=True)
class PFedGP(FedAvg):
    any_optimizer: ClassVar[bool] = False
    noise: float = parameter(0.1, "sigma2", "variance of the noise of the labels", least=1e-6)
    inducing: int = parameter(100, "", "largest number of training samples that a device predicts from", least=1)

    def check(self, server: Children) -> list[str]:
        if server.num_classes is None:
            raise ValueError(
                "pFedGP classifies samples and these data have other targets; give one class per sample, or use pfedme"
            )
        return []

    def init(self, x: Tensor) -> Rows:
        return {"model": x}

    def device(self, x: Any, local: LocalProblem) -> Rows:
        theta, lr, l2 = x["model"], local.value(self.device_lr), local.l2
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
        """[n, B, C] log-probabilities up to a constant, from the training samples of each device."""
        (held,) = local.subset(self.inducing, width=-(-self.inducing // 16) * 16).groups  # see `aligned`
        features, inside, targets = process(local.apply(model, held.x), held.y, held.weight)
        queries = aligned(local.apply(model, inputs).double())
        root = inverse_root(kernel(features, features), inside, self.noise)
        v = root @ torch.where(inside, kernel(features, queries), 0.0)  # [n, slots, B]
        m, variance = v.mT @ (root @ targets), 1 + self.noise - (v * v).sum(-2).unsqueeze(-1)
        return (m / variance)[:, : inputs.shape[1]].to(model.dtype)


def evidence(apply: Callable, row: Tensor, x: Tensor, y: Tensor, weight: Tensor, noise: Tensor) -> Tensor:
    """A loss of one row with the gradient of the objective: sum(G * K), where G = d objective / dK is constant.

    The backward pass of a Cholesky factorisation is avoided: its last bits depend on where in a stack a matrix is.
    """
    features, inside, targets = process(apply(row, x), y, weight)
    k = kernel(features, features)
    root = inverse_root(k.detach(), inside, noise.double())
    A = torch.where(inside, root.mT @ root, 0.0)
    alpha = A @ targets
    G = (features.shape[-1] * A - alpha @ alpha.mT) / (2 * inside.sum())
    return (G * k).sum().to(row.dtype)


# -- for one device or a stack of them, always in float64 ---------------------------------------------


def process(outputs: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features [.., B, C], which of them are samples and not padding [.., B, 1], and one-hot labels [.., B, C]."""
    inside = weight.unsqueeze(-1) > 0
    targets = inside & (y.unsqueeze(-1) == torch.arange(outputs.shape[-1], device=y.device))
    features, inside, targets = (aligned(t.double()) for t in (outputs, inside, targets))
    return features, inside > 0, targets


def aligned(rows: Tensor) -> Tensor:
    """[.., B, C] padded with zeros to a multiple of 8 rows.

    So each matrix of a stack starts at a multiple of 64 bytes: the last bits of a product depend on the alignment.
    """
    return torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[-2] % 8))


def kernel(a: Tensor, b: Tensor) -> Tensor:
    """[.., A, B] k(a, b) for all rows of a [.., A, C] and b [.., B, C]."""
    squared = (a * a).sum(-1).unsqueeze(-1) + (b * b).sum(-1).unsqueeze(-2) - 2 * (a @ b.mT)
    return torch.exp(-squared / 2)


def inverse_root(k: Tensor, inside: Tensor, noise: Any) -> Tensor:
    """R with R' R = (K + noise I)^-1 for the rows and columns in `inside`; elsewhere R is the identity."""
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    k = torch.where(inside & inside.mT, k + noise * eye, eye)
    return torch.linalg.solve_triangular(torch.linalg.cholesky_ex(k).L, eye, upper=False)
