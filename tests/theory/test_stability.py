"""What is said about divergence before a run, and what the run then does.

`python tests/theory/test_stability.py` prints the table of docs/theory.md.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from polytier import Diverged, Federation, PerMFL, PFedMT, Topology, build_federation
from polytier.algorithms import MFARR
from polytier.data.synthetic import quadratics
from polytier.runs.divergence import initial_loss
from polytier.runs.loop import Loop, make_loop
from polytier.theory import stability
from polytier.theory.curvature import quadratic_matrices
from polytier.theory.linearised import least_eigenvalue, round_of
from polytier.theory.stability import MAY, WILL, warnings

ROUNDS = 20
AUTHORS: dict[str, Any] = {"device_pull": 5.0, "team_pull": 5.0, "server_lr": 0.99}
STEEP: dict[str, Any] = {"device_lr": 0.1, "team_lr": 0.15, "device_pull": 5.0, "team_pull": 5.0, "device_steps": 3}
HARD: dict[str, Any] = {"device_lr": 0.2, "team_lr": 0.3, "device_pull": 3.0, "team_pull": 3.0} | {
    "device_steps": 3,
    "team_rounds": 3,
}
# data, model, l2, method, what is said, whether the loss is above that of the initial model after ROUNDS rounds
CASES: list[tuple[str, str, float, PerMFL, str, bool]] = [
    ("quadratics", "quadratic", 0, PerMFL(**HARD, server_lr=2.0), "", False),
    ("quadratics", "quadratic", 0, PerMFL(**HARD, server_lr=3.0), WILL, True),
    ("quadratics", "quadratic", 0, PerMFL(device_lr=2.0, device_steps=3), WILL, True),
    ("quadratics", "quadratic", 0, PerMFL(**HARD | {"team_lr": 0.5, "team_rounds": 10}), WILL, True),
    ("quadratics", "quadratic", 0, PFedMT(device_lr=0.05, device_steps=3, team_rounds=10), "", False),
    (
        "quadratics",
        "quadratic",
        0,
        PFedMT(device_lr=0.2, team_pull=5.0, server_lr=2.0, device_steps=3, team_rounds=10),
        WILL,
        True,
    ),
    ("digits", "mclr", 0, PerMFL(), "", False),
    ("digits", "mclr", 0, PFedMT(), "", False),
    ("digits", "mclr", 0, PerMFL(**AUTHORS), "", False),
    ("digits", "mclr", 0, PerMFL(server_lr=0.9, team_pull=3.0), "", False),
    ("digits", "mclr", 0, PerMFL(**STEEP, server_lr=3.0), "", False),
    ("sensors", "mclr", 0, PerMFL(), "", False),
    ("sensors", "mclr", 0, PerMFL(device_lr=0.05), "", False),
    ("digits", "dnn:16", 0, PerMFL(), "", False),
    ("digits", "mclr", 1.0, PerMFL(**STEEP, server_lr=5.0), MAY, True),
    ("digits", "mclr", 0.1, PerMFL(**STEEP, server_lr=20.0), MAY, True),
    ("digits", "dnn:16", 0.1, PerMFL(**STEEP, server_lr=20.0), MAY, True),
    ("regression", "linear", 0, PerMFL(**STEEP, server_lr=0.6), "", False),
    ("regression", "linear", 0, PerMFL(**STEEP, server_lr=4.0), MAY, True),
    # bounded gradients: the loss rises to 20, then falls
    ("digits", "mclr", 0, PerMFL(**STEEP, server_lr=20.0), MAY, False),
    # an eigenvalue of +2: nothing is said before the run
    ("digits", "mclr", 0, PerMFL(device_steps=3, team_lr=0.5, team_pull=5.0), "", True),
]


@cache
def data_of(name: str) -> Federation:
    rng = np.random.default_rng(0)
    if name == "quadratics":
        return quadratics(6, 2, seed=5, mu=0.5, smoothness=4.0)
    if name == "digits":
        return build_federation("digits", devices=8, teams=2)
    device = np.arange(480) % 6
    if name == "regression":
        x = rng.normal(0, 1, (480, 5)).astype(np.float32)
        y = x @ np.arange(1.0, 6.0, dtype=np.float32) + rng.normal(0, 0.1, 480).astype(np.float32)
        return Federation.from_arrays(x, y, device, device % 2)
    # as features of motion sensors: from -1 to 1, most of them near -1, so that one direction is very steep
    y = rng.integers(0, 6, 480)
    x = np.clip(rng.normal(0, 0.4, (6, 200))[y] + rng.normal(-0.8, 0.3, (480, 200)), -1, 1).astype(np.float32)
    return Federation.from_arrays(x, y, device, device % 2)


def loop_of(data: str, model: str, l2: float, method: Any, **more: Any) -> Loop:
    torch.manual_seed(0)
    module: Any = torch.nn.Linear(5, 1) if model == "linear" else model
    if data == "quadratics":
        federation = data_of(data)
        more = {"topology": Topology.build(federation.ids, np.arange(6) % 2), **more}
    return make_loop(method, data_of(data), module, l2=l2, eval_every=ROUNDS, **more)


def observed(loop: Loop) -> tuple[bool, str]:
    """Whether the loss of the global model is above that of the initial one, and the loss as text."""
    first = initial_loss(loop.context, loop.state, 0)
    try:
        last = loop.run(ROUNDS).history[-1]["global"]["train"]["loss"]
    except Diverged as error:
        return True, f"stopped in round {error.round}"
    return last > first, f"{first:.3g} to {last:.3g}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{type(case[3]).__name__}-{case[4][:4]}")
def test_what_is_said_is_what_happens(case):
    *setting, said, grows = case
    with loop_of(*setting) as loop:
        lines = warnings(loop)
        assert [line.split(":")[0] for line in lines] == ([said] if said else [])
        assert observed(loop)[0] is grows


@pytest.mark.parametrize("case", [case for case in CASES if case[4]])
def test_the_advice_is_good(case):
    """With the advised steps nothing is said any more, and the run converges."""
    data, model, l2, method, _, _ = case
    with loop_of(data, model, l2, method) as loop:
        (line,) = warnings(loop)
    fields = dict(part.split("=") for part in line.split("; try ")[1].split(", "))
    calmer = type(method)(**{**vars(method), **{name: float(value) for name, value in fields.items()}})
    with loop_of(data, model, l2, calmer) as loop:
        assert warnings(loop) == []
        assert observed(loop)[0] is False


def test_the_linearised_round_is_that_of_quadratics():
    data = data_of("quadratics")
    method = PerMFL(**HARD, server_lr=3.0)
    with loop_of("quadratics", "quadratic", 0, method, dtype="float64") as loop:
        context, R = loop.context, stability.round_matrix(loop.context, method)
        function, x = round_of(context), torch.ones(2, dtype=torch.float64)
        moved = (function(2 * x) - function(x)).numpy()
        np.testing.assert_allclose(moved, R @ np.ones(2), rtol=1e-9)
        assert least_eigenvalue(context) == pytest.approx(np.linalg.eigvalsh(R)[0], rel=1e-3)
        assert len(quadratic_matrices(context)) == len(data)


def test_linearising_leaves_no_trace():
    """A run after the warnings has the bits of one without."""
    found = []
    for say in (False, True):
        with loop_of("digits", "mclr", 0, PerMFL(**STEEP, server_lr=20.0)) as loop:
            if say:
                assert warnings(loop)
            run = loop.run(2)
            assert run.global_ is not None
            found.append((run.global_, loop.context.device_steps, loop.ledger.total()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def test_will_is_said_of_constant_rounds_only():
    for more in ({"device_lr": "2/(10+t)"}, {"team_lr": {"team": "3/(10+t)"}}):
        method = PerMFL(**{**HARD, **more}, server_lr=3.0)
        with loop_of("quadratics", "quadratic", 0, method) as loop:
            assert warnings(loop)[0].startswith(MAY)
    with loop_of("quadratics", "quadratic", 0, PerMFL(**HARD, server_lr=3.0), device_participation="0.5") as loop:
        assert warnings(loop)[0].startswith(MAY)


def test_a_first_round_that_overflows_may_diverge():
    method = PerMFL(device_lr=10.0, device_pull=50.0, device_steps=20)
    with loop_of("digits", "mclr", 0, method) as loop:
        (line,) = warnings(loop)
    assert line.startswith("may diverge: at the initial model, a round multiplies errors by up to -inf; try device_lr=")


def test_inputs_of_zero_are_no_reason_to_stop():
    rng = np.random.default_rng(0)
    data = Federation.from_arrays(
        np.zeros((12, 3), np.float32), rng.normal(size=12).astype(np.float32), np.arange(12) % 3
    )
    with make_loop(PerMFL(), data, torch.nn.Linear(3, 1, bias=False)) as loop:
        assert warnings(loop) == []


def test_large_rounds_are_not_linearised(monkeypatch):
    monkeypatch.setattr(stability, "QUICK_WORK", 1)
    monkeypatch.setattr(stability, "least_eigenvalue", None)
    with loop_of("digits", "mclr", 0, PerMFL(**STEEP, server_lr=20.0)) as loop:
        assert warnings(loop) == []


def test_several_models_are_named():
    methods = MFARR({"calm": PerMFL(**HARD), "wild": PerMFL(**HARD, server_lr=3.0)})
    with loop_of("quadratics", "quadratic", 0, methods) as loop:
        (line,) = warnings(loop)
    assert line.startswith("wild: ")


def table() -> str:
    """The table of docs/theory.md."""
    lines = ["| data, model | method | said before the run | global training loss |", "|---|---|---|---|"]
    for data, model, l2, method, _, _ in CASES:
        with loop_of(data, model, l2, method) as loop:
            said = "; ".join(warnings(loop)).replace("at the initial model, ", "") or "-"
            name = f"{type(method).__name__}"
            fields = [f"{k}={v:g}" for k, v in vars(method).items() if v != getattr(type(method)(), k)]
            term = f", l2 {l2:g}" if l2 else ""
            lines.append(f"| {data}, {model}{term} | {' '.join([name, *fields])} | {said} | {observed(loop)[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
