"""A test engine over pipes: every node is a process with its own context, memory and data, and computes n = 1.

The server is the process that trains; below it are teams and devices. A message is the bytes of a row and a
small header. Evaluation, which the server addresses to the devices, is relayed by the teams.
"""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from polytier.data.federation import Federation
from polytier.engines.exchange import Exchange
from polytier.engines.process_start import start_process
from polytier.messages.codec import CODECS, Codec
from polytier.messages.ledger import Ledger
from polytier.method.algorithm import Algorithm
from polytier.method.call import Call
from polytier.method.children import Children
from polytier.method.context import Context
from polytier.method.execute import execute
from polytier.method.memory import Memory
from polytier.method.travel import STATISTICS
from polytier.runs.loop import Loop
from polytier.stack.rows import Rows, as_dict, cat_rows, fold, map_rows
from polytier.tree.topology import Topology

EXACT = CODECS["float64"]  # evaluation is not part of the traffic: nothing is rounded


class Pipes:
    """What a node does with its calls: sends them to its children, each by its own pipe."""

    remote, workers, tiles = False, 1, {"": 1}

    def __init__(
        self,
        context: Context,
        exchange: Exchange,
        tier: int,
        below: dict[int, Connection],
        ledger: Ledger | None = None,
    ):
        self.context, self.exchange, self.tier, self.below, self.ledger = context, exchange, tier, below, ledger

    def deliver(self, call: Call) -> Iterator[Any]:
        ids = call.ids.tolist()
        for i, node in enumerate(ids):
            plain = self.exchange.codec.plain
            self._count(call, "down", node, send(self._pipe(call.tier, node), plain, call.part(i, i + 1)))
        answers = []
        for i, node in enumerate(ids):
            alone = call.part(i, i + 1)
            answer, nbytes = receive(self._pipe(call.tier, node), codecs(self, alone))
            if not call.quiet:
                alone = replace(alone, rows=self.exchange.down(alone.rows))  # as the node has got them
                answer = self.exchange.incoming(self.context, alone, answer)
            self._count(call, "up", node, nbytes)
            answers.append(answer)
        if not call.quiet and call.tier < self.context.topology.leaf and self.tier == 0:
            self._collect(call)
        if answers:
            rows = cat_rows(answers)
            yield rows if call.blocks is None or call.shares is None else fold(rows, call.shares, call.blocks)

    def _pipe(self, tier: int, node: int) -> Connection:
        """To the child, or to the team above a device."""
        while tier > self.tier + 1:
            node, tier = int(self.context.topology.parents[tier][node]), tier - 1
        return self.below[node]

    def _count(self, call: Call, way: str, node: int, nbytes: int) -> None:
        if self.ledger is not None and not call.quiet:
            self.ledger.add(call.tier, way, torch.tensor([node]), torch.tensor([nbytes]))

    def _collect(self, call: Call) -> None:
        """The server learns the teams' models, to have them evaluated."""
        ask = replace(call, method=kept_model, rows={}, blocks=None, shares=None, quiet=True)
        for i, node in enumerate(call.ids.tolist()):
            send(self.below[node], EXACT, ask.part(i, i + 1))
            answer, _ = receive(self.below[node], lambda field: EXACT)
            for name, rows in as_dict(answer).items():
                self.context.memory.write(call.tier, name, call.ids[i : i + 1], rows)

    def use_workers(self, workers: int) -> None: ...

    def close(self) -> None: ...


def codecs(engine: Pipes, call: Call) -> Callable[[str], Codec]:
    """The codec of each field of an answer."""
    return lambda field: EXACT if call.quiet else engine.exchange.codec_of(engine.context, call, field)


def kept_model(algorithm: Algorithm, rows: Rows, node: Children) -> Rows:
    names = node._context.memory.names(node.tier)
    found = {STATISTICS: node.statistics} if STATISTICS in names else {}
    return {"model": node.memory("model", node.initial), **found} if "model" in names else {}


# -- messages -----------------------------------------------------------------------------------------


def send(pipe: Connection, codec: Codec, call: Call) -> int:
    codec = EXACT if call.quiet else codec
    message, nbytes = pack(lambda field: codec, map_rows(lambda r: r[call.sender], call.rows))
    pipe.send_bytes(pickle.dumps(("call", (call.tier, int(call.ids[0]), call.method, call.clock, call.quiet, message))))
    return nbytes


def receive(pipe: Connection, codec_of: Callable[[str], Codec]) -> tuple[Rows, int]:
    kind, body = pickle.loads(pipe.recv_bytes())
    if kind == "error":
        raise RuntimeError(body)
    return unpack(codec_of, body)


