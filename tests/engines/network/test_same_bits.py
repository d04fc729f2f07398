"""Every node with a world of its own computes the same models, to the bit, as all of them in one stack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from network_tree import data, over_network, same, simulated
from polytier import MFARR, CoBo, FedAvg, PerMFL, SFedHP, Topology
from polytier.method.call import Diverged
from short_methods import short

HALF = {"team_participation": 0.5, "device_participation": 0.5}
SETTINGS: dict[str, Any] = {"batch_size": 4, "seed": 3}


def four_tiers() -> dict[str, Any]:
    federation = data(8, 4)
    assert federation.team is not None
    regions = np.array(["east", "east", "west", "west"])
    return {"federation": federation, "topology": Topology.build(federation.ids, federation.team, regions)}


def check(algorithm: Any, federation: Any = None, **settings: Any) -> None:
    settings = {**SETTINGS, **settings}
    federation = data() if federation is None else federation
    run = simulated(algorithm, federation, **settings)
    tree, other = over_network(algorithm, federation, **settings)
    same(run, tree, other)
    assert tree.server.absences == []


@pytest.mark.parametrize("part", [{}, HALF], ids=["all", "half"])
@pytest.mark.parametrize("name", ["permfl", "pfedmt", "fedavg", "scaffold", "ditto", "hier-fedavg"])
def test_methods_have_the_bits_of_the_simulation(name, part):
    check(short(name), **part)


@pytest.mark.parametrize("part", [{}, HALF], ids=["all", "half"])
def test_four_tiers_have_the_bits_of_the_simulation(part):
    check(short("permfl"), **four_tiers(), **part)


@pytest.mark.parametrize("part", [{}, HALF], ids=["all", "half"])
def test_sparse_rows_have_the_bits_of_the_simulation(part):
    check(SFedHP(device_steps=2, team_rounds=2), codec="sparse", **part)


@pytest.mark.parametrize("part", [{}, HALF], ids=["all", "half"])
def test_several_models_on_trees_of_different_depth_have_the_bits_of_the_simulation(part):
    check(MFARR({"deep": PerMFL(device_steps=2, team_rounds=2), "flat": FedAvg(device_steps=2)}), **part)


@pytest.mark.parametrize("part", [{}, {"device_participation": 0.5}], ids=["all", "half"])
def test_cobo_has_the_bits_of_the_simulation(part):
    check(CoBo(sampling="all"), **part)


def test_cobo_with_teams_as_clients_has_the_bits_of_the_simulation():
    check(CoBo(sampling="all", clients="teams"))


@pytest.mark.parametrize("settings", [{"codec": "int8"}, {"codec": "top:0.25"}, {"upload": "clip:0.5,noise:0.1"}])
def test_codecs_and_transforms_of_changes_have_the_bits_of_the_simulation(settings):
    check(short("permfl"), **settings)


def test_features_of_frozen_layers_have_the_bits_of_the_simulation():
    check(short("permfl"), model="dnn:6", train="head", cache_features=True)


def test_last_answers_of_those_not_drawn_have_the_bits_of_the_simulation():
    check(short("fedavg"), absent="stale", device_participation=0.5)


@pytest.mark.parametrize("name", ["fedavg", "hier-fedavg"])
def test_a_run_that_diverges_stops_with_the_words_of_the_simulation(name):
    federation = data()
    federation = replace(federation, x=1e4 * federation.x)
    method: Any = replace(short(name), device_lr=1e6)  # type: ignore[call-arg]
    with pytest.raises(Diverged) as expected:
        simulated(method, federation, **SETTINGS)
    with pytest.raises(Diverged) as found:
        over_network(method, federation, **SETTINGS)
    assert "its parameters reach" in str(found.value)
    assert str(found.value) == str(expected.value)
