"""The server of a federation."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from polytier._errors import BAD_INPUT, INTERRUPTED, Stopped, outcome
from polytier._terminal import event
from polytier.data.moments import mean_and_spread
from polytier.engines.exchange import Exchange
from polytier.engines.network.absences import FILE, read_absences, write_absences
from polytier.engines.network.contents import Limits
from polytier.engines.network.health import Vitals, answering
from polytier.engines.network.keys import tls
from polytier.engines.network.links import LinkHub
from polytier.engines.network.parent import Parent
from polytier.engines.network.rehearsal import rehearse
from polytier.engines.network.transport import check_address, open_hub
from polytier.engines.network.world import places
from polytier.files.lock import FolderLock
from polytier.files.read import read_json
from polytier.files.write import make_folder, remove_partials, write_json
from polytier.messages.ledger import WAYS
from polytier.method.context import Context
from polytier.models.trainable import digest
from polytier.runs import checkpoint
from polytier.runs.admission import Admission, those_counted
from polytier.runs.callbacks import RunFolder
from polytier.runs.divergence import measure_initial, measure_largest
from polytier.runs.evaluate import measure, personal
from polytier.runs.folder import check_free
from polytier.runs.job import Job, check_code, make_job
from polytier.runs.launch import advice
from polytier.runs.loop import Loop
from polytier.runs.model_specs import model_specs
from polytier.runs.read_files import CHECKPOINTS, PRESENT
from polytier.runs.resume import check_settings
from polytier.runs.roster import FILE as CHANGES
from polytier.runs.roster import Change, members, moved, next_changes, paths, read_changes, with_roster, write_changes

log = logging.getLogger("polytier")
PROGRAMS = {"measure": measure, "personal": personal, "initial": measure_initial, "largest": measure_largest}
NETWORK = "network.json"  # in the run folder of the server
JOB, SCALING = "job", "scaling"  # under which network.json has the job, and mean and spread of the inputs
NOTE = 1.0  # seconds between looks at who is there, for present.json
MOST_LISTED = 2000  # nodes whose bytes are in present.json
LOOK = 0.1  # seconds between looks at who has come
START = 30.0  # seconds to wait for all children before the first call after a start


class EveryRound(RunFolder):
    """A run folder with a checkpoint after every round: the nodes can go back to the start of a round, not further."""

    def __init__(self, folder: Path, lock: FolderLock, engine: Parent, hub: LinkHub, vitals: Vitals) -> None:
        super().__init__(folder, resumed=True, lock=lock)
        self.engine, self.hub, self.vitals = engine, hub, vitals
        self._bytes: dict[str, list[int]] = {}
        self._noted: dict[str, Any] = {}
        self._guard = threading.Lock()

    def on_round(self, loop: Loop, record: dict[str, Any]) -> None:
        write_absences(self.folder / FILE, self.engine.absences)
        super().on_round(loop, record)
        if self.saved != loop.round:
            self.checkpoint(loop)
        self.vitals.seconds, self.vitals.absences = record["seconds"], len(self.engine.absences)
        there, of = len(self.hub.present()), self.vitals.expected
        text = "round %d of %d: %.1f seconds, %d of %d children are there"
        log.info(text, loop.round, loop.rounds, record["seconds"], there, of, extra=event("round"))
        self._bytes = bytes_by_node(loop.context)
        self.note_present()

    def note_present(self) -> None:
        """Write who is there to present.json, if that has changed."""
        about = {"round": self.vitals.round, "present": self.hub.present(), "below": self.engine.present()}
        about |= {"bytes": self._bytes}
        with self._guard:
            if about != self._noted:
                write_json(self.folder / PRESENT, {**about, "time": time.time()})
                self._noted = about

    def checkpoint(self, loop: Loop) -> None:
        super().checkpoint(loop)
        self.vitals.round, self.vitals.saved = loop.round, time.time()

    def on_end(self, loop: Loop, run: Any) -> None:
        write_absences(self.folder / FILE, self.engine.absences)
        super().on_end(loop, run)


def run_server(
    job: Job,
    listen: str,
    keys: Path,
    folder: Path,
    started: Callable[[str], None],
    stop: Callable[[], bool],
    health: str | None = None,
    roster: Callable[[Job], Job] = lambda job: job,
) -> None:
    """Run the server of a federation, from the start or from its last checkpoint.

    Args:
        job: The job.
        listen: HOST:PORT.
        keys: Folder with the key and certificates of the server.
        folder: The run folder.
        started: Called with the address at which the server listens.
        stop: Called before each round; the run stops if it returns True.
        health: HOST:PORT for /healthz and /metrics.
        roster: The job as it is now, given the job as it was: its roster may change during the run.

    Raises:
        Stopped: The run ended before its last round. The message says how to continue.
    """
    check_address(listen)
    tls(keys, listens=True)
    if any(spec.batching is None for spec in model_specs(job.spec).values()):
        raise ValueError("the job is not settled; run `polytier federation init JOB.toml` first")
    check_code(job)
    known = folder / NETWORK
    if not known.exists():
        check_free(folder)
    made, vitals = make_folder(folder), Vitals("server", children=True)
    newcomers: dict[str, list[int]] = {}
    told = False  # where this server listens
    with answering(health, vitals):
        while True:
            with FolderLock(folder, made) as lock:
                for place in (folder, folder / CHECKPOINTS, folder / "models"):
                    remove_partials(place)
                gate = Admission(job, job.tree, 0, limits_of(job))
                hub = open_hub(listen, keys, gate)
                vitals.present, vitals.traffic, vitals.expected = hub.present, hub.traffic, len(gate.children)
                try:
                    if not told:
                        started(hub.address)
                    about = read_json(known) if known.exists() else first_facts(job, gate, stop)
                    changed = take_in(job, about, newcomers, folder)
                    gate.begin({name: about["counts"][name] for name in members(about["first"], changed)})
                    job = replace(job, scaling=about[SCALING])
                    found = lead(job, gate, hub, about, folder, lock, stop, vitals, roster)
                finally:
                    hub.close()
            if found is None:
                return
            job, newcomers = found
            listen, made, told = listen if "://" in listen else hub.address, [], True


def first_facts(job: Job, gate: Admission, stop: Callable[[], bool]) -> dict[str, Any]:
    """Wait for the roster; returns what network.json says of the run."""
    gather(gate, float(job.network["wait"]), job.patience.quorum, stop)
    counts, whole = gate.counts, {**job.values(), "network": job.network}
    about = {"run": secrets.token_hex(8), "counts": counts, "first": sorted(counts), JOB: whole}
    return {**about, SCALING: scaling_of(gate, counts)}


def take_in(job: Job, about: dict[str, Any], newcomers: Mapping[str, list[int]], folder: Path) -> list[Change]:
    """Write down who joins and who leaves now, if anybody; returns all changes so far.

    Args:
        job: With the present roster.
        about: What network.json says; it is changed, and written.
        newcomers: Devices that have come since, and their samples by split.
        folder: The run folder.
    """
    changed, saved = read_changes(folder / CHANGES), checkpoint.latest(folder / CHECKPOINTS)
    about |= {"first": about.get("first", sorted(about["counts"])), SCALING: about.get(SCALING)}
    wanted = {str(name) for name in job.roster.names[-1].tolist()}
    there, round_ = members(about["first"], changed), 0 if saved is None else saved[0]
    due = next_changes(there, wanted, newcomers, len(changed), round_) if saved is not None else []
    about["counts"] |= newcomers
    if due:
        about[JOB]["network"] = with_roster(job_of_facts(about), job)
        for change in due:
            log.info("%s %s after round %d", change.device, change.action, round_, extra=event("roster", change.device))
    write_json(folder / NETWORK, about)
    if due:
        write_changes(folder / CHANGES, [*changed, *due])
    return [*changed, *due]


def job_of_facts(about: Mapping[str, Any]) -> Job:
    """The job of a run, with everybody who was ever in its roster, from what network.json says."""
    return make_job(about[JOB]["spec"], about[JOB]["network"], NETWORK)


def bytes_by_node(context: Context) -> dict[str, list[int]]:
    """Bytes down and up of every node by its address, for `polytier watch`; nothing for large trees."""
    part = context.parts[0]
    if sum(len(names) for names in part.topology.names) > MOST_LISTED:
        return {}
    found = {}
    for tier in range(1, part.topology.num_tiers):
        link = part.ledger.nodes[part.topology.link(tier)]
        for name, node in places(part.topology, tier).items():
            found[name] = [int(link[way][node]) for way in WAYS]
    return found


@contextmanager
def repeated(action: Callable[[], None]) -> Iterator[None]:
    """Call a function again and again in a thread, inside this context."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(NOTE):
            with suppress(OSError):  # a full disk ends the run elsewhere
                action()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def scaling_of(gate: Admission, counts: Mapping[str, list[int]]) -> list[Any] | None:
    """Mean and spread of the inputs of the devices in `counts`, if the job wants them standardised."""
    if not gate.job.standardized:
        return None
    axes = len(gate.job.network["shape"])
    return [values.tolist() for values in mean_and_spread(gate.all_moments(counts), axes)]


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
            text = "starting with %d of %d devices; the others cannot take part"
            log.warning(text, len(gate.counts), everybody, extra=event("start"))
            return
        time.sleep(LOOK)


