"""Every method as a plain loop in NumPy, float64, straight from its paper: slow, obvious, and the judge.

Only the draws are shared with the package, and this page is their definition. A draw has a key, made of
the seed, its purpose, the round and the number of the call, folded with the node's name:

    order of a device's samples | sorted by 64 signed random bits a sample; key "shuffle", device, epoch, where a
                                  device with k * 1024 samples or more (and less than (k + 1) * 1024) has an epoch
                                  of 1 + k rounds
    mini-batches of a call      | batches of that order, one after the other and round again, from a first one
                                  drawn by key "batch", stream, round, call, device; the last batch may be short
    who takes part              | the children with the smallest draws by key "participation", round, call, child:
                                  max(1, round(fraction * n)) or `count` of them, of those that the table says are there
    number of a call            | the k-th call of a node that runs in call c is call c * 2^16 + k
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polytier.tree.random import GOLDEN, key, mix_int, name_key, signed

NEST = 2**16


def node_key(base, name):
    return mix_int(mix_int(name_key(name) + GOLDEN) ^ base)


def draw_bits(node, slot):
    return mix_int(node + (slot + 1) * GOLDEN)


def draw_uniform(node, slot=0):
    return (draw_bits(node, slot) >> 11) * 2.0**-53


@dataclass
class Problem:
    """Devices with data under a tree, and the l2-regularised multinomial logistic regression that they train.

    data          | device -> (x [s, F], y [s])
    children      | a dict a tier but the last: node -> its children, in the topology's order; tier 0 is the server
    participation | a dict a tier: {"fraction": f}, {"count": c}, {"table": [rounds, nodes]} or {} for everybody
    """

    data: dict[Any, tuple[np.ndarray, np.ndarray]]
    children: list[dict[Any, list]]
    classes: int
    l2: float = 0.0
    seed: int = 0
    batch_size: int = 4
    participation: list[dict] = field(default_factory=list)
    absent: str = "skip"

    def __post_init__(self):
        self.leaf = len(self.children)
        self.nodes = [["server"]]
        for tier in self.children:
            self.nodes.append([c for kids in tier.values() for c in kids])
        self.participation = self.participation or [{}] * (self.leaf + 1)
        self.last = {}  # (tier, node) -> its last answer, for absent="stale"

    def samples(self, tier, node):
        if tier == self.leaf:
            return len(self.data[node][1])
        return sum(self.samples(tier + 1, c) for c in self.children[tier][node])

    def grad(self, theta, device, index):
        x, y = self.data[device][0][index], self.data[device][1][index]
        C, F = self.classes, x.shape[1]
        W, b = theta[: C * F].reshape(C, F), theta[C * F :]
        z = x @ W.T + b
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        e = (p - np.eye(C)[y]) / len(y)
        return np.concatenate([(e.T @ x).ravel(), e.sum(0)]) + self.l2 * theta

    def batches(self, device, t, call, stream=""):
        """The mini-batches of a call, for ever: lists of the device's own sample numbers."""
        size, B = len(self.data[device][1]), self.batch_size
        epoch = t // (1 + size // 1024)
        order_key = mix_int(node_key(key(self.seed, "shuffle"), device) ^ mix_int(epoch + 1))
        order = sorted(range(size), key=lambda s: signed(draw_bits(order_key, s)))
        pieces = [order[s : s + B] for s in range(0, size, B)]
        first = int(draw_uniform(node_key(key(self.seed, "batch", stream, t, call), device)) * len(pieces))
        while True:
            yield pieces[first % len(pieces)]
            first += 1

    def present(self, tier, node, t, call):
        """The children of a node that take part in its call."""
        kids, rule = self.children[tier][node], self.participation[tier + 1]
        quota = len(kids)
        if "fraction" in rule:
            quota = max(1, round(rule["fraction"] * len(kids)))
        if "count" in rule:
            quota = min(rule["count"], len(kids))
        base = key(self.seed, "participation", t, call)
        there = kids
        if "table" in rule:
            row = rule["table"][t % len(rule["table"])]
            there = [c for c in kids if row[self.nodes[tier + 1].index(c)]]
        chosen = sorted(there, key=lambda c: draw_uniform(node_key(base, c)))[:quota]
        return [c for c in kids if c in chosen]

    def ask(self, tier, node, sent, t, call, program, weights):
        """Send a row to the children that take part; the mean of their answers, or the row itself if there is none."""
        answers = {c: program(c, sent, t, call) for c in self.present(tier, node, t, call)}
        if self.absent == "stale" and self.participation[tier + 1]:
            self.last |= {(tier + 1, c): a for c, a in answers.items()}
            answers = {c: self.last.get((tier + 1, c), sent) for c in self.children[tier][node]}
        if not answers:
            return sent
        weight = {c: self.samples(tier + 1, c) if weights == "samples" else 1 for c in answers}
        return sum(weight[c] * a for c, a in answers.items()) / sum(weight.values())


