"""Bytes on every link: by direction, by round and by node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polytier.topology import Topology


@dataclass
class Ledger:
    """Messages of a run.

    rounds    | a dict a round: link -> direction -> bytes
    nodes     | link -> direction -> [nodes] bytes of each node below the link, all rounds
    took_part | tier -> [nodes] who got a message in the last round; `ever` the same for all rounds
    """

    topology: Topology
    rounds: list[dict[str, dict[str, int]]] = field(default_factory=list)
    nodes: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    took_part: dict[int, Tensor] = field(default_factory=dict)
    ever: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tier in range(1, self.topology.num_tiers):
            size = self.topology.size(tier)
            self.nodes[self.topology.link(tier)] = {way: torch.zeros(size, dtype=torch.int64) for way in ("down", "up")}
            self.took_part[tier] = torch.zeros(size, dtype=torch.bool)
            self.ever[tier] = torch.zeros(size, dtype=torch.bool)

    def start_round(self) -> None:
        self.rounds.append({link: {"down": 0, "up": 0} for link in self.nodes})
        for mask in self.took_part.values():
            mask.zero_()

    def add(self, tier: int, direction: str, ids: Tensor, nbytes: Tensor) -> None:
        """Messages between the nodes `ids` of a tier and their parents."""
        link = self.topology.link(tier)
        self.rounds[-1][link][direction] += int(nbytes.sum())
        self.nodes[link][direction].index_add_(0, ids, nbytes)
        self.took_part[tier][ids] = True
        self.ever[tier][ids] = True

    def total(self) -> dict[str, dict[str, int]]:
        """All rounds, by link and direction."""
        return {link: {way: int(b.sum()) for way, b in ways.items()} for link, ways in self.nodes.items()}

    def entries(self) -> Iterator[tuple[int, str, str, int]]:
        """(round, link, direction, bytes), rounds counted from 1."""
        for number, links in enumerate(self.rounds, 1):
            for link, ways in links.items():
                for way, amount in ways.items():
                    yield number, link, way, amount

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside `rounds`."""
        tensors = {f"bytes:{link}:{way}": b for link, ways in self.nodes.items() for way, b in ways.items()}
        return tensors | {f"ever:{tier}": mask for tier, mask in self.ever.items()}

    def load(self, tensors: dict[str, Tensor], rounds: list[dict[str, dict[str, int]]]) -> None:
        self.rounds = rounds
        for link, ways in self.nodes.items():
            for way in ways:
                ways[way] = tensors[f"bytes:{link}:{way}"]
        self.ever = {tier: tensors[f"ever:{tier}"] for tier in self.ever}
