"""Rows that nodes keep from round to round, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase, digits
from typing import NamedTuple
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import Tensor

from polytier.files.read import Damaged
from polytier.tree.topology import Topology

LONGEST = 100  # characters of a name
PART = 100  # characters of a folder's name; a longer name is a path of several folders
PLAIN = frozenset(ascii_lowercase + digits + "_-")  # what stays as it is in a file name; some systems ignore the case
OWN, CHILDREN = "own", "children"


class RowName(NamedTuple):
    """What rows are called: the rows of a tier's nodes themselves, or those that parents remember about these nodes.

    Args:
        tier: of the nodes that the rows are about.
        name: as the program gives it, any text of up to 100 characters.
        field: for rows that parents remember, the field of the children's answers ("" for a plain tensor); None for
            a node's own rows. So the two can never collide.

    Examples:
        >>> str(RowName(2, "a.b/c")), str(RowName(1, "answer", "model"))
        ('2/own/a.b%2Fc', '1/children/answer/model')
        >>> RowName.parse("2/own/a.b%2Fc").name
        'a.b/c'
    """

    tier: int
    name: str
    field: str | None = None

    def __str__(self) -> str:
        """The name in a checkpoint."""
        own = f"{self.tier}/{OWN if self.field is None else CHILDREN}/{quoted(self.name)}"
        return own if self.field is None else f"{own}/{quoted(self.field)}"

    @classmethod
    def parse(cls, text: str) -> RowName:
        """The name that `str` wrote."""
        tier, kind, *names = text.split("/")
        if (kind, len(names)) not in ((OWN, 1), (CHILDREN, 2)):
            raise ValueError(f"{text!r} is no name of kept rows")
        return cls(int(tier), *(unquote(name, errors="surrogatepass") for name in names))

    def checked(self) -> RowName:
        for text in (self.name, self.field):
            if text is not None and not isinstance(text, str):
                raise ValueError(f"rows are kept under a text; got {text!r}")
            if text is not None and len(text) > LONGEST:
                raise ValueError(
                    f"rows are kept under names of up to {LONGEST} characters; {text[:20]!r}... has {len(text)}: "
                    "use a shorter name"
                )
        return self

    def folder(self) -> Path:
        """Where the files of these rows are, below the folder of a memory."""
        text = file_text(self.name) if self.field is None else f"{file_text(self.name)},{file_text(self.field)}"
        parts = (text[start : start + PART] for start in range(0, len(text), PART))
        return Path(str(self.tier), OWN if self.field is None else CHILDREN, *parts)

    @classmethod
    def of_folder(cls, folder: Path) -> RowName:
        """The rows whose files are in this folder."""
        tier, _, *parts = folder.parts
        return cls(int(tier), *(unquote(text, errors="surrogatepass") for text in "".join(parts).split(",")))


class Memory:
    """For each name of rows: a tensor [nodes, ...], and [nodes] bool, which nodes have written to it.

    With a folder the tensors are memory-mapped files that several processes share:
    FOLDER/TIER/own/NAME/DTYPE.SHAPE.rows and .kept, or FOLDER/TIER/children/NAME,FIELD/... for what parents remember.
    The path contains the name, the type and the shape of a row, so that a process can open what another one has
    created.

    Args:
        topology: the tree.
        folder: where the files are; None: in memory.
    """

    def __init__(self, topology: Topology, folder: Path | None = None) -> None:
        self.topology = topology
        self.folder = folder
        self._rows: dict[RowName, tuple[Tensor, Tensor]] = {}

    def names(self, tier: int) -> list[str]:
        """The names of the rows that nodes of this tier keep themselves."""
        return sorted(row.name for row in self._known() if row.tier == tier and row.field is None)

    def read(self, tier: int, name: str, ids: Tensor, default: Tensor, field: str | None = None) -> Tensor:
        """The rows of the nodes `ids` of a tier.

        Args:
            tier: the tier of the nodes.
            name: as given to `write`.
            ids: [n] positions of the nodes in their tier.
            default: [n, ...] the rows of nodes that have none yet.
            field: reads what the nodes' parents remember about them, see `RowName`.

        Returns:
            [n, ...] a copy.
        """
        found = self.find(tier, name, ids, field)
        if found is None:
            return default
        rows, kept = found
        return rows if kept.numpy().all() else filled(rows, kept, default)

    def find(self, tier: int, name: str, ids: Tensor, field: str | None = None) -> tuple[Tensor, Tensor] | None:
        """A copy of the rows [n, ...] of the nodes `ids`, and which of them are kept [n]; None if no node has any."""
        found = self._open(RowName(tier, name, field).checked())
        if found is None:
            return None
        places = consecutive(ids)
        rows = found[0][places].clone() if isinstance(places, slice) else found[0].index_select(0, ids)
        return rows, found[1][places]

    def write(self, tier: int, name: str, ids: Tensor, rows: Tensor, field: str | None = None) -> None:
        """Keep rows [n, ...] of the nodes `ids` [n].

        Raises:
            ValueError: the name is too long, or rows of another shape were kept under this name.
        """
        row = RowName(tier, name, field).checked()
        found = self._open(row) or self._create(row, rows.dtype, tuple(rows.shape[1:]))
        if found[0].shape[1:] != rows.shape[1:]:
            was, came = tuple(found[0].shape[1:]), tuple(rows.shape[1:])
            what = f"rows {name!r} were kept with shape {was} and now come with {came}"
            raise ValueError(f"{what}; keep them under another name, or always with the same shape")
        self._before_write(row, found, ids)
        places = consecutive(ids)
        found[0][places] = rows
        found[1][places] = True

    def state(self) -> dict[str, Tensor]:
        """All rows by name, for a checkpoint: NAME/rows and NAME/kept."""
        state = {}
        for row in sorted(self._known(), key=str):
            found = self._open(row)
            assert found is not None
            state[f"{row}/rows"], state[f"{row}/kept"] = found
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned, also in version 0.1."""
        for row, rows, kept in entries(state):
            found = self._create(row, rows.dtype, tuple(rows.shape[1:]))
            found[0].copy_(rows)
            found[1].copy_(kept)

    def _known(self) -> set[RowName]:
        if self.folder is None:
            return set(self._rows)
        folders = {path.parent.relative_to(self.folder) for path in self.folder.glob("*/*/**/*.rows")}
        return {*self._rows, *map(RowName.of_folder, folders)}

    def _before_write(self, row: RowName, found: tuple[Tensor, Tensor], ids: Tensor) -> None:
        """Called before rows are written; for a memory with a journal."""

    def _create(self, row: RowName, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        n = self.topology.size(row.tier)
        if self.folder is None:
            made = untouched((n, *shape), dtype), torch.zeros(n, dtype=torch.bool)
        else:
            stem = self._stem(row, dtype, shape)
            made = map_file(Path(f"{stem}.rows"), dtype, (n, *shape)), map_file(Path(f"{stem}.kept"), torch.bool, (n,))
        self._rows[row] = made
        return made

    def _stem(self, row: RowName, dtype: torch.dtype, shape: tuple[int, ...]) -> Path:
        """The path of the files of these rows without its ending; the folder is made."""
        assert self.folder is not None
        folder = self.folder / row.folder()
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{str(dtype).removeprefix('torch.')}.{'x'.join(map(str, shape))}"

    def _open(self, row: RowName) -> tuple[Tensor, Tensor] | None:
        if row not in self._rows and self.folder is not None:
            for path in (self.folder / row.folder()).glob("*.rows"):
                dtype, shape, _ = path.name.split(".")
                return self._create(row, getattr(torch, dtype), tuple(int(s) for s in shape.split("x") if s))
        return self._rows.get(row)


# -- names --------------------------------------------------------------------------------------------


def quoted(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")


def file_text(text: str) -> str:
    """A text as a part of a path: as in an URL, but without a dot or a capital letter of its own."""
    encoded = ((c, c.encode("utf-8", "surrogatepass")) for c in text)
    return "".join(c if c in PLAIN else "".join(f"%{byte:02X}" for byte in utf8) for c, utf8 in encoded)


def entries(state: dict[str, Tensor]) -> Iterator[tuple[RowName, Tensor, Tensor]]:
    """Name, rows and which of them are kept, of all that is in the state of a memory; also of version 0.1."""
    for key, rows in state.items():
        of_0_1 = re.match(r"(\d+)\.(.*)\.rows", key, re.DOTALL)
        if of_0_1:
            yield name_of_0_1(int(of_0_1[1]), of_0_1[2]), rows, state[f"{key.removesuffix('.rows')}.kept"]
        elif key.endswith("/rows"):
            yield RowName.parse(key.removesuffix("/rows")), rows, state[f"{key.removesuffix('/rows')}/kept"]


def name_of_0_1(tier: int, name: str) -> RowName:
    """A name that version 0.1 wrote: with an underscore in front, it was what parents remember, `_NAME-FIELD`."""
    if not name.startswith("_"):
        return RowName(tier, name)
    name, _, field = name.removeprefix("_").rpartition("-")
    return RowName(tier, name, field)


# -- tensors ------------------------------------------------------------------------------------------


def filled(rows: Tensor, kept: Tensor, default: Tensor) -> Tensor:
    """[n, ...] the rows that are kept, and the default for the others."""
    return torch.where(kept.reshape(-1, *[1] * (rows.ndim - 1)), rows, default.to(rows.dtype))


def consecutive(ids: Tensor) -> Tensor | slice:
    """The same places as a slice if they are consecutive numbers, which is much faster; else as they are."""
    numbers = ids.numpy()
    if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1 and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return ids


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages take no memory until they are written. Of a large population few nodes may ever take part."""
    return torch.from_numpy(np.zeros(shape, torch.empty(0, dtype=dtype).numpy().dtype))


def map_file(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor that is mapped from a file; a new file holds zeros."""
    numel = int(torch.Size(shape).numel())
    if path.is_dir():
        raise Damaged(f"{path} is a folder, not a file of rows")
    if numel == 0:
        path.touch()
        return torch.zeros(shape, dtype=dtype)
    return torch.from_file(str(path), shared=True, size=numel, dtype=dtype).reshape(shape)
