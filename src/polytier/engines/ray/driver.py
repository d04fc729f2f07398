"""The engine for a cluster: each sub-tree of the server lives in a process of its own, an actor of Ray.

An actor owns some consecutive nodes of tier 1 with all below them (teams with their devices; in a flat tree, devices by
whole blocks): their data, what they keep, and a stacked engine that runs them. The server's program runs here, in the
driver, which cuts its calls by owner. Sums keep the order that the topology gives them, so no bit changes. If an
actor is lost a new one takes its place and `NodesLost` is raised: the training then goes back to its last snapshot.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polytier.data.federation import Federation
from polytier.engines.ray.actor import SubTree, pack, unpack
from polytier.engines.ray.remote_memory import RemoteMemory
from polytier.engines.stacked import default_tile
from polytier.engines.workers import bare, drawing
from polytier.messages.codec import Codec
from polytier.method.call import Call, NodesLost
from polytier.method.context import Context
from polytier.stack.rows import cat_rows, fold, map_rows
from polytier.tree.topology import Topology

STARTS = 180.0  # seconds in which the cluster has to give room to an actor; on a busy machine starting one takes long
ANSWERS = 5.0  # seconds in which its head has to answer
SETTINGS = b"\x04"  # Ray speaks gRPC, whose servers first send a frame of this kind, told after three bytes of length
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + SETTINGS + bytes(5)


class Ray:
    """Runs the server's program here and every sub-tree in an actor, of the cluster at `address` or ("") of its own."""

    remote = True  # nodes may be lost, and keep their rows elsewhere

    def __init__(
        self, context: Context, codec: Codec, *, tile: int | None = None, inner_tile: int | None = None,
        workers: int | None = None, address: str = "",
    ) -> None:  # fmt: skip
        if {part.objective.device.type for part in context.parts} != {"cpu"}:
            raise ValueError("the ray engine computes on CPUs; use --on cpu, or --engine stacked")
        self.context, self.codec, self.inner_tile = context, codec, inner_tile
        self.tiles = {part.name: tile or default_tile(part) for part in context.parts}
        self.actors: dict[int, Any] = {}
        self._ray, self._joined = connect(address, workers)
        try:
            workers = workers or max(1, int(self._ray.available_resources().get("CPU", 1)))
            self.owners = {part.name: owners(part.topology, workers) for part in context.parts}
            self.workers = 1 + max(int(of_tier[-1].max()) for of_tier in self.owners.values())
            self._start(range(self.workers))
        except BaseException:
            self.close()
            raise
        for part in context.parts:
            part.memory = RemoteMemory(self, part)

    def close(self) -> None:
        for actor in self.actors.values():
            self._ray.kill(actor)
        self.actors = {}
        if self._joined:
            disconnect(self._ray)
            self._joined = False

    def deliver(self, call: Call) -> Iterator[Any]:
        part = self.context.scope(call.scope)
        owner = self.owners[call.scope][call.tier][call.ids]
        summed = call.blocks is not None and call.tier == part.topology.leaf  # there; the rows of teams: here
        asked = call if summed else replace(call, blocks=None, shares=None)
        places = {k: (owner == k).nonzero().squeeze(1) for k in owner.unique().tolist()}
        pieces = []
        for k, (answers, traffic, steps) in self.ask("deliver", {k: (asked.take(w),) for k, w in places.items()}):
            part.device_steps += steps
            for messages in traffic:
                part.ledger.add(*messages)
            if summed:
                first = int(call.blocks[places[k][0]])  # type: ignore[index]
                yield from (replace(folded, first=first + folded.first) for folded in answers)
            else:
                pieces += answers
        if pieces:
            back = torch.cat(list(places.values())).argsort()
            rows = map_rows(lambda r: r[back], cat_rows(pieces))
            yield rows if call.blocks is None or call.shares is None else fold(rows, call.shares, call.blocks)

    def ask(self, what: str, arguments: Mapping[int, tuple]) -> Iterator[tuple[int, Any]]:
        """Have actors do something, all at once; what each of them answers, in order."""
        if not self.actors:
            raise RuntimeError("the training is closed, and what its nodes kept is gone with them")
        futures = {k: self.actors[k].do.remote(what, pack(given)) for k, given in arguments.items()}
        for k, future in futures.items():
            try:
                answer = self._answer(future)
            except self._ray.exceptions.RayError as error:
                raise self._replaced(error) from None
            yield k, answer

    def _answer(self, future: Any) -> Any:
        answer = unpack(self._ray.get(future))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _replaced(self, error: Exception) -> NodesLost:
        """New actors for those that are gone, and who they were."""
        lost = [k for k, actor in self.actors.items() if not self._lives(actor)]
        if not lost:
            return NodesLost(f"an actor could not be reached ({first_line(error)})")
        self._start(lost)
        part = self.context.parts[0]
        ranges = [part.topology.names[1][(self.owners[part.name][1] == k).numpy()] for k in lost]
        who = ", ".join(f"{names[0]} to {names[-1]}" for names in ranges if len(names))
        return NodesLost(f"the process of {part.topology.tier_names[1]} {who} was lost (killed, or out of memory)")

    def _lives(self, actor: Any) -> bool:
        try:
            self._ray.get(actor.__ray_ready__.remote())
        except self._ray.exceptions.RayError:
            return False
        return True

    def _start(self, which: Sequence[int]) -> None:
        self.actors |= {k: self._spawn() for k in which}
        futures = [self.actors[k].do.remote("start", pack(self._owned(k))) for k in which]
        waiting = self._ray.wait(futures, num_returns=len(futures), timeout=STARTS)[1]
        if waiting:
            raise TimeoutError(
                f"Ray gave no room to {len(waiting)} of {len(futures)} actors (a CPU each) in {STARTS:.0f} seconds; "
                "try fewer --workers, or free some CPUs"
            )
        try:
            for future in futures:
                self._answer(future)
        except self._ray.exceptions.RayError as error:
            raise OSError(f"an actor of Ray ended as it started: {first_line(error)}") from None
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{error}: an actor lacks it; install it on every machine of the cluster") from None

    def _spawn(self) -> Any:
        return self._ray.remote(num_cpus=1)(SubTree).remote(sys.path)

    def _owned(self, k: int) -> tuple:
        """What an actor starts from: the tree as a whole, the samples of its own devices alone."""
        federations: dict[Any, Federation] = {}  # models that share their data share them there too
        shares = []
        for part in self.context.parts:
            owned = [of_tier == k for of_tier in self.owners[part.name]]
            devices, federation = part.topology.order[owned[-1]], part.batches.federation
            alike = id(federation), devices.numpy().tobytes()
            if alike not in federations:
                federations[alike] = only(federation, devices)
            held = [(int(mask.long().argmax()), int(mask.sum())) for mask in owned]
            shares.append((federations[alike], drawing(part), held))
        return bare(self.context), shares, self.codec, self.tiles, self.inner_tile


