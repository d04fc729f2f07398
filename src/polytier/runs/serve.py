"""The processes of a federation: the server, a team, and a device or several."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polytier._errors import BAD_INPUT, INTERRUPTED, Stopped, outcome
from polytier.data.federation import Federation
from polytier.engines.exchange import Exchange
from polytier.engines.network.absences import FILE, read_absences, write_absences
from polytier.engines.network.contents import Limits, as_tensor, from_tensor
from polytier.engines.network.keys import CERTIFICATE, crypto, tls
from polytier.engines.network.message import Message, Refused, encode
from polytier.engines.network.node import Node
from polytier.engines.network.parent import Parent
from polytier.engines.network.rehearsal import rehearse
from polytier.engines.network.versions import NodeMemory, Versions
from polytier.engines.network.websocket import Uplink, WebSocketHub, split_address
from polytier.engines.network.world import read_tree, without_samples
from polytier.files.lock import FolderLock
from polytier.files.read import read_json
from polytier.files.write import make_folder, remove_partials, write_bytes, write_json
from polytier.messages.ledger import Ledger
from polytier.method.call import Call, Clock
from polytier.method.context import Context
from polytier.method.execute import execute
from polytier.models.trainable import digest
from polytier.runs import checkpoint
from polytier.runs.admission import Admission, hello, own_address, those_counted
from polytier.runs.callbacks import RunFolder
from polytier.runs.evaluate import measure, personal
from polytier.runs.folder import check_free
from polytier.runs.job import Job, check_code_names, job_of_parent
from polytier.runs.launch import advice
from polytier.runs.loop import Loop
from polytier.runs.model_specs import model_specs
from polytier.runs.read_files import CHECKPOINTS
from polytier.runs.resume import check_settings
from polytier.runs.write_tensors import pieces
from polytier.tree.topology import Topology

log = logging.getLogger("polytier")
PROGRAMS = {"measure": measure, "personal": personal}
NETWORK, PRESENT = "network.json", "present.json"  # in the run folder of the server
JOB = "job"  # under which network.json has the job
LOOK = 0.1  # seconds between looks at who has come
START = 30.0  # seconds to wait for all children before the first call after a start
LARGEST = 4 << 30  # bytes of a message from a parent, before its job is known


# -- the server ---------------------------------------------------------------------------------------


class EveryRound(RunFolder):
    """A run folder with a checkpoint after every round: the nodes can go back to the start of a round, not further."""

    def __init__(self, folder: Path, lock: FolderLock, engine: Parent, hub: WebSocketHub) -> None:
        super().__init__(folder, resumed=True, lock=lock)
        self.engine, self.hub = engine, hub

    def on_round(self, loop: Loop, record: dict[str, Any]) -> None:
        write_absences(self.folder / FILE, self.engine.absences)
        super().on_round(loop, record)
        if self.saved != loop.round:
            self.checkpoint(loop)
        write_json(self.folder / PRESENT, {"round": loop.round, "present": self.hub.present(), "time": time.time()})

    def on_end(self, loop: Loop, run: Any) -> None:
        write_absences(self.folder / FILE, self.engine.absences)
        super().on_end(loop, run)


def run_server(
    job: Job, listen: str, keys: Path, folder: Path, started: Callable[[str], None], stop: Callable[[], bool]
) -> None:
    """Run the server of a federation, from the start or from its last checkpoint.

    Args:
        job: The job.
        listen: HOST:PORT.
        keys: Folder with the key and certificates of the server.
        folder: The run folder.
        started: Called with the address at which the server listens.
        stop: Called before each round; the run stops if it returns True.

    Raises:
        Stopped: The run ended before its last round. The message says how to continue.
    """
    split_address(listen)
    tls(keys, listens=True)
    if any(spec.batching is None for spec in model_specs(job.spec).values()):
        raise ValueError("the job is not settled; run `polytier federation init JOB.toml` first")
    known = folder / NETWORK
    if not known.exists():
        check_free(folder)
    made = make_folder(folder)
    with FolderLock(folder, made) as lock:
        for place in (folder, folder / CHECKPOINTS, folder / "models"):
            remove_partials(place)
        gate = Admission(job, job.tree, 0, limits_of(job))
        hub = WebSocketHub(listen, keys, gate)
        try:
            started(hub.address)
            if known.exists():
                about = read_json(known)
                gate.counts = about["counts"]
            else:
                gather(gate, float(job.network["wait"]), job.patience.quorum, stop)
                whole = {**job.values(), "network": job.network}
                about = {"run": secrets.token_hex(8), "counts": gate.counts, JOB: whole}
                write_json(known, about)
            lead(job, gate, hub, about["run"], folder, lock, stop)
        finally:
            hub.close()


def limits_of(job: Job) -> Limits:
    """The limits of messages, from a rehearsal in the tree of the roster."""
    tree = job.tree
    assembly = job.assemble(tree, job.population(tree, {str(name): (4, 2, 2) for name in tree.names[-1]}))
    try:
        return rehearse(assembly.context, Exchange(assembly.codec, assembly.upload))
    finally:
        assembly.close()


def gather(gate: Admission, wait: float, quorum: float, stop: Callable[[], bool]) -> None:
    """Wait until the sizes of all devices are known, or of enough of them after `wait` seconds."""
    end, everybody = time.monotonic() + wait, gate.tree.size(gate.tree.leaf)
    while not gate.complete:
        if stop():
            raise Stopped("interrupted before the first round; start the server again", INTERRUPTED)
        if wait and time.monotonic() > end and len(gate.counts) >= max(1, quorum * everybody):
            log.warning("starting with %d of %d devices; the others cannot take part", len(gate.counts), everybody)
            return
        time.sleep(LOOK)


def lead(
    job: Job, gate: Admission, hub: WebSocketHub, run: str, folder: Path, lock: FolderLock, stop: Callable[[], bool]
) -> None:
    """Train: the server's program, with all nodes below it over the network."""
    tree = those_counted(gate.tree, gate.counts)

    def engine(context: Context, **settings: Any) -> Parent:
        exchange = Exchange(settings["codec"], settings["upload"])
        tiers = {part.name: 0 for part in context.parts}
        return Parent(context, exchange, tiers, hub, limits=gate.limits, programs=PROGRAMS, patience=job.patience)

    with Loop(job.assemble(tree, job.population(tree, gate.counts), engine)) as loop:  # type: ignore[arg-type]
        initial = {part.name: digest({"": part.objective.initial}) for part in loop.context.parts}
        gate.settle(tree, {"run": run, "initial": initial})
        hub.send_worlds()
        writer = EveryRound(folder, lock, loop.context.engine, hub)  # type: ignore[arg-type]
        await_children(hub, tree.size(1))
        resume_from(loop, folder)
        text = "stopped"
        try:
            loop.run(loop.spec.rounds, [writer], stop)
            text = "done"
        except BaseException as error:
            code, reason = outcome(error)
            if code is None or isinstance(error, KeyboardInterrupt):
                raise
            log.debug("where this came from:", exc_info=error)
            if code != BAD_INPUT:
                reason = f"{reason}; {advice(error, loop, folder, writer.saved)}"
            hub.stop(reason)
            raise Stopped(reason, code) from None
        if loop.round < loop.spec.rounds:
            raise Stopped(f"interrupted after round {loop.round}; start the server again to continue", INTERRUPTED)
        hub.stop(text)


