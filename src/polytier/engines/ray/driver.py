"""The engine for a cluster: sub-trees live in processes of their own, actors of Ray.

An actor owns some consecutive nodes of tier 1 with all nodes below them (teams with their devices; in a flat tree,
devices by whole blocks): their data, the rows that they keep, and a stacked engine that runs them. The program of the
server runs in this process, the driver, which splits its calls by owner. Sums keep the order given by the topology, so
that no bit of the result changes. If an actor is lost, a new one is started in its place and `NodesLost` is raised: the
run then goes back to its last snapshot.
"""

from __future__ import annotations

import gc
import ipaddress
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
from polytier.engines.workers import batch_settings, without_data
from polytier.messages.codec import Codec
from polytier.messages.transforms import Transform
from polytier.method.call import Call, NodesLost
from polytier.method.context import Context
from polytier.stack.rows import cat_rows, fold, map_rows
from polytier.tree.topology import Topology

START_SECONDS = 180.0  # time for the cluster to start an actor; on a busy machine this takes long
ANSWER_SECONDS = 5.0  # time for the head of a cluster to answer
# Ray uses gRPC over HTTP/2, whose servers first send a SETTINGS frame; its type follows three bytes of length
SETTINGS = b"\x04"
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + SETTINGS + bytes(5)


