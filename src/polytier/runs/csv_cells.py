"""Texts in CSV files. Names of devices come from the data, and a spreadsheet computes what looks like a formula."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a formula may begin
MARK = "'"  # says in a spreadsheet that a text follows


def as_cell(value: Any) -> Any:
    """A value for a CSV file: a text that begins like a formula, or with the mark, is marked; numbers are not.

    Examples:
        >>> [as_cell(value) for value in ("=1+1", "'a", "a", -1)]
        ["'=1+1", "''a", 'a', -1]
    """
    return f"{MARK}{value}" if isinstance(value, str) and value.startswith((*FORMULA, MARK)) else value


def from_cell(text: str) -> str:
    """The text for which `as_cell` returned this cell."""
    return text[1:] if text.startswith(MARK) and text[1:].startswith((*FORMULA, MARK)) else text


def csv_lines(rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    """The lines of a CSV file. Texts with a line break of any kind are quoted, so that none of them begins a line."""
    line = io.StringIO(newline="")
    writer = csv.writer(line, lineterminator="\r\n")  # the writer quotes texts with characters of this
    for row in rows:
        writer.writerow(row)
        yield line.getvalue().removesuffix("\r\n") + "\n"
        line.seek(0)
        line.truncate()
