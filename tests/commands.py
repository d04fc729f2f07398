"""What the tests of the command line share."""

from __future__ import annotations

import csv
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from polytier.cli.main import app
from polytier.runs.spec import RunSpec
from polytier.studies import run_queue

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


# -- in place of a run, found by name in another process ----------------------------------------------


def obey(spec: RunSpec, folder: Path, resumed: bool, pipe: Connection) -> None:
    """Wait for Ctrl-C."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    run_queue.set_apart()
    Path(f"{folder.name}.started").touch()
    time.sleep(60)
