"""What a run will take, said before it starts."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import torch

from polytier.algorithm import Children
from polytier.codec import Codec
from polytier.data.batches import batch_sizes
from polytier.data.federation import Federation
from polytier.engines.stacked import Stacked, default_tile
from polytier.ledger import Ledger
from polytier.memory import Memory
from polytier.participation import Participation
from polytier.topology import Topology
from polytier.training import Training
from polytier.world import Clock, World

TIMED = 3  # steps


def memory_bytes(training: Training) -> int:
    """Data, a model for every node, and the working set of a tile."""
    return sum(memory_of(world) for world in training.world.parts)


def memory_of(world: World) -> int:
    federation, width = world.batches.federation, world.objective.dtype.itemsize
    data = sum(t.numel() * t.element_size() for t in (federation.x, federation.y))
    nodes = sum(world.topology.size(tier) for tier in range(world.topology.num_tiers))
    return data + width * world.objective.dimension * (nodes + 6 * default_tile(world))


def seconds_a_round(training: Training, workers: int) -> float | None:
    """From a few timed steps of a tile and the steps that the method asks of a device; None if unknown."""
    seconds = 0.0
    for world in training.world.parts:  # several models share the devices out
        steps = steps_of_a_device(world, training.codec)
        if steps is None:
            return None
        devices = devices_that_take_part(world) / len(training.world.parts)
        seconds += steps * devices * seconds_a_step(world) / workers
    return seconds


def seconds_a_step(world: World) -> float:
    """Of one device in a tile: draw a batch, take its gradient, step."""
    rows = torch.arange(min(default_tile(world), len(world.batches.federation)))
    theta = world.objective.initial.to(world.objective.device).expand(len(rows), -1).clone()
    sizes = batch_sizes(world.batch_size, world.batches.federation.samples[rows], 0)
    walk = world.batches.walk(rows, 0, 0, sizes)
    world.objective.grad(theta, walk.next())  # traces the graph, which the run then uses
    started = time.perf_counter()
    for _ in range(TIMED):
        theta = theta - 0.01 * world.objective.grad(theta, walk.next())
    return (time.perf_counter() - started) / len(rows) / TIMED


def devices_that_take_part(world: World) -> float:
    """In an ordinary call, on average."""
    expected = 1.0
    for tier in range(1, world.topology.num_tiers):
        each = world.topology.size(tier) / world.topology.size(tier - 1)
        rule = world.participation[tier]
        expected *= min(each, rule.count) if rule.count is not None else max(1.0, rule.fraction * each)
    return expected


def steps_of_a_device(world: World, codec: Codec) -> int | None:
    """The method's own programs, run for a round at one device below one team, with gradients of zero."""
    chain = Topology.build(world.topology.names[-1][:1], *[["one"]] * (world.topology.num_tiers - 2))
    objective = copy.copy(world.objective)
    objective.grad = lambda theta, *_: torch.zeros_like(theta)  # type: ignore[method-assign]
    alone: Any = replace(
        world, topology=chain, objective=objective, memory=Memory(chain), device_steps=0, name="",
        batches=world.batches.over(one_device(world.batches.federation)), ledger=Ledger(chain),
        participation=(Participation(),) * chain.num_tiers,
    )  # fmt: skip
    alone.ledger.start_round()
    alone.engine = Stacked(alone, codec, tile=1)
    server = Children(alone, 0, torch.zeros(1, dtype=torch.int64), Clock(0))
    try:
        world.algorithm.server(world.algorithm.init(objective.initial.unsqueeze(0).clone()), server)
    except ValueError:  # fields with a value a node do not fit one device
        return None
    return alone.device_steps


def one_device(federation: Federation) -> Federation:
    end = int(federation.bounds[0, 3])
    return replace(
        federation, x=federation.x[:end], y=federation.y[:end], bounds=federation.bounds[:1],
        ids=federation.ids[:1], team=None, cluster=None,
    )  # fmt: skip