def lead(
    job: Job,
    gate: Admission,
    hub: LinkHub,
    about: Mapping[str, Any],
    folder: Path,
    lock: FolderLock,
    stop: Callable[[], bool],
    vitals: Vitals,
    roster: Callable[[Job], Job],
) -> tuple[Job, dict[str, list[int]]] | None:
    """Train: the server's program, with all nodes below it over the network.

    Returns:
        If the roster changes before the last round: the job with the new one, and the devices that have come.
    """
    tree = those_counted(gate.tree, gate.counts)

    def engine(context: Context, **settings: Any) -> Parent:
        exchange = Exchange(settings["codec"], settings["upload"])
        tiers = {part.name: 0 for part in context.parts}
        return Parent(context, exchange, tiers, hub, limits=gate.limits, programs=PROGRAMS, patience=job.patience)

    with Loop(job.assemble(tree, job.population(tree, gate.counts), engine)) as loop:  # type: ignore[arg-type]
        initial = {part.name: digest({"": part.objective.initial}) for part in loop.context.parts}
        gate.settle(tree, {"run": about["run"], "initial": initial, SCALING: job.scaling})
        hub.send_worlds()
        writer = EveryRound(folder, lock, loop.context.engine, hub, vitals)  # type: ignore[arg-type]
        vitals.expected = tree.size(1)
        await_children(hub, tree.size(1))
        resume_from(loop, folder, about)
        changes = RosterWatch(job, gate, loop.context.engine, roster)  # type: ignore[arg-type]
        text = "stopped"
        try:
            with repeated(writer.note_present):
                loop.run(loop.spec.rounds, [writer], lambda: stop() or (loop.round > 0 and changes.due()))
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
        if loop.round < loop.spec.rounds and not stop():
            return changes.job, changes.newcomers
        if loop.round < loop.spec.rounds:
            raise Stopped(f"interrupted after round {loop.round}; start the server again to continue", INTERRUPTED)
        hub.stop(text)
        return None


