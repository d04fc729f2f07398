"""Who takes part: all children of a parent, a fraction, a number of them, or those that a table says are there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polytier import random


@dataclass(frozen=True)
class Participation:
    """One rule for a tier. At most one of fraction and count; a table [rounds, nodes] limits who can be drawn.

    Round t reads row t modulo the number of rows; columns are the nodes in the order of the topology.
    """

    fraction: float = 1.0
    count: int | None = None
    table: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"participation is a fraction in (0, 1]; got {self.fraction}; a number is count:N")
        if self.count is not None and self.count < 1:
            raise ValueError(f"participation count:N needs N of at least 1; got {self.count}")

    @classmethod
    def parse(cls, value: float | str | np.ndarray | Participation) -> Participation:
        """0.5, "0.5", "count:4", "table:FILE.npy" (or .csv), or the table itself."""
        if isinstance(value, Participation):
            return value
        if isinstance(value, np.ndarray):
            return cls(table=as_table(value, "the participation table"))
        if isinstance(value, str) and value.startswith("table:"):
            return cls(table=read_table(Path(value.removeprefix("table:"))))
        try:
            if isinstance(value, str) and value.startswith("count:"):
                return cls(count=int(value.removeprefix("count:")))
            return cls(fraction=float(value))
        except ValueError as error:
            if "participation" in str(error):
                raise
            raise ValueError(
                f"participation {value!r} is not understood; give a fraction such as 0.5, count:4 or table:FILE"
            ) from None

    @property
    def everybody(self) -> bool:
        return self.fraction == 1 and self.count is None and self.table is None

    def draw(self, base: int, round_: int, keys: Tensor, kids: Tensor, position: Tensor, m: int) -> Tensor:
        """A mask over `kids`: of the children at the same `position` (of m), the ones with the smallest draws."""
        if self.everybody:
            return torch.ones(len(kids), dtype=torch.bool)
        there = torch.ones(len(kids), dtype=torch.bool)
        if self.table is not None:
            there = self.table[round_ % len(self.table)][kids]
        registered = torch.bincount(position, minlength=m)
        if self.count is None:
            quota = (self.fraction * registered.double()).round().long().clamp(min=1)
        else:
            quota = registered.clamp(max=self.count)
        draws = random.uniform(random.node_keys(base, keys), 1).squeeze(1)
        draws = torch.where(there, draws, draws + 1)  # the absent come last and are cut off below
        order = torch.from_numpy(np.lexsort((draws.numpy(), position.numpy())))
        rank = torch.empty_like(order)
        first = registered.cumsum(0) - registered
        rank[order] = torch.arange(len(kids)) - first[position[order]]
        return (rank < quota[position]) & there


def read_table(path: Path) -> Tensor:
    try:
        values = np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.loadtxt(path, delimiter=",")
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"cannot read the participation table {path}: {error}") from None
    return as_table(values, str(path))


def as_table(values: np.ndarray, name: str) -> Tensor:
    if values.ndim != 2 or not len(values) or not np.isin(values, (0, 1)).all():
        raise ValueError(f"{name} needs 0 or 1 for every round (rows) and node (columns)")
    return torch.from_numpy(values.astype(bool))
