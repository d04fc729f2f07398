"""Local optimisers: each against plain NumPy, the state that is kept, and the same bits on every layout."""

import pickle

import numpy as np
import pytest
import torch

from algorithms.test_cluster_baselines import DATA, LR, LR_OF, SETTINGS, close, problem, rows
from polytier import CoBo, Ditto, FedAvg, FedProx, LocalTraining, PerMFL, check_algorithm, train
from polytier.algorithms import ALGORITHMS
from polytier.algorithms.fedavg_ft import FedAvgFT
from polytier.runs.loop import make_loop
from polytier.stack.optimizers import LocalOptimizer


class Momentum:
    def __init__(self, mu=0.8):
        self.mu, self.v = mu, 0.0

    def step(self, theta, g, lr):
        self.v = self.mu * self.v + g
        return theta - lr * self.v


class AdamW:
    def __init__(self, beta1=0.9, beta2=0.999, decay=0.01):
        self.beta1, self.beta2, self.decay = beta1, beta2, decay
        self.m = self.v = 0.0
        self.t = 0

    def step(self, theta, g, lr):
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        m, v = self.m / (1 - self.beta1**self.t), self.v / (1 - self.beta2**self.t)
        return theta - lr * self.decay * theta - lr * m / (np.sqrt(v) + 1e-8)


KINDS = {
    "momentum:0.8": Momentum,
    "adamw": AdamW,
    "adamw:beta1=0.5,beta2=0.9,decay=0.3": lambda: AdamW(0.5, 0.9, 0.3),
}
RULES = [{}, {"fraction": 0.6}]


def oracle(rule, x, make, keep, rounds, steps, pull):
    p, kept = problem(DATA, rule), {}
    for t in range(rounds):
        answers, sizes = [], []
        for d in p.present(0, "server", t, 0):
            optimizer = kept.setdefault(d, make()) if keep else make()
            theta, batches = x.copy(), p.batches(d, t, 0)
            for _ in range(steps):
                theta = optimizer.step(theta, p.grad(theta, d, next(batches)) + pull * (theta - x), LR_OF[d])
            answers.append(theta)
            sizes.append(p.samples(1, d))
        x = np.average(answers, axis=0, weights=sizes)
    return x


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("text", KINDS)
def test_fedprox_with_an_optimizer_is_its_oracle(text, rule, keep):
    method = FedProx(tuple(LR), 3, device_pull=0.7)
    taken = rule.get("fraction", 1.0)
    name = f"{text}:keep" if keep else text
    with make_loop(method, DATA, "mclr", device_participation=taken, optimizer=name, **SETTINGS) as training:
        x0 = training.context.objective.initial.numpy().copy()
        found = training.run(4)
        names = training.context.memory.names(1)
    close(rows(found.global_), oracle(rule, x0, KINDS[text], keep, 4, 3, 0.7))
    assert any(each.startswith("optimizer") for each in names) == keep


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("momentum:0.9", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.1)),
    ],
)
def test_steps_are_those_of_torch(text, make):
    target = torch.tensor([[1.0, -2.0, 3.0]], dtype=torch.float64)
    theta, parameter = torch.zeros_like(target), torch.zeros_like(target, requires_grad=True)
    ours, theirs = LocalOptimizer.parse(text), make([parameter])
    state = ours.start(theta)
    for _ in range(20):
        theta = ours.step(theta, theta - target, 0.1, state)
        parameter.grad = (parameter - target).detach()
        theirs.step()
    torch.testing.assert_close(theta, parameter.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [FedAvg(device_steps=2), PerMFL(device_steps=2, team_rounds=2), CoBo(), Ditto()])
@pytest.mark.parametrize("text", ["adamw:keep", "momentum:0.5"])
def test_the_same_bits_on_every_layout(method, text):
    check_algorithm(method, optimizer=text, rounds=2)


def test_two_processes_have_the_same_bits():
    settings = {**SETTINGS, "rounds": 2, "optimizer": "adamw:keep"}
    one, two = (train(LocalTraining(0.1, 3), DATA, "mclr", workers=w, **settings) for w in (1, 2))
    assert np.array_equal(rows(one.personal), rows(two.personal))


def test_ditto_keeps_a_state_for_each_of_its_models():
    with make_loop(Ditto(), DATA, "mclr", optimizer="momentum:keep", **SETTINGS) as training:
        training.run(1)
        assert {"optimizer v", "optimizer global v"} <= set(training.context.memory.names(1))


def test_an_evaluation_starts_without_state_and_keeps_none():
    method = FedAvgFT(device_steps=1, tune_steps=2)
    runs = [train(method, DATA, "mclr", rounds=1, optimizer=text, **SETTINGS) for text in ("adamw", "adamw:keep")]
    assert np.array_equal(rows(runs[0].personal), rows(runs[1].personal))


def test_methods_with_steps_of_their_own_say_so():
    for name in ("scaffold", "apfl", "per-fedavg", "pfedgp", "fedrep", "fc", "pfedbayes", "sfedhp"):
        with pytest.raises(ValueError, match=r"steps of its own.*use sgd"):
            train(ALGORITHMS[name](), DATA, "dnn:4", rounds=1, optimizer="adamw", **SETTINGS)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("adam", "adamw"),
        ("sgd:keep", "no state"),
        ("momentum:1.5", "below 1"),
        ("momentum:x", "number"),
        ("adamw:decay=-1", "0 or more"),
        ("adamw:lr=1", "it takes beta1, beta2, decay"),
    ],
)
def test_bad_optimizers_give_advice(text, advice):
    with pytest.raises(ValueError, match=advice):
        LocalOptimizer.parse(text)


def test_an_optimizer_is_pickled_as_text():
    again = pickle.loads(pickle.dumps(LocalOptimizer.parse("adamw:decay=0.5:keep")))
    assert again.keep
    assert again.text == "adamw:decay=0.5:keep"