def resume_from(loop: Loop, folder: Path) -> None:
    """Continue from the last checkpoint, if there is one."""
    saved = checkpoint.latest(folder / CHECKPOINTS)
    if saved is None:
        return
    number, tensors, facts = saved
    check_settings(loop.spec, facts, folder)
    engine: Any = loop.context.engine
    engine.absences = [line for line in read_absences(folder / FILE) if line.round <= number]
    loop.restore(tensors, facts)
    log.info("continuing after round %d of %d", loop.round, loop.spec.rounds)


def await_children(hub: WebSocketHub, number: int) -> None:
    """Wait until all children can be called, for START seconds at most."""
    end = time.monotonic() + START
    while len(hub.present()) < number and time.monotonic() < end:
        time.sleep(LOOK)


# -- nodes below the server ---------------------------------------------------------------------------


def certificate_name(keys: Path) -> str:
    """The name in a node's own certificate."""
    x509, _, _, _, NameOID = crypto()
    try:
        certificate = x509.load_pem_x509_certificate((keys / CERTIFICATE).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{keys} has no certificate ({error}); make one with `polytier federation enrol NAME`, and give its folder"
        ) from None
    return certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value


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
        self.uplink = Uplink(parent, keys, hello(names), LARGEST)
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
                self._asked = came
                try:
                    answer = self._answer(came[1])
                    if answer is not None:
                        self.uplink.answer(came[0], encode(answer))
                except Refused as error:
                    self.uplink.cut(str(error))
        finally:
            self.uplink.close()
            self.close()
            self._lock.release()

    def close(self) -> None:
        """End what a subclass has started."""

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
        self.limits = Limits.of(about["limits"])
        counts = self.counts(self.job, trees, about["counts"])
        return None if counts is None else Message("ready", {}, {"counts": as_tensor(counts)})

    def _enter(self, about: Any) -> Message:
        """Make the nodes of this process, unless they are there already."""
        text = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        if text != self._world:
            assert self.job is not None
            self.build(self.job, about)
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

    def build(self, job: Job, about: Any) -> None:
        trees = {name: read_tree(about["nodes"][name]["tree"]) for name in self.names}
        first = self.names[0]
        assembly = job.assemble(trees[first], self.federations[first])
        exchange = Exchange(assembly.codec, assembly.upload)
        for name, tree in trees.items():
            context = world_context(assembly.context, tree, self.federations[name])
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
        self.hub: WebSocketHub | None = None
        super().__init__(parent, keys, state, [name], trust)

    def counts(self, job: Job, trees: dict[str, Topology], known: Any) -> dict[str, list[int]] | None:
        (tree,) = trees.values()
        tier = tree.tier_names.index(self.names[0].partition("/")[0])
        if self.gate is None:
            self.gate = Admission(job, tree, tier, self.limits)
            self.hub = WebSocketHub(self.listen, self.keys, self.gate)
            self.started(self.hub.address)
        if known:
            self.gate.counts = known
            return known
        try:
            gather(self.gate, float(job.network["wait"]), job.patience.quorum, self._gone)
        except Stopped:
            return None
        return self.gate.counts

    def _gone(self) -> bool:
        """Whether the parent has gone."""
        return self.is_old() or self.uplink.ended is not None

    def build(self, job: Job, about: Any) -> None:
        assert self.gate is not None
        assert self.hub is not None
        world = about["nodes"][self.names[0]]
        tree, hub = read_tree(world["tree"]), self.hub
        population = job.population(tree, world["counts"])
        assembly = job.assemble(tree, population)
        exchange = Exchange(assembly.codec, assembly.upload)
        context = world_context(assembly.context, tree, without_samples(population))
        tier = {part.name: self.gate.tier for part in context.parts}
        settings: Any = {"limits": self.limits, "programs": PROGRAMS, "patience": job.patience}
        parent = Parent(context, exchange, tier, hub, newer=self.is_old, **settings)
        for part in (context, *context.parts):
            part.engine = parent
        self.nodes = {self.names[0]: self.make_node(self.names[0], context, exchange, about, parent)}
        self.gate.counts = {**self.gate.counts, **world["counts"]}
        self.gate.settle(tree, {"run": about["run"], "initial": about["initial"]})
        hub.send_worlds()

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
    name: str, parent: str, listen: str, keys: Path, state: Path, started: Callable[[str], None], trust: bool = False
) -> str:
    """Run a team until its parent says that the run is over; returns what it said."""
    address = own_address(certificate_name(keys), ("team",), name)
    return Team(parent, keys, state, address, listen, started, trust).run()


def run_devices(parent: str, keys: Path, state: Path, data: Mapping[str, Path], trust: bool = False) -> str:
    """Run one device, or several behind a gateway, until the run is over; returns what the parent said.

    Args:
        parent: HOST:PORT.
        keys: Folder with the key and certificates.
        state: Folder for rows and models.
        data: The .npz file of each device, by name.
        trust: Whether the job may name code to import.
    """
    for path in data.values():
        if not path.is_file():
            raise ValueError(f"there is no file {path}; give the .npz file of the device")
    return Devices(parent, keys, state, {f"device/{name}": path for name, path in data.items()}, trust).run()
