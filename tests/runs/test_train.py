"""`polytier.train`: methods by name, settings and their advice, what `help` shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polytier
from polytier import FedAvg, PerMFL, build_federation, make_loop, train
from polytier.data.batches import Batches
from polytier.runs.methods import fields_of
from polytier.runs.model_specs import python_settings

QUICK: Any = {"device_steps": 2, "team_rounds": 2}


@pytest.fixture(scope="module")
def federation():
    return build_federation(devices=6, teams=2)


def test_a_method_by_name_is_the_method(federation):
    fields = fields_of(PerMFL(**QUICK))  # all of them, so that none is chosen for the data
    by_name = train("permfl", federation, "mclr", rounds=1, set=fields)
    by_object = train(PerMFL(**QUICK), federation, "mclr", rounds=1)
    assert by_name.personal is not None
    assert by_object.personal is not None
    assert torch.equal(by_name.personal, by_object.personal)
    assert by_name.spec == by_object.spec


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        (FedAvg(), {"batchsize": 8}, "no setting 'batchsize'; did you mean 'batch_size'"),
        (FedAvg(), {"device_lr": 0.1}, r"device_lr is a field of the method: give FedAvg\(device_lr=\.\.\.\)"),
        ("fedavg", {"device_lr": 0.1}, r"set=\{'device_lr': \.\.\.\}"),
        (FedAvg(), {"set": {"device_lr": 0.1}}, r"give the fields to FedAvg\(\.\.\.\)"),
        (FedAvg(), {"devices": 3}, r"use polytier.build_federation\(devices=\.\.\.\)"),
        (FedAvg(), {"out": "runs/x"}, r"callbacks=\[polytier.RunFolder\(FOLDER\)\]"),
    ],
)
def test_a_wrong_keyword_gets_advice(method, given, message, federation):
    with pytest.raises(TypeError, match=message):
        train(method, federation, "mclr", rounds=1, **given)


@pytest.mark.parametrize(
    ("name", "message"), [("fedvag", "did you mean 'fedavg'"), ("mfa-rr", r"give MFARR\(\{NAME: METHOD, \.\.\.\}\)")]
)
def test_a_wrong_name_gets_advice(name, message, federation):
    with pytest.raises(ValueError, match=message):
        train(name, federation, "mclr", rounds=1)


@pytest.mark.parametrize("function", [train, make_loop])
def test_help_lists_every_setting(function):
    for each in python_settings():
        assert f"`{each.name}`: {each.help}" in function.__doc__ or f"        {each.name}: " in function.__doc__
    assert function.__doc__.index("`batch_size`") < function.__doc__.index("Returns:")


def test_dir_shows_the_api_and_nothing_else():
    assert {name for name in dir(polytier) if not name.startswith("__")} == set(polytier.__all__)
    assert {"__version__", "__doc__"} <= set(dir(polytier))


def test_without_shuffle_every_epoch_has_the_same_mini_batches(federation):
    def batches(round_: int, shuffle: bool) -> set[bytes]:
        walk = Batches(federation, 0, torch.float32).walk(torch.tensor([0]), round_, 0, 32, shuffle=shuffle)
        return {walk.next().groups[0].x.numpy().tobytes() for _ in range(20)}

    assert batches(0, shuffle=False) == batches(5, shuffle=False)
    assert batches(0, shuffle=True) != batches(5, shuffle=True)
    given, usual = (make_loop(FedAvg(), federation, "mclr", **more) for more in ({"shuffle": False}, {}))
    assert (given.context.shuffle, usual.context.shuffle) == (False, True)
    one, other = (train(FedAvg(), federation, "mclr", rounds=2, shuffle=s).global_ for s in (True, False))
    assert one is not None
    assert other is not None
    assert not torch.equal(one, other)
