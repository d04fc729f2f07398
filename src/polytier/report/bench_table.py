"""The table that `polytier bench` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from polytier.report.tables import line, number, table

CONTENDERS = ("engine", "one_worker", "loop", "kernels")


def print_speeds(console: Console, found: dict[str, Any]) -> None:
    """One row per work: medians with their spread, and the engine's speed relative to the others."""
    shown = [c for c in CONTENDERS if any(c in work for work in found["works"])]
    rows = []
    for work in found["works"]:
        ratios = [number(work[name]) for name in ("engine_over_loop", "engine_over_kernels")]
        rows.append((work["work"], *(speed(work.get(contender)) for contender in shown), *ratios))
    columns = ("work", *(c.replace("_", " ") for c in shown), "engine / loop", "engine / kernels")
    console.print(table(columns, rows, right=True))
    workers = f"{found['workers']} worker{'s' * (found['workers'] > 1)}"
    line(console, f"device steps per second: median (lowest to highest) of {found['repeat']}; engine with {workers}")


def speed(figures: dict[str, float] | None) -> str:
    """The median with its range, as text."""
    return "-" if figures is None else "{median:,.0f} ({min:,.0f} to {max:,.0f})".format(**figures)
