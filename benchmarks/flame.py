"""A flame graph of the rounds of a work of `polytier bench`: which functions take the time, from the round downwards.

    python benchmarks/flame.py --record round round.txt              # needs py-spy; one worker, 20 seconds
    python benchmarks/flame.py --draw round.png before=old.txt now=round.txt

The samples of `--record` are lines "function;function;... number", as other tools read them too. To record another
revision, run the file in a tree of that revision.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

SECONDS, RATE = 20, 500  # of a recording: how long, and samples per second
DEPTH = 16  # frames that are drawn below a round
NARROWEST = 0.004  # share of a round below which a frame is left out
COLOURS = {"stack": "#e8a25c", "data": "#7fb069", "method": "#6a9fb5", "engines": "#9d7fb5", "algorithms": "#c97b84"}

Tree = dict[tuple[str, ...], int]


def spin(work: str) -> None:
    """Compute rounds of a work, for ever."""
    import torch

    from polytier.studies.bench import WORKS

    torch.set_num_threads(1)
    x, y = WORKS[work].data()
    with WORKS[work].engine(WORKS[work].federation(x, y), 1) as loop:
        for _ in range(20):  # traces graphs
            loop.step()
        print("ready", flush=True)
        while True:
            loop.step()


def record(work: str, file: Path) -> None:
    """Sample a process that computes rounds."""
    process = subprocess.Popen([sys.executable, __file__, "--spin", work], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        options = ["--rate", str(RATE), "--duration", str(SECONDS), "--format", "raw", "--output", str(file)]
        subprocess.run(["py-spy", "record", *options, "--pid", str(process.pid)], check=True)
    finally:
        process.kill()


def read(file: Path) -> Tree:
    """Samples by stack, from the round downwards; frames are (function, room)."""
    found: Tree = defaultdict(int)
    for line in file.read_text().splitlines():
        stack, number = line.rsplit(" ", 1)
        frames = [frame.rsplit(":", 1)[0].removesuffix(")") for frame in stack.split(";")]
        start = next((k for k, frame in enumerate(frames) if "loop.py" in frame and "step" in frame), None)
        if start is not None:
            found[tuple(frames[start : start + DEPTH])] += int(number)
    return found


def draw(axes, samples: Tree, title: str) -> None:
    """One flame graph, upside down: a frame is as wide as its share of the samples, below the one that called it."""
    total, widths = sum(samples.values()), defaultdict(int)
    for stack, number in samples.items():
        for depth in range(len(stack)):
            widths[stack[: depth + 1]] += number
    places: dict[tuple[str, ...], float] = {(): 0.0}
    for stack in sorted(widths):
        share, left = widths[stack] / total, places[stack[:-1]]
        places[stack], places[stack[:-1]] = left, left + share
        if share < NARROWEST:
            continue
        name, _, path = stack[-1].partition(" (")
        room = path.removeprefix("polytier/").partition("/")[0]
        axes.barh(-len(stack), share, 1, left, align="edge", color=COLOURS.get(room, "#cccccc"), edgecolor="white")
        shown = name[: int(share * 150)]
        if len(shown) > 2:
            axes.text(left + 0.002, 0.5 - len(stack), shown, va="center", fontsize=6, clip_on=True)
    axes.set(xlim=(0, 1), ylim=(-DEPTH - 1, 0), yticks=[], title=title)
    axes.set_xlabel("share of the time of a round")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs=2, metavar=("WORK", "FILE"))
    parser.add_argument("--draw", nargs="+", metavar="PICTURE TITLE=FILE")
    parser.add_argument("--spin", metavar="WORK", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.spin:
        spin(options.spin)
    if options.record:
        record(options.record[0], Path(options.record[1]))
    if options.draw:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.patches import Patch

        picture, *files = options.draw
        figure, axes = pyplot.subplots(len(files), 1, figsize=(11, 4.2 * len(files)), squeeze=False)
        for each, text in zip(axes[:, 0], files, strict=True):
            title, _, file = text.partition("=")
            draw(each, read(Path(file)), title)
        figure.legend(handles=[Patch(color=c, label=room) for room, c in COLOURS.items()], ncols=5, loc="lower center")
        figure.tight_layout(rect=(0, 0.04, 1, 1))
        figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
