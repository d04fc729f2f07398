"""Per-FedAvg, Ditto, APFL and FedRep equal plain NumPy loops, and are what they must be where the answer is known."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from oracle_cases import SETTINGS, STEPS, WEIGHTS, agree, cases, close
from oracles import Models, Problem, sgd
from polytier import FedAvg, Federation, check_algorithm, train
from polytier.algorithms import LocalTraining
from polytier.algorithms.apfl import APFL
from polytier.algorithms.ditto import Ditto
from polytier.algorithms.fedrep import FedRep
from polytier.algorithms.per_fedavg import PerFedAvg
from polytier.data.synthetic import quadratics
from polytier.runs.loop import make_loop
from polytier.runs.run import Run

# -- the oracles --------------------------------------------------------------------------------------


def per_fedavg(p, x0, rounds, device_lr, device_steps, weights, inner_lr, variant, hessian_step, adapt_steps):
    """Fallah et al.: a step of the gradient of f(w - alpha grad f(w)), its three gradients on batches of their own."""

    def device(c, w, t, call):
        first, second, third = (p.batches(c, t, call, stream) for stream in ("inner", "", "hessian"))
        for _ in range(device_steps):
            d = p.grad(w - inner_lr * p.grad(w, c, next(first)), c, next(second))
            curved = np.zeros_like(d)
            if variant == "hessian-free":
                held = next(third)
                ahead, back = (p.grad(w + sign * hessian_step * d, c, held) for sign in (1, -1))
                curved = (ahead - back) / (2 * hessian_step)
            w = w - device_lr[c] * (d - inner_lr * curved)
        return w

    w = x0
    for t in range(rounds):
        w = p.ask(0, "server", w, t, 0, device, weights)
    return Models(w, {c: sgd(p, c, w, rounds, 0, inner_lr, adapt_steps) for c in p.nodes[-1]})


def ditto(p, x0, rounds, device_lr, device_steps, personal_lr, personal_steps, device_pull, weights):
    """Li et al., Algorithm 1: FedAvg, and v_i pulled to the w^t that was received."""
    models = Models(x0)

    def device(c, received, t, call):
        batches, w, v = p.batches(c, t, call, "global"), received, models.personal.get(c, x0)
        for _ in range(device_steps):
            w = w - device_lr[c] * p.grad(w, c, next(batches))
        models.personal[c] = sgd(p, c, v, t, call, personal_lr[c], personal_steps, received, device_pull)
        return w

    for t in range(rounds):
        models.everywhere = p.ask(0, "server", models.everywhere, t, 0, device, weights)
    return models


def apfl(p, x0, rounds, device_lr, device_steps, alpha, adaptive, weights):
    """Deng et al., Algorithm 1, with the gradients of f(alpha v + (1 - alpha) w) in v and in alpha."""
    models, own, share = Models(x0), {}, {}

    def device(c, w, t, call):
        batches, v, a = p.batches(c, t, call), own.get(c, x0), share.get(c, alpha)
        for _ in range(device_steps):
            held = next(batches)
            g = p.grad(a * v + (1 - a) * w, c, held)
            in_v, in_w, in_alpha = a * g, p.grad(w, c, held), (v - w) @ g
            v, w = v - device_lr[c] * in_v, w - device_lr[c] * in_w
            if adaptive:
                a = min(1.0, max(0.0, a - device_lr[c] * in_alpha))
        own[c], share[c], models.personal[c] = v, a, a * v + (1 - a) * w
        return w

    for t in range(rounds):
        models.everywhere = p.ask(0, "server", models.everywhere, t, 0, device, weights)
    return models


def fedrep(p, x0, rounds, device_lr, head_steps, body_steps, weights, head):
    """Collins et al., Algorithm 1; `head` [d] says which parameters are the head's."""
    heads = {}

    def joined(c, body):
        row = x0.copy()
        row[~head] = body
        row[head] = heads.get(c, x0[head])
        return row

    def device(c, body, t, call):
        batches, row = p.batches(c, t, call), joined(c, body)
        for _ in range(head_steps):
            row[head] = row[head] - device_lr[c] * p.grad(row, c, next(batches))[head]
        for _ in range(body_steps):
            row[~head] = row[~head] - device_lr[c] * p.grad(row, c, next(batches))[~head]
        heads[c] = row[head]
        return row[~head]

    body = x0[~head]
    for t in range(rounds):
        body = p.ask(0, "server", body, t, 0, device, weights)
    return Models(None, {c: joined(c, body) for c in p.nodes[-1]})


