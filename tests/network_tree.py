"""A tree of network nodes in one process: the server's loop, and every node with a world of its own, in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier import Federation, Loop, Run
from polytier.engines.exchange import Exchange
from polytier.engines.network.absences import Absence, Replayed
from polytier.engines.network.contents import Limits
from polytier.engines.network.node import Node
from polytier.engines.network.parent import Parent, Patience
from polytier.engines.network.rehearsal import rehearse
from polytier.engines.network.transport import InMemory
from polytier.engines.network.versions import NodeMemory, Versions
from polytier.engines.network.world import address, without_samples, world_of
from polytier.method.context import Context
from polytier.runs.loop import make_loop
from polytier.runs.serve import PROGRAMS

QUICK = Patience(device=5, team=20, quorum=0.5)


class Tree:
    """All nodes of a run. `models` are the models that nodes kept at the end, by model, kind and name of the node.

    Args:
        loop: A run that has not started; its engine and its data are replaced.
        lose: See `InMemory`; called with the tier's address and the answer.
        folder: Where nodes keep their rows; None: in memory.
    """

    def __init__(
        self,
        loop: Loop,
        lose: Callable[[str, bytes], bool] = lambda address, data: False,
        folder: Path | None = None,
        patience: Patience = QUICK,
    ) -> None:
        self.loop, self.lose, self.folder, self.patience = loop, lose, folder, patience
        self.exchange = Exchange(loop.codec, loop.assembly.upload)
        self.full = {part.name: replace(part) for part in loop.context.parts}
        self.limits = Limits.of(rehearse(loop.context, self.exchange).as_values())
        self.nodes: dict[str, Node] = {}
        self.where: dict[str, dict[str, tuple[int, int]]] = {}
        self.hubs: dict[str, InMemory] = {"server": InMemory(lose)}
        self.models: dict[tuple[str, str, str], Tensor] = {}
        for part in loop.context.parts:
            part.batches = part.batches.over(without_samples(part.population))
            part.memory = NodeMemory(part.topology)
        server_tier = {part.name: 0 for part in loop.context.parts}
        self.server = self._parent(loop.context, server_tier, self.hubs["server"])
        loop.use(self.server)
        self._grow()

    def _parent(self, context: Context, tier: dict[str, int], hub: InMemory) -> Parent:
        settings: Any = {"limits": self.limits, "programs": PROGRAMS, "patience": self.patience}
        return Parent(context, self.exchange, tier, hub, **settings)

    def _grow(self) -> None:
        """Make all nodes below the server; a node may be in the trees of several models."""
        places: dict[str, dict[str, tuple[int, int]]] = {}
        for name, part in self.full.items():
            for tier in range(1, part.topology.num_tiers):
                for node in range(part.topology.size(tier)):
                    places.setdefault(address(part.topology, tier, node), {})[name] = tier, node
        for own, where in places.items():
            self.start(own, where)
        for own, where in places.items():
            for name, (tier, node) in where.items():
                tree = self.full[name].topology
                above = "server" if tier == 1 else address(tree, tier - 1, int(tree.parents[tier][node]))
                self.hubs[above].dial(own, lambda data, own=own: self.nodes[own].handle(data))

    def start(self, own: str, where: dict[str, tuple[int, int]] | None = None) -> None:
        """Start a node, or start it again from its files."""
        where = self.where.setdefault(own, where or {})
        worlds = {name: world_of(self.full[name], *place) for name, place in where.items()}
        first = next(iter(worlds.values()))
        context = worlds[""] if "" in worlds else replace(first, name="", scopes=worlds)
        tier = {name: tier for name, (tier, _) in where.items()}
        parent = None
        if own.startswith("team"):
            hub = self.hubs.setdefault(own, InMemory(self.lose))
            hub.hang_up()
            parent = self._parent(context, tier, hub)
            for part in (context, *context.parts):
                part.engine = parent
        folders = {name: None if self.folder is None else self.folder / own / f"m-{name}" for name in worlds}
        versions: Any = {name: Versions(world.memory, folders[name]) for name, world in worlds.items()}  # type: ignore
        self.nodes[own] = Node(
            own,
            context,
            tier,
            self.exchange,
            limits=self.limits,
            programs=PROGRAMS,
            versions=versions,
            keep_model=lambda model, kind, row: self.models.__setitem__((model, kind, own), row.clone()),
            parent=parent,
        )


def data(devices: int = 6, teams: int = 2, split: tuple = (3, 0, 1)) -> Federation:
    """Devices with different numbers of samples."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(8, 20, devices)
    device = np.repeat(np.arange(devices), sizes)
    x, y = rng.normal(size=(len(device), 3)), rng.integers(0, 3, len(device))
    names = np.array([f"d{k}" for k in range(devices)])
    team = np.array([f"t{k % teams}" for k in range(devices)])
    return Federation.from_arrays(x, y, names[device], team[device], shares=split, num_classes=3)


def same(run: Run, tree: Tree, other: Run, figures: bool = True) -> None:
    """Compare the models and figures of a simulation with those of a tree of nodes, to the bit."""
    for part, its in zip(run.parts, other.parts, strict=True):
        scope, topology = part.context.name, tree.full[part.context.name].topology
        if part.global_ is not None:
            assert its.global_ is not None
            assert torch.equal(part.global_, its.global_)
        for kind, rows, names in (
            ("personal", part.personal, part.device_ids),
            ("team", part.team, part.team_ids if part.team is not None else []),
        ):
            tier = topology.leaf if kind == "personal" else topology.leaf - 1
            for row, name in zip([] if rows is None else rows, names, strict=False):
                kept = tree.models[scope, kind, f"{topology.tier_names[tier]}/{name}"]
                assert torch.equal(row, kept), (scope, kind, name)
        assert (its.personal, its.team) == (None, None)
    assert not figures or [without_time(r) for r in run.history] == [without_time(r) for r in other.history]


def without_time(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "seconds"}


def replayed(algorithm: Any, federation: Any, absences: list[Absence], rounds: int = 3, **settings: Any) -> Run:
    """The simulation with the same absences."""
    engine = partial(Replayed, absences=absences)
    with make_loop(algorithm, federation, "mclr", engine=engine, **settings) as loop:
        return loop.run(rounds)


def simulated(algorithm: Any, federation: Any, rounds: int = 3, **settings: Any) -> Run:
    model = settings.pop("model", "mclr")
    with make_loop(algorithm, federation, model, **settings) as loop:
        return loop.run(rounds)


def over_network(algorithm: Any, federation: Any, rounds: int = 3, **settings: Any) -> tuple[Tree, Run]:
    own = {k: settings.pop(k) for k in ("lose", "folder", "patience") if k in settings}
    model = settings.pop("model", "mclr")
    with make_loop(algorithm, federation, model, **settings) as loop:
        tree = Tree(loop, **own)
        return tree, loop.run(rounds)
