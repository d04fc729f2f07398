"""The classifier for scikit-learn: its contract, and which model predicts for whom."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator

from polytier import FedAvg, HierFedAvg, LocalTraining, PerMFL, PersonalizedClassifier

QUICK: Any = {"device_lr": 0.5, "device_steps": 5, "team_rounds": 2}
APART: Any = {**QUICK, "team_rounds": 5, "device_pull": 1.0, "team_lr": 1.0, "team_pull": 0.05}  # teams may differ
# checks of scikit-learn that cannot pass, with the reason: none, for without groups this is an ordinary classifier
EXPECTED: dict[str, str] = {}


def test_scikit_learn_accepts_it(monkeypatch):
    monkeypatch.setattr(logging.getLogger("polytier"), "disabled", True)
    found = check_estimator(
        PersonalizedClassifier(PerMFL(**QUICK), rounds=5), expected_failed_checks=EXPECTED, on_skip=None
    )
    assert {each["status"] for each in found} <= {"passed", "skipped"}
    assert [each["check_name"] for each in found if each["status"] == "skipped"] in ([], ["check_array_api_input"])


@pytest.fixture(scope="module")
def data():
    """Four people in two teams; the meaning of the first feature differs between teams."""
    rng = np.random.default_rng(0)
    X, person = rng.normal(size=(200, 3)), np.repeat(["anna", "bert", "chen", "dora"], 50)
    team = np.where(np.isin(person, ["anna", "bert"]), "north", "south")
    y = np.where((X[:, 0] > 0) == (team == "north"), "yes", "no")
    return X, y, person, team


def fitted(method, data):
    X, y, person, team = data
    return PersonalizedClassifier(method, rounds=10).fit(X, y, groups=person, teams=team)


def test_each_group_has_its_model(data):
    X, y, person, _ = data
    made = fitted(PerMFL(**APART), data)
    assert made.score(X, y, groups=person) > 0.9
    assert PersonalizedClassifier(PerMFL(**QUICK), rounds=10).fit(X, y).score(X, y) < 0.7
    for name in np.unique(person):
        mine = person == name
        expected = made.classes_[made.run_.predict(X[mine].astype(np.float32), device=name)]
        assert made.predict(X, groups=person)[mine].tolist() == expected.tolist()
    assert made.predict_proba(X, groups=person).sum(1) == pytest.approx(np.ones(len(X)))


def test_a_new_group_gets_the_model_of_its_team_or_the_global_one(data):
    X, y, _, team = data
    made = fitted(PerMFL(**APART), data)
    new = np.full(len(X), "eve")
    assert made.score(X, y, groups=new, teams=team) > 0.9
    everywhere = made.classes_[made.run_.predict(X)].tolist()
    assert made.predict(X, groups=new).tolist() == everywhere
    assert made.predict(X).tolist() == everywhere
    assert made.predict(X, groups=new, teams=np.full(len(X), "west")).tolist() == everywhere


def test_methods_without_personal_models_use_those_they_have(data):
    X, y, person, _ = data
    teams = fitted(HierFedAvg(device_lr=0.5), data)
    assert teams.score(X, y, groups=person) > 0.9
    flat = fitted(FedAvg(), data)
    assert flat.predict(X, groups=person).tolist() == flat.predict(X).tolist()


def test_what_is_missing_is_said(data):
    X = data[0]
    made = fitted(LocalTraining(), data)
    with pytest.raises(ValueError, match="groups= is missing"):
        made.predict(X)
    with pytest.raises(ValueError, match=r"'eve' was not in fit.*run_\.adapt"):
        made.predict(X[:1], groups=["eve"])
    with pytest.raises(ValueError, match="groups has 2 values for 200 samples"):
        made.predict(X, groups=["anna", "bert"])


def test_a_clone_gives_the_same_result(data):
    X, y, person, _ = data
    first = PersonalizedClassifier("fedavg", rounds=2, random_state=3).fit(X, y, groups=person)
    copies: Any = [clone(first), clone(first)]
    again = copies[0].fit(X, y, groups=person)
    assert np.array_equal(first.predict_proba(X), again.predict_proba(X))
    other = copies[1].set_params(random_state=np.random.RandomState(0)).fit(X, y, groups=person)
    assert not np.array_equal(first.predict_proba(X), other.predict_proba(X))
