"""Estimates of the memory and time of a run, before it starts."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import torch

from polytier._text import size
from polytier.data.batches import batch_sizes
from polytier.data.federation import Federation
from polytier.engines.build import make_engine
from polytier.engines.protocol import engine_of
from polytier.engines.stacked import default_tile
from polytier.messages.codec import Codec
from polytier.messages.ledger import Ledger
from polytier.method.call import Clock, Diverged
from polytier.method.children import Children
from polytier.method.context import Context
from polytier.method.memory import Memory
from polytier.runs.callbacks import IN_FILES, rows_bytes
from polytier.runs.loop import Loop
from polytier.stack.held import bytes_per_sample, physical_memory
from polytier.tree.participation import Participation
from polytier.tree.topology import Topology

TIMED = 3  # steps
GAPS = 1.25  # freed memory between values that exist, as a factor
PROCESS = 250 << 20  # bytes that Python, torch and this package take in every process


def memory_bytes(loop: Loop) -> int:
    """Bytes of the processes, the data, one model per node, frozen parameters, and the gradients of a tile."""
    engine = engine_of(loop.context)
    processes = engine.workers + engine.remote  # this process is one of the workers, unless they are elsewhere
    return PROCESS * processes + sum(sum(memory_of(loop, context).values()) for context in loop.context.parts)


def memory_of(loop: Loop, context: Context) -> dict[str, int]:
    """Bytes by purpose."""
    federation, width, engine = context.batches.federation, context.objective.dtype.itemsize, engine_of(loop.context)
    nodes = sum(context.topology.size(tier) for tier in range(context.topology.num_tiers))
    tile = min(engine.tiles[context.name], len(federation))
    sample = int(federation.samples.max()) if isinstance(context.batch_size, str) else context.batch_size
    sample = min(sample, int(federation.samples.max()))
    batch = sample * federation.x[0].numel()
    group = context.batches.whole(federation.samples.argmax().reshape(1), "train", 1).groups[0]
    at_once = min(sample, context.objective.micro_batch or sample)
    values = int(GAPS * bytes_per_sample(context.objective, group.x[0], group.y[0])) * at_once
    return {
        "data": federation.x.nbytes + federation.y.nbytes,
        "models": width * (context.objective.dimension * nodes + context.objective.frozen_size),
        "tiles": (width * (6 * context.objective.dimension + 3 * batch) + values) * tile * engine.workers,
    }


def check_memory(loop: Loop) -> None:
    """Raise an error before the start if the run does not fit into memory. Memory-mapped files are not counted."""
    have = physical_memory()
    if have is None:
        return
    for context in loop.context.parts:
        need, engine = memory_of(loop, context), engine_of(loop.context)
        if hasattr(context.batches.federation.x, "file"):
            del need["data"]
        if rows_bytes(loop) > IN_FILES:
            del need["models"]
        if (total := sum(need.values())) > have:
            tiles = f"tiles of {engine.tiles[context.name]} devices in {engine.workers} processes"
            advice = {
                "data": ("data", "pack them (`polytier data pack`), which maps them"),
                "models": ("models", "train fewer devices or a smaller model"),
                "tiles": (tiles, "lower --tile, --workers or --micro-batch"),
            }
            what, then = advice[max(need, key=need.__getitem__)]
            raise ValueError(
                f"this needs about {size(total)} of memory, {size(max(need.values()))} for its {what}; "
                f"available: {size(have)}; {then}"
            )


def seconds_a_round(loop: Loop, workers: int) -> float | None:
    """Estimated seconds per round, from a few timed steps of a tile; None if the number of steps is unknown."""
    seconds = 0.0
    for context in loop.context.parts:  # several models divide the devices among themselves
        steps = steps_of_a_device(context, loop.codec)
        if steps is None:
            return None
        devices = devices_that_take_part(context) / len(loop.context.parts)
        seconds += steps * devices * seconds_a_step(context) / workers
    return seconds


def steps_a_round(loop: Loop) -> float | None:
    """Device steps per round over all participating devices and all models; None if unknown."""
    total = 0.0
    for context in loop.context.parts:
        steps = steps_of_a_device(context, loop.codec)
        if steps is None:
            return None
        total += steps * devices_that_take_part(context) / len(loop.context.parts)
    return total


def seconds_a_step(context: Context) -> float:
    """Measured seconds of one step of one device in a tile: batch, gradient and update."""
    tile = min(default_tile(context), engine_of(context).tiles[context.name])  # a smaller one takes less memory
    rows = torch.arange(min(tile, len(context.batches.federation)))
    theta = context.objective.initial.to(context.objective.device).expand(len(rows), -1).clone()
    sizes = batch_sizes(context.batch_size, context.batches.federation.samples[rows], 0)
    walk = context.batches.walk(rows, 0, 0, sizes, shuffle=context.shuffle)
    context.objective.grad(theta, walk.next())  # traces the graph, which the run then uses
    started = time.perf_counter()
    for _ in range(TIMED):
        theta = theta - 0.01 * context.objective.grad(theta, walk.next())
    return (time.perf_counter() - started) / len(rows) / TIMED


def devices_that_take_part(context: Context) -> float:
    """Expected number of participating devices in one call."""
    expected = 1.0
    for tier in range(1, context.topology.num_tiers):
        each = context.topology.size(tier) / context.topology.size(tier - 1)
        rule = context.participation[tier]
        expected *= min(each, rule.count) if rule.count is not None else max(1.0, rule.fraction * each)
    return expected


def steps_of_a_device(context: Context, codec: Codec) -> int | None:
    """Device steps per round, counted by running the method on one device with gradients of zero; None if unknown."""
    chain = Topology.build(context.topology.names[-1][:1], *[["one"]] * (context.topology.num_tiers - 2))
    objective = copy.copy(context.objective)
    objective.grad = lambda theta, *_: torch.zeros_like(theta)  # type: ignore[method-assign]
    objective.grad_pieces = lambda theta, *_: iter([(slice(None), [torch.zeros_like(theta)])])  # type: ignore[method-assign]
    device = one_device(context.batches.federation)
    alone: Any = replace(
        context,
        topology=chain,
        objective=objective,
        memory=Memory(chain),
        device_steps=0,
        name="",
        batches=context.batches.over(device),
        population=device.population,
        ledger=Ledger(chain),
        participation=(Participation(),) * chain.num_tiers,
    )
    alone.ledger.start_round()
    alone.engine = make_engine("stacked", alone, codec=codec, tile=1)
    server = Children(alone, 0, torch.zeros(1, dtype=torch.int64), Clock(0))
    try:
        context.algorithm.server(context.algorithm.init(objective.initial.unsqueeze(0).clone()), server)
    except (
        ValueError,
        Diverged,
    ):  # fields with one value per node do not fit one device; other errors are reported by the run itself
        return None
    return alone.device_steps


def one_device(federation: Federation) -> Federation:
    """The federation with its first device only."""
    end = int(federation.bounds[0, 3])
    return replace(
        federation,
        x=federation.x[:end],
        y=federation.y[:end],
        bounds=federation.bounds[:1],
        ids=federation.ids[:1],
        team=None,
        cluster=None if federation.cluster is None else federation.cluster[:1],
    )