class RosterWatch:
    """Looks between rounds whether devices have come, and whether the roster has changed.

    Args:
        job: With the roster of now.
        gate: The server's.
        engine: The server's.
        roster: See `run_server`.
    """

    def __init__(self, job: Job, gate: Admission, engine: Parent, roster: Callable[[Job], Job]) -> None:
        self.job, self.gate, self.engine, self.roster = job, gate, engine, roster
        self._told = False

    @property
    def newcomers(self) -> dict[str, list[int]]:
        """The devices that have come, and their samples by split."""
        return {**self.engine.newcomers, **self.gate.newcomers}

    def due(self) -> bool:
        """Whether the tree of the run has to change."""
        before, self.job = self.job, self.roster(self.job)
        same = paths(before) == paths(self.job) and before.network["gateways"] == self.job.network["gateways"]
        if not self.gate.limits.fixed:
            return not same or bool(set(self.newcomers) & set(paths(self.job)))
        if not same and not self._told:
            log.warning("%s cannot change its roster during a run; it counts for the next run", self.job.spec.algorithm)
            self._told = True
        return False


def resume_from(loop: Loop, folder: Path, about: Mapping[str, Any]) -> None:
    """Continue from the last checkpoint, if there is one; its tree may have had other devices."""
    changed, saved = read_changes(folder / CHANGES), checkpoint.latest(folder / CHECKPOINTS)
    loop.notes = {"changes": len(changed)}
    if saved is None:
        return
    number, tensors, facts = saved
    check_settings(loop.spec, facts, folder)
    if facts.get("changes", 0) < len(changed):
        before = members(about["first"], changed[: facts.get("changes", 0)])
        tensors = moved(tensors, those_counted(job_of_facts(about).tree, dict.fromkeys(before)), loop.context.topology)
    engine: Any = loop.context.engine
    engine.absences = [line for line in read_absences(folder / FILE) if line.round <= number]
    loop.restore(tensors, facts)
    log.info("continuing after round %d of %d", loop.round, loop.spec.rounds, extra=event("continue"))


def await_children(hub: LinkHub, number: int) -> None:
    """Wait until all children can be called, for START seconds at most."""
    end = time.monotonic() + START
    while len(hub.present()) < number and time.monotonic() < end:
        time.sleep(LOOK)
