"""Rows that nodes keep from round to round, by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polytier.tree.topology import Topology


class Memory:
    """For each tier and name: a tensor [nodes, ...], and [nodes] bool, which nodes have written to it.

    With a folder the tensors are memory-mapped files that several processes share. The name of a file contains the
    dtype and the shape of a row, so that a process can open what another one has created.

    Args:
        topology: the tree.
        folder: where the files are; None: in memory.
    """

    def __init__(self, topology: Topology, folder: Path | None = None) -> None:
        self.topology = topology
        self.folder = folder
        self._rows: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def names(self, tier: int) -> list[str]:
        """The names under which nodes of a tier have kept rows."""
        for path in self.folder.glob(f"{tier}.*.rows") if self.folder else ():
            self._open(tier, path.name.split(".")[1])
        return sorted(name for t, name in self._rows if t == tier)

    def read(self, tier: int, name: str, ids: Tensor, default: Tensor) -> Tensor:
        """[n, ...] the rows of the nodes `ids` [n]; those of `default` [n, ...] for nodes that have kept none."""
        found = self._open(tier, name)
        if found is None:
            return default
        rows, kept = found[0][ids], found[1][ids]
        if kept.all():
            return rows
        return torch.where(kept.reshape(-1, *[1] * (rows.ndim - 1)), rows, default.to(rows.dtype))

    def kept(self, tier: int, name: str, ids: Tensor) -> Tensor:
        """[n] bool, which of the nodes `ids` [n] have kept rows of that name."""
        found = self._open(tier, name)
        return torch.zeros(len(ids), dtype=torch.bool) if found is None else found[1][ids]

    def write(self, tier: int, name: str, ids: Tensor, rows: Tensor) -> None:
        """Keep rows [n, ...] of the nodes `ids` [n].

        Raises:
            ValueError: if rows of another shape were kept under this name.
        """
        found = self._open(tier, name) or self._create(tier, name, rows.dtype, tuple(rows.shape[1:]))
        if found[0].shape[1:] != rows.shape[1:]:
            was, came = tuple(found[0].shape[1:]), tuple(rows.shape[1:])
            what = f"rows {name!r} were kept with shape {was} and now come with {came}"
            raise ValueError(f"{what}; keep them under another name, or always with the same shape")
        found[0][ids] = rows
        found[1][ids] = True

    def state(self) -> dict[str, Tensor]:
        """All rows by name, for a checkpoint."""
        state = {}
        for tier in range(self.topology.num_tiers):
            for name in self.names(tier):
                state[f"{tier}.{name}.rows"], state[f"{tier}.{name}.kept"] = self._rows[tier, name]
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for key, rows in state.items():
            tier, name, what = key.split(".")
            if what == "rows":
                found = self._create(int(tier), name, rows.dtype, tuple(rows.shape[1:]))
                found[0].copy_(rows)
                found[1].copy_(state[f"{tier}.{name}.kept"])

    def _create(self, tier: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        n = self.topology.size(tier)
        if self.folder is None:
            made = untouched((n, *shape), dtype), torch.zeros(n, dtype=torch.bool)
        else:
            stem = self._stem(tier, name, dtype, shape)
            made = map_file(self.folder / f"{stem}.rows", dtype, (n, *shape)), self._map_kept(stem, n)
        self._rows[tier, name] = made
        return made

    def _stem(self, tier: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
        return f"{tier}.{name}.{str(dtype).removeprefix('torch.')}.{'x'.join(map(str, shape))}"

    def _map_kept(self, stem: str, n: int) -> Tensor:
        assert self.folder is not None
        return map_file(self.folder / f"{stem}.kept", torch.bool, (n,))

    def _open(self, tier: int, name: str) -> tuple[Tensor, Tensor] | None:
        if (tier, name) not in self._rows and self.folder is not None:
            for path in self.folder.glob(f"{tier}.{name}.*.rows"):
                _, _, dtype, shape, _ = path.name.split(".")
                row = tuple(int(s) for s in shape.split("x") if s)
                return self._create(tier, name, getattr(torch, dtype), row)
        return self._rows.get((tier, name))


def remembered(name: str, field: str) -> str:
    """The name under which a parent keeps a field of its children's answers, one row per child."""
    return f"_{name}-{field}"


def is_remembered(name: str) -> bool:
    """Whether a name was made by `remembered`."""
    return name.startswith("_")


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages take no memory until they are written. Of a large population few nodes may ever take part."""
    return torch.from_numpy(np.zeros(shape, torch.empty(0, dtype=dtype).numpy().dtype))


def map_file(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor that is mapped from a file; a new file holds zeros."""
    numel = int(torch.Size(shape).numel())
    if numel == 0:
        path.touch()
        return torch.zeros(shape, dtype=dtype)
    return torch.from_file(str(path), shared=True, size=numel, dtype=dtype).reshape(shape)
