"""Seconds per round of `polytier run` with its run folder and checkpoints: here against another revision, in turns.

    python benchmarks/folder_cost.py REV [--repeat 5]

The time of a short run is subtracted from that of a long one, so that the start of the process does not count. Run it
on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parents[1]
SHORT, LONG = 50, 550
RUN = ("run", "--devices", "40", "--teams", "4", "--set", "device_steps=5", "--set", "team_rounds=2", "--quiet")


def wall(tree: Path, rounds: int) -> float:
    """Seconds of one command in a tree."""
    with tempfile.TemporaryDirectory() as folder:
        command = "from polytier.cli import main; main()"
        args = [sys.executable, "-c", command, *RUN, "--workers", "1", "--rounds", str(rounds), "--out", "run"]
        started = time.perf_counter()
        subprocess.run(args, cwd=folder, env={**os.environ, "PYTHONPATH": str(tree / "src")}, check=True, stdout=-3)
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rev")
    parser.add_argument("--repeat", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        other = Path(place) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(other), asked.rev], cwd=HERE, check=True)
        try:
            ratios = []
            for turn in range(asked.repeat):
                trees = (other, HERE) if turn % 2 else (HERE, other)
                seconds = {tree: (wall(tree, LONG) - wall(tree, SHORT)) / (LONG - SHORT) for tree in trees}
                ratios.append(seconds[HERE] / seconds[other])
                print(
                    f"{seconds[other] * 1000:.2f} ms, here {seconds[HERE] * 1000:.2f} ms: {ratios[-1]:.3f}", flush=True
                )
            print(f"time per round, here / {asked.rev}: median {statistics.median(ratios):.3f}")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=HERE, check=True)


if __name__ == "__main__":
    main()
