"""A short run of a method on made-up data in a small tree. The limits of messages follow from what it sends."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch

from polytier.data.federation import Federation
from polytier.data.population import Population
from polytier.engines.exchange import Exchange
from polytier.engines.loopback import Loopback
from polytier.engines.network.contents import DOWN, DTYPES, UP, Form, Limits, form_key, forms_of
from polytier.messages.ledger import Ledger
from polytier.method.algorithm import Algorithm
from polytier.method.call import Call, Clock
from polytier.method.children import Children
from polytier.method.context import Context
from polytier.method.memory import Memory
from polytier.stack.kept_features import features_of
from polytier.stack.rows import Rows
from polytier.tree.participation import Participation
from polytier.tree.topology import Topology

log = logging.getLogger("polytier")
TRIALS = ((2, 2), (3, 1))  # children per node at most, and rounds: forms that depend on the number of nodes differ
COUNTS = (4, 2, 2)  # samples per device by split
SPARE = 4  # rows may be so many times larger than those seen
MOST_ROWS = 16  # rows of one message, for methods that send one row to each child


class Recorder(Loopback):
    """An engine that notes the forms of all rows."""

    forms: dict[str, dict[str, Form]]
    several = False  # whether a child was sent a row of its own, of which it may get many in one call

    def _answer(self, call: Call) -> Rows:
        answer = super()._answer(call)
        if not call.quiet:
            self.forms[form_key(call, DOWN)] = forms_of(call.rows)
            self.forms[form_key(call, UP)] = forms_of(answer)
        return answer

    def deliver(self, call: Call) -> Any:
        self.several = self.several or call.method not in ("solve", "team", "device")
        return super().deliver(call)


def rehearse(context: Context, exchange: Exchange) -> Limits:
    """The limits of the messages of a run.

    Args:
        context: Of the server; its devices need no samples.
        exchange: How rows travel.
    """
    trials: list[Recorder] = []
    states: list[Rows | None] = []
    for width, rounds in TRIALS:
        small = small_context(context, width)
        recorder = Recorder(small, codec=exchange.codec, upload=exchange.upload)
        recorder.forms = {}
        trials.append(recorder)
        for part in (small, *small.parts):
            part.engine = recorder
        states.append(None)
        try:
            states[-1] = play(small, rounds)
        except Exception as error:  # on made-up data a method may fail; what it sent so far is known
            log.debug("the rehearsal ended early: %s", error, exc_info=error)
    forms: dict[str, dict[str, Form | None]] = {}
    for recorder in trials:
        for key, seen in recorder.forms.items():
            known = forms.setdefault(key, dict(seen))
            forms[key] = {name: form if known.get(name, form) == form else None for name, form in seen.items()}
    return replace(limits_of(context, trials, forms), fixed=bool(context.scopes) or depends_on_devices(context, states))


def depends_on_devices(context: Context, states: list[Rows | None]) -> bool:
    """Whether the server keeps something per device, so that the roster cannot change during a run."""
    if any(state is None or context.algorithm.collaboration(state) is not None for state in states):
        return True
    return len({repr(sorted(forms_of(state).items())) for state in states if state is not None}) > 1


def limits_of(context: Context, trials: list[Recorder], forms: dict[str, dict[str, Form | None]]) -> Limits:
    """The limits that follow from the forms of rows."""
    seen = [form for recorder in trials for fields in recorder.forms.values() for form in fields.values()]
    size = max([prod(shape) * DTYPES[dtype].itemsize for dtype, shape in seen if dtype in DTYPES], default=0)
    size = max(size, *(8 * part.objective.dimension for part in context.parts))
    devices = len(context.population)
    grows = any(form is None for fields in forms.values() for form in fields.values())
    row_bytes = SPARE * size * (devices if grows else 1)
    rows = max(MOST_ROWS, devices if any(recorder.several for recorder in trials) else 0)
    tiers = {
        f"{part.name}/{tier}"
        for part in trials[0].context.parts
        for tier in range(1, part.topology.leaf)
        if "model" in part.memory.names(tier)
    }
    return Limits(forms, row_bytes, (1 << 20) + rows * row_bytes + 200 * devices, frozenset(tiers))


def play(context: Context, rounds: int) -> Rows:
    """Run rounds of the server's program; returns what the server keeps."""
    first = {part.name: part.objective.initial.unsqueeze(0).clone() for part in context.parts}
    algorithm = context.algorithm
    state = algorithm.init(first if algorithm.parts() else first[""])
    for round_ in range(rounds):
        for part in context.parts:
            part.ledger.start_round()
        state = algorithm.server(state, Children(context, 0, torch.zeros(1, dtype=torch.int64), Clock(round_)))
    return state


def small_context(context: Context, width: int) -> Context:
    """A context with a small tree, made-up data and one step of everything."""
    scopes = {name: small_context(part, width) for name, part in context.scopes.items()}
    tree = pruned(context.topology, width)
    federation = made_up(context.population, tree)
    if context.objective.boundary is not None:
        federation = features_of(federation, context.objective)
    algorithm = context.algorithm
    models: Any = {name: part.algorithm for name, part in scopes.items()}
    return replace(
        context,
        algorithm=replace(algorithm, models=models) if scopes else shortened(algorithm),  # type: ignore[call-arg]
        topology=tree,
        population=federation.population,
        batches=context.batches.over(federation),
        memory=Memory(tree),
        participation=(Participation(),) * tree.num_tiers,
        ledger=Ledger(tree),
        device_steps=0,
        scopes=scopes,
    )


def shortened(algorithm: Algorithm) -> Algorithm:
    """The method with one step instead of many."""
    known = {field.name for field in dataclasses.fields(algorithm)}
    steps = [name for name in algorithm.budget if name in known and isinstance(getattr(algorithm, name), int)]
    return replace(algorithm, **dict.fromkeys(steps, 1))


def pruned(topology: Topology, width: int) -> Topology:
    """The tree with at most `width` children of every node."""
    kept = torch.zeros(1, dtype=torch.int64)
    names, parents = [topology.names[0]], [topology.parents[0]]
    for tier in range(1, topology.num_tiers):
        place = torch.full((topology.size(tier - 1),), -1)
        place[kept] = torch.arange(len(kept))
        rank = torch.arange(topology.size(tier)) - topology.offsets[tier - 1][topology.parents[tier]]
        above = place[topology.parents[tier]]
        kept = ((above >= 0) & (rank < width)).nonzero().squeeze(1)
        names.append(topology.names[tier][kept.numpy()])
        parents.append(above[kept])
    return Topology(tuple(names), tuple(parents), torch.arange(len(kept)))


def made_up(population: Population, tree: Topology) -> Federation:
    """Samples of the right shape for the devices of a tree."""
    n, each = tree.size(tree.leaf), sum(COUNTS)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((n * each, *population.shape), generator=generator, dtype=torch.float64)
    x = x.to(population.dtype) if population.dtype.is_floating_point else torch.zeros_like(x, dtype=population.dtype)
    shape = (n * each, *population.target_shape)
    if population.num_classes is None:
        y = torch.rand(shape, generator=generator)
    else:
        y = torch.arange(n * each).reshape(-1, *[1] * len(population.target_shape)) % population.num_classes
        y = y.expand(shape).contiguous()
    ends = np.cumsum([[0, *COUNTS]] * n, axis=1) + each * np.arange(n)[:, None]
    return Federation(
        x=x,
        y=y,
        bounds=torch.from_numpy(ends),
        ids=tree.names[-1],
        num_classes=population.num_classes,
        scale=population.scale,
        shift=population.shift,
    )
