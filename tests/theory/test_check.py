"""`polytier check`: constants of the data, conditions of the theorems, and runs that behave as it says."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commands import call
from polytier import CoBo, FedAvg, Federation, PerMFL, PFedMT, SFedHP, Topology, theory
from polytier.algorithms import MFARR, Ditto, MFARand
from polytier.data.synthetic import quadratic_clusters, quadratics
from polytier.runs.loop import Loop, make_loop
from polytier.runs.smoothness import first_vector, hessian_product, quick_smoothness
from polytier.theory.check import check_training
from polytier.theory.curvature import curvature, extremes, softmax_smoothness
from polytier.theory.formulas import condition, prediction, with_derived
from polytier.theory.measure import Trail, measure
from polytier.theory.permfl import conditions as permfl_conditions
from polytier.theory.permfl import predictions as permfl_predictions
from polytier.theory.round_map import Level, multiplier
from polytier.theory.stability import STABLE, WILL, round_matrix, spectral_radius, warnings
from polytier.theory.stability import settings as settings_of

TEAM = np.array([0, 0, 1, 1, 1, 2, 2, 0])


def classes(seed: int = 0, devices: int = 4, features: int = 3, num_classes: int = 3) -> Federation:
    rng = np.random.default_rng(seed)
    n = 20 * devices
    x = rng.normal(0.4, 1, (n, features)).astype(np.float32)
    return Federation.from_arrays(x, rng.integers(0, num_classes, n), device=np.arange(n) % devices)


def training(method: Any, data: Any, model: Any = "quadratic", team: Any = None, **more: Any) -> Loop:
    topology = None if team is None else Topology.build(data.ids, team[: len(data)])
    usual: dict[str, Any] = {"dtype": "float64", "batching": "stacked"}
    return make_loop(method, data, model, topology=topology, **usual | more)


def by_formula(report: Any) -> dict[str, Any]:
    return {c.formula: c for c in report.conditions}


# -- curvature ----------------------------------------------------------------------------------------


def test_smoothness_of_softmax_regression_is_the_smallest_that_holds():
    with training(FedAvg(), classes(), "mclr", l2=0.01) as t:
        found, objective = curvature(t.context), t.context.objective
        assert (found.kind, found.mu) == ("exact", 0.01)
        tops = []
        for k in range(4):
            x, y = t.context.batches.federation.device(k)
            x, weight = x.double(), torch.full((len(x),), 1 / len(x), dtype=torch.float64)

            def largest(row, x=x, y=y, weight=weight):
                hessian = torch.autograd.functional.hessian(lambda r: objective.row_loss(r, x, y, weight), row)
                return float(torch.linalg.eigvalsh(hessian)[-1])

            bound = softmax_smoothness(x, seed=0) + 0.01
            X = np.concatenate([x.numpy(), np.ones((len(x), 1))], 1)
            assert bound == pytest.approx(0.5 * np.linalg.eigvalsh(X.T @ X / len(X))[-1] + 0.01, rel=1e-6)
            generator = torch.Generator().manual_seed(k)
            for scale in (0.1, 1.0, 5.0):
                row = scale * torch.randn(objective.dimension, generator=generator, dtype=torch.float64)
                assert largest(row) < bound
            biased = torch.zeros(objective.dimension, dtype=torch.float64)
            biased[-3:] = torch.tensor([40.0, 40.0, -40.0])  # p = (1/2, 1/2, 0) for all samples
            assert largest(biased) == pytest.approx(bound, rel=1e-6)
            tops.append(bound)
    assert found.range == pytest.approx((min(tops), max(tops)))
    assert found.smoothness == pytest.approx(max(tops))


def test_curvature_of_quadratics_is_that_of_their_matrices():
    data = quadratics(5, 4, seed=2, mu=0.3, smoothness=2.0)
    with training(FedAvg(), data, l2=0.5) as t:
        found = curvature(t.context)
    values = np.linalg.eigvalsh(data.x.numpy()) + 0.5
    assert (found.mu, found.smoothness, found.kind) == (
        pytest.approx(values.min()),
        pytest.approx(values.max()),
        "exact",
    )


def test_power_iteration_finds_both_ends_of_a_hessian():
    with training(FedAvg(), classes(), "dnn:4") as t:
        context, found = t.context, curvature(t.context)
        start = first_vector(context.objective.dimension, 0, context.objective.initial)
        product = hessian_product(context, 1)
        dense = torch.stack([product(e) for e in torch.eye(len(start), dtype=torch.float64)])
        values = torch.linalg.eigvalsh(dense)
        low, high = extremes(product, start, 1e-9)
    assert (low, high) == (pytest.approx(float(values[0]), rel=1e-4), pytest.approx(float(values[-1]), rel=1e-4))
    assert low < 0 < high
    assert found.kind == "estimate"
    assert found.mu < 0 < found.smoothness
    assert "4 of 4 devices" in found.how


def test_before_a_run_only_what_is_cheap():
    with training(FedAvg(), classes(), "dnn:4") as t:
        assert quick_smoothness(t.context) == pytest.approx(curvature(t.context).smoothness, rel=0.05)


# -- rules and theorems -------------------------------------------------------------------------------


def test_a_rule_is_computed_as_it_reads():
    c = condition("here", "beta <= 1 / (4 * lam)", {"beta": 0.5, "lam": 0.25})
    assert (c.formula, c.value, c.allowed, c.holds) == ("beta <= 1 / (4 * lambda)", 0.5, "<= 1", True)
    assert condition("", "a >= 1 / b", {"a": 2.0, "b": 0}).holds is False  # infinite
    assert condition("", "a <= b", {"a": 0.1 + 0.2, "b": 0.3}).holds is True  # but for rounding
    assert condition("", "a < b", {"a": 0.3, "b": 0.3}).holds is False
    open_ = condition("", "a < sqrt(b) + lam1", {"a": 1.0})
    assert (open_.holds, open_.missing, open_.value) == (None, ("b", "lambda1"), 1.0)
    assert condition("", "K >= a", {"K": 3, "a": np.array([2.0, 4.0])}).holds is False  # the worst team
    assert condition("", "a > log(b)", {"a": 1.0, "b": -1.0}).holds is None
    known = with_derived({"a": 2.0}, c="a * b", d="c + 1", e="a ** 2")
    assert known["e"] == 4
    assert prediction("", "", "d * e", known).missing == ("b",)


def test_permfl_theorem_1_by_hand():
    known = {"alpha": 0.1, "eta": 0.05, "beta": 0.01, "lam": 3.0, "gamma": 7.0, "mu_f": 1.0, "L_f": 1.4, "K": 5, "L": 9}
    found = {c.formula: c for c in permfl_conditions({**known, "T": 10})}
    mu = 3 * 7 / (3 + 7 + 21)
    assert found["beta <= mu_Ft / (4 * gamma)"].allowed == f"<= {mu / 28:.4g}"
    assert found["eta <= 1 / (2 * (lambda + gamma))"].holds is True  # 0.05
    assert found["alpha <= 1 / (L_f + lambda)"].allowed == f"<= {1 / 4.4:.4g}"
    assert found["gamma > 2 * lambda"].holds
    assert found["lambda > 2 * L_f"].holds
    waiting = [c for c in found.values() if c.holds is None]
    assert [c.where for c in waiting] == ["(61)", "(58)"]
    assert waiting[0].missing == ("Gamma5", "Gamma4")
    rates = permfl_predictions({**known, "T": 10})
    assert rates[0].value == pytest.approx(1 - 0.01 * mu / 2)
    assert rates[1].value == pytest.approx(theory.rate(0.01, mu, 10))
    assert rates[2].note.startswith("as printed; false")
    not_convex = {c.formula: c for c in permfl_conditions({**known, "mu_f": 0.0, "T": 10})}
    assert not_convex["beta <= 1 / (4 * gamma)"].allowed == f"<= {1 / 28:.4g}"
    assert "eta <= 1 / (lambda + gamma)" in not_convex
    promise = permfl_predictions({**known, "mu_f": 0.0, "T": 10, "gap": 2.0, "nu": 0.5})
    assert [p.value for p in promise] == pytest.approx([2 * 2 / 0.1 + 49 * 0.5, 2 / 0.1])


def test_sfedhp_theorems_by_hand():
    from polytier.theory import sfedhp

    known = {
        "eta1": 0.01,
        "eta2": 0.1,
        "beta": 2.0,
        "R": 5,
        "lam1": 3.0,
        "lam2": 4.0,
        "gamma1": 0.01,
        "gamma2": 0.02,
        "rho": 0.01,
        "T": 10,
        "mu": 1.0,
        "L": 2.0,
        "delta": 0.1,
        "Delta0": 3.0,
        "sigma_F1": 0.5,
    }
    L_F, mu_F, eta, bar = 4 + 2.0, 12 / 19, 0.1, 12 / 7
    convex = sfedhp.conditions(known)
    assert convex[0].value == pytest.approx(eta)
    assert convex[0].allowed == f"<= {1 / (18 * (3 + 128 * L_F / (mu_F * 2))):.4g}"
    assert convex[1].allowed == f"<= {1 / 6:.4g}"
    M1 = 8 * 0.01 * bar**2 / mu_F
    M2 = 6 * (1 + 64 * L_F / (mu_F * 2)) * 0.25 + 128 * L_F * 0.01 * bar**2 / (mu_F * 2)
    assert sfedhp.predictions(known)[0].value == pytest.approx(3 / (eta * 10) + M1 + eta * M2)
    found = {c.formula: c for c in sfedhp.conditions({**known, "mu": 0.0})}
    assert found["lambda2 > 4 * L + 4 * gamma1 / rho"].allowed == "> 12"
    third = found["lambda >= sqrt(16 * (L + gamma1 / rho) ^ 2 + 1)"]
    assert (third.value, third.allowed) == (pytest.approx(12 / 5), f">= {math.sqrt(145):.4g}")
    assert not third.holds
    assert "printed as <=" in third.note
    assert sfedhp.predictions({**known, "mu": 0.0})[0].missing == ("Delta_F", "sigma_l")
    lam, ball = 12 / 5, 0.02**2 * 30**2 / bar**2 + 0.01
    own = sfedhp.predictions({**known, "d_s": 30, "gap_T": 0.5})[1]
    assert (own.where, own.value) == (
        "Theorem 2 (b)",
        pytest.approx((L_F + lam**2) / (lam**2 * mu_F) * 0.5 + 0.25 / lam**2 + ball),
    )
    rough = {**known, "mu": 0.0, "lam1": 30.0, "lam2": 40.0, "d_s": 30, "Delta_F": 2.0, "sigma_l": 0.1}
    global_, own = sfedhp.predictions(rough)
    noise = 24**2 / (24**2 - 16 * 9) * 0.01
    bar = 1200 / 70
    assert own.value == pytest.approx((global_.value or 0) + noise / 24**2 + 0.02**2 * 30**2 / bar**2 + 0.01)
    assert "does not give" in own.note


def test_mfa_theorems_by_hand():
    from polytier.theory import mfa

    known = {"beta": 3.0, "gamma": 50.0, "mu": 0.5, "L": 4.0, "E": 2, "M": 2, "N": 5, "T": 100, "every": 1, "left": 0.5}
    assert [c.holds for c in mfa.conditions(known, frames=False)] == [True, True, True, True, True]
    assert mfa.conditions({**known, "M": 3}, frames=False)[3].holds is False
    alone = mfa.conditions({**known, "E": 1, "Gamma": 0.25, "G": 1.0}, frames=False)[4]
    assert (alone.allowed, alone.holds) == ("> 7", False)
    assert mfa.conditions(known, frames=False)[1].allowed == "> 47"
    rr = mfa.conditions({**known, "G": 1.0, "beta1": 1.0, "beta2": 3.0, "V": 4.0}, frames=True)
    assert [c.allowed for c in rr] == ["> 2", "> 11", "== 2", "<= 0.5"]
    assert [c.holds for c in rr] == [True, True, False, True]
    assert mfa.conditions(known, frames=True)[3].missing == ("V", "beta1", "beta2", "G")
    given_ = {**known, "G": 1.0, "beta1": 1.0, "beta2": 3.0, "V": 4.0, "Gamma": 0.25, "Delta1": 2.0}
    B, C = 6 * 4 * 0.25 + 16 / 5 + 8, 1 / 4 * 4
    assert mfa.predictions(given_, frames=False)[0].value == pytest.approx(math.sqrt(max(18 * (B + C), 204) / 150))
    gain = mfa.predictions(given_, frames=False)[1]
    assert (gain.where, gain.value) == ("Theorem 3", pytest.approx(2 * max(18 * B, 204) / max(18 * (B + C), 204)))
    phi = 3 * 2 / 2 + max(18 * (4 * 4 / 4 + 8 + 4), 51 * 2)
    assert mfa.predictions(given_, frames=True)[0].value == pytest.approx(phi / 100)
    assert mfa.predictions(known, frames=True)[0].missing == ("G", "V", "Delta1")
    full = {**known, "left": 0.0}
    last = mfa.conditions(full, frames=True)[3]
    assert (last.where, last.holds) == ("Corollary 1", True)
    smaller = mfa.predictions({**given_, "left": 0.0, "V": 4.0}, frames=True)[0]
    phi = 3 * 2 / 2 + max(18 * (4 * 4 / 4 + 8), 51 * 2)
    assert (smaller.where, smaller.value) == ("Corollary 1", pytest.approx(phi / 100))


def test_cobo_theorem_by_hand():
    from polytier.theory import cobo

    known = {"eta": 0.1, "rho": 0.5, "n": 12, "T": 100, "b": 8, "c": 4, "L": 1.0, "sigma": 2.0, "gap": 1.0, "M_ij": 0.3}
    found = {c.formula: c for c in cobo.conditions(known)}
    assert found["M_ij ^ 2 < 1 / 5"].holds
    assert not found["M_ij < 1 / 5"].holds
    assert found["eta * rho * n < 2"].value == pytest.approx(0.6)
    assert found["b >= 2 / c ^ 2 * 2 * L * eta * (c - 2) * sigma ^ 2"].allowed == ">= 0.2"
    assert found["rho >= sqrt(3) * L / c"].allowed == f">= {math.sqrt(3) / 4:.4g}"
    assert found["eta <= 1 / (2 * sqrt(3) * L)"].holds
    assert found["eta <= 2 / (sigma * sqrt(L * T)) * sqrt(gap)"].allowed == "<= 0.1"
    assert found["eta <= 1 / (2 * rho * c)"].allowed == "<= 0.25"
    assert found["zeta ^ 2 >= sum_ik ^ 2"].missing == ("zeta", "sum_ik")
    assert [p.value for p in cobo.predictions(known)] == pytest.approx([6 * 0.09 / 4 * 0.2, 0.6, 0.8])


# -- what a round does --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [PerMFL, PFedMT])
def test_the_map_of_a_round_is_what_a_run_does(method):
    """Devices of different curvature, two tiers of teams, a step a team: moves of x follow the matrix."""
    data = quadratics(8, 3, seed=4, mu=0.2, smoothness=3.0)
    topology = Topology.build(data.ids, TEAM, np.array([0, 0, 1]))
    lr = {"team1": 0.2, "team2": (0.1, 0.2, 0.3)}
    algorithm = method(0.1, lr, 0.9, 0.8, {"team1": 1.1, "team2": 1.7}, 3, {"team1": 2, "team2": 4})
    trail = Trail()
    with make_loop(algorithm, data, "quadratic", topology=topology, dtype="float64", batching="stacked") as t:
        R, radius = round_matrix(t.context, algorithm), spectral_radius(t.context, algorithm)
        assert settings_of(t.context, algorithm)[3][1] == Level(0.2, 1.1, 2)
        t.run(4, [trail])
    moves = np.diff(np.array(trail.x[""]), axis=0)
    np.testing.assert_allclose(moves[1:], moves[:-1] @ R.T, rtol=1e-9, atol=1e-14)
    assert radius == pytest.approx(np.abs(np.linalg.eigvals(R)).max())


def test_multiplier_of_a_flat_tree_and_of_overflow():
    flat = multiplier([0.5, 2.0], 0.1, 0.8, 3, [], 0.9)
    t = [(0.8 + a * (1 - 0.1 * (a + 0.8)) ** 3) / (a + 0.8) for a in (0.5, 2.0)]
    assert flat == pytest.approx([1 - 0.9 * 0.8 * (1 - v) for v in t])
    assert not np.isfinite(multiplier([100.0], 1.0, 1.0, 500, [Level(1.0, 1.0, 50)], 1.0)).all()


def test_divergence_on_quadratics_is_foretold_exactly():
    data = quadratics(6, 2, seed=5, mu=0.5, smoothness=4.0)
    for beta, will in ((2.0, False), (3.0, True)):
        assert abs(theory.round_multiplier(4.0, 0.2, 0.3, beta, 3.0, 3.0, 3, 3)) > 1.4  # if all shared the steepest
        with training(PerMFL(0.2, 0.3, beta, 3.0, 3.0, 3, 3), data, team=TEAM, eval_every=20) as t:
            report = check_training(t, 20, {})[0]
            measure(t, 20, [report])
            assert [line.split(":")[0] for line in warnings(t)] == ([WILL] if will else [])
        assert report.verdict == (WILL if will else STABLE)
        assert report.measured is not None
        assert (report.measured["factor"] > 1) == will


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.floats(0.5, 5), st.floats(1, 1.4), st.integers(1, 4), st.integers(0, 99), st.integers(3, 6))
def test_measured_rate_is_never_worse_than_62(mu, ratio, dimension, seed, rounds):
    data = quadratics(5, dimension, seed=seed, mu=mu, smoothness=mu * ratio)
    lam = 2.02 * mu * ratio
    A, b, team = data.x.numpy(), data.y.numpy(), TEAM[:5]
    curved = np.linalg.eigvalsh(A)
    steps = theory.admissible_steps(curved.min(), curved.max(), lam, 2.02 * lam)
    K, L = theory.loops(A, b, team, np.zeros(dimension), rounds, lam, 2.02 * lam, steps)
    with training(PerMFL(*steps[:3], lam, 2.02 * lam, L, K), data, team=team, eval_every=rounds) as t:
        report = check_training(t, rounds, {})[0]
        measure(t, rounds, [report])
    assert all(c.holds for c in report.conditions)
    assert report.verdict == STABLE
    found = report.measured
    assert found is not None
    assert found["what"] == "|x^t - x*|^2"
    assert (found["where"], found["keeps"]) == ("(62)", True)
    assert found["factor"] <= report.predictions[0].value
    short = replace(t.algorithm, team_rounds=K - 1)  # type: ignore[type-var]
    with training(short, data, team=team) as t:
        assert by_formula(check_training(t, rounds, {})[0])[report.conditions[6].formula].holds is False


def test_l_is_that_of_the_k_that_is_asked_for():
    data = quadratics(5, 2, seed=1, mu=1.0, smoothness=1.2)
    lam, (A, b), team = 2.5, (data.x.numpy(), data.y.numpy()), TEAM[:5]
    steps = theory.admissible_steps(1.0, 1.2, lam, 2.1 * lam)
    K, L = theory.loops(A, b, team, np.zeros(2), 5, lam, 2.1 * lam, steps)
    for longer in (0, 50):
        with training(PerMFL(*steps[:3], lam, 2.1 * lam, L, K + longer), data, team=team) as t:
            conditions = {c.where: c for c in check_training(t, 5, {})[0].conditions}
        assert conditions["(58)"].holds
        assert float(conditions["(58)"].allowed.removeprefix(">= ")) == pytest.approx(L, abs=1)
        assert "the K that (61) asks for" in conditions["(58)"].note


@pytest.mark.parametrize("good", [True, False])
def test_gradients_of_phi_keep_to_63_where_its_conditions_hold(good):
    data, team = classes(1, 6), TEAM[:6]
    with training(PerMFL(), data, "mclr", team=team) as t:
        smoothness = curvature(t.context).smoothness
    lam = 2.1 * smoothness
    gamma = 2.1 * lam
    steps = (1 / (smoothness + lam), 1 / (lam + gamma), 1 / (4 * gamma))
    method = PerMFL(*steps, lam, gamma, device_steps=20, team_rounds=30)
    if not good:
        method = replace(method, server_lr=1.99 / gamma, team_rounds=1)
    with training(method, data, "mclr", team=team, batch_size=1000) as t:
        report = check_training(t, 30, {})[0]
        measure(t, 30, [report])
    where = {c.where for c in report.conditions}
    assert "Theorem 2" in where
    assert all(c.holds for c in report.conditions) == good
    found = report.measured
    assert found is not None
    assert found["where"] == "(63)"
    if good:
        assert found["keeps"]
        assert found["values"][-1] < found["values"][0] / 1.1
        assert found["bound"][-1] == pytest.approx(found["bound"][0] / 30, rel=1e-3)  # the teams' error is small
        assert found["bound"][0] <= 2 * math.log(4) / steps[2]
    else:
        assert found["bound"][-1] > found["bound"][0] / 30 * 1.01  # one team round solves nothing


@pytest.mark.parametrize(
    ("scheme", "step", "where"), [(MFARR, "1.5/(9+t//2)", "Corollary 1"), (MFARand, "1.5/(30+t)", "Theorem 1")]
)
def test_models_of_mfa_keep_to_their_bounds(scheme, step, where):
    data = quadratics(6, 3, seed=2, mu=1.0, smoothness=4.0)
    models = {name: FedAvg(step, 3) for name in ("a", "b")}
    with training(scheme(models), {"a": data, "b": data}) as t:
        reports = check_training(t, 200, {})
        measure(t, 200, reports)
    for report in reports:
        assert all(c.holds for c in report.conditions), report.conditions
        found = report.measured
        assert found is not None
        assert (found["where"], found["keeps"]) == (where, True)
        assert found["values"][-1] < 0.1 * found["values"][0]
        A, b = data.x.numpy(), data.y.numpy()
        best = np.linalg.solve(A.mean(0), b.mean(0))
        assert found["values"][0] == pytest.approx(np.linalg.norm(best - t.context.parts[0].objective.initial.numpy()))


def test_bounds_of_gradients_are_never_exceeded_on_quadratics():
    from polytier.theory import mfa

    rng, data = np.random.default_rng(0), quadratics(5, 3, seed=3, mu=0.5, smoothness=2.0, spread=2.0)
    A, b, x = data.x.numpy(), data.y.numpy(), np.full(3, 2.0)
    found, largest = mfa.quadratic_constants(A, b, x), 0.0
    for _ in range(500):
        k = rng.integers(5)
        gradient = A[k] @ x - b[k]
        largest, x = max(largest, float(np.linalg.norm(gradient))), x - 0.5 * gradient
    assert largest <= found["G"]
    best, own = np.linalg.solve(A.mean(0), b.mean(0)), [np.linalg.solve(a, y) for a, y in zip(A, b, strict=True)]
    values = [a @ o @ o / 2 - y @ o for a, y, o in zip(A, b, own, strict=True)]
    assert found["Gamma"] == pytest.approx(A.mean(0) @ best @ best / 2 - b.mean(0) @ best - np.mean(values))
    assert found["Gamma"] > 0


def test_constants_of_clusters_in_closed_form():
    from polytier.theory import cobo

    data = quadratic_clusters(6, 2, 2, seed=1)
    A, b, group = data.x.numpy(), data.y.numpy(), np.asarray(data.cluster)
    a, centre = A[:, 0, 0], b / A[:, :1, 0]
    found = cobo.quadratic_constants(A, b, group, np.zeros(2))
    pairs = [(i, j) for i in range(6) for j in range(6)]
    example = max(abs(a[i] - a[j]) / (a[i] + a[j]) for i, j in pairs if group[i] == group[j])  # Example 2
    assert found["M_ij"] == pytest.approx(example)
    apart = [(i, k) for i, k in pairs if group[i] != group[k]]
    line = np.linspace(0, 1, 20001)[:, None]  # the least value is between the two centres
    least = min(
        (
            a[i] ** 2 * ((p := centre[i] + line * (centre[k] - centre[i])) - centre[i]) ** 2
            + a[k] ** 2 * (p - centre[k]) ** 2
        )
        .sum(1)
        .min()
        for i, k in apart
    )
    assert found["zeta"] ** 2 == pytest.approx(least, rel=1e-6)
    first = [i for i in range(6) if group[i] == 0]
    assert found["gap"][0] == pytest.approx(np.mean([a[i] for i in first]) * centre[0] @ centre[0] / 2)
    assert found["sum_ik"] == np.inf
    assert cobo.quadratic_constants(A[:3], b[:3], group[:3], np.zeros(2))["sum_ik"] == 0
    b[0] += 1
    assert cobo.quadratic_constants(A, b, group, np.zeros(2))["M_ij"] == np.inf  # no common minimiser


# -- methods ------------------------------------------------------------------------------------------


def test_methods_know_their_letters():
    data = quadratic_clusters(6, 2, 2, seed=1)
    with training(CoBo(0.2, 0.4), data) as t:
        report = check_training(t, 50, {"M_ij": 0.1})[0]
    assert (report.letters["c"], report.letters["n"], report.letters["M_ij"]) == (3, 6, 0.1)
    assert by_formula(report)["zeta ^ 2 >= sum_ik ^ 2"].holds is False
    assert "not bounded" in by_formula(report)["zeta ^ 2 >= sum_ik ^ 2"].note
    assert by_formula(report)["M_ij < 1 / 5"].holds
    with training(SFedHP(), quadratics(6, 2, seed=1), team=TEAM) as t:
        report = check_training(t, 50, {})[0]
    assert report.letters["eta1"] == 0.05
    assert [c.where for c in report.conditions] == ["Theorem 2", "a device's descent"]
    with training(Ditto(), data) as t:
        report = check_training(t, 50, {})[0]
    assert "no theorem" in report.theory
    assert by_formula(report)["device_lr < 2 / (L + device_pull)"].holds


def test_several_models_have_a_report_each():
    data = classes()
    models = {"a": FedAvg("2/(9+t//2)", 3), "b": FedAvg(0.1, 3)}
    with training(MFARR(models), {"a": data, "b": data}, "mclr", l2=0.6, batch_size="grow:1/(4+t//2)") as t:
        first, second = check_training(t, 11, {})
    assert (first.letters["beta"], first.letters["gamma"], first.letters["every"]) == (2, 8, 2)
    assert first.letters["left"] == pytest.approx((1 / 4) / (2 / 9))  # the later one is (1/9) / (2/14)
    assert [c.holds for c in first.conditions[:3]] == [True, 2 * first.letters["L"] - 1 < 8, True]
    assert "the step size of this run is constant" in second.theory
    assert second.conditions[0].missing == ("beta",)
    with training(MFARand(models), {"a": data, "b": data}, "mclr", batch_size=5) as t:
        first = check_training(t, 10, {})[0]
    assert first.theory.startswith("MFA-Rand's Theorems 1 and 3")
    assert first.letters["left"] == pytest.approx((1 - 5 / 15) / (2 / 13))  # the step of round 9
    assert [c.holds for c in first.conditions][2] is False  # a step that waits for a frame


# -- the command line ---------------------------------------------------------------------------------

DIGITS = ("--devices", "8", "--teams", "2", "--set", "device_steps=3")


def found(*args: object) -> Any:
    return json.loads(call("check", *args, "--json").stdout)


def test_defaults_run_without_a_word_and_the_papers_steps_are_stable(tmp_path):
    paper = ("device_lr=0.01", "team_lr=0.03", "server_lr=0.6", "device_pull=0.5", "team_pull=1.5")
    report = found(*DIGITS, *(word for field in paper for word in ("--set", field)))[0]
    assert report["verdict"] == STABLE
    assert report["curvature"]["kind"] == "exact"
    result = call("run", *DIGITS, "--rounds", 1, "--out", tmp_path / "run")
    assert "diverge" not in result.output + result.stderr


def test_check_prints_tables():
    out = call("check", *DIGITS, "--l2", 0.1).output
    for text in ("Theorem 1", "BROKEN", "holds", "not checked: Gamma5, Gamma4 not given", "as printed; false", "(62)"):
        assert text in out
    out = call(
        "check", *DIGITS, "--l2", 0.1, "--given", "Gamma4=1", "--given", "Gamma5=0.1", "--measure", "--rounds", 3
    ).output
    assert "not checked: Gamma1, Gamma3 not given" in out
    assert "measured: |x^{t+1} - x^t|" in out
    assert "measured: training loss of the global model" in out
    out = call("check", "cobo", "--data", "quadratic-clusters", "--model", "quadratic", "--devices", "8").output
    assert "sum_ik = infinite" in out
    assert "Corollary II" in out
    out = call("check", "ditto", *DIGITS[:2], "--model", "dnn:4").output
    assert "no theorem of Ditto is available" in out
    assert "curvature, estimate" in out


def test_measured_and_predicted_are_one_picture(tmp_path):
    problem = ("--data", "quadratics", "--model", "quadratic", "--devices", "6", "--teams", "2", "--rounds", "4")
    out = call("check", "permfl", *problem, "--measure", "--picture", tmp_path / "check.svg").output
    assert "the bound of (62)" in out
    drawn = (tmp_path / "check.svg").read_text()
    assert "<svg" in drawn
    advice = call("check", "permfl", *problem, "--picture", tmp_path / "check.svg", code=2).stderr
    assert "add --measure" in advice


def test_letters_are_given():
    report = found("cobo", *DIGITS[:2], "--given", "c=4", "--given", "L=1")[0]
    assert report["letters"]["c"] == 4
    assert report["letters"]["L"] == 1
    both = found(*DIGITS, "--given", "mu_f=0.1", "--given", "L_f=2")[0]
    assert both["curvature"] is None
    assert both["letters"]["L_f"] == 2
    advice = call("check", *DIGITS, "--given", "G=1", code=2).stderr
    assert "--given G" in advice
    assert "Gamma4: mean of Gamma1 over teams" in advice
    assert "write LETTER=VALUE" in call("check", "--given", "G", code=2).stderr
    assert "no algorithm 'permfll'" in call("check", "permfll", code=2).stderr
