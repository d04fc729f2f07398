"""The tree: a server, any number of tiers of teams, and the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from polytier.tree.random import name_keys

BLOCKS = 32  # largest number of blocks in which the answers of a node's children are summed; a block has at least two


@dataclass(frozen=True)
class Kids:
    """The children of all nodes of a tier, and in which blocks their answers are summed. It depends on the tree alone.

    ids      | [k] the children, by number in their tier
    position | [k] the number of each one's parent
    blocks   | [k] the block of each, numbered from 0 over all parents
    parents  | [blocks] the parent of each block
    """

    ids: Tensor
    position: Tensor
    blocks: Tensor
    parents: Tensor


@dataclass(frozen=True)
class Topology:
    """A tree with a server, any number of tiers of teams, and devices.

    Tier 0 is the server, the last tier are the devices. The nodes of a tier are numbered so that the children of a
    parent have consecutive numbers. Use `Topology.build` to make one.

    Args:
        names: by tier, from the server down: the names of the nodes [size].
        parents: by tier: the number of each node's parent in the tier above, int64 [size]; 0 for the server.
        order: [n] the number of each device in the federation.

    Examples:
        >>> from polytier import Topology
        >>> tree = Topology.build(["ann", "bob", "cleo"], ["north", "south", "north"])
        >>> tree.tier_names, tree.num_tiers, tree.leaf
        (['server', 'team', 'device'], 3, 2)
        >>> tree.names[2].tolist()  # the devices, those of a team together
        ['ann', 'cleo', 'bob']
        >>> tree.order.tolist()  # and their numbers in the federation
        [0, 2, 1]
        >>> tree.parents[2].tolist(), tree.names[1].tolist()
        ([0, 0, 1], ['north', 'south'])
    """

    names: tuple[np.ndarray, ...]
    parents: tuple[Tensor, ...]
    order: Tensor

    @classmethod
    def build(cls, devices: Sequence | np.ndarray, *tiers: Sequence | np.ndarray) -> Topology:
        """Build a tree from the names of the devices and of their teams.

        Args:
            devices: the names of the devices, in the order of the federation.
            tiers: the name of each node's parent, from the innermost tier outwards. The first has one name per device;
                each further one has one name per team of the tier before, in the sorted order of their names.

        Returns:
            ``build(ids)`` has no teams, ``build(ids, team)`` one tier of teams, ``build(ids, team, region)`` two.

        Raises:
            ValueError: if a tier does not have one name per node.

        Examples:
            Three teams in two regions; the regions are those of the teams a, b and c:

            >>> from polytier import Topology
            >>> tree = Topology.build([0, 1, 2, 3], ["b", "a", "c", "a"], ["west", "west", "east"])
            >>> [names.tolist() for names in tree.names]
            [['server'], ['east', 'west'], ['c', 'a', 'b'], [2, 1, 3, 0]]
        """
        names, parents = [np.asarray(devices)], []
        order = np.arange(len(names[0]))
        for tier in tiers:
            tier = np.asarray(tier)
            if len(tier) != len(names[0]):
                what = f"a tier has the name of the parent of each node; got {len(tier)} for {len(names[0])} nodes"
                raise ValueError(f"{what}; give one name per node, in the sorted order of the nodes of the tier below")
            above, parent = np.unique(tier, return_inverse=True)
            parents.insert(0, parent)
            names.insert(0, above)
        parents.insert(0, np.zeros(len(names[0]), dtype=np.int64))
        # sort every tier by the new number of the parent, from the top, so that siblings have consecutive numbers
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
        """Whether both trees have the same nodes with the same parents."""
        same = zip(self.names, other.names, strict=False)
        return (
            self.num_tiers == other.num_tiers
            and all(np.array_equal(a, b) for a, b in same)
            and all(torch.equal(a, b) for a, b in zip(self.parents, other.parents, strict=True))
        )

    @property
    def num_tiers(self) -> int:
        """Number of tiers, server and devices included."""
        return len(self.names)

    @property
    def leaf(self) -> int:
        """The tier of the devices."""
        return len(self.names) - 1

    @cached_property
    def tier_names(self) -> list[str]:
        """Names of the tiers: server, team (or team1, team2, ... from the top), device."""
        teams = ["team"] if self.num_tiers == 3 else [f"team{k}" for k in range(1, self.num_tiers - 1)]
        return ["server", *teams, "device"]

    def link(self, tier: int) -> str:
        """The name of the link between a tier and the one above it, e.g. ``"server-team"``."""
        return f"{self.tier_names[tier - 1]}-{self.tier_names[tier]}"

    def size(self, tier: int) -> int:
        """Number of nodes of a tier."""
        return len(self.names[tier])

    @cached_property
    def offsets(self) -> tuple[Tensor, ...]:
        """By tier: [size + 1]; the children of node i have the numbers offsets[i] .. offsets[i + 1] - 1."""
        return tuple(
            torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(p, minlength=self.size(t)).cumsum(0)])
            for t, p in enumerate(self.parents[1:])
        )

    @cached_property
    def blocks(self) -> tuple[Tensor, ...]:
        """By tier: [size] the block of each node among the children of its parent.

        It depends only on the position among the children. Answers are summed by blocks, so sums are the same to the
        bit for all tiles and numbers of workers.
        """
        found = [torch.zeros(1, dtype=torch.int64)]
        for parent, offsets in zip(self.parents[1:], self.offsets, strict=True):
            size = (-(-offsets.diff() // BLOCKS)).clamp(min=2)
            found.append((torch.arange(len(parent)) - offsets[parent]) // size[parent])
        return tuple(found)

    @cached_property
    def keys(self) -> tuple[Tensor, ...]:
        """By tier: [size] the key of each node for random draws, made from its name and not from its number."""
        return tuple(name_keys(names) for names in self.names)

    @cached_property
    def all_kids(self) -> tuple[Kids, ...]:
        """By tier, except that of the devices: the children of all its nodes."""
        found = []
        for tier in range(self.leaf):
            ids, position = torch.arange(self.size(tier + 1)), self.parents[tier + 1]
            blocks = self.numbered_blocks(tier + 1, ids, position)
            found.append(Kids(ids, position, blocks, position[starts_of(blocks)]))
        return tuple(found)

    def is_whole(self, tier: int, ids: Tensor) -> bool:
        """Whether `ids` are all nodes of a tier, in order."""
        return len(ids) == self.size(tier) and bool((ids.numpy() == self._numbers[tier]).all())

    @cached_property
    def _numbers(self) -> tuple[np.ndarray, ...]:
        return tuple(np.arange(self.size(tier)) for tier in range(self.num_tiers))

    def numbered_blocks(self, tier: int, ids: Tensor, position: Tensor) -> Tensor:
        """[k] the blocks of some nodes of a tier, numbered from 0; `position` [k] are the parents, ascending."""
        block, parent = self.blocks[tier].numpy()[ids.numpy()], position.numpy()
        number = np.zeros(len(block), dtype=np.int64)
        np.cumsum((block[1:] != block[:-1]) | (parent[1:] != parent[:-1]), out=number[1:])
        return torch.from_numpy(number)

    def kids(self, tier: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[k] the children of the nodes `ids` of a tier, and [k] the position in `ids` of the parent of each."""
        if self.is_whole(tier, ids):
            return self.all_kids[tier].ids, self.all_kids[tier].position
        start, end = self.offsets[tier][ids], self.offsets[tier][ids + 1]
        count = end - start
        position = torch.repeat_interleave(torch.arange(len(ids)), count)
        first = torch.repeat_interleave(start - (count.cumsum(0) - count), count)
        return first + torch.arange(len(position)), position

    def ancestor(self, tier: int, of: int | None = None) -> Tensor:
        """[n] the ancestor in tier `tier` of each device, or of each node of tier `of`."""
        of = self.leaf if of is None else of
        node = torch.arange(self.size(of))
        for t in range(of, tier, -1):
            node = self.parents[t][node]
        return node

    def flat(self) -> Topology:
        """The tree without teams, with the devices in the order of the federation."""
        back = torch.empty_like(self.order)
        back[self.order] = torch.arange(len(self.order))
        return Topology.build(self.names[-1][back.numpy()])

    def summed(self, values: Tensor) -> tuple[Tensor, ...]:
        """By tier: [size] the sum of the devices' values [n] below each node."""
        sums = [values]
        for tier in range(self.leaf, 0, -1):
            above = torch.zeros(self.size(tier - 1), dtype=values.dtype)
            sums.insert(0, above.index_add_(0, self.parents[tier], sums[0]))
        return tuple(sums)


def starts_of(blocks: Tensor) -> Tensor:
    """The position at which each block starts; `blocks` [k] are ascending, 0, 0, ..., 1, 1, ..."""
    number = blocks.numpy()
    return torch.from_numpy(np.searchsorted(number, np.arange(int(number[-1]) + 1 if len(number) else 0)))


def nested(team: np.ndarray, shape: Sequence[int]) -> list[np.ndarray]:
    """Tiers for `Topology.build` of regular trees.

    Args:
        team: [n] the innermost team of each device, 0 .. prod(shape) - 1.
        shape: number of teams of the outermost tier, number per team of the next one, and so on.
    """
    tiers = [np.asarray(team)]
    num = int(np.prod(shape))
    for width in list(shape)[:0:-1]:
        tiers.append(np.arange(num) // width)
        num //= width
    return tiers
