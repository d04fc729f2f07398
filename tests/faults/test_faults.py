"""A sample of the proofs of run_all.py: run folders survive kills, failing disks, losses of power, and damage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SAMPLE = 97  # every how many of the cases
TESTS = Path(__file__).parents[1]
COMMANDS = ("run", "resume", "extend", "run with rows in files", "resume with rows in files", "compare", "tune")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, memfd_create and /proc")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """The counts of the sample, from one process that forks one for each case."""
    out = tmp_path_factory.mktemp("faults") / "faults.json"
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    args = [sys.executable, "-m", "faults.run_all", "--sample", str(SAMPLE), "--out", str(out)]
    ended = subprocess.run(args, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert out.exists(), ended.stderr
    return json.loads(out.read_text())


def test_the_same_bits_or_advice(found):
    """No wrong result, no traceback, no other exit code, no message without advice or without the file's name."""
    assert found["problems"] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_was_killed_failed_and_lost_power(found, command):
    counts = found["by command"][command]
    assert counts["operations"] > 30
    for kind in ("kills", "failures", "full disks", "short writes", "failed reads", "losses", "recovered"):
        assert counts[kind], kind


def test_every_flipped_bit_was_found(found):
    counts = found["by command"]["every bit"]
    assert counts["found"] == counts["flipped bits"] > 100


def test_files_of_all_kinds_of_runs_were_damaged(found):
    kinds = [counts for name, counts in found["by command"].items() if name.startswith("files of")]
    assert len(kinds) == 6
    assert all(counts["right results"] and counts["refused with the name of the file"] for counts in kinds)
