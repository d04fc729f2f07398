"""Late answers, teams and servers that crash, nodes that start again, at random: the models are those of the replay."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from network_tree import Tree, data, replayed, same
from polytier import MFARR, FedAvg, Loop, PerMFL
from polytier.engines.network.message import decode
from polytier.engines.network.parent import Patience
from polytier.runs.loop import make_loop
from short_methods import short

ROUNDS = 4
METHODS = [
    short("permfl"),
    short("scaffold"),
    short("ditto"),
    MFARR({"deep": PerMFL(device_steps=2, team_rounds=2), "flat": FedAvg(device_steps=2)}),
]


class Crash(BaseException):
    """The process of a node ends."""


class Faults:
    """Loses answers and ends processes at random."""

    def __init__(self, seed: int) -> None:
        self.draw, self.on = random.Random(seed), True

    def lose(self, address: str, data: bytes) -> bool:
        if not self.on or decode(data, 1 << 30).kind != "answer":
            return False
        drawn = self.draw.random()
        if drawn < 0.02:
            raise Crash
        return drawn < 0.15

    def hold(self, tree: Tree) -> None:
        """A crash below a team ends the team, which starts again; a crash at the server ends the server."""
        for hub in tree.hubs.values():
            for name in [name for name in hub.children if name.startswith("team")]:

                def handle(data: bytes, name: str = name) -> bytes | None:
                    try:
                        return tree.nodes[name].handle(data)
                    except Crash:
                        tree.start(name)
                        return None

                hub.dial(name, handle)


def train(loop: Loop, tree: Tree, faults: Faults) -> None:
    """Run all rounds; a server that crashes goes back to its last checkpoint."""
    while loop.round < ROUNDS:
        tensors, facts = loop.snapshot()
        saved = {k: v.clone() for k, v in tensors.items()}, copy.deepcopy({**facts, "history": list(loop.history)})
        absences = list(tree.server.absences)
        for name in list(tree.nodes):
            if faults.draw.random() < 0.1:
                tree.start(name)
        try:
            loop.run(loop.round + 1)
        except Crash:
            faults.on, tree.server.absences = False, absences
            loop.restore(*saved)
            faults.on = True


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_faults_leave_the_bits_of_the_replay(tmp_path: Path, method: Any, seed: int):
    faults, federation = Faults(seed), data(8, 4)
    settings: dict[str, Any] = {"batch_size": 4, "seed": seed, "device_participation": 1.0 if seed else 0.5}
    with make_loop(method, federation, "mclr", **settings) as loop:
        tree = Tree(loop, faults.lose, tmp_path, Patience(device=1, team=5, quorum=0.3))
        faults.hold(tree)
        train(loop, tree, faults)
        faults.on = False
        other = loop.run(ROUNDS)
    assert tree.server.absences
    same(replayed(method, federation, tree.server.absences, ROUNDS, **settings), tree, other, figures=False)
