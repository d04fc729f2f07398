"""A round linearised at the initial model: how it changes small errors of the global model.

The method's own programs compute the round. All devices take part, and every round uses the draws of the first one, so
that the result is a function of the global model alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polytier.engines.build import make_engine
from polytier.messages.codec import CODECS
from polytier.messages.ledger import Ledger
from polytier.method.call import Clock, Diverged
from polytier.method.children import Children
from polytier.method.context import Context
from polytier.method.memory import Memory
from polytier.theory.curvature import steepest
from polytier.tree.participation import Participation

ROUNDS = 4  # computed at most, the one at the initial model included
STEP = 1e-3  # of the difference quotient, relative to the length of the initial model


def least_eigenvalue(context: Context) -> float:
    """An upper bound of the least eigenvalue of a round, from a few steps of power iteration; -inf on overflow.

    The first direction is the steepest one of the devices' mean objective. The iteration is on the move of the global
    model, (round - 1): directions that a round leaves as they are, such as those that do not change the outputs of a
    softmax, vanish from it. A Rayleigh quotient of a symmetric map is never below its least eigenvalue, and the map of
    a round is symmetric up to changes of curvature within the round.
    """
    round_, x = round_of(context), context.objective.initial
    step, least = STEP * max(1.0, float(x.norm())), math.inf
    try:
        base, v = round_(x), steepest(context).to(x)
        for _ in range(ROUNDS - 1):
            v = v / v.norm()
            image = (round_(x + step * v) - base) / step - v
            least = min(least, 1 + float(v @ image))
            if not float(image.norm()):
                break
            v = image
    except Diverged:
        return -math.inf
    return least


def round_of(context: Context) -> Callable[[Tensor], Tensor]:
    """The first round as a function: the global model x [d] -> the global model after the round."""
    topology = context.topology
    alone: Any = replace(
        context,
        memory=Memory(topology),
        ledger=Ledger(topology),
        participation=(Participation(),) * topology.num_tiers,
        absent="skip",
        name="",
        device_steps=0,
    )
    codec = CODECS[str(context.objective.dtype).removeprefix("torch.")]
    alone.engine = make_engine("stacked", alone, codec=codec, workers=1)

    def run(x: Tensor) -> Tensor:
        alone.ledger.start_round()
        server = Children(alone, 0, torch.zeros(1, dtype=torch.int64), Clock(0))
        state = context.algorithm.server(context.algorithm.init(x.unsqueeze(0).clone()), server)
        found = context.algorithm.global_model(state)
        assert found is not None
        if not torch.isfinite(found).all():
            raise Diverged(1, "server", ["server"])
        return found[0]

    return run
