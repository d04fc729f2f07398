"""The figures of `polytier bench` for people; needs no torch."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from polytier.report.tables import line, number, table

CONTENDERS = ("engine", "one_worker", "loop", "kernels")


def print_speeds(console: Console, found: dict[str, Any]) -> None:
    """A row a work: medians with their spread, and how the engine compares."""
    shown = [c for c in CONTENDERS if any(c in work for work in found["works"])]
    rows = [
        (
            work["work"], *(speed(work.get(contender)) for contender in shown),
            number(work["engine_over_loop"]), number(work["engine_over_kernels"]),
        )
        for work in found["works"]
    ]  # fmt: skip
    columns = ("work", *(c.replace("_", " ") for c in shown), "engine / loop", "engine / kernels")
    console.print(table(columns, rows, right=True))
    workers = f"{found['workers']} worker{'s' * (found['workers'] > 1)}"
    line(console, f"device steps a second: median (least to most) of {found['repeat']}; engine with {workers}")


def speed(figures: dict[str, float] | None) -> str:
    return "-" if figures is None else "{median:,.0f} ({min:,.0f} to {max:,.0f})".format(**figures)