def owners(topology: Topology, workers: int) -> list[Tensor]:
    """By tier: the actor of each node. Neighbours with about as many devices each; sums of blocks are not cut."""
    group = topology.blocks[1] if topology.leaf == 1 else torch.arange(topology.size(1))
    devices = torch.bincount(group[topology.ancestor(1)])
    middle = devices.cumsum(0) - devices / 2
    owner = torch.unique((middle * workers / devices.sum()).long(), return_inverse=True)[1][group]
    return [torch.zeros(1, dtype=torch.int64), *(owner[topology.ancestor(1, t)] for t in range(1, topology.num_tiers))]


def only(federation: Federation, devices: Tensor) -> Federation:
    """The same devices, with the samples of some of them alone."""
    start, end = federation.bounds[devices, 0], federation.bounds[devices, 3]
    length = end - start
    first = length.cumsum(0) - length  # where each one's samples are now
    index = torch.repeat_interleave(start - first, length) + torch.arange(int(length.sum()))
    bounds = federation.bounds.clone()
    bounds[devices] += (first - start).unsqueeze(1)
    return replace(federation, x=federation.x[index], y=federation.y[index], bounds=bounds)


# -- Ray itself ---------------------------------------------------------------------------------------


def connect(address: str, workers: int | None) -> tuple[Any, bool]:
    """Ray, and whether it was started or joined by this call."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # what it would print beside our own line on lost actors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own
        try:
            import ray
        except ImportError:
            from polytier._errors import missing

            raise missing("ray") from None
        if ray.is_initialized():
            return ray, False
        advice = "give HOST:PORT of its head node, or auto for one on this machine; without an address one is started"
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if not address:
                ray.init("local", num_cpus=workers, include_dashboard=False, **quiet)
            else:
                check_address(address)
                ray.init(address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            if not address:
                raise OSError(f"Ray does not start on this machine: {first_line(error)}") from None
            raise ValueError(f"no Ray cluster answers at {address!r} ({first_line(error)}); {advice}") from None
    return ray, True


def disconnect(ray: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.shutdown()


def check_address(address: str) -> None:
    """Whether something like Ray's head answers there; Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError("this is no address")
    with socket.create_connection((host, int(port)), ANSWERS) as line:
        line.sendall(HELLO)
        if line.recv(4)[3:] != SETTINGS:
            raise ValueError("something else does")


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
