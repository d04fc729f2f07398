"""Tables for the terminal, made from run files alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polytier._text import duration, size
from polytier.runs.read import KINDS, bytes_until, score


def at_round(figures: dict[str, Any] | None) -> str:
    return f"{score(figures)} (round {figures['round']})" if figures else "-"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: bool = False) -> Table:
    """A plain table; `right` puts all but the first column to the right."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for k, column in enumerate(columns):
        made.add_column(column, justify="right" if right and k else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))  # not markup: cells may hold brackets
    return made


def accuracy_table(summary: dict[str, Any]) -> Table:
    best, chosen = summary["best"] or {}, summary["chosen"] or {}
    outer = [name for name in summary if name.startswith("team") and name not in ("team", "teams")]
    rows = [
        (
            name, score(summary[name]), at_round(best.get(name)), at_round(chosen.get(name)),
            score(summary[name], "_worst_decile"),
        )
        for name in ("personal", *outer, "team", "global")
    ]  # fmt: skip
    columns = ("test accuracy", "last", "best", "chosen on validation", "worst decile")
    return table(columns, rows, right=True)


def models_table(models: dict[str, Any]) -> Table:
    """Several models on one pool: a line for each, test and training accuracy."""
    kinds = [kind for kind in KINDS if any(each[kind] for each in models.values())]
    rows = [
        (
            name, each["algorithm"], f"{each['parameters']:,}",
            *(text for kind in kinds for text in (score(each[kind]), score(each["train"].get(kind)))),
        )
        for name, each in models.items()
    ]  # fmt: skip
    columns = ("model", "method", "parameters", *(c for kind in kinds for c in (f"{kind}: test", "train")))
    return table(columns, rows, right=True)


def gain_table(found: dict[str, Any]) -> Table:
    """A line a seed, and their mean with its interval."""
    rows = [
        (f"seed {seed}", "not reached" if rounds is None else str(rounds), number(found["gains"].get(seed)))
        for seed, rounds in found["rounds"].items()
    ]
    low, high = found["interval"] or (None, None)
    spread = "" if low is None else f" ({number(low)} to {number(high)})"
    rows.append(("mean", "", f"{number(found['mean'])}{spread}"))
    columns = (f"{found['models']} models, T1 = {found['single']}", "TM", "gain (95 % interval)")
    return table(columns, rows, right=True)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def traffic_table(summary: dict[str, Any]) -> Table:
    rows = [(link, size(ways["down"]), size(ways["up"])) for link, ways in summary["traffic"].items()]
    return table(("traffic", "down", "up"), rows, right=True)


def line(console: Console, text: str, style: str | None = None) -> None:
    """Plain text, never broken or coloured by what it holds."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def title(config: dict[str, Any]) -> str:
    """What was run on what."""
    models = config.get("models")
    if not models:
        return f"{config['algorithm']} on {config['data']} with {config['model']}"
    return f"{config['algorithm']} of " + ", ".join(f"{k} ({v.get('data', config['data'])})" for k, v in models.items())


def print_summary(console: Console, config: dict[str, Any], summary: dict[str, Any], folder: Path) -> None:
    """The result of a run."""
    teams = f" in {summary['teams']} teams" if summary["teams"] else ""
    line(console, f"{title(config)}, seed {summary['seed']}", style="bold")
    who = f"{summary['devices']} devices{teams}"
    line(console, f"{who}, {summary['parameters']:,} parameters, {summary['rounds']} rounds\n")
    models = summary.get("models")
    console.print(models_table(models) if models else accuracy_table(summary))
    console.print()
    console.print(traffic_table(summary))
    console.print()
    speed = summary["device_steps_per_second"] or 0
    line(console, f"{duration(summary['seconds'])} of training, {speed:,.0f} device steps a second")
    if "collaboration" in summary:
        found = summary["collaboration"]
        match = f"adjusted Rand index {found['adjusted_rand_index']:.2f}, contrast {found['contrast'] or 0:.2f}"
        line(console, f"{found['groups']} groups learned; against the true ones: {match}")
    if summary["never_took_part"]:
        line(console, f"{summary['never_took_part']} devices never took part and keep the first model")
    line(console, f"run folder: {folder}")


def print_until(console: Console, history: list[dict[str, Any]], accuracy: float) -> None:
    """By model, the bytes that were sent until its accuracy was reached."""
    rows = []
    for model in (m for m in KINDS if any("accuracy" in r.get(m, {}).get("test", {}) for r in history)):
        found = bytes_until(history, accuracy, model)
        rows.append((model, "never", "-") if found is None else (model, f"round {found[0]}", size(found[1])))
    console.print(table((f"until {100 * accuracy:g} % test accuracy", "reached in", "bytes"), rows, right=True))


def print_unfinished(console: Console, config: dict[str, Any], history: list[dict[str, Any]], folder: Path) -> None:
    """How far a run has come that has no results yet."""
    done = history[-1]["round"] if history else 0
    line(console, f"{title(config)}: round {done} of {config['rounds']}", style="bold")
    judged = [record for record in history if any(model in record for model in KINDS)]
    if judged:
        rows = [(m, score(judged[-1][m].get("test"))) for m in KINDS if m in judged[-1]]
        console.print(table(("test accuracy", f"round {judged[-1]['round']}"), rows, right=True))
    line(console, f"no results yet; go on with: polytier resume {folder}")
