"""How a call is run at the nodes that receive it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from polytier.method.call import Call
from polytier.method.children import Children
from polytier.method.context import Context
from polytier.method.local_problem import LocalProblem
from polytier.method.node import check_finite
from polytier.method.travel import OWN_PROGRAMS, STATISTICS, without_statistics
from polytier.stack.rows import Rows, as_dict, map_rows


def takes_local(program: Callable) -> bool:
    """Whether this is a program of devices: the name of its last parameter is `local`."""
    return last_parameter(getattr(program, "__func__", program)) == "local"


@lru_cache
def last_parameter(function: Callable) -> str:
    """The name of the last parameter."""
    return list(inspect.signature(function).parameters)[-1]


def relay(name: str, rows: Rows, team: Children) -> Rows:
    """Run a program of devices for a team.

    Returns:
        [m, ...] the mean of the answers of each team's devices, weighted by samples; zeros where nobody answered.
    """
    answers = team.call(name, rows)
    zeros = map_rows(torch.zeros_like, answers.sums["samples"] if answers.sums else rows)
    return answers.mean("samples", empty=zeros)


def received(rows: Rows, node: Any, call: Call) -> Rows:
    """What the program of a node is given; its statistics are set."""
    travel, leaf = node._context.travel, node.tier == node._context.topology.leaf
    statistics, rows = as_dict(rows).get(STATISTICS), without_statistics(rows)
    if leaf:
        if len(travel.statistics):
            node.statistics = travel.arrive_statistics(statistics, node)
        return travel.arrive(rows, node)
    if statistics is not None:
        node.set_statistics(statistics)
    return travel.widen(rows) if call.method in OWN_PROGRAMS else rows


def answered(answer: Rows, sent: Rows, node: Any, call: Call) -> Rows:
    """What a node sends to its parent."""
    if call.method not in OWN_PROGRAMS or call.quiet:
        return answer
    context, leaf = node._context, node.tier == node._context.topology.leaf
    travel = context.travel
    if leaf:
        if node.statistics is not None:
            node.keep(**{STATISTICS: node.statistics})
        answer = travel.leave(answer, context.algorithm.model_fields, node)
        shared = None if node.statistics is None else node.statistics[:, ~travel.home_statistics]
    else:
        answer = travel.thin(answer)
        shared = node.statistics[:, ~travel.home_statistics] if len(travel.statistics) else None
    if shared is None or not shared.shape[1] or STATISTICS not in as_dict(sent):
        return answer
    return {**as_dict(answer), STATISTICS: shared}


def execute(context: Context, call: Call, start: int, end: int) -> Rows:
    """Run the program of a call at its receivers start .. end - 1 and return their answers [end - start, ...].

    Raises:
        ValueError: if a program does not answer one row per node.
        Diverged: if an answer holds NaN or infinity.
    """
    context, ids = context.scope(call.scope), call.ids[start:end]
    algorithm, leaf = context.algorithm, context.topology.leaf
    kind = LocalProblem if call.tier == leaf else Children
    node: Any = kind(context, call.tier, ids, call.clock, call.quiet, call.only)
    rows = map_rows(lambda r: r.to(node.device), call.received(start, end))
    sent = rows
    if context.travel.active:
        rows = received(rows, node, call)
    if isinstance(call.method, str):
        name = ("device" if call.tier == leaf else "team") if call.method == "solve" else call.method
        program = getattr(algorithm, name)
        relayed = call.tier < leaf and takes_local(program)
        answer = relay(name, rows, node) if relayed else program(rows, node)
    else:
        name = call.method.__name__
        answer = call.method(algorithm, rows, node)
    for value in as_dict(answer).values():
        if len(value) != len(ids):
            what = f"{type(algorithm).__name__}.{name} was given {len(ids)} rows and answered {len(value)}"
            raise ValueError(f"{what}; answer one row per node, in the order of the rows given")
    if context.travel.active:
        answer = answered(answer, sent, node, call)
    # the only point of a tile that waits for an accelerator
    node._write_kept()
    answer = map_rows(lambda r: r.cpu(), answer)
    if not call.quiet:
        check_finite(node, answer)
    return answer