def pack(codec_of: Callable[[str], Codec], rows: Rows) -> tuple[Any, int]:
    """One row as bytes with its names, types and shapes; and how many bytes the codec made."""
    parts = {k: (v.dtype, tuple(v.shape[1:]), codec_of(k).encode(v[0])) for k, v in as_dict(rows).items()}
    return (isinstance(rows, dict), parts), sum(len(p[2]) for p in parts.values())


def unpack(codec_of: Callable[[str], Codec], message: Any) -> tuple[Rows, int]:
    named, parts = message
    rows = {
        k: codec_of(k).decode(b, torch.empty(shape, dtype=dtype)).unsqueeze(0) for k, (dtype, shape, b) in parts.items()
    }
    return (rows if named else rows[""]), sum(len(p[2]) for p in parts.values())


# -- processes ----------------------------------------------------------------------------------------


def serve(up: list[Connection], below: dict[int, Connection]) -> None:
    """A node's process: gets a context, then runs calls, until it is told to stop."""
    torch.set_num_threads(1)
    engine: Pipes | None = None
    while True:
        for pipe in wait(up):
            assert isinstance(pipe, Connection)
            kind, body = pickle.loads(pipe.recv_bytes())
            if kind == "stop":
                return
            if kind == "context":
                context, exchange, tier = body
                engine = context.engine = Pipes(context, exchange, tier, below)
                continue
            assert engine is not None
            try:
                pipe.send_bytes(pickle.dumps(("answer", run(engine, *body))))
            except Exception:
                pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))


def run(engine: Pipes, tier: int, node: int, method: Any, clock: Any, quiet: bool, message: Any) -> Any:
    plain = EXACT if quiet else engine.exchange.codec.plain
    rows, _ = unpack(lambda field: plain, message)
    one = torch.zeros(1, dtype=torch.int64)
    call = Call(tier, torch.tensor([node]), method, clock, rows, one, quiet=quiet)
    if tier == engine.tier:
        answer = engine.exchange.outgoing(engine.context, call, execute(engine.context, call, 0, 1))
    else:
        answer = cat_rows(list(engine.deliver(call)))  # for a device below this team: evaluation
    return pack(codecs(engine, call), answer)[0]


class Processes:
    """Teams and devices as processes; the devices also have a pipe to the server, for flat methods."""

    def __init__(self, topology: Topology) -> None:
        pipe = multiprocessing.Pipe
        num_teams, num_devices = topology.size(1), topology.size(2)
        self.teams, team_ends = zip(*(pipe() for _ in range(num_teams)), strict=True)
        self.devices, device_ends = zip(*(pipe() for _ in range(num_devices)), strict=True)
        below: list[dict[int, Connection]] = [{} for _ in range(num_teams)]
        ups: list[list[Connection]] = [[end] for end in device_ends]
        for device, team in enumerate(topology.parents[2].tolist()):
            below[team][device], end = pipe()
            ups[device].append(end)
        jobs = [([end], below[k]) for k, end in enumerate(team_ends)] + [(up, {}) for up in ups]
        self.processes = [start_process(serve, *job, daemon=True) for job in jobs]

    def attach(self, training: Loop) -> None:
        """Give every node its context: only a device's own process has its samples."""
        context, leaf = training.context, training.context.topology.leaf
        exchange = Exchange(training.codec, training.assembly.upload)
        pipes = {1: self.teams, 2: self.devices} if leaf == 2 else {1: self.devices}
        for tier, nodes in pipes.items():
            for node, pipe in enumerate(nodes):
                own = int(context.topology.order[node]) if tier == leaf else None
                batches = copy.copy(context.batches)
                batches.federation = only(batches.federation, own)
                part = replace(context, batches=batches, memory=Memory(context.topology), engine=None)  # type: ignore[arg-type]
                pipe.send_bytes(pickle.dumps(("context", (part, exchange, tier))))
        context.batches.federation = only(context.batches.federation, None)
        training.use(Pipes(context, exchange, 0, dict(enumerate(pipes[1])), training.ledger))

    def close(self) -> None:
        for pipe in (*self.devices, *self.teams):  # a device whose team has gone would find its pipe closed
            pipe.send_bytes(pickle.dumps(("stop", None)))
        for process in self.processes:
            process.join(30)
        for pipe in (*self.teams, *self.devices):
            pipe.close()


def only(federation: Federation, device: int | None) -> Federation:
    """The federation with nothing but one device's samples; the others' are not numbers."""
    x, y = torch.full_like(federation.x, torch.nan), torch.zeros_like(federation.y)
    if device is not None:
        start, end = int(federation.bounds[device, 0]), int(federation.bounds[device, 3])
        copy_rows(x, federation.x, start, end)
        copy_rows(y, federation.y, start, end)
    return replace(federation, x=x, y=y)


def copy_rows(to: Tensor, source: Tensor, start: int, end: int) -> None:
    to[start:end] = source[start:end]
