"""The table that `polytier bench` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from polytier.report.tables import line, number, table

CONTENDERS = ("engine", "one_worker", "loop", "kernels", "gathered")
RATIOS = ("loop", "kernels", "gathered", "one_worker")


def print_speeds(console: Console, found: dict[str, Any]) -> None:
    """One row per work: medians, their largest spread, and the engine's speed relative to the others."""
    shown = [c for c in CONTENDERS if any(c in work for work in found["works"])]
    others = [name for name in RATIOS if name in shown]
    rows = []
    for work in found["works"]:
        ratios = [number(work[f"engine_over_{name}"] if name in work else None) for name in others]
        speeds = [work.get(contender) for contender in shown]
        rows.append((work["work"], *map(median, speeds), spread(speeds), *ratios))
    ratios = (f"/ {name.replace('_', ' ')}" for name in others)
    console.print(table(("work", *(c.replace("_", " ") for c in shown), "spread", *ratios), rows, right=True))
    workers = f"{found['workers']} worker{'s' * (found['workers'] > 1)}"
    line(
        console, f"device steps per second: median of {found['repeat']}; engine with {workers}; / is engine divided by"
    )
    line(console, "spread: the largest difference between two measurements of the same, relative to their median")
    for work in found["works"]:
        if "fixed_round_ms" in work:
            fixed = f"{work['fixed_round_ms']:.2f} ms per round, {work['fixed_call_ms']:.2f} ms per call of devices"
            line(console, f"{work['work']}: besides its steps, one worker takes {fixed}")


def median(figures: dict[str, float] | None) -> str:
    """The median as text."""
    return "-" if figures is None else f"{figures['median']:,.0f}"


def spread(contenders: Sequence[dict[str, float] | None]) -> str:
    """The largest relative range as text."""
    return f"{max((each['max'] - each['min']) / each['median'] for each in contenders if each):.0%}"
