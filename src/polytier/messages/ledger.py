"""The ledger: bytes sent over every link, by direction, by round and by node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from polytier.tree.topology import Topology

WAYS = ("down", "up")
FEW_NODES = 4096  # largest tier with bytes by node and round: 16 bytes each, in memory and in every checkpoint


@dataclass
class Ledger:
    """The bytes of all messages of a run.

    Attributes:
        topology: The tree; a link is named after the two tiers it connects.
        rounds: For each round, link -> direction -> bytes.
        nodes: Link -> direction -> [nodes] bytes of each node below the link, summed over all rounds.
        by_round: The same as a list of one tensor per round, for tiers of at most `FEW_NODES` nodes; -1 where the
            bytes are not known.
        took_part: Tier -> [nodes] whether a node sent or received a message in the last round.
        ever: The same for all rounds.
    """

    topology: Topology
    rounds: list[dict[str, dict[str, int]]] = field(default_factory=list)
    nodes: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    by_round: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)
    took_part: dict[int, Tensor] = field(default_factory=dict)
    ever: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tier in range(1, self.topology.num_tiers):
            size = self.topology.size(tier)
            self.nodes[self.topology.link(tier)] = {way: torch.zeros(size, dtype=torch.int64) for way in WAYS}
            if size <= FEW_NODES:
                self.by_round[self.topology.link(tier)] = {way: [] for way in WAYS}
            self.took_part[tier] = torch.zeros(size, dtype=torch.bool)
            self.ever[tier] = torch.zeros(size, dtype=torch.bool)

    def start_round(self) -> None:
        """Start counting for the next round."""
        self.rounds.append({link: dict.fromkeys(WAYS, 0) for link in self.nodes})
        for link, ways in self.by_round.items():
            for way, rounds in ways.items():
                rounds.append(torch.zeros_like(self.nodes[link][way]))
        for mask in self.took_part.values():
            mask.zero_()

    def add(self, tier: int, direction: str, ids: Tensor, nbytes: Tensor) -> None:
        """Count messages between nodes and their parents.

        Args:
            tier: Tier of the nodes.
            direction: "down" (to the nodes) or "up" (to their parents).
            ids: [n] the nodes.
            nbytes: [n] the length of each message.
        """
        link, who, amount = self.topology.link(tier), ids.numpy(), nbytes.numpy()
        self.rounds[-1][link][direction] += int(amount.sum())
        np.add.at(self.nodes[link][direction].numpy(), who, amount)  # a node may be there several times
        if link in self.by_round:
            np.add.at(self.by_round[link][direction][-1].numpy(), who, amount)
        self.took_part[tier].numpy()[who] = True
        self.ever[tier].numpy()[who] = True

    def total(self) -> dict[str, dict[str, int]]:
        """Return the bytes of all rounds: link -> direction -> bytes."""
        return {link: {way: int(b.sum()) for way, b in ways.items()} for link, ways in self.nodes.items()}

    def entries(self) -> Iterator[tuple[int, str, str, int]]:
        """Yield (round, link, direction, bytes); rounds are counted from 1."""
        for number, links in enumerate(self.rounds, 1):
            for link, ways in links.items():
                for way, amount in ways.items():
                    yield number, link, way, amount

    def read(
        self,
        *,
        link: str | None = None,
        tier: str | None = None,
        direction: str | None = None,
        round: int | None = None,
        node: object = None,
    ) -> int:
        """Return the bytes of all messages that match the arguments given.

        Args:
            link: Name of a link, such as "server-team".
            tier: Name of the tier below a link, instead of `link`.
            direction: "down" or "up".
            round: Number of a round, counted from 1.
            node: Name of a node of the tier below the link; needs `link` or `tier`.

        Raises:
            ValueError: If there is no such link, tier, direction, round or node, or if bytes by node and round are
                asked for in a tier of more than `FEW_NODES` nodes.
        """
        links, ways, place = self._find(link, tier, direction, node)
        if round is not None and round not in range(1, len(self.rounds) + 1):
            raise ValueError(f"there is no round {round}; {len(self.rounds)} are done, counted from 1")
        return self._bytes(links, ways, place, round)

    def cumulated(self, *, link: str | None = None, direction: str | None = None, node: object = None) -> list[int]:
        """Return for each round the bytes from the first round up to it. For the arguments see `read`."""
        found = self._find(link, None, direction, node)
        return list(accumulate(self._bytes(*found, number) for number in range(1, len(self.rounds) + 1)))

    def _find(
        self, link: str | None, tier: str | None, direction: str | None, node: object
    ) -> tuple[list[str], list[str], int | None]:
        """The links and directions that match, and the index of the node in its tier."""
        tiers = {name: self.topology.link(t) for t, name in enumerate(self.topology.tier_names) if t}
        links, ways = chosen("link", link, self.nodes), chosen("direction", direction, WAYS)
        below = [tiers[name] for name in chosen("tier", tier, tiers)]
        links = [name for name in links if name in below]
        if not links:
            raise ValueError(f"tier {tier} is not below link {link}; give one of the two")
        if node is None:
            return links, ways, None
        if link is None and tier is None:
            raise ValueError(f"node {node} may be in any tier; give link ({', '.join(self.nodes)}) or tier as well")
        names = self.topology.names[list(self.nodes).index(links[0]) + 1].astype(str).tolist()
        return links, ways, names.index(chosen("node", str(node), names)[0])

    def _bytes(self, links: list[str], ways: list[str], place: int | None, round: int | None) -> int:
        """The bytes on these links and directions, of one node and round or of all."""
        if place is None:
            rounds = self.rounds if round is None else [self.rounds[round - 1]]
            return sum(sent[link][way] for sent in rounds for link in links for way in ways)
        (link,) = links
        if round is None:
            return sum(int(self.nodes[link][way][place]) for way in ways)
        if link not in self.by_round:
            raise ValueError(
                f"bytes by node and round are kept for tiers of at most {FEW_NODES:,} nodes; "
                f"{link} has {len(self.nodes[link]['up']):,}: give node or round, not both"
            )
        amounts = [int(self.by_round[link][way][round - 1][place]) for way in ways]
        if min(amounts) < 0:
            raise ValueError(f"the checkpoint had no bytes by node for round {round}: give node or round, not both")
        return sum(amounts)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint needs in addition to `rounds`."""
        tensors = {f"bytes:{link}:{way}": b for link, ways in self.nodes.items() for way, b in ways.items()}
        for link, ways in self.by_round.items() if self.rounds else ():
            tensors |= {f"rounds:{link}:{way}": torch.stack(rounds) for way, rounds in ways.items()}
        return tensors | {f"ever:{tier}": mask for tier, mask in self.ever.items()}

    def load(self, tensors: dict[str, Tensor], rounds: list[dict[str, dict[str, int]]]) -> None:
        """Restore what `state` and `rounds` held when a checkpoint was written."""
        self.rounds = rounds
        for link, ways in self.nodes.items():
            for way in ways:
                ways[way] = tensors[f"bytes:{link}:{way}"]
        for link, ways in self.by_round.items():
            for way, total in self.nodes[link].items():
                # checkpoints of older versions have no bytes by round, and a history may be longer than its checkpoint
                known = list(tensors.get(f"rounds:{link}:{way}", ()))[: len(rounds)]
                ways[way] = known + [torch.full_like(total, -1)] * (len(rounds) - len(known))
        self.ever = {tier: tensors[f"ever:{tier}"] for tier in self.ever}


def chosen(what: str, name: str | None, there: Iterable[str]) -> list[str]:
    """The name as a list, or all names if it is None; a ValueError if there is no such name."""
    there = list(there)
    if name is None:
        return there
    if name not in there:
        more = f" and {len(there) - 8} more" if len(there) > 8 else ""
        raise ValueError(f"no {what} {name!r}; available: {', '.join(there[:8])}{more}")
    return [name]


def add_up(amounts: Iterable[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Return link -> direction -> bytes, summed over several models."""
    total: dict[str, dict[str, int]] = {}
    for links in amounts:
        for link, ways in links.items():
            sums = total.setdefault(link, dict.fromkeys(WAYS, 0))
            for way, amount in ways.items():
                sums[way] += amount
    return total
