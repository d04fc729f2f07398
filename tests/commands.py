"""What the tests of the command line share."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from polytier.cli import app

QUICK = ("--set", "device_steps=2", "--set", "team_rounds=2")
SMALL = ("--devices", "6", "--teams", "2", *QUICK)


def call(*args: object, code: int = 0):
    result = CliRunner().invoke(app, [str(a) for a in args])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def own_file(path: Path) -> None:
    digits: Any = load_digits()
    x = (digits.images * 15).astype(np.uint8)[:400]
    names = np.array(["anna", "bert", "chen", "dora"])
    device = np.arange(400) % 4
    np.savez(path, x=x, y=digits.target[:400], device=names[device], team=np.array(["north", "south"])[device // 2])
