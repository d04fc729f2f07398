"""pFedBayes and pFedGP equal plain NumPy loops, and are what they must be where the answer is known."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oracle_cases import CLASSES, FEATURES, close, fixed_case
from oracles import Models, draw_uniform, node_key
from polytier import Federation, check_algorithm, train
from polytier.algorithms import LocalTraining
from polytier.algorithms.pfedbayes import PFedBayes, normal
from polytier.algorithms.pfedgp import PFedGP
from polytier.method.call import Clock
from polytier.method.local_problem import LocalProblem
from polytier.runs.contract import small_federation
from polytier.runs.loop import Loop, make_loop
from polytier.tree.random import key

TINY = 1e-30  # of the complex step: f'(x) = Im f(x + ih) / h, without rounding


def slope_of(function, row):
    """The gradient of an analytic function of a row, by complex steps."""
    return np.array([function(row + 1j * TINY * e).imag / TINY for e in np.eye(len(row))])


# -- pFedBayes: the oracle ----------------------------------------------------------------------------


def softplus(rho):
    return np.log(1 + np.exp(rho))


def kl(q, w):
    """Of Gaussians as rows: means, then rho."""
    (mean, rho), (prior_mean, prior_rho) = np.split(q, 2), np.split(w, 2)
    s, prior = softplus(rho), softplus(prior_rho)
    return np.sum(np.log(prior / s) + (s**2 + (mean - prior_mean) ** 2) / (2 * prior**2) - 0.5)


def normals(p, name, purpose, t, call, d):
    node = node_key(key(p.seed, purpose, t, call), name)
    u = [draw_uniform(node, k) for k in range(2 * d)]
    return np.array([np.sqrt(-2 * np.log(1 - a)) * np.cos(2 * np.pi * b) for a, b in zip(u[::2], u[1::2], strict=True)])


def pfedbayes(p, x0, rounds, device_lr, global_lr, server_lr, zeta, device_steps, num_samples, prior_deviation):
    d, kept = len(x0), {}
    first = np.concatenate([x0, np.full(d, np.log(np.exp(prior_deviation) - 1))])

    def device(c, w, t, call):
        batches, q, pull = p.batches(c, t, call), kept.get(c, w), zeta / p.samples(1, c)
        for step in range(device_steps):
            held, (mean, rho), g = next(batches), np.split(q, 2), np.zeros(2 * d)
            for draw in range(num_samples):
                e = normals(p, c, f"noise {step} {draw}", t, call, d)
                at = p.grad(mean + softplus(rho) * e, c, held)
                g += np.concatenate([at, at * e / (1 + np.exp(-rho))]) / num_samples
            q = q - device_lr[c] * (g + pull * slope_of(lambda v, w=w: kl(v, w), q))
            w = w - global_lr[c] * pull * slope_of(lambda v, q=q: kl(q, v), w)
        kept[c] = q
        return w

    w = first
    for t in range(rounds):
        w = (1 - server_lr) * w + server_lr * p.ask(0, "server", w, t, 0, device, "uniform")
    return w, {c: kept.get(c, first) for c in p.nodes[-1]}


@pytest.mark.parametrize("absent", ["skip", "stale"])
def test_pfedbayes_equals_its_oracle(absent):
    case = fixed_case(2, 3, absent=absent, l2=0.1)
    lr, eta = ({c: a + 0.01 * c for c in range(12)} for a in (0.05, 0.1))
    fields = {"server_lr": 0.7, "zeta": 0.3, "device_steps": 3, "num_samples": 2, "prior_deviation": 0.4}
    algorithm = PFedBayes(device_lr=tuple(lr.values()), global_lr=tuple(eta.values()), **fields)
    with make_loop(algorithm, case.federation, "mclr", **case.settings) as training:
        x0 = training.context.objective.initial.numpy().copy()
        run = training.run(case.rounds)
        w, q = pfedbayes(case.problem, x0, case.rounds, device_lr=lr, global_lr=eta, **fields)
        mean, rho = np.split(np.stack([q[c] for c in range(12)]), 2, 1)
        close(run.personal, mean)
        first = np.full_like(rho, np.log(np.expm1(fields["prior_deviation"])))
        close(training.context.memory.read(1, "rho", torch.arange(12), torch.from_numpy(first)), rho)
    state: Any = run.state
    close(torch.cat([state["model"], state["rho"]], 1)[0], w)
    close(run.global_, w[: len(x0)])
    assert np.abs(w - np.concatenate([x0, first[0]])).max() > 0.01  # it moved


def test_pfedbayes_without_divergence_and_deviation_is_local():
    federation = small_federation()
    more: Any = {"rounds": 3, "batch_size": 4, "dtype": "float64", "device_participation": 0.6, "batching": "stacked"}
    alone = train(LocalTraining(0.1, 4), federation, "mclr", **more)
    run = train(PFedBayes(0.1, device_steps=4, zeta=0, prior_deviation=1e-8), federation, "mclr", **more)
    assert alone.personal is not None
    assert run.personal is not None
    assert run.global_ is not None
    torch.testing.assert_close(run.personal, alone.personal, rtol=0, atol=1e-6)
    assert torch.equal(run.global_, run.context.objective.initial)  # nothing pulls it
    noisy = train(PFedBayes(0.1, device_steps=4, zeta=0, prior_deviation=0.1), federation, "mclr", **more)
    assert noisy.personal is not None
    assert (noisy.personal - alone.personal).abs().max() > 1e-4


def test_noise_is_normal_and_never_the_same_twice():
    with make_loop(PFedBayes(), small_federation(), "mclr", batching="eager") as training:
        ids, like = torch.arange(11), torch.zeros(11, 4000, dtype=torch.float64)
        draw = lambda purpose, t: normal(LocalProblem(training.context, 1, ids, Clock(t)), purpose, like)  # noqa: E731
        draws = torch.stack([draw("noise 0 0", 0), draw("noise 0 1", 0), draw("noise 1 0", 0), draw("noise 0 0", 1)])
        z = draws.reshape(44, -1).numpy()
        assert abs(z.mean()) < 0.01
        np.testing.assert_allclose(np.mean(z**2), 1, atol=0.02)
        np.testing.assert_allclose(np.mean(z**4), 3, atol=0.1)
        assert np.abs(np.corrcoef(z) - np.eye(44)).max() < 0.1  # devices, steps, draws and rounds


def test_pfedbayes_warns_of_steps_that_diverge(caplog):
    settings: Any = {"batch_size": 4, "dtype": "float64", "batching": "eager"}
    with caplog.at_level(logging.WARNING, "polytier"):  # other tests may have asked for more
        with make_loop(PFedBayes(), small_federation(), "mclr", **settings):
            assert not caplog.records
        with make_loop(PFedBayes(global_lr=0.05), small_federation(), "mclr", **settings):
            (record,) = caplog.records
            assert record.message.startswith("global_lr * zeta / (n prior_deviation^2) =")


# -- pFedGP: the oracle -------------------------------------------------------------------------------


def features_of(theta, x):
    return x @ theta[: CLASSES * FEATURES].reshape(CLASSES, FEATURES).T + theta[CLASSES * FEATURES :]


def gram(a, b):
    return np.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / 2)


def negative_log_evidence(theta, x, y, noise):
    """Of C processes with the same kernel on one-hot labels, a sample; analytic in theta."""
    f, Y = features_of(theta, x), np.eye(CLASSES)[y]
    A = gram(f, f) + noise * np.eye(len(y))
    sign, logdet = np.linalg.slogdet(A)
    return (np.sum(Y * np.linalg.solve(A, Y)) + CLASSES * (logdet + 1j * np.angle(sign))) / (2 * len(y))


def pfedgp(p, x0, rounds, device_lr, device_steps, noise, weights):
    def device(c, theta, t, call):
        (x, y), batches = p.data[c], p.batches(c, t, call)
        for _ in range(device_steps):
            held = next(batches)
            g = slope_of(lambda v, i=held: negative_log_evidence(v, x[i], y[i], noise), theta)
            theta = theta - device_lr[c] * (g + p.l2 * theta)
        return theta

    theta = x0
    for t in range(rounds):
        theta = p.ask(0, "server", theta, t, 0, device, weights)
    return Models(None, personal=dict.fromkeys(p.nodes[-1], theta))


def posterior(theta, x, y, inputs, noise, inducing):
    """Mean over variance of every class, at every input."""
    chosen = [k * len(y) // min(inducing, len(y)) for k in range(min(inducing, len(y)))]
    f, q, Y = features_of(theta, x[chosen]), features_of(theta, inputs), np.eye(CLASSES)[y[chosen]]
    A, cross = gram(f, f) + noise * np.eye(len(f)), gram(f, q)
    variance = 1 + noise - np.sum(cross * np.linalg.solve(A, cross), 0)
    return (cross.T @ np.linalg.solve(A, Y)) / variance[:, None]


def predictions(training: Loop, model: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """[devices, B, C] what each device says of the same inputs."""
    n = training.context.topology.size(1)
    local = LocalProblem(training.context, 1, torch.arange(n), Clock(training.round), quiet=True)
    return training.algorithm.predict(model.expand(n, -1), local, inputs.expand(n, *inputs.shape))


@pytest.mark.parametrize(("weights", "inducing"), [("samples", 4), ("uniform", 100)])
def test_pfedgp_equals_its_oracle(weights, inducing):
    case = fixed_case(2, 3, l2=0.05)
    lr = {c: 0.2 + 0.05 * c for c in range(12)}
    fields: Any = {"device_steps": 3, "noise": 0.2, "weights": weights}
    with make_loop(
        PFedGP(tuple(lr.values()), inducing=inducing, **fields), case.federation, "mclr", **case.settings
    ) as training:
        x0 = training.context.objective.initial.numpy().copy()
        run = training.run(case.rounds)
        theta = pfedgp(case.problem, x0, case.rounds, device_lr=lr, **fields).personal[0]
        assert run.personal is not None
        close(run.personal, np.stack([theta] * 12))
        assert np.abs(theta - x0).max() > 0.01
        inputs = np.random.default_rng(0).normal(size=(5, FEATURES))
        found = predictions(training, run.personal[:1], torch.from_numpy(inputs))
        expected = [posterior(theta, *case.problem.data[c], inputs, fields["noise"], inducing) for c in range(12)]
        close(found, np.stack(expected))
    assert run.global_ is None


def test_pfedgp_finds_its_own_samples_again():
    """With next to no noise the posterior goes through the labels, whatever the network."""
    federation = small_federation()
    settings: Any = {"rounds": 1, "batch_size": 4, "dtype": "float64", "batching": "eager"}
    sure = train(PFedGP(0.01, 1, noise=1e-4), federation, "mclr", **settings).history[-1]["personal"]["train"]
    vague = train(PFedGP(0.01, 1, noise=10), federation, "mclr", **settings).history[-1]["personal"]["train"]
    assert sure["accuracy"] == 1
    assert sure["loss"] < 0.2
    assert vague["accuracy"] < 0.9
    assert abs(vague["loss"] - np.log(3)) < 0.1  # as good as a guess


def test_pfedgp_predicts_from_training_data_alone():
    federation = small_federation()
    start, end = federation.span("test")
    is_test = torch.zeros(len(federation.y), dtype=torch.bool)
    for a, b in zip(start.tolist(), end.tolist(), strict=True):
        is_test[a:b] = True
    assert is_test.any()
    inputs = torch.from_numpy(np.random.default_rng(1).normal(size=(6, 2))).float()

    def says(changed: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        other: Federation = replace(federation, y=torch.where(changed, (federation.y + 1) % 3, federation.y))
        with make_loop(PFedGP(device_steps=2), other, "mclr", batch_size=4, batching="eager") as training:
            run = training.run(2)
            assert run.personal is not None
            return predictions(training, run.personal[:1], inputs), run.history[-1]["personal"]

    honest, measured = says(torch.zeros_like(is_test))
    peeked, other = says(is_test)
    assert torch.equal(honest, peeked)
    assert measured["train"] == other["train"]
    assert measured["test"] != other["test"]
    assert not torch.allclose(honest, says(~is_test)[0], atol=0.1)  # while training labels matter


def test_pfedgp_needs_classes():
    x = np.zeros((6, 2))
    for y in (np.zeros(6), np.zeros((6, 3), dtype=np.int64)):
        federation = Federation.from_arrays(x, y, np.repeat([0, 1], 3))
        with pytest.raises(ValueError, match="pFedGP classifies samples.*give one class per sample"):
            make_loop(PFedGP(), federation, torch.nn.Linear(2, 3), batching="eager")


# -- both ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [PFedBayes(device_steps=2, num_samples=2), PFedGP(device_steps=2, inducing=5)])
def test_contract(method):
    check_algorithm(method, absent="stale", dtype="float32", rounds=2)
    check_algorithm(method, batch_size=13)  # an odd width: matrices of a stack start anywhere


def test_a_new_device_adapts():
    federation = small_federation()
    run = train(PFedBayes(device_steps=2), federation, "mclr", rounds=1, batch_size=4, batching="eager")
    row = torch.cat([v.reshape(-1) for v in run.adapt(*federation.device(3)).parameters()])
    assert run.global_ is not None
    assert 0 < (row - run.global_).norm() < 1  # it starts from the global Gaussian


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        (PFedBayes, {"zeta": -1}),
        (PFedBayes, {"prior_deviation": 0}),
        (PFedBayes, {"num_samples": 0}),
        (PFedBayes, {"global_lr": 0}),
        (PFedGP, {"noise": 0}),
        (PFedGP, {"inducing": 0}),
    ],
)
def test_bad_fields(method, fields):
    with pytest.raises(ValueError, match=f"{next(iter(fields))} = .* is out of range; allowed: "):
        method(**fields)
