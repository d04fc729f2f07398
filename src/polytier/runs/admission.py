"""Who may join a node of a federation, what they are told, and what they tell: the side of the parent."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from polytier.data.moments import Moments, merged, read_moments
from polytier.engines.network.contents import Limits, as_tensor, from_tensor
from polytier.engines.network.links import COUNTS
from polytier.engines.network.message import Message, Refused
from polytier.engines.network.parent import is_count
from polytier.engines.network.relay import VIA
from polytier.engines.network.world import address, places, span, subtree, tree_text
from polytier.runs.job import Job
from polytier.runs.node_versions import check_versions, own_versions, warn_of_bits
from polytier.tree.topology import Topology

MOST_NAMES = 100_000
MOST_RELAYS = 16


def hello(names: list[str]) -> Message:
    """What a child says first."""
    return Message("hello", {**own_versions(), "names": names})


class Admission:
    """The gate of a parent.

    Args:
        job: The job.
        tree: The tree that this parent may see; its devices are those of the roster.
        tier: Tier of this parent.
        limits: What messages may contain.
    """

    def __init__(self, job: Job, tree: Topology, tier: int, limits: Limits) -> None:
        self.job, self.tree, self.tier, self.limits = job, tree, tier, limits
        self.largest = limits.largest
        self.children = places(tree, tier + 1)
        self.counts: dict[str, list[int]] = {}  # samples by split, by the name of the device
        self.moments: dict[str, Moments] = {}  # of the samples below each child, if inputs are standardised
        self.newcomers: dict[str, list[int]] = {}  # the same of devices that came after the start
        self.begun = False  # whether it is fixed who takes part
        self.settled: tuple[Topology, dict[str, Any]] | None = None
        self._lock = threading.Lock()

    def change(self, tree: Topology) -> None:
        """Let in those of another roster."""
        self.tree, self.children = tree, places(tree, self.tier + 1)

    @property
    def complete(self) -> bool:
        """Whether the sizes of all devices are known."""
        return len(self.counts) == self.tree.size(self.tree.leaf)

    def begin(self, counts: Mapping[str, list[int]]) -> None:
        """Fix who takes part, with their samples. Whoever else of the roster has come is a newcomer."""
        with self._lock:
            found = {**self.counts, **self.newcomers}
            roster = {str(name) for name in self.tree.names[-1].tolist()}
            self.newcomers.clear()  # a team's `Parent` has the same dictionary
            self.newcomers |= {name: found[name] for name in found if name in roster and name not in counts}
            self.counts, self.begun = dict(counts), True

    def settle(self, tree: Topology, about: dict[str, Any]) -> None:
        """Note the tree of the run; `about` is told to everybody."""
        self.settled = tree, about

    def admit(self, certificate: str, hello: Message) -> Message:
        names = hello.fact("names", list)
        check_versions(hello.facts)
        if not 1 <= len(names) <= MOST_NAMES or not all(isinstance(name, str) for name in names):
            raise Refused("it does not say who it is")
        certificate, relays = speaker(certificate, hello)
        gateways = self.job.network["gateways"]
        kind, _, own = certificate.partition("/")
        allowed = {certificate}
        if kind == "gateway" and isinstance(gateways.get(own), list):
            allowed |= {f"device/{name}" for name in gateways[own]}
        if names == [certificate] and self._is_relay(certificate):
            about = {"relay": True, "largest": self.largest, "versions": own_versions()}
            return Message("welcome", {}, {"job": as_tensor(about)})
        for name in names:
            if name not in allowed:
                raise Refused(f"the certificate of {certificate!r} may not speak for {name[:60]!r}")
            if name not in self.children:
                raise Refused(
                    f"{name[:60]} is not in the roster of this node; add it to the job, or dial its own parent"
                )
            if relays and not set(relays) <= self._above(name):
                raise Refused(f"{relays[0]!r} may not pass on what {name[:60]!r} says; it is not above it in the job")
        warn_of_bits(certificate, hello.facts)
        trees = {name: tree_text(subtree(self.tree, self.tier + 1, self.children[name])) for name in names}
        known = {}
        if self.settled is not None:  # the run goes on: nobody is counted again
            below = (device for tree in trees.values() for device in tree["names"][-1])
            known = {str(device): self.counts[str(device)] for device in below if str(device) in self.counts}
        job = self.job.values()
        if self.tier + 1 == self.tree.leaf:
            job["network"].pop("gateways")  # names of other devices
        own = {"versions": own_versions(), "limits": self.limits.as_values()}
        job = {**job, **own, "trees": trees, "counts": known}
        return Message("welcome", {}, {"job": as_tensor(job)})

    def _is_relay(self, certificate: str) -> bool:
        """Whether this is a team of the roster that passes messages on.

        Raises:
            Refused: It is a team, and the job has no use for it.
        """
        roster = self.job.roster
        teams = {name for tier in range(1, roster.leaf) for name in places(roster, tier)}
        if certificate not in teams or self.tree.num_tiers > 2:
            return False
        if not self.job.relayed:
            raise Refused(
                f"{self.job.spec.algorithm} has no teams: let the devices dial the server, or write relay = true in "
                "[network] of the job"
            )
        return True

    def _above(self, name: str) -> set[str]:
        """The teams above a device that may pass on what it says."""
        if not self.job.relayed:
            return set()
        roster = self.job.roster
        spans = span(roster, roster.leaf, places(roster, roster.leaf)[name])
        return {address(roster, tier, spans[tier][0]) for tier in range(1, roster.leaf)}

    def ready(self, names: list[str], message: Message) -> None:
        counts = from_tensor(message, COUNTS)
        below = {device for name in names for device in self._devices(name)}
        if not isinstance(counts, dict) or not set(counts) <= below:
            raise Refused("it counts samples of devices that are not below it")
        for device, count in counts.items():
            if not is_count(count):
                raise Refused(f"the numbers of samples of device {device} are not possible")
        moments = self._moments(names, counts, message) if self.job.standardized and not self.begun else {}
        with self._lock:
            if not self.begun:
                self.moments = {**self.moments, **moments}
                self.counts = {**self.counts, **counts}
                return
            if changed := [d for d, count in counts.items() if self.counts.get(d) not in (None, count)]:
                text = "device {} has other numbers of samples than when the run started; restore its data"
                raise Refused(text.format(changed[0]))
            self.newcomers |= {device: count for device, count in counts.items() if device not in self.counts}

    def _moments(self, names: list[str], counts: Mapping[str, list[int]], message: Message) -> dict[str, Moments]:
        """Mean and spread of the samples below each of these children."""
        features, each = self.job.features
        rows = message.tensors.get("moments")
        if rows is None or rows.dtype != torch.float64 or tuple(rows.shape) != (len(names), 2, features):
            raise Refused("it does not say mean and spread of its samples, by which inputs are standardised")
        found = {}
        for name, row in zip(names, rows, strict=True):
            samples = sum(counts[device][0] for device in self._devices(name) if device in counts)
            try:
                found[name] = read_moments(row, each * samples)
            except ValueError as error:
                raise Refused(str(error)) from None
        return found

    def all_moments(self, counts: Mapping[str, list[int]]) -> Moments:
        """Mean and spread of the samples of the devices in `counts`, merged in the order of the tree."""
        there = [name for name in self.children if any(device in counts for device in self._devices(name))]
        return merged(self.moments[name] for name in there)

    def _devices(self, name: str) -> list[str]:
        """The names of the devices below a child."""
        return [str(device) for device in subtree(self.tree, self.tier + 1, self.children[name]).names[-1].tolist()]

    def world(self, names: list[str]) -> Message | None:
        if self.settled is None or (self.job.relayed and names[0].startswith("team")):  # a relay has no world
            return None
        tree, about = self.settled
        known = places(tree, self.tier + 1)
        nodes = {}
        for name in names:
            if name not in known:
                if self.limits.fixed:
                    raise Refused(f"{name} was not there when the run started; it can take part in the next run")
                return None  # it is taken in between two rounds
            part = subtree(tree, self.tier + 1, known[name])
            nodes[name] = {"tree": tree_text(part), "counts": counts_of(part, self.counts)}
        return Message("world", {}, {"world": as_tensor({**about, "nodes": nodes})})


def speaker(certificate: str, hello: Message) -> tuple[str, list[str]]:
    """Who speaks: the certificate of the node itself, and those of the teams that have passed its hello on."""
    via = hello.facts.get(VIA, [])
    if not isinstance(via, list) or len(via) > MOST_RELAYS or not all(isinstance(name, str) for name in via):
        raise Refused("it does not say which way it came")
    return (via[0], [*via[1:], certificate]) if via else (certificate, [])


def counts_of(tree: Topology, counts: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """The numbers of samples of the devices of a tree."""
    return {str(name): counts[str(name)] for name in tree.names[-1].tolist()}


def those_counted(tree: Topology, counts: Mapping[str, Any]) -> Topology:
    """The tree without devices whose samples are not known, and without teams of none."""
    kept = torch.tensor([str(name) in counts for name in tree.names[-1].tolist()])
    if bool(kept.all()):
        return tree
    names, parents = [tree.names[-1][kept.numpy()]], [tree.parents[-1][kept]]
    for tier in range(tree.leaf - 1, -1, -1):
        used, place = torch.unique(parents[0], return_inverse=True)
        parents[0] = place
        names.insert(0, tree.names[tier][used.numpy()])
        parents.insert(0, tree.parents[tier][used])
    order = names[-1].argsort().argsort()
    return Topology(tuple(names), tuple(parents), torch.from_numpy(order))


def own_address(certificate: str, kinds: tuple[str, ...], name: str) -> str:
    """The address of this node, from its own certificate.

    Raises:
        ValueError: The certificate is that of another node.
    """
    kind, _, own = certificate.partition("/")
    if kind.rstrip("0123456789") not in kinds or own != name:
        raise ValueError(
            f"the certificate in --keys is that of {certificate}, not of {kinds[0]} {name}; give its folder"
        )
    return certificate
