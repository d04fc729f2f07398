"""The table that `polytier bench` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from polytier.report.tables import line, number, table

CONTENDERS = ("engine", "one_worker", "loop", "kernels", "gathered")
RATIOS = ("loop", "kernels", "gathered", "one_worker")


def print_speeds(console: Console, found: dict[str, Any]) -> None:
    """One row per work: medians with their spread, and the engine's speed relative to the others."""
    shown = [c for c in CONTENDERS if any(c in work for work in found["works"])]
    others = [name for name in RATIOS if name in shown]
    rows = []
    for work in found["works"]:
        ratios = [number(work[f"engine_over_{name}"] if name in work else None) for name in others]
        rows.append((work["work"], *(speed(work.get(contender)) for contender in shown), *ratios))
    ratios = (f"engine / {name.replace('_', ' ')}" for name in others)
    console.print(table(("work", *(c.replace("_", " ") for c in shown), *ratios), rows, right=True))
    workers = f"{found['workers']} worker{'s' * (found['workers'] > 1)}"
    line(console, f"device steps per second: median (lowest to highest) of {found['repeat']}; engine with {workers}")
    for work in found["works"]:
        if "fixed_round_ms" in work:
            fixed = f"{work['fixed_round_ms']:.2f} ms per round, {work['fixed_call_ms']:.2f} ms per call of devices"
            line(console, f"{work['work']}: besides its steps, one worker takes {fixed}")


def speed(figures: dict[str, float] | None) -> str:
    """The median with its range, as text."""
    return "-" if figures is None else "{median:,.0f} ({min:,.0f} to {max:,.0f})".format(**figures)