class Layers(nn.Module):
    """Two features to three classes; the head's parameters lie between those of the body."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 3), nn.Linear(2, 2, bias=False)
        rng = np.random.default_rng(5)
        for parameter in self.parameters():
            parameter.data = torch.from_numpy(rng.normal(size=tuple(parameter.shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(self.first(x))))


HEAD = np.repeat([False, True, False], [4, 9, 4])


class LayersProblem(Problem):
    def grad(self, theta, device, index):
        x, y = self.data[device][0][index], self.data[device][1][index]
        A, H, b, S = (
            part.reshape(shape)
            for part, shape in zip(np.split(theta, [4, 10, 13]), [(2, 2), (3, 2), (3,), (2, 2)], strict=True)
        )
        u = x @ A.T
        v = np.tanh(u @ S.T)
        z = v @ H.T + b
        p = np.exp(z - z.max(1, keepdims=True))
        e = (p / p.sum(1, keepdims=True) - np.eye(3)[y]) / len(y)
        back = (e @ H) * (1 - v * v)
        parts = [(back @ S).T @ x, e.T @ v, e.sum(0), back.T @ u]
        return np.concatenate([part.ravel() for part in parts]) + self.l2 * theta


# -- against the oracles ------------------------------------------------------------------------------


@SETTINGS
@given(cases(tiers=(2,)), STEPS, WEIGHTS, st.floats(0, 1), st.booleans(), st.integers(1, 3))
def test_per_fedavg(case, steps, weights, inner_lr, hessian, adapt_steps):
    lr, lr_of = case.device_steps(0.01, 1)
    fields = {
        "device_steps": steps,
        "weights": weights,
        "inner_lr": inner_lr,
        "hessian_step": 0.1,
        "variant": "hessian-free" if hessian else "first-order",
        "adapt_steps": adapt_steps,
    }
    agree(case, PerFedAvg(device_lr=lr, **fields), per_fedavg, device_lr=lr_of, **fields)


@SETTINGS
@given(cases(tiers=(2,)), STEPS, STEPS, WEIGHTS, st.floats(0, 1))
def test_ditto(case, steps, personal_steps, weights, pull):
    lr, lr_of = case.device_steps(0.01, 1)
    own, own_of = case.device_steps(0.01, 1)
    fields = {"device_steps": steps, "personal_steps": personal_steps, "device_pull": pull, "weights": weights}
    method = Ditto(device_lr=lr, personal_lr=own, **fields)
    agree(case, method, ditto, device_lr=lr_of, personal_lr=own_of, **fields)


@SETTINGS
@given(cases(tiers=(2,)), STEPS, WEIGHTS, st.floats(0, 1), st.booleans())
def test_apfl(case, steps, weights, alpha, adaptive):
    lr, lr_of = case.device_steps(0.01, 1)
    fields = {"device_steps": steps, "weights": weights, "alpha": alpha, "adaptive": adaptive}
    agree(case, APFL(device_lr=lr, **fields), apfl, device_lr=lr_of, **fields)


@SETTINGS
@given(cases(tiers=(2,)), STEPS, STEPS, WEIGHTS)
def test_fedrep(case, head_steps, body_steps, weights):
    lr, lr_of = case.device_steps(0.01, 1)
    fields = {"head_steps": head_steps, "body_steps": body_steps, "weights": weights}
    p = case.problem
    problem = LayersProblem(p.data, p.children, p.classes, p.l2, p.seed, p.batch_size, p.participation, p.absent)
    with make_loop(FedRep(device_lr=lr, **fields), case.federation, Layers(), **case.settings) as training:
        x0 = training.context.objective.initial.numpy().copy()
        run = training.run(case.rounds)
    expected = fedrep(problem, x0, case.rounds, device_lr=lr_of, head=HEAD, **fields).personal
    assert run.global_ is None
    close(run.personal, np.stack([expected[name] for name in case.federation.ids.tolist()]))


@pytest.mark.parametrize(
    ("method", "model"),
    [
        (PerFedAvg(0.1, 2, inner_lr=0.1, variant="hessian-free"), "mclr"),
        (Ditto(0.1, 2, 0.1, 2), "mclr"),
        (APFL(0.1, 2), "mclr"),
        (FedRep(0.1, 2, 2), Layers()),
    ],
)
def test_contract(method, model):
    check_algorithm(method, model=model)


# -- where the answer is known ------------------------------------------------------------------------


def make(test_labels: int = 0) -> Federation:
    """Six devices of 4 to 13 samples; `test_labels` seeds the labels of their tests and nothing else."""
    rng, sizes, tests = np.random.default_rng(2), np.array([4, 9, 13, 5, 8, 6]), 2
    ends = np.cumsum(sizes)
    x, y = rng.normal(size=(ends[-1], 2)), rng.integers(0, 3, ends[-1])
    for end in ends:
        y[end - tests : end] = np.random.default_rng([test_labels, end]).integers(0, 3, tests)
    bounds = np.stack([ends - sizes, ends - tests, ends - tests, ends], 1)
    return Federation(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(bounds), np.arange(6), num_classes=3)


HALF: dict[str, Any] = {"rounds": 4, "batch_size": 3, "device_participation": 0.5, "batching": "eager"}
FULL: dict[str, Any] = {**HALF, "batch_size": 99}


def personal(run: Run) -> torch.Tensor:
    assert run.personal is not None
    return run.personal


def same_global(a: Run, b: Run) -> None:
    assert torch.equal(a.row(), b.row())
    assert (a.row() - a.context.objective.initial).abs().max() > 1e-2  # not two runs that stand still


@pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
def test_per_fedavg_without_inner_step_is_fedavg_to_the_bit(variant):
    a = train(PerFedAvg(0.1, 5, inner_lr=0, variant=variant), make(), "mclr", **HALF)
    same_global(a, train(FedAvg(0.1, 5), make(), "mclr", **HALF))
    assert torch.equal(personal(a), a.row().expand(6, -1))


@pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
def test_per_fedavg_on_quadratics(variant):
    """f = t'At/2 - b't: grad F = (I - alpha A)(A (w - alpha (A w - b)) - b); first-order, (I - alpha A) is left out."""
    data, alpha, beta = quadratics(4, 3, seed=1, mu=0.5, smoothness=2.0), 0.3, 0.2
    method = PerFedAvg(beta, 1, inner_lr=alpha, variant=variant)
    run = train(method, data, "quadratic", rounds=6, dtype="float64", batching="eager")
    A, b, w = data.x.numpy(), data.y.numpy(), np.zeros(3)
    for _ in range(6):
        steps = []
        for Ai, bi in zip(A, b, strict=True):
            g = Ai @ (w - alpha * (Ai @ w - bi)) - bi
            steps.append(g - alpha * Ai @ g if variant == "hessian-free" else g)
        w = w - beta * np.mean(steps, 0)
    close(run.row(), w)
    close(personal(run), w - alpha * (np.einsum("nij,j->ni", A, w) - b))


def test_personal_models_of_per_fedavg_see_no_test_data():
    one, other = (train(PerFedAvg(0.1, 5, inner_lr=0.5), make(seed), "mclr", **HALF) for seed in (0, 1))
    assert not torch.equal(make(0).y, make(1).y)
    assert torch.equal(personal(one), personal(other))
    moved = (personal(one) - one.row()).abs().amax(1)
    assert moved.min() > 1e-3  # all devices, whether they took part or not


def test_ditto_without_pull_has_locals_models_to_the_bit():
    a = train(Ditto(0.3, 3, 0.1, 5, device_pull=0), make(), "mclr", **HALF)
    assert torch.equal(personal(a), personal(train(LocalTraining(0.1, 5), make(), "mclr", **HALF)))
    b = train(Ditto(0.3, 3, 0.1, 5, device_pull=0.5), make(), "mclr", **HALF)
    assert (personal(a) - personal(b)).abs().max() > 1e-3


def test_ditto_is_pulled_to_what_it_received():
    """An anchor that is the live model gives no pull, or one to what the device has trained since."""
    once = {**FULL, "rounds": 1, "device_participation": 1.0, "dtype": "float64"}
    first, pulled, free = (
        train(Ditto(0.3, 3, 0.1, steps, pull), make(), "mclr", **once) for steps, pull in ((1, 0.7), (2, 0.7), (2, 0))
    )
    start = first.context.objective.initial
    torch.testing.assert_close(
        personal(free) - personal(pulled), 0.1 * 0.7 * (personal(first) - start), rtol=0, atol=1e-12
    )
    assert (personal(first) - start).abs().max() > 1e-2
    again = train(Ditto(0.9, 7, 0.1, 2, 0.7), make(), "mclr", **once)
    assert torch.equal(personal(pulled), personal(again))  # whatever became of its copy of the global model


def test_the_two_models_of_ditto_do_not_mix():
    """Gradients that are never cleared would carry the one's into the other's steps."""
    a = train(Ditto(0.3, 3, 0.1, 5, 0.7), make(), "mclr", **HALF)
    same_global(a, train(Ditto(0.3, 3, 0.9, 1, 0.1), make(), "mclr", **HALF))
    b = train(Ditto(0.3, 3), make(), "mclr", **FULL)
    same_global(b, train(FedAvg(0.3, 3), make(), "mclr", **FULL))  # one batch: another stream draws the same


def test_apfl_with_its_own_model_alone_is_local_to_the_bit():
    a = train(APFL(0.1, 5, alpha=1, adaptive=False), make(), "mclr", **HALF)
    assert torch.equal(personal(a), personal(train(LocalTraining(0.1, 5), make(), "mclr", **HALF)))


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_global_model_of_apfl_is_fedavgs_to_the_bit(adaptive):
    a = train(APFL(0.1, 5, 0.3, adaptive, "samples"), make(), "mclr", **HALF)
    same_global(a, train(FedAvg(0.1, 5), make(), "mclr", **HALF))


def test_apfl_learns_its_alpha():
    """Each device its own, in [0, 1] however long the steps; absent devices keep theirs."""
    with make_loop(APFL(2.0, 5), make(), "mclr", **{k: v for k, v in HALF.items() if k != "rounds"}) as training:
        training.run(12)
        alpha = training.context.memory.read(1, "alpha", torch.arange(6), torch.full((6, 1), 0.5))
    assert alpha.min() >= 0
    assert alpha.max() <= 1
    assert len(alpha.unique()) > 2
    assert ((alpha == 0) | (alpha == 1)).any()  # it was clipped


def test_fedrep_of_a_head_alone_is_local_to_the_bit(caplog):
    with caplog.at_level(logging.WARNING, "polytier"):
        a = train(FedRep(0.1, 5, 2), make(), "mclr", **HALF)
    assert "nothing is shared" in caplog.text
    assert torch.equal(personal(a), personal(train(LocalTraining(0.1, 5), make(), "mclr", **HALF)))


def test_bodies_travel_and_heads_stay():
    with make_loop(FedRep(0.1, 2, 2), make(), Layers(), batch_size=3, batching="eager", codec="float64") as training:
        start = training.context.objective.initial
        run = training.run(2)
    head = torch.from_numpy(HEAD)
    assert [r["bytes"]["server-device"] for r in run.history if r["round"]] == [{"down": 6 * 64, "up": 6 * 64}] * 2
    bodies, heads = personal(run)[:, ~head], personal(run)[:, head]
    assert torch.equal(bodies, bodies[:1].expand(6, -1))
    assert not torch.equal(bodies[0], start[~head])
    assert len(heads.unique(dim=0)) == 6


@pytest.mark.parametrize(
    ("method", "gradients"),
    [
        (PerFedAvg(0.1, 5), 10),
        (PerFedAvg(0.1, 5, variant="hessian-free"), 20),
        (Ditto(0.1, 5, 0.1, 3), 8),
        (APFL(0.1, 5), 10),
        (FedRep(0.1, 5, 3), 8),
    ],
)
def test_every_gradient_is_counted(method, gradients):
    with make_loop(method, make(), "mclr", batch_size=3, batching="eager") as training:
        training.run(2)
        assert training.context.device_steps == 2 * 6 * gradients


# -- advice -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields", "advice"),
    [
        (PerFedAvg, {"variant": "exact"}, "allowed: first-order | hessian-free"),
        (PerFedAvg, {"inner_lr": -0.1}, "inner_lr = -0.1 is out of range; allowed: >= 0"),
        (PerFedAvg, {"hessian_step": 0}, "hessian_step = 0 is out of range; allowed: > 0"),
        (PerFedAvg, {"adapt_steps": 0}, "adapt_steps = 0 is out of range; allowed: >= 1"),
        (Ditto, {"device_pull": -1}, "device_pull = -1 is out of range; allowed: >= 0"),
        (Ditto, {"personal_steps": 0}, "personal_steps = 0 is out of range; allowed: >= 1"),
        (APFL, {"alpha": 1.5}, "alpha = 1.5 is out of range; allowed: >= 0, <= 1"),
        (APFL, {"adaptive": 1}, "adaptive = 1 is not true or false"),
        (FedRep, {"body_steps": 0}, "body_steps = 0 is out of range; allowed: >= 1"),
    ],
)
def test_bad_fields(kind, fields, advice):
    with pytest.raises(ValueError) as error:
        kind(**fields)
    assert advice in str(error.value)


def test_fedrep_needs_a_head():
    with pytest.raises(
        ValueError, match=r"named head\.\*, got theta; call the model's last layer `head`, or use FedAvg"
    ):
        make_loop(FedRep(), quadratics(3, 2), "quadratic", batching="eager")
