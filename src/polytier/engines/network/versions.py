"""The rows of a node in versions, so that it can go back to before a call whose answer nobody used.

A call has a number. The parent of a node remembers, among its own rows, the last call whose answer it used, and every
message says which one it is: the node then continues from the rows after that call. A parent that goes back itself
also goes back in what it remembers, so the nodes below it follow when they are next called.

A node keeps the rows after its last call, before it, and at the first call of each call above it that is not over (the
current round, the current call of its team, ...): its parent cannot ask for any others.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from polytier.files.read import Damaged, read_json
from polytier.files.write import make_folder, remove_partials, write_bytes, write_json
from polytier.method.memory import Memory

log = logging.getLogger("polytier")
FIRST = 0  # the number that stands for the rows before any call
FILE = "versions.json"


class Lost(Exception):
    """The rows that a parent asks for are not there."""


class NodeMemory(Memory):
    """Rows that can be set back: what is loaded replaces all rows."""

    def load(self, state: dict[str, Tensor]) -> None:
        self._rows.clear()
        super().load(state)


def carried(value: Tensor, before: list[Any], now: list[Any], axis: int = 0) -> Tensor:
    """Values of the nodes `before`, one per node along an axis, for the nodes `now`; 0 for those that are new."""
    if before == now:
        return value
    place = {name: k for k, name in enumerate(before)}
    there = [k for k, name in enumerate(now) if name in place]
    found = value.new_zeros([len(now) if k == axis else n for k, n in enumerate(value.shape)])
    which = torch.tensor([place[now[k]] for k in there], dtype=torch.int64)
    return found.index_copy(axis, torch.tensor(there, dtype=torch.int64), value.index_select(axis, which))


class Versions:
    """The rows of one node for one model.

    Args:
        memory: The rows as programs read and write them.
        folder: Where the versions are kept; None: in memory alone. Versions that are there already are loaded.
    """

    def __init__(self, memory: NodeMemory, folder: Path | None = None) -> None:
        self.memory, self.folder = memory, folder
        self.last = FIRST
        self.chain: list[tuple[int, int]] = []  # the calls above that are not over, and the version when each began
        self._saved: dict[int, dict[str, Tensor]] = {FIRST: {}}
        self._names: dict[int, list[list[Any]]] = {}  # of all nodes by tier, when a version was written
        if folder is not None and (folder / FILE).exists():
            self._load(folder)

    def go_to(self, number: int) -> None:
        """Continue from the rows after a call.

        Raises:
            Lost: There are no such rows.
        """
        if number == self.last:
            return
        if number not in self._saved:
            raise Lost(f"the rows after call {number} are not here; there are {sorted(self._saved)}")
        self.last = number
        self.undo()

    def begin(self, chain: list[int]) -> None:
        """Note that a call starts.

        Args:
            chain: The round and the numbers of the calls above this one, from the top.
        """
        same = 0
        while same < min(len(chain), len(self.chain)) and self.chain[same][0] == chain[same]:
            same += 1
        self.chain = self.chain[:same] + [(number, self.last) for number in chain[same:]]

    def commit(self, number: int) -> None:
        """Keep the present rows as those after call `number`."""
        before, self.last = self.last, number
        self._saved[number] = {name: value.clone() for name, value in self.memory.state().items()}
        wanted = {number, before, *(version for _, version in self.chain)}
        self._saved = {k: rows for k, rows in self._saved.items() if k in wanted}
        self._names[number] = [names.tolist() for names in self.memory.topology.names]
        self._names = {k: names for k, names in self._names.items() if k in wanted}
        if self.folder is not None:
            self._store(self.folder)

    def undo(self) -> None:
        """Forget what programs wrote since the last commit."""
        self.memory.load(self._saved[self.last])

    # -- files ---------------------------------------------------------------------------------------

    def _store(self, folder: Path) -> None:
        """Write the new version, then the list of versions, then remove files that are no longer needed."""
        make_folder(folder)
        write_bytes(folder / f"{self.last}.safetensors", [save(self._saved[self.last])])
        about: dict[str, Any] = {"last": self.last, "chain": self.chain, "versions": sorted(self._saved)}
        write_json(folder / FILE, {**about, "names": self._names})
        for path in folder.glob("*.safetensors"):
            if int(path.stem) not in self._saved:
                path.unlink()

    def _load(self, folder: Path) -> None:
        remove_partials(folder)
        about = read_json(folder / FILE)
        self.last, self.chain = about["last"], [(number, version) for number, version in about["chain"]]
        try:
            self._saved = {
                k: {} if k == FIRST else load_file(folder / f"{k}.safetensors") for k in map(int, about["versions"])
            }
        except (SafetensorError, OSError) as error:
            raise Damaged(f"the rows in {folder} cannot be read: {error}; restore the folder from a copy") from None
        self._names = {int(k): names for k, names in about.get("names", {}).items()}
        self._saved = {k: self._carried(k, rows) for k, rows in self._saved.items()}
        self.undo()

    def _carried(self, number: int, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rows of a version for the present tree, which may have other nodes than the one it was written with."""
        now, before = self.memory.topology.names, self._names.get(number)
        if before is None:
            return rows
        tiers = {name: int(name.split("/")[0]) for name in rows}
        return {k: carried(v, before[tiers[k]], now[tiers[k]].tolist()) for k, v in rows.items()}
