"""The interface of engines: who has it, how engines are made, and what happens where somebody does not answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import outside
from pipes_engine import Pipes
from polytier import Engine, FedAvg, Federation, make_engine
from polytier.engines.build import ENGINES, find_engine
from polytier.engines.loopback import Loopback
from polytier.engines.protocol import EngineFactory, engine_of
from polytier.engines.ray.driver import Ray
from polytier.engines.stacked import Stacked
from polytier.method.call import Call
from polytier.runs.loop import Loop, make_loop
from polytier.stack.rows import Answered, Folded, fold, map_rows, share_of_samples


def as_engines(stacked: Stacked, loopback: Loopback, ray: Ray, pipes: Pipes, own: outside.Counting) -> list[Engine]:
    """For the type checker: each of them is an `Engine`, and each class makes one."""
    factories: list[EngineFactory] = [Stacked, Loopback, Ray, outside.Counting]
    assert factories
    return [stacked, loopback, ray, pipes, own]


def federation() -> Federation:
    rng = np.random.default_rng(0)
    device = np.repeat(np.arange(6), [4, 8, 5, 6, 7, 9])
    return Federation.from_arrays(rng.normal(size=(39, 2)), rng.integers(0, 3, 39), device, num_classes=3)


def started(**settings: Any) -> Loop:
    return make_loop(FedAvg(0.1, 2), federation(), "mclr", batching="eager", batch_size=4, **settings)


@pytest.mark.parametrize("name", ["stacked", "loopback"])
def test_engines_by_name_have_all_that_a_run_uses(name):
    with started() as training:
        engine: Engine = make_engine(name, training.context, codec=training.codec, tile=1)
        assert type(engine) is {"stacked": Stacked, "loopback": Loopback}[name]
        assert (engine.remote, engine.workers, dict(engine.tiles)) == (False, 1, {"": 1})
        engine.use_workers(1)
        engine.close()
        engine.close()
        assert engine_of(training.context) is training.context.engine


def test_names_are_found_and_others_get_advice():
    assert list(ENGINES) == ["stacked", "ray", "loopback"]
    for name in ("stacked", "ray", "loopback"):
        assert find_engine(name) is ENGINES[name]
    assert find_engine("ray:auto").keywords == {"address": "auto"}  # type: ignore[attr-defined]
    assert find_engine("ray:10.0.0.1:6379").keywords == {"address": "10.0.0.1:6379"}  # type: ignore[attr-defined]
    assert find_engine(outside.Counting) is outside.Counting
    for bad in ("ray:", "stacked:2", "rai", ""):
        with pytest.raises(ValueError, match=f"no engine '{bad}'; .*available: stacked, ray, loopback, ray:auto"):
            find_engine(bad)


def test_the_table_of_engines_imports_neither_torch_nor_ray():
    code = "import sys, polytier.engines as e; assert e.ENGINES; assert not {'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- whoever does not answer is absent -------------------------------------------------------------------


class Silent(Stacked):
    """An engine that does not hear from devices 1 and 4."""

    def deliver(self, call: Call) -> Iterator[Any]:
        if call.quiet:
            yield from super().deliver(call)
            return
        which = ~torch.isin(call.ids, torch.tensor([1, 4]))
        if not which.any():
            return
        (rows,) = super().deliver(replace(call, blocks=None, shares=None))
        assert not isinstance(rows, Folded)
        rows = map_rows(lambda r: r[which], rows)
        if call.blocks is None:
            yield Answered(rows, which.nonzero().squeeze(1))
        else:
            ids = call.ids[which]
            shares = share_of_samples(self.context.samples[call.tier][ids], torch.zeros(len(ids), dtype=torch.int64))
            yield fold(rows, shares, call.blocks[which], int(call.blocks[-1]) + 1)


@dataclass(frozen=True)
class Holding(FedAvg):
    """FedAvg that holds all answers."""

    def server(self, x, devices):
        answers = devices.call("solve", x)
        assert len(answers.ids) == len(answers.rows)
        return answers.mean(self.weights)


@pytest.mark.parametrize("kind", [FedAvg, Holding])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_means_are_over_those_who_answered(kind, weights):
    """The same bits as a run in which the silent devices do not take part."""
    method = kind(0.1, 2, weights)
    table = np.array([[1, 0, 1, 1, 0, 1]])
    settings: Any = {"batching": "eager", "batch_size": 4}
    with make_loop(method, federation(), "mclr", **settings, device_participation=table) as training:
        expected = training.run(2)
    with make_loop(method, federation(), "mclr", **settings, engine=Silent) as training:
        found = training.run(2)
    assert torch.equal(found.row(), expected.row())


@pytest.mark.parametrize("kind", [FedAvg, Holding])
def test_where_nobody_answers_the_model_stays(kind):
    table = np.array([[0, 1, 0, 0, 1, 0]])  # only those that are silent
    settings: Any = {"batching": "eager", "batch_size": 4, "device_participation": table, "engine": Silent}
    with make_loop(kind(0.1, 2), federation(), "mclr", **settings) as training:
        run = training.run(1)
    assert torch.equal(run.row(), run.context.objective.initial)
