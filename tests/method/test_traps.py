"""Mistakes that public implementations of these methods make; each test fails on one of them, for every method."""

from typing import Any

import numpy as np
import pytest
import torch

from polytier import ALGORITHMS, Algorithm, Federation, FedProx, PerMFL, Topology, train
from polytier.algorithms import LocalTraining
from polytier.algorithms.ditto import Ditto
from polytier.algorithms.pfedme import PFedMe
from polytier.data.partition import PARTITIONS

SHORT = {"device_steps": 3, "team_rounds": 2, "local_rounds": 2, "steps": 6, "head_steps": 2, "body_steps": 2}
QUICK: dict[str, Any] = {"batching": "eager", "dtype": "float64", "batch_size": 4}
DRAWN = ("pfedbayes",)  # its weights are draws: they have gradients whatever the inputs
STILL: dict[str, Any] = {"ifca": {"num_clusters": 1}, "sfedhp": {"device_sparsity": 0, "team_sparsity": 0}}


def make(test_seed: int = 0, devices: int = 6, zeros: bool = False) -> Federation:
    """Eight samples a device for training, two each for validation and test; the test samples are of their own seed."""
    rng, test = np.random.default_rng(1), np.random.default_rng(test_seed)
    split = np.tile(np.repeat([0, 1, 2], [8, 2, 2]), devices)
    x, y = rng.normal(size=(len(split), 3)), rng.integers(0, 3, len(split))
    x[split == 2], y[split == 2] = test.normal(size=(2 * devices, 3)), test.integers(0, 3, 2 * devices)
    device = np.repeat(np.arange(devices), 12)
    return Federation.from_arrays(
        x * (not zeros), y, device, team=device // 3, split=split, cluster=device // 3, num_classes=3
    )


def method(name: str, **fields: Any) -> Algorithm:
    kind: Any = ALGORITHMS[name]
    return kind(**{k: v for k, v in SHORT.items() if k in kind.__dataclass_fields__}, **fields)


SINGLE = [name for name in ALGORITHMS if not name.startswith("mfa")]


@pytest.mark.parametrize("name", SINGLE)
def test_no_model_depends_on_test_samples(name):
    """Personalising, choosing a cluster or a round on test data."""
    one, other = (train(method(name), make(seed), "mclr", rounds=3, **QUICK) for seed in (0, 1))
    for a, b in zip((one.personal, one.team, one.global_), (other.personal, other.team, other.global_), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]
    assert not torch.equal(make(0).x, make(1).x)


@pytest.mark.parametrize("name", [n for n in SINGLE if n not in DRAWN])
def test_nothing_decays_by_itself(name):
    """A hidden weight decay moves weights whose gradient is zero: all inputs are zero, so that only biases have one."""
    run = train(method(name, **STILL.get(name, {})), make(zeros=True), "mclr", rounds=3, **QUICK)
    objective = run.context.objective
    is_weight = torch.tensor([each.endswith("weight") for each in objective.names])
    weight = torch.repeat_interleave(is_weight, torch.tensor(objective.sizes))
    for rows in (run.personal, run.team, run.global_):
        if rows is not None:
            found = rows[..., weight]
            torch.testing.assert_close(found, objective.initial[weight].expand_as(found), rtol=0, atol=1e-12)


def test_the_personal_model_of_pfedme_is_not_its_local_one():
    """After one step from w, theta = w - lr g, and the local model w' = w - eta lambda (w - theta)."""
    lr, eta, pull = 0.1, 0.01, 5.0
    run = train(PFedMe(lr, eta, 1.0, pull, 1, 1), make(), "mclr", rounds=1, **{**QUICK, "batch_size": 8})
    assert run.personal is not None
    start = run.context.objective.initial
    theta = train(LocalTraining(lr, 1), make(), "mclr", rounds=1, **{**QUICK, "batch_size": 8}).personal
    torch.testing.assert_close(run.personal, theta, rtol=0, atol=1e-12)
    torch.testing.assert_close(run.row() - start, (eta * pull * (theta - start)).mean(0), rtol=0, atol=1e-12)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("free", "pulled"),
    [
        (FedProx(0.1, 3, device_pull=0), FedProx(0.1, 3, device_pull=5.0)),
        (Ditto(0.1, 3, 0.1, 3, 0), Ditto(0.1, 3, 0.1, 3, 5.0)),
        (PerMFL(0.1, device_steps=3, device_pull=0), PerMFL(0.1, device_steps=3, device_pull=5.0)),
        (PFedMe(0.1, device_steps=3, device_pull=0), PFedMe(0.1, device_steps=3, device_pull=5.0)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_anchor_stays_where_it_was(free, pulled):
    """An anchor that is the live parameters themselves pulls nowhere."""
    a, b = (train(m, make(), "mclr", rounds=1, **QUICK) for m in (free, pulled))
    away = [
        float((r.row() if r.personal is None else r.personal).sub(r.context.objective.initial).norm()) for r in (a, b)
    ]
    assert away[1] < 0.95 * away[0]


def test_gradients_do_not_add_up():
    """Gradients that are never cleared: the second step is the plain one of a step that starts there."""
    one, two = (
        train(LocalTraining(0.1, steps), make(), "mclr", rounds=1, **{**QUICK, "batch_size": 8}).personal
        for steps in (1, 2)
    )
    again = train(LocalTraining(0.1, 1), make(), "mclr", rounds=2, **{**QUICK, "batch_size": 8}).personal
    torch.testing.assert_close(two, again, rtol=0, atol=1e-12)
    assert not torch.equal(one, two)  # type: ignore[arg-type]


def test_other_devices_are_drawn_in_every_round_and_team_round():
    """A seed that is the inner counter draws the same devices for ever."""
    data, drawn = make(devices=24), []

    class Watched(PerMFL):
        def device(self, w: Any, local: Any) -> Any:
            drawn.append(tuple(sorted(local.ids.tolist())))
            return super().device(w, local)

    topology = Topology.build(data.ids, np.arange(24) // 12)
    share: dict[str, Any] = {"device_participation": 0.25, "batching": "eager"}
    train(Watched(device_steps=1, team_rounds=4), data, "mclr", rounds=8, topology=topology, **share)
    assert len(drawn) == 32
    assert len(set(drawn)) == 32
    assert len({device for ids in drawn for device in ids}) == 24


def test_all_devices_are_evaluated_and_the_last_round_is_the_result():
    """Evaluating those who took part alone; reporting the best round on test data."""
    settings: Any = {**QUICK, "device_participation": "count:1"}
    run = train(LocalTraining(5.0, 3), make(), "mclr", rounds=5, **settings)  # such steps go up and down
    assert run.evaluation is not None
    assert run.personal is not None
    correct = []
    for i, span in enumerate(run.context.batches.federation.bounds.tolist()):
        x, y = run.context.batches.federation.x[span[2] : span[3]], run.context.batches.federation.y[span[2] : span[3]]
        scores = run.model(device=i)(x.double())
        correct.append(float((scores.argmax(1) == y).double().mean()))
    by_round = [record["personal"]["test"]["accuracy"] for record in run.history]
    assert by_round[-1] == pytest.approx(np.mean(correct))
    assert max(by_round) > by_round[-1]  # so that the two can be told apart


def test_dirichlet_shares_end():
    """Drawing again until every device has enough never ends where a draw hardly ever gives that."""
    y = np.repeat(np.arange(10), 12)
    assignment = PARTITIONS["dirichlet"](y, 60, np.random.default_rng(0), alpha=0.01, minimum=1)
    assert min(np.bincount(assignment.device, minlength=60)) >= 1
