"""Fields on the user's own data: chosen on training data, the same however it is computed, and what is set wins."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import call, own_file
from polytier import FedAvg, Federation, PerMFL, train
from polytier.algorithms import ALGORITHMS
from polytier.runs import first_fields
from polytier.runs.assemble import assemble
from polytier.runs.defaults import settings
from polytier.runs.first_fields import class_advice, exact_steps, free_fields, hold_out, scale_advice
from polytier.runs.spec import RunSpec

SHORT: dict[str, Any] = {"rounds": 20, "batching": "eager"}  # nothing is traced: that takes longest
FEW: dict[str, Any] = {"device_steps": 2, "team_rounds": 2}
CHOSEN = {"device_lr", "device_pull", "team_pull", "team_lr", "server_lr"}


def made(teams: bool = True, classes: bool = True) -> Federation:
    """Eight devices in two teams, each with its own linear rule."""
    rng = np.random.default_rng(3)
    device = np.repeat(np.arange(8), 40)
    x = 0.2 * rng.normal(size=(len(device), 5))
    rule = rng.normal(size=(2, 5)).repeat(4, 0) + 0.3 * rng.normal(size=(8, 5))
    score = (x * rule[device]).sum(1)
    y = (score > 0).astype(int) if classes else score
    return Federation.from_arrays(x, y, device, team=device // 4 if teams else None)


def chosen(spec: RunSpec, **more: Any) -> dict[str, Any]:
    assembly = assemble(spec, **more)
    assembly.close()
    return assembly.spec.set


def python_spec(algorithm: str = "permfl", **more: Any) -> RunSpec:
    fields = FEW if algorithm == "permfl" else {"device_steps": 2}
    return RunSpec(**{"algorithm": algorithm, "data": "python", "set": fields, **SHORT, **more})


def test_the_same_fields_whatever_the_tile_the_workers_and_the_test_samples(caplog):
    data = made()
    with caplog.at_level("INFO", "polytier"):
        first = chosen(python_spec(), federation=data)
    (told,) = [r.message for r in caplog.records if "chosen on training data" in r.message]
    assert told.startswith(f"permfl: device_lr = {first['device_lr']}, ")
    assert "--set FIELD=VALUE wins" in told
    assert chosen(python_spec(tile=1, workers=2), federation=data) == first
    others = data.x.clone()
    for start, end in zip(*data.span("test"), strict=True):
        others[start:end] = 1e3
    assert chosen(python_spec(), federation=dataclasses.replace(data, x=others)) == first
    defaults = {field.name: field.default for field in dataclasses.fields(PerMFL)}
    assert {name for name, value in first.items() if value != defaults[name]} == CHOSEN | set(FEW)


def test_what_is_set_wins_and_an_object_is_used_as_it_is():
    data = made()
    found = chosen(python_spec(set={**FEW, "device_lr": 0.07, "team_pull": 2.0}), federation=data)
    assert (found["device_lr"], found["team_pull"], found["server_lr"]) == (0.07, 2.0, 0.5)
    assert found["device_pull"] != PerMFL().device_pull
    method = PerMFL(device_steps=2)
    assert assemble(python_spec(), algorithm=method, federation=data).algorithm is method


def test_bundled_data_and_complete_settings_are_not_searched(monkeypatch):
    monkeypatch.setattr(first_fields.Search, "begin", lambda *_: pytest.fail("searched"))
    few = {"devices": 6, "teams": "2", **SHORT}
    table = {name: value for name, (value, _) in settings("permfl", "digits", "mclr").items()}
    found = chosen(RunSpec(algorithm="permfl", **few))
    assert {name: found[name] for name in table} == table
    # the steps of teams and of the server follow from the pulls that are used, unless they are set
    assert {name: found[name] for name in ("team_lr", "server_lr")} == exact_steps(PerMFL(**table), ["team"])
    own = chosen(RunSpec(algorithm="permfl", set={"team_pull": 1.0, "team_lr": 0.2}, **few))
    assert (own["team_pull"], own["team_lr"], own["server_lr"]) == (1.0, 0.2, 1.0)
    flat = chosen(RunSpec(algorithm="permfl", set={"device_pull": 0.5}, **{**few, "teams": "0"}))
    assert (flat["device_pull"], flat["server_lr"]) == (0.5, 2.0)
    complete = {**dataclasses.asdict(FedAvg()), "device_lr": 0.3}
    assert chosen(python_spec("fedavg", set=complete), federation=made()) == complete


def test_config_toml_repeats_the_run_to_the_bit_and_a_run_is_resumed(tmp_path, monkeypatch):
    own_file(tmp_path / "own.npz")
    base = ("--data", tmp_path / "own.npz", "--batching", "eager", "--set", "device_steps=2", "--set", "team_rounds=1")
    result = call("run", "permfl", *base, "--rounds", 10, "--out", tmp_path / "a")
    assert "chosen on training data by a short search" in result.stderr
    fields = tomllib.loads((tmp_path / "a/config.toml").read_text())["set"]
    assert set(fields) >= CHOSEN
    monkeypatch.setattr(first_fields.Search, "begin", lambda *_: pytest.fail("searched again"))
    call("run", tmp_path / "a/config.toml", "--out", tmp_path / "b")
    assert rounds_of(tmp_path / "a") == rounds_of(tmp_path / "b")
    call("resume", tmp_path / "a", "--rounds", 12)
    assert tomllib.loads((tmp_path / "a/config.toml").read_text())["set"] == fields


def rounds_of(folder: Path) -> list[Any]:
    from polytier.runs.read import RunRecord

    return [{k: v for k, v in r.items() if k != "seconds"} for r in RunRecord(folder).history]


@pytest.mark.parametrize("name", ["permfl", "local"])
def test_a_run_beats_the_old_defaults(name):
    data, kind = made(), ALGORITHMS[name]
    few = FEW if name == "permfl" else {"device_steps": 2}
    new = train(name, data, "mclr", set=few, **SHORT).history[-1]["personal"]["test"]
    old = train(kind(**few), data, "mclr", **SHORT).history[-1]["personal"]["test"]
    assert new["accuracy"] > old["accuracy"] + 0.05
    assert new["loss"] < old["loss"]


def test_numbers_as_targets_and_a_tree_without_teams():
    found = chosen(python_spec(model="linear"), federation=made(teams=False, classes=False))
    assert found["server_lr"] == pytest.approx(1 / found["device_pull"], rel=0.05)
    assert found["team_pull"] == PerMFL().team_pull  # not used, not chosen


@pytest.mark.parametrize("name", [n for n, kind in ALGORITHMS.items() if "models" not in kind.__dataclass_fields__])
def test_a_start_for_every_method(name):
    kind = ALGORITHMS[name]
    spec = python_spec(name, set={}, rounds=1, metric=["accuracy"])
    try:
        plain = assemble(spec, algorithm=kind(), federation=made())
    except ValueError:
        pytest.skip("not for these data")
    plain.close()
    found = chosen(spec, federation=made())
    assert "device_lr" in free_fields(kind)
    assert all(np.isfinite(found[field]) and found[field] >= 0 for field in free_fields(kind))


def test_a_large_problem_gets_steps_from_its_curvature_alone(monkeypatch, caplog):
    monkeypatch.setattr(first_fields, "MOST_WORK", 1)
    monkeypatch.setattr(first_fields.Search, "loss", lambda *_: pytest.fail("searched"))
    with caplog.at_level("INFO", "polytier"):
        assert chosen(python_spec("fedavg"), federation=made())["device_lr"] != FedAvg().device_lr
    assert "curvature alone: a search would take long" in caplog.text


def test_a_fifth_of_the_training_samples_is_held_out():
    x = np.arange(40.0)[:, None]
    data = Federation.from_arrays(x, np.zeros(40, dtype=int), np.repeat([0, 1, 2], [4, 16, 20]), shares=(1, 0, 0))
    held = hold_out(data, seed=0)
    assert held.population.counts.tolist() == [[4, 0, 0], [13, 3, 0], [16, 4, 0]]
    for k in range(3):
        both = torch.cat([held.device(k, split)[0] for split in ("train", "validation")])
        assert sorted(both.flatten().tolist()) == sorted(data.device(k)[0].flatten().tolist())


def test_inner_nodes_move_to_the_minimiser_of_their_pulls():
    method = PerMFL(device_pull=0.5, team_pull=0.25)
    assert exact_steps(method, ["team"]) == {"team_lr": 1.3, "server_lr": 4.0}
    assert exact_steps(method, ["group", "team"]) == {"team_lr": {"group": 2.0, "team": 1.3}, "server_lr": 4.0}
    assert exact_steps(method, []) == {"server_lr": 2.0}
    assert exact_steps(PerMFL(team_pull=0.0), ["team"]) == {}


def test_classes_without_samples_are_told():
    data = made()
    assert class_advice(data) == []
    assert data.num_classes is not None
    shifted = dataclasses.replace(data, y=data.y + 1, num_classes=data.num_classes + 1)
    assert f"the classes are 0 to {data.num_classes}, and 1 of them have no samples" in class_advice(shifted)[0]


def test_features_of_different_scales_are_told():
    data = made()
    assert scale_advice(data) == []
    wide = dataclasses.replace(data, x=data.x * torch.tensor([1.0, 1.0, 1.0, 1.0, 1e3]))
    assert "--standardize" in scale_advice(wide)[0]
    assert scale_advice(wide.standardized()) == []
