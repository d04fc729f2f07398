"""CSV files whose lines are named tuples of whole numbers and texts."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_type_hints

from polytier.files.read import check_file
from polytier.files.write import atomic


def read_records(path: Path, kind: Any) -> list[Any]:
    """The lines of a file that `write_records` wrote; none if there is no such file.

    Args:
        path: The file.
        kind: The named tuple; its fields are int or str.

    Raises:
        ValueError: The file cannot be read.
    """
    if not path.exists():
        return []
    check_file(path)
    types = get_type_hints(kind).values()
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *lines = csv.reader(file)
            if tuple(header) != kind._fields:
                raise ValueError(f"its first line is {','.join(header)}")
            return [kind(*(make(cell) for make, cell in zip(types, line, strict=True))) for line in lines]
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}; restore it from a copy of the run folder") from None


def write_records(path: Path, kind: Any, lines: Iterable[Any]) -> None:
    """Write the file as a whole, with the names of the fields first."""
    with atomic(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([kind._fields, *lines])
