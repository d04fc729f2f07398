"""The sentence on top of a page and below the table of `compare`: true whoever leads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polytier.models.metrics import ACCURACY, METRICS, MetricInfo
from polytier.report.finding import finding
from polytier.report.intervals import interval

DEVICES = [f"d{k}" for k in range(12)]


def said(*shown: tuple[str, str, float], seeds: int = 3, metric: MetricInfo = ACCURACY, spread: float = 0.02) -> str:
    """The sentence about models (method, kind, mean); all of them do well and badly on the same devices."""
    rng = np.random.default_rng(0)
    hard = {(seed, name): rng.normal(0, 0.1) for seed in range(seeds) for name in DEVICES}
    rows: dict[str, dict[str, Any]] = {}
    values: dict[tuple[str, str], dict[tuple[int, str], float]] = {}
    for method, kind, mean in shown:
        noise = rng.normal(0, spread, len(hard))
        own = {where: mean + base + own for (where, base), own in zip(hard.items(), noise, strict=True)}
        row = rows.setdefault(
            method, {"method": method, "seeds": seeds, "personal": None, "team": None, "global": None}
        )
        row[kind] = interval([mean] * seeds)
        values[method, kind] = own
    return finding(list(rows.values()), values, metric, "local")


def test_a_clear_leader_is_compared_with_local_and_the_best_global_model():
    models = [("permfl", "personal", 0.83), ("permfl", "global", 0.6), ("ditto", "personal", 0.7)]
    text = said(*models, ("local", "personal", 0.72), ("fedavg", "global", 0.65))
    assert text == (
        "The personal models of permfl lead with 83.00 % test accuracy over 3 seeds, ahead of ditto (70.00 %). "
        "Training alone (local) reaches 72.00 % and the best global model (fedavg) reaches 65.00 %."
    )


def test_models_that_the_paired_test_does_not_separate_are_level():
    text = said(("permfl", "personal", 0.8001), ("ditto", "personal", 0.8), ("fedavg", "global", 0.5), spread=0.05)
    assert text.startswith("The personal models of permfl reach 80.01 % test accuracy over 3 seeds, level with ditto")
    assert "lead" not in text
    assert text.endswith("The best global model (fedavg) reaches 50.00 %.")


def test_local_leads_where_it_does():
    text = said(("permfl", "personal", 0.5), ("local", "personal", 0.9), ("fedavg", "global", 0.4), seeds=1)
    assert text.startswith(
        "Training alone (local) leads with 90.00 % test accuracy, seen with one seed only, ahead of permfl (50.00 %)."
    )


def test_a_method_is_represented_by_its_best_kind_of_model():
    shown = [("hier-fedavg", "team", 0.9), ("hier-fedavg", "global", 0.6), ("permfl", "personal", 0.7)]
    assert said(*shown) == (
        "The team models of hier-fedavg lead with 90.00 % test accuracy over 3 seeds, ahead of permfl (70.00 %)."
        " The best global model (hier-fedavg) reaches 60.00 %."
    )


def test_lower_is_better_for_errors():
    text = said(("fedavg", "global", 2.0), ("local", "personal", 1.0), metric=METRICS["mae"])
    assert text.startswith("Training alone (local) leads with 1 test mae")


def test_one_run_compares_its_tiers_and_names_the_worst_device():
    text = said(("permfl", "personal", 0.8), ("permfl", "team", 0.6), ("permfl", "global", 0.5), seeds=1)
    start = "The personal models of permfl lead with 80.00 % test accuracy, seen with one seed only, ahead of its"
    assert text.startswith(f"{start} team models (60.00 %) and its global model (50.00 %). The worst-off device is d")
    assert "worst-off" not in said(("permfl", "personal", 0.8), seeds=2)  # devices of two seeds hold different data


def test_many_devices_that_are_worst_off_are_counted():
    row = {"method": "local", "seeds": 1, "team": None, "global": None}
    row["personal"] = {"mean": 0.5, "half": None, "seeds": 1}
    values = {(0, name): 0.0 if k < 5 else 1.0 for k, name in enumerate(DEVICES)}
    text = finding([row], {("local", "personal"): values}, ACCURACY)
    assert text.endswith("The worst-off devices are d0, d1, d2 and 2 more (0.00 %).")


def test_nothing_is_said_without_figures_or_shared_devices():
    assert finding([], {}, ACCURACY) == ""
    rows = [
        {"method": name, "seeds": 1, "personal": interval([mean]), "team": None, "global": None}
        for name, mean in (("permfl", 0.9), ("ditto", 0.1))
    ]
    values = {("permfl", "personal"): {(0, "a"): 0.9}, ("ditto", "personal"): {(1, "a"): 0.1}}
    assert finding(rows, values, ACCURACY) == (
        "The personal models of permfl reach 90.00 % test accuracy, seen with one seed only."
    )
    rows[0]["personal"] = rows[1]["personal"] = None  # no test samples
    assert finding(rows, values, ACCURACY) == ""


@pytest.mark.parametrize("leader", ["a", "b"])
def test_a_better_mean_from_a_few_devices_is_not_a_lead(leader):
    other = "b" if leader == "a" else "a"
    own = {(0, name): 1.0 if k < 4 else 0.49 for k, name in enumerate(DEVICES)}
    rest = {(0, name): 0.5 for name in DEVICES}
    rows = [{"method": leader, "seeds": 1, "personal": interval([0.66]), "team": None, "global": None}]
    rows.append({"method": other, "seeds": 1, "personal": interval([0.5]), "team": None, "global": None})
    text = finding(rows, {(leader, "personal"): own, (other, "personal"): rest}, ACCURACY)
    assert f"level with {other}" in text
