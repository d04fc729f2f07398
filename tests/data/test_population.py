"""A population says of the devices what a server may know, and holds no samples."""

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from polytier import Federation, PerMFL, Population, Run, build_federation, train
from polytier.data.synthetic import quadratic_clusters


def test_it_is_made_of_the_data():
    x = np.arange(40, dtype=np.uint8).reshape(10, 1, 2, 2)
    device = np.array(["b", "a", "a", "b", "a", "a", "b", "b", "c", "c"])
    split = [0, 0, 0, 1, 2, 0, 2, 2, 0, 0]
    federation = Federation.from_arrays(
        x, np.arange(10) % 3, device, team=np.where(device == "c", 1, 0), split=split, cluster=device == "a"
    )
    population = federation.population
    assert population is federation.population  # made once
    assert population.ids.tolist() == ["a", "b", "c"]
    assert population.counts.tolist() == [[3, 0, 1], [1, 1, 2], [2, 0, 0]]
    assert population.count("validation").tolist() == [0, 1, 0]
    assert torch.equal(population.samples, federation.samples)
    assert population.splits == ["train", "validation", "test"]
    assert (population.shape, population.dtype, population.target_shape) == ((1, 2, 2), torch.uint8, ())
    assert population.num_classes == 3
    assert population.team is not None
    assert population.team.tolist() == [0, 0, 1]
    assert population.cluster is not None
    assert population.cluster.tolist() == [True, False, False]
    assert population.scale == torch.tensor(1 / 255)


def test_targets_and_clusters():
    population = quadratic_clusters(6, 2, 3).population
    assert (population.shape, population.target_shape, population.num_classes) == ((3, 3), (3,), None)
    assert population.cluster is not None
    assert population.cluster.tolist() == [0, 0, 0, 1, 1, 1]
    assert population.splits == ["train"]


def test_it_holds_no_samples():
    federation = build_federation("digits", devices=10)
    population = federation.population
    held = sum(getattr(v, "nbytes", 0) for f in fields(population) if (v := getattr(population, f.name)) is not None)
    assert held < federation.x.nbytes / 100
    assert len(pickle.dumps(population)) < 5000


def test_fields_that_do_not_belong_together_bring_advice():
    population = build_federation("digits", devices=5).population
    with pytest.raises(ValueError, match=r"one row per device .* got shape \(4, 3\) for 5 devices"):
        replace(population, counts=population.counts[:4])
    with pytest.raises(ValueError, match="0 or more"):
        replace(population, counts=-population.counts)
    with pytest.raises(ValueError, match="team needs one row per device; got 2 for 5"):
        replace(population, team=np.zeros(2))
    labels = replace(population, label_counts=np.ones((5, 10)))
    assert isinstance(labels, Population)


def test_a_run_without_data_knows_its_population(tmp_path):
    federation = build_federation(devices=4, teams=2, standardize=True)
    run = train(PerMFL(device_steps=1, team_rounds=1), federation, "mclr", rounds=1)
    run.save(tmp_path / "run")
    again = Run.load(tmp_path / "run")
    known, found = run.context.population, again.context.population
    assert again.context.batches is None
    assert found.ids.tolist() == known.ids.tolist()
    assert (found.shape, found.dtype, found.num_classes) == (known.shape, known.dtype, known.num_classes)
    assert torch.equal(found.scale, known.scale)  # type: ignore[arg-type]
    x, y = federation.device(0)
    for module in (again.adapt(x, y, team=run.team_ids[0]), again.model(device=0)):
        assert module(x).shape == (len(x), 10)