@dataclass
class Models:
    """What a method ends with. `team` has a dict a tier; nodes that kept nothing are missing."""

    everywhere: np.ndarray | None
    personal: dict = field(default_factory=dict)
    team: dict = field(default_factory=dict)


def sgd(p, device, theta, t, call, lr, steps, anchor=None, pull=0.0):
    """theta <- theta - lr (grad f(theta) + pull (theta - anchor)), each step on its own mini-batch."""
    batches = p.batches(device, t, call)
    for _ in range(steps):
        g = p.grad(theta, device, next(batches))
        theta = theta - lr * (g if anchor is None else g + pull * (theta - anchor))
    return theta


def local(p, x0, rounds, device_lr, device_steps):
    models = Models(None)

    def device(c, sent, t, call):
        start = models.personal.get(c, x0)
        models.personal[c] = sgd(p, c, start, t, call, device_lr[c], device_steps)
        return sent

    for t in range(rounds):
        p.ask(0, "server", x0, t, 0, device, "uniform")
    return models


def fedavg(p, x0, rounds, device_lr, device_steps, weights, device_pull=0.0, tune_lr=None, tune_steps=0):
    """FedAvg; with `device_pull` FedProx, with `tune_lr` fine-tuning of all devices after the last round."""

    def device(c, x, t, call):
        return sgd(p, c, x, t, call, device_lr[c], device_steps, x, device_pull)

    x = x0
    for t in range(rounds):
        x = p.ask(0, "server", x, t, 0, device, weights)
    models = Models(x)
    if tune_lr is not None:
        models.personal = {c: sgd(p, c, x, rounds, 0, tune_lr, tune_steps) for c in p.nodes[-1]}
    return models


def hier_fedavg(p, x0, rounds, device_lr, device_steps, weights, team_rounds):
    models = Models(x0, team={tier: {} for tier in range(1, p.leaf)})

    def node(tier):
        def program(c, x, t, call):
            if tier == p.leaf:
                return sgd(p, c, x, t, call, device_lr[c], device_steps)
            w = x
            for k in range(team_rounds[tier]):
                w = p.ask(tier, c, w, t, call * NEST + k, node(tier + 1), weights)
            models.team[tier][c] = w
            return w

        return program

    for t in range(rounds):
        models.everywhere = p.ask(0, "server", models.everywhere, t, 0, node(1), weights)
    return models


def pfedme(p, x0, rounds, device_lr, local_lr, server_lr, device_pull, device_steps, local_rounds, weights):
    """T. Dinh et al., Algorithm 1: K inner steps on one mini-batch give theta, which moves the local model w_i."""
    models = Models(x0)

    def device(c, w, t, call):
        batches = p.batches(c, t, call)
        theta = w
        for _ in range(local_rounds):
            held, theta = next(batches), w
            for _ in range(device_steps):
                theta = theta - device_lr[c] * (p.grad(theta, c, held) + device_pull * (theta - w))
            w = w - local_lr[c] * device_pull * (w - theta)
        models.personal[c] = theta
        return w

    w = x0
    for t in range(rounds):
        w = (1 - server_lr) * w + server_lr * p.ask(0, "server", w, t, 0, device, weights)
    models.everywhere = w
    return models


def permfl(p, x0, rounds, device_lr, team_lr, server_lr, device_pull, team_pull, device_steps, team_rounds, weights):
    """PerMFL's (4), (9), (13) over any number of tiers; pFedMT is the same with weights "samples".

    team_lr[node], team_pull[tier], team_rounds[tier]; a tier's pull is that of its nodes to their parents.
    """
    models = Models(x0, team={tier: {} for tier in range(1, p.leaf)})
    pull = {**team_pull, p.leaf: device_pull}

    def node(tier):
        def program(c, x, t, call):
            if tier == p.leaf:
                models.personal[c] = sgd(p, c, x, t, call, device_lr[c], device_steps, x, device_pull)  # (4)
                return models.personal[c]
            w, eta = x, team_lr[tier][c]
            for k in range(team_rounds[tier]):
                mean = p.ask(tier, c, w, t, call * NEST + k, node(tier + 1), weights)
                lam, gamma = pull[tier + 1], pull[tier]
                w = (1 - eta * (lam + gamma)) * w + eta * gamma * x + lam * eta * mean  # (9)
            models.team[tier][c] = w
            return w

        return program

    x = x0
    for t in range(rounds):
        mean = p.ask(0, "server", x, t, 0, node(1), weights)
        x = (1 - server_lr * pull[1]) * x + server_lr * pull[1] * mean  # (13)
    models.everywhere = x
    return models
