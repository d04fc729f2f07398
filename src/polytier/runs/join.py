"""The processes below the server of a federation: a team, and a device or several behind a gateway."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polytier._errors import Stopped
from polytier.data.federation import Federation
from polytier.data.moments import Moments, moments_of
from polytier.engines.exchange import Exchange
from polytier.engines.network.contents import Limits, as_tensor, from_tensor
from polytier.engines.network.health import Vitals, answering
from polytier.engines.network.keys import certificate_name
from polytier.engines.network.links import COUNTS, LinkHub
from polytier.engines.network.message import Message, Refused
from polytier.engines.network.node import Node
from polytier.engines.network.parent import Parent
from polytier.engines.network.relay import Relay
from polytier.engines.network.transport import open_hub, open_uplink
from polytier.engines.network.versions import NodeMemory, Versions
from polytier.engines.network.world import places, read_tree, without_samples
from polytier.files.lock import FolderLock
from polytier.files.write import make_folder, write_bytes
from polytier.messages.ledger import Ledger
from polytier.method.call import Call, Clock
from polytier.method.context import Context
from polytier.method.execute import execute
from polytier.models.trainable import digest
from polytier.runs.admission import Admission, hello, own_address
from polytier.runs.job import Job, check_code, check_code_names, job_of_parent
from polytier.runs.node_versions import warn_of_bits
from polytier.runs.serve import LOOK, PROGRAMS, SCALING, await_children, gather
from polytier.runs.write_tensors import pieces
from polytier.tree.topology import Topology

log = logging.getLogger("polytier")
LARGEST = 4 << 30  # bytes of a message from a parent, before its job is known


class Child:
    """What a team and devices have in common: they dial, are told a job and a world, and answer calls.

    Args:
        parent: HOST:PORT.
        keys: Folder with the key and certificates.
        state: Folder for rows and models.
        names: The nodes that this process speaks for.
        trust: Whether the job may name code to import.
    """

    def __init__(self, parent: str, keys: Path, state: Path, names: list[str], trust: bool) -> None:
        self.state, self.names, self.trust = state, names, trust
        make_folder(state)
        self._lock = FolderLock(state)
        self.uplink = open_uplink(parent, keys, hello(names), LARGEST)
        self.vitals = Vitals(certificate_name(keys), linked=lambda: self.uplink.linked)
        self.job: Job | None = None
        self.limits = Limits()
        self.nodes: dict[str, Node] = {}
        self.over: str | None = None  # what the parent said when the run was over
        self._world = ""
        self._asked: tuple[int, Message] | None = None

    def run(self) -> str:
        """Answer the parent until it says that the run is over.

        Returns:
            What the parent said.
        """
        try:
            while True:
                came = self.uplink.next()
                if came is None:
                    self.over = str(self.uplink.ended)
                    return self.over
                self._asked, started = came, time.monotonic()
                try:
                    answer = self._answer(came[1])
                    if answer is not None:
                        self.uplink.answer(came[0], answer)
                    self._note(came[1], time.monotonic() - started)
                except Refused as error:
                    self.uplink.cut(str(error))
        finally:
            self.uplink.close()
            self.close()
            self._lock.release()

    def close(self) -> None:
        """End what a subclass has started."""

    def _note(self, message: Message, seconds: float) -> None:
        """Say in /metrics what was answered."""
        vitals, traffic = self.vitals, self.vitals.traffic
        if message.kind == "call":
            vitals.round, vitals.seconds, vitals.saved = message.whole("round") + 1, seconds, time.time()
        traffic[self.uplink.parent, "down"], traffic[self.uplink.parent, "up"] = self.uplink.received, self.uplink.sent

    def is_old(self) -> bool:
        """Whether the message that is being answered no longer counts."""
        return self._asked is None or self.uplink.is_old(*self._asked)

    def _answer(self, message: Message) -> Message | None:
        if message.kind == "welcome":
            return self._welcome(from_tensor(message, "job"))
        if message.kind == "world":
            return self._enter(from_tensor(message, "world"))
        node = self.nodes.get(message.fact("node", str))
        if node is None:
            raise Refused("it calls a node that is not here")
        return node.answer(message)

    def _welcome(self, about: Any) -> Message | None:
        trees = {name: read_tree(about["trees"][name]) for name in self.names}
        self.job = job_of_parent(about, next(iter(trees.values())))
        check_code_names(self.job, self.trust)
        check_code(self.job)
        warn_of_bits(f"the parent at {self.uplink.parent}", about.get("versions", {}))
        self.limits = Limits.of(about["limits"])
        counts = self.counts(self.job, trees, about["counts"])
        return None if counts is None else self._ready(self.job, counts, begun=bool(about["counts"]))

    def _ready(self, job: Job, counts: dict[str, list[int]], begun: bool) -> Message:
        """What is told of the samples below; `begun`: the scale of the inputs is known already."""
        tensors = {COUNTS: as_tensor(counts)}
        if job.standardized and not begun:
            tensors["moments"] = torch.stack([torch.stack(found[1:]) for found in self.moments(counts)])
        return Message("ready", {}, tensors)

    def _enter(self, about: Any) -> Message:
        """Make the nodes of this process, unless they are there already."""
        text = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        if text != self._world:
            assert self.job is not None
            self.build(replace(self.job, scaling=about.get(SCALING)), about)
            self._world = text
        self.gathered()
        return Message("ready", {})

    def counts(self, job: Job, trees: dict[str, Topology], known: Any) -> dict[str, list[int]] | None:
        """The samples of the devices below, by name; None if the parent has gone meanwhile.

        Args:
            job: The job.
            trees: The part of the roster of each node of this process.
            known: What was counted when the run started; empty before that.
        """
        raise NotImplementedError

    def moments(self, counts: dict[str, list[int]]) -> list[Moments]:
        """Mean and spread of the samples of each node of this process, of the devices in `counts`."""
        raise NotImplementedError

    def build(self, job: Job, about: Any) -> None:
        """Make the nodes of this process."""
        raise NotImplementedError

    def gathered(self) -> None:
        """Wait for what a node needs before it can be called."""

    def make_node(
        self, name: str, context: Context, exchange: Exchange, about: Any, parent: Parent | None = None
    ) -> Node:
        """A node with its rows in files."""
        place = self.state / about["run"] / name.replace("/", "-")
        tier = {part.name: part.topology.leaf if parent is None else parent.tier[part.name] for part in context.parts}
        for part in context.parts:
            if digest({"": part.objective.initial}) != about["initial"].get(part.name):
                raise ValueError(
                    "the model here starts from other values than that of the server; install the same versions of "
                    "polytier, torch and the model's code"
                )
        versions: dict[str, Versions] = {}
        for part in context.parts:
            assert isinstance(part.memory, NodeMemory)
            versions[part.name] = Versions(part.memory, place / f"rows-{part.name}")

        def keep(model: str, kind: str, row: Tensor) -> None:
            part, folder = context.scope(model), place / "models" / model
            make_folder(folder)
            tensors = part.objective.parameters(row.unsqueeze(0))
            write_bytes(folder / f"{kind}.safetensors", pieces(tensors, ids=json.dumps([name.partition("/")[2]])))

        settings: Any = {"limits": self.limits, "programs": PROGRAMS, "versions": versions, "keep_model": keep}
        return Node(name, context, tier, exchange, parent=parent, **settings)


def world_context(context: Context, tree: Topology, federation: Federation) -> Context:
    """A context with other data and another tree; models and traced graphs are shared."""
    scopes = {name: world_context(part, tree, federation) for name, part in context.scopes.items()}
    own = tree.flat() if context.algorithm.tiers == 2 and tree.num_tiers > 2 else tree
    return replace(
        context,
        topology=own,
        population=federation.population,
        batches=context.batches.over(federation),
        memory=NodeMemory(own),
        ledger=Ledger(own),
        engine=None,  # type: ignore[arg-type]
        scopes=scopes,
    )


class Devices(Child):
    """One device, or several that a gateway speaks for.

    Args:
        parent, keys, state, trust: See `Child`.
        data: The .npz file of each device, by address.
    """

    def __init__(self, parent: str, keys: Path, state: Path, data: Mapping[str, Path], trust: bool) -> None:
        self.data, self.federations = data, {}
        super().__init__(parent, keys, state, list(data), trust)

    def counts(self, job: Job, trees: dict[str, Topology], known: Any) -> dict[str, list[int]]:
        if not self.federations:
            self.federations = {name: job.federation(name.partition("/")[2], path) for name, path in self.data.items()}
        return {
            name.partition("/")[2]: federation.population.counts[0].tolist()
            for name, federation in self.federations.items()
        }

    def moments(self, counts: dict[str, list[int]]) -> list[Moments]:
        return [moments_of(self.federations[name]) for name in self.names]

    def build(self, job: Job, about: Any) -> None:
        trees = {name: read_tree(about["nodes"][name]["tree"]) for name in self.names}
        federations = {name: job.rescaled(federation) for name, federation in self.federations.items()}
        first = self.names[0]
        assembly = job.assemble(trees[first], federations[first], whole=False)
        exchange = Exchange(assembly.codec, assembly.upload)
        for name, tree in trees.items():
            context = world_context(assembly.context, tree, federations[name])
            self.nodes[name] = self.make_node(name, context, exchange, about)
        warm_up(self.nodes[first], self.limits)


def warm_up(node: Node, limits: Limits) -> None:
    """Run every program of a device once, with zeros, so that graphs are traced before the first deadline."""
    zero = torch.zeros(1, dtype=torch.int64)
    for key, forms in limits.forms.items():
        scope, tier, method, way = key.rsplit("/", 3)
        if way != "down" or scope not in node.tier or int(tier) != node.tier[scope] or None in forms.values():
            continue
        rows: Any = {
            name: torch.zeros((1, *form[1]), dtype=getattr(torch, form[0])) for name, form in forms.items() if form
        }
        call = Call(int(tier), zero, method, Clock(0), rows[""] if list(rows) == [""] else rows, zero, quiet=True)
        try:
            execute(node.context, replace(call, scope=scope), 0, 1)
        except Exception as error:  # zeros may be no valid input
            log.debug("%s was not tried: %s", key, error)


class Team(Child):
    """A team: a child of its parent, and the parent of its devices or teams.

    Args:
        parent, keys, state, trust: See `Child`.
        name: Its address.
        listen: HOST:PORT for its children.
        started: Called with the address at which it listens.
    """

    def __init__(
        self, parent: str, keys: Path, state: Path, name: str, listen: str, started: Callable[[str], None], trust: bool
    ) -> None:
        self.listen, self.keys, self.started = listen, keys, started
        self.gate: Admission | None = None
        self.hub: LinkHub | None = None
        self.parent: Parent | None = None
        super().__init__(parent, keys, state, [name], trust)

    def _welcome(self, about: Any) -> Message | None:
        """As every child; or pass on what devices say from now on, if the method has no teams."""
        if about.get("relay") is not True:
            return super()._welcome(about)
        if self.hub is None:
            if "://" in self.listen + self.uplink.parent:
                raise ValueError("a broker passes messages on by itself: let the devices name the server as parent")
            self.hub = Relay(self.listen, self.keys, self.uplink.parent, about["largest"], LARGEST)
            self.vitals.children, self.vitals.present, self.vitals.traffic = True, self.hub.present, self.hub.traffic
            self.started(self.hub.address)
        return None

    def counts(self, job: Job, trees: dict[str, Topology], known: Any) -> dict[str, list[int]] | None:
        (tree,) = trees.values()
        tier = tree.tier_names.index(self.names[0].partition("/")[0])
        if self.gate is None:
            self.gate = Admission(job, tree, tier, self.limits)
            self.hub = open_hub(self.listen, self.keys, self.gate)
            vitals, vitals.children, vitals.expected = self.vitals, True, len(self.gate.children)
            vitals.present, vitals.traffic = self.hub.present, self.hub.traffic
            self.started(self.hub.address)
        self.gate.job = job
        self.gate.change(tree)
        if known:
            self.gate.begin(known)
            return known
        try:
            gather(self.gate, float(job.network["wait"]), job.patience.quorum, self._gone)
        except Stopped:
            return None
        told, asked = self.gate.counts, self._asked
        if len(told) < tree.size(tree.leaf) and asked is not None:
            threading.Thread(target=self._tell, args=(self.gate, asked, told), daemon=True).start()
        return told

    def _tell(self, gate: Admission, asked: tuple[int, Message], told: dict[str, list[int]]) -> None:
        """Tell the parent which devices come after the first ones, until the run begins."""
        while not gate.begun and not self.uplink.is_old(*asked):
            if len(now := gate.counts) > len(told):
                told = now
                self.uplink.answer(asked[0], self._ready(gate.job, told, begun=False))
            time.sleep(LOOK)

    def moments(self, counts: dict[str, list[int]]) -> list[Moments]:
        assert self.gate is not None
        return [self.gate.all_moments(counts)]

    def _gone(self) -> bool:
        """Whether the parent has gone."""
        return self.is_old() or self.uplink.ended is not None

    def build(self, job: Job, about: Any) -> None:
        assert self.gate is not None
        assert self.hub is not None
        world = about["nodes"][self.names[0]]
        tree, hub = read_tree(world["tree"]), self.hub
        population = job.population(tree, world["counts"])
        assembly = job.assemble(tree, population, whole=False)
        exchange = Exchange(assembly.codec, assembly.upload)
        context = world_context(assembly.context, tree, without_samples(population))
        tier = {part.name: self.gate.tier for part in context.parts}
        settings: Any = {"limits": self.limits, "programs": PROGRAMS, "patience": job.patience}
        parent = Parent(context, exchange, tier, hub, newer=self.is_old, **settings)
        if self.parent is not None:
            parent.asked = self.parent.asked  # links stay, and late answers may come
        self.parent = parent
        for part in (context, *context.parts):
            part.engine = parent
        self.vitals.expected = tree.size(self.gate.tier + 1)
        self.nodes = {self.names[0]: self.make_node(self.names[0], context, exchange, about, parent)}
        self.gate.begin(world["counts"])
        parent.newcomers = self.gate.newcomers
        self.gate.settle(tree, {key: about.get(key) for key in ("run", "initial", SCALING)})
        hub.send_worlds()
        for name in set(hub.present()) - set(places(tree, self.gate.tier + 1)):
            hub.forget(hub.link_of(name) or name, "it is no longer in the roster")

    def gathered(self) -> None:
        assert self.gate is not None
        assert self.hub is not None
        assert self.gate.settled is not None
        await_children(self.hub, self.gate.settled[0].size(self.gate.tier + 1))

    def close(self) -> None:
        if self.hub is not None and self.over is not None:
            self.hub.stop(self.over)
        elif self.hub is not None:  # the devices wait until this team is started again
            self.hub.close()


def run_team(
    name: str,
    parent: str,
    listen: str,
    keys: Path,
    state: Path,
    started: Callable[[str], None],
    trust: bool = False,
    health: str | None = None,
) -> str:
    """Run a team until its parent says that the run is over; returns what it said. `health`: see `run_server`."""
    address = own_address(certificate_name(keys), ("team",), name)
    team = Team(parent, keys, state, address, listen, started, trust)
    with answering(health, team.vitals):
        return team.run()


def run_devices(
    parent: str, keys: Path, state: Path, data: Mapping[str, Path], trust: bool = False, health: str | None = None
) -> str:
    """Run one device, or several behind a gateway, until the run is over; returns what the parent said.

    Args:
        parent: HOST:PORT.
        keys: Folder with the key and certificates.
        state: Folder for rows and models.
        data: The .npz file of each device, by name.
        trust: Whether the job may name code to import.
        health: HOST:PORT for /healthz and /metrics.
    """
    for path in data.values():
        if not path.is_file():
            raise ValueError(f"there is no file {path}; give the .npz file of the device")
    devices = Devices(parent, keys, state, {f"device/{name}": path for name, path in data.items()}, trust)
    with answering(health, devices.vitals):
        return devices.run()