class Ray:
    """Runs the program of the server in this process and every sub-tree in an actor.

    Args:
        context: What the programs share. Its memory is replaced by one that asks the actors.
        codec: How rows are encoded.
        upload: What is done to the changes of models before devices send them.
        tile: Devices that an actor computes at once; None: as many as fit into the cache of the processor.
        inner_tile: Teams that an actor computes at once; None: all of them.
        workers: Number of actors, one CPU each; None: one per free CPU of the cluster.
        address: HOST:PORT of the head of a cluster, or "auto" for a cluster on this machine; "" starts an instance of
            Ray for this run.

    Raises:
        ValueError: If Ray is not installed, no cluster answers, or models are on an accelerator.
        OSError: If Ray or an actor does not start.
    """

    remote = True

    def __init__(
        self,
        context: Context,
        *,
        codec: Codec,
        upload: Transform | None = None,
        tile: int | None = None,
        inner_tile: int | None = None,
        workers: int | None = None,
        address: str = "",
    ) -> None:
        if {part.objective.device.type for part in context.parts} != {"cpu"}:
            raise ValueError("the ray engine computes on CPUs; use --on cpu, or --engine stacked")
        self.context, self.codec, self.upload, self.inner_tile = context, codec, upload, inner_tile
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

    def use_workers(self, workers: int) -> None:
        """Change nothing: the number of actors is fixed."""

    def close(self) -> None:
        """End the actors, and leave Ray if it was started or joined for this run."""
        for actor in self.actors.values():
            self._ray.kill(actor)
        self.actors = {}
        if self._joined:
            disconnect(self._ray)
            self._joined = False

    def deliver(self, call: Call) -> Iterator[Any]:
        """Run the program of a call at its receivers; see `Engine.deliver`."""
        part = self.context.scope(call.scope)
        owner = self.owners[call.scope][call.tier][call.ids]
        summed = call.blocks is not None and call.tier == part.topology.leaf  # actors sum devices, the driver teams
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
        """Call a method of actors, all at the same time.

        Args:
            what: Name of a method of `SubTree`.
            arguments: Its arguments, by the number of the actor.

        Yields:
            (number of the actor, result), in order.

        Raises:
            NodesLost: If an actor was lost; a new one is in its place.
        """
        if not self.actors:
            raise RuntimeError("the training is closed, and the rows that its nodes kept no longer exist")
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
        """Start new actors in place of the lost ones, and return an error that names their nodes."""
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
        waiting = self._ray.wait(futures, num_returns=len(futures), timeout=START_SECONDS)[1]
        if waiting:
            raise TimeoutError(
                f"Ray did not start {len(waiting)} of {len(futures)} actors (one CPU each) in {START_SECONDS:.0f} "
                "seconds; use fewer --workers, or free some CPUs"
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
        """The arguments of `SubTree.start` of an actor: the whole tree, and the samples of its own devices alone."""
        federations: dict[Any, Federation] = {}  # models with the same data share them in the actor too
        shares = []
        for part in self.context.parts:
            owned = [of_tier == k for of_tier in self.owners[part.name]]
            devices, federation = part.topology.order[owned[-1]], part.batches.federation
            alike = id(federation), devices.numpy().tobytes()
            if alike not in federations:
                federations[alike] = only(federation, devices)
            held = [(int(mask.long().argmax()), int(mask.sum())) for mask in owned]
            shares.append((federations[alike], batch_settings(part), held))
        return without_data(self.context), shares, self.codec, self.upload, self.tiles, self.inner_tile


def owners(topology: Topology, workers: int) -> list[Tensor]:
    """Return for each tier the actor [nodes] of each node.

    Actors own neighbouring nodes of tier 1, with about the same number of devices each; no block of a sum is split.
    """
    group = topology.blocks[1] if topology.leaf == 1 else torch.arange(topology.size(1))
    devices = torch.bincount(group[topology.ancestor(1)])
    middle = devices.cumsum(0) - devices / 2
    owner = torch.unique((middle * workers / devices.sum()).long(), return_inverse=True)[1][group]
    return [torch.zeros(1, dtype=torch.int64), *(owner[topology.ancestor(1, t)] for t in range(1, topology.num_tiers))]


def only(federation: Federation, devices: Tensor) -> Federation:
    """Return a federation of the same devices that holds the samples of some devices only."""
    start, end = federation.bounds[devices, 0], federation.bounds[devices, 3]
    length = end - start
    first = length.cumsum(0) - length  # where the samples of each device start in the result
    index = torch.repeat_interleave(start - first, length) + torch.arange(int(length.sum()))
    bounds = federation.bounds.clone()
    bounds[devices] += (first - start).unsqueeze(1)
    return replace(federation, x=federation.x[index], y=federation.y[index], bounds=bounds)


# -- Ray itself ---------------------------------------------------------------------------------------


def connect(address: str, workers: int | None) -> tuple[Any, bool]:
    """Start or join Ray.

    Returns:
        The module, and whether this call has started or joined Ray (False: it was in use already).

    Raises:
        ValueError: If Ray is not installed or no cluster answers at the address.
        OSError: If Ray does not start on this machine.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # it would print a line of its own for lost actors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own warnings
        try:
            import ray
        except ImportError:
            from polytier._errors import missing

            raise missing("ray") from None
        if ray.is_initialized():
            return ray, False
        advice = "give HOST:PORT of its head node, or auto for a cluster on this machine; engine ray starts one"
        try:
            if not address:
                start_here(ray, workers)
            else:
                check_address(address)
                ray.init(address, **job_settings())
        except (OSError, RuntimeError, ValueError) as error:
            if not address:
                raise OSError(f"Ray does not start on this machine: {first_line(error)}") from None
            raise ValueError(f"no Ray cluster answers at {address!r} ({first_line(error)}); {advice}") from None
        gc.collect()  # closes files that Ray leaves open, while warnings about them are off
    return ray, True


def job_settings() -> dict[str, Any]:
    """Arguments of `ray.init`: no output; actors do not search the current folder before installed packages."""
    from ray.job_config import JobConfig

    job: Any = JobConfig()
    job._runtime_env_has_working_dir = lambda: True  # Ray adds the current folder if a job has no folder of its own
    return {"log_to_driver": False, "logging_level": logging.ERROR, "job_config": job}


def start_here(ray: Any, workers: int | None) -> None:
    """Start an instance of Ray for this run. Its processes listen on the loopback interface only.

    Ray listens on all interfaces unless its node has the address 127.0.0.1, and it replaces that address by one on the
    network where clusters are possible. Its own switch for that is read when Ray is imported, and set here meanwhile.

    Raises:
        OSError: If Ray took another address; it is shut down.
    """
    switches = ray._private.ray_constants
    before, switches.ENABLE_RAY_CLUSTER = switches.ENABLE_RAY_CLUSTER, False
    try:
        ray.init("local", num_cpus=workers, include_dashboard=False, **job_settings())
    finally:
        switches.ENABLE_RAY_CLUSTER = before
    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        ray.shutdown()
        raise OSError(
            f"Ray {ray.__version__} would listen on {address} and not on this machine alone; use another version"
        )


def disconnect(ray: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.shutdown()


def check_address(address: str) -> None:
    """Raise an error unless the head of a Ray cluster seems to answer there. Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError("this is not an address")
    with socket.create_connection((host, int(port)), ANSWER_SECONDS) as line:
        line.sendall(HELLO)
        if line.recv(4)[3:] != SETTINGS:
            raise ValueError("another program answers there")


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
