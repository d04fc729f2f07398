"""The tree: a server, any number of tiers of teams, and the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from polytier.tree.random import name_keys

BLOCKS = 32  # as which the children of a node are summed, at most; each has two children at least


@dataclass(frozen=True)
class Topology:
    """Nodes of a tier are numbered so that the children of one parent are neighbours.

    names   | a list a tier, from the server down: the nodes' names
    parents | an int64 tensor a tier: each node's parent in the tier above (the server's is 0)
    order   | [n] the row of each device in the federation
    """

    names: tuple[np.ndarray, ...]
    parents: tuple[Tensor, ...]
    order: Tensor

    @classmethod
    def build(cls, devices: Sequence | np.ndarray, *tiers: Sequence | np.ndarray) -> Topology:
        """From the devices' names and, from the innermost tier outwards, the name of each node's parent.

        `Topology.build(ids)` is flat; `build(ids, team)` has teams; `build(ids, team, region)` has the
        region of each team, in the order of the sorted team names.
        """
        names, parents = [np.asarray(devices)], []
        order = np.arange(len(names[0]))
        for tier in tiers:
            tier = np.asarray(tier)
            if len(tier) != len(names[0]):
                raise ValueError(f"a tier names one parent a node; got {len(tier)} for {len(names[0])} nodes")
            above, parent = np.unique(tier, return_inverse=True)
            parents.insert(0, parent)
            names.insert(0, above)
        parents.insert(0, np.zeros(len(names[0]), dtype=np.int64))
        # sort every tier by its parent's new place, from the top, so that siblings are neighbours
        place = np.zeros(1, dtype=np.int64)
        sorted_names, sorted_parents = [], []
        for name, parent in zip(names, parents, strict=True):
            parent = place[parent]
            order = np.argsort(parent, kind="stable")
            sorted_names.append(name[order])
            sorted_parents.append(torch.from_numpy(parent[order]))
            place = np.empty(len(order), dtype=np.int64)
            place[order] = np.arange(len(order))
        server = np.array(["server"])
        return cls(
            (server, *sorted_names),
            (torch.zeros(1, dtype=torch.int64), *sorted_parents),
            torch.from_numpy(order),
        )

    def same_as(self, other: Topology) -> bool:
        """Whether both are the same tree."""
        same = zip(self.names, other.names, strict=False)
        return (
            self.num_tiers == other.num_tiers
            and all(np.array_equal(a, b) for a, b in same)
            and all(torch.equal(a, b) for a, b in zip(self.parents, other.parents, strict=True))
        )

    @property
    def num_tiers(self) -> int:
        return len(self.names)

    @property
    def leaf(self) -> int:
        """The devices' tier."""
        return len(self.names) - 1

    @property
    def tier_names(self) -> list[str]:
        teams = ["team"] if self.num_tiers == 3 else [f"team{k}" for k in range(1, self.num_tiers - 1)]
        return ["server", *teams, "device"]

    def link(self, tier: int) -> str:
        """The name of the link above this tier, e.g. "server-team"."""
        return f"{self.tier_names[tier - 1]}-{self.tier_names[tier]}"

    def size(self, tier: int) -> int:
        return len(self.names[tier])

    @cached_property
    def offsets(self) -> tuple[Tensor, ...]:
        """By tier: the children of node i are offsets[i] .. offsets[i + 1] of the tier below."""
        return tuple(
            torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(p, minlength=self.size(t)).cumsum(0)])
            for t, p in enumerate(self.parents[1:])
        )

    @cached_property
    def blocks(self) -> tuple[Tensor, ...]:
        """By tier: the block of each node among its parent's children, by its rank: whatever the tile or worker is."""
        found = [torch.zeros(1, dtype=torch.int64)]
        for parent, offsets in zip(self.parents[1:], self.offsets, strict=True):
            size = (-(-offsets.diff() // BLOCKS)).clamp(min=2)
            found.append((torch.arange(len(parent)) - offsets[parent]) // size[parent])
        return tuple(found)

    @cached_property
    def keys(self) -> tuple[Tensor, ...]:
        """By tier: the key under which a node draws, made from its name and not from its place."""
        return tuple(name_keys(names) for names in self.names)

    def kids(self, tier: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Children of the nodes `ids`, in order, and the position in `ids` of each one's parent."""
        start, end = self.offsets[tier][ids], self.offsets[tier][ids + 1]
        count = end - start
        position = torch.repeat_interleave(torch.arange(len(ids)), count)
        first = torch.repeat_interleave(start - (count.cumsum(0) - count), count)
        return first + torch.arange(len(position)), position

    def ancestor(self, tier: int, of: int | None = None) -> Tensor:
        """[n] the ancestor in that tier of each device, or of each node of tier `of`."""
        of = self.leaf if of is None else of
        node = torch.arange(self.size(of))
        for t in range(of, tier, -1):
            node = self.parents[t][node]
        return node

    def flat(self) -> Topology:
        """The same devices directly under the server, in the federation's order."""
        back = torch.empty_like(self.order)
        back[self.order] = torch.arange(len(self.order))
        return Topology.build(self.names[-1][back.numpy()])

    def summed(self, values: Tensor) -> tuple[Tensor, ...]:
        """By tier: the sum of the devices' values (in the topology's order) below each node."""
        sums = [values]
        for tier in range(self.leaf, 0, -1):
            above = torch.zeros(self.size(tier - 1), dtype=values.dtype)
            sums.insert(0, above.index_add_(0, self.parents[tier], sums[0]))
        return tuple(sums)


def nested(team: np.ndarray, shape: Sequence[int]) -> list[np.ndarray]:
    """Tiers for `Topology.build`: innermost teams 0 .. prod(shape)-1 in blocks of the next tier, and so on."""
    tiers = [np.asarray(team)]
    num = int(np.prod(shape))
    for width in list(shape)[:0:-1]:
        tiers.append(np.arange(num) // width)
        num //= width
    return tiers
