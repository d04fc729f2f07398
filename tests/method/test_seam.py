"""The seam between methods and the rest: a method uses the named parts of a node and nothing behind them."""

import re
from pathlib import Path

import pytest

import polytier.algorithms

FILES = sorted(Path(polytier.algorithms.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_methods_do_not_reach_into_the_context(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [f"{path.name}:{k}: {line.strip()}" for k, line in enumerate(lines, 1) if re.search("context", line, re.I)]
    assert not found, "give the node a documented name for what is needed: " + "; ".join(found)
