"""Tables and lines for the terminal about one run, from its files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polytier._text import counted, duration, size
from polytier.models.metrics import MetricInfo
from polytier.runs.read import RunRecord, bytes_until, score
from polytier.runs.read_files import KINDS, RUNNING

FIRST_OUT = ("training", "gradients", "better than Local")  # of a table that is too wide; then from the right
STAYS = ("method", *KINDS, "Rand index of groups", "runs")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: bool = False) -> Table:
    """A plain table; `right` aligns all columns but the first to the right."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for k, column in enumerate(columns):
        made.add_column(column, justify="right" if right and k else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))  # not markup: cells may hold brackets
    return made


def print_fitting(console: Console, columns: dict[str, list[str]], where: str) -> None:
    """Print the columns that fit side by side, right-aligned, and the names of the others; `where` has them."""
    shown = fitting(columns, console.width)
    console.print(table(shown, zip(*(columns[name] for name in shown), strict=True), right=True))
    if hidden := [name for name in columns if name not in shown]:
        line(console, f"no room here for {', '.join(hidden)}: in {where}")


def fitting(columns: dict[str, list[str]], width: int) -> list[str]:
    """The names of the columns that fit side by side; `STAYS` are always among them.

    Examples:
        >>> fitting({"method": ["permfl"], "personal": ["98.7 %"], "seconds": ["3"], "runs": ["failed"]}, width=24)
        ['method', 'personal', 'runs']
    """
    kept = list(columns)
    for name in (*FIRST_OUT, *reversed(columns)):
        taken = sum(max(map(len, [each, *columns[each]])) + 2 for each in kept) - 2
        if taken > width and name in kept and name not in STAYS:
            kept.remove(name)
    return kept


def line(console: Console, text: str, style: str | None = None) -> None:
    """Print plain text without line breaks or automatic colours."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def number(value: float | None) -> str:
    """The number with two decimals; "-" if there is none."""
    return "-" if value is None else f"{value:.2f}"


# -- the result of a run ------------------------------------------------------------------------------


def result_table(summary: dict[str, Any], metric: MetricInfo) -> Table:
    """The leading metric of each kind of model that there is: last, best and chosen round, worst tenth of devices."""
    best, chosen = summary["best"] or {}, summary["chosen"] or {}
    outer = [name for name in summary if name.startswith("team") and name not in ("team", "teams")]
    rows = []
    for name in (name for name in ("personal", *outer, "team", "global") if summary[name]):
        rounds = [at_round(found.get(name), metric) for found in (best, chosen)]
        rows.append((name, score(summary[name], metric), *rounds, score(summary[name], metric, "_worst_decile")))
    columns = (f"test {metric.name}", "last", "best", "chosen on validation", "worst decile")
    shown = columns if any(row[-1] != "-" for row in rows) else columns[:-1]  # a loss has no worst decile
    return table(shown, [row[: len(shown)] for row in rows], right=True)


def at_round(figures: dict[str, Any] | None, metric: MetricInfo) -> str:
    """A value and its round, as text."""
    return f"{score(figures, metric)} (round {figures['round']})" if figures else "-"


def other_metrics_table(summary: dict[str, Any], metrics: Sequence[MetricInfo]) -> Table:
    """The other metrics in the last round, and on how many devices they are undefined."""
    kinds = [kind for kind in KINDS if summary[kind]]
    rows = []
    for metric in metrics:
        undefined = max((summary[kind].get(f"{metric.name}_undefined", 0) for kind in kinds), default=0)
        note = f"undefined on {counted(undefined, 'device')}" if undefined else ""
        rows.append((metric.name, *(score(summary[kind], metric) for kind in kinds), note))
    columns = ("test, last round", *kinds, "")
    return table(columns, rows, right=True)


def models_table(models: dict[str, Any], metric: MetricInfo) -> Table:
    """Several models on the same devices: one line per model, the metric on test and training samples."""
    kinds = [kind for kind in KINDS if any(each[kind] for each in models.values())]
    rows = []
    for name, each in models.items():
        figures = [found for kind in kinds for found in (each[kind], each["train"].get(kind))]
        rows.append((name, each["algorithm"], f"{each['parameters']:,}", *(score(f, metric) for f in figures)))
    columns = ("model", "method", "parameters", *(c for kind in kinds for c in (f"{kind}: test", "train")))
    return table(columns, rows, right=True)


def traffic_table(summary: dict[str, Any]) -> Table:
    """The bytes sent over each link, down and up."""
    rows = [(link, size(ways["down"]), size(ways["up"])) for link, ways in summary["traffic"].items()]
    return table(("traffic", "down", "up"), rows, right=True)


def sparsity_table(sparsity: dict[str, Any], codec: str) -> Table:
    """How many parameters of the last models are not zero, and what the codec saves by leaving out zeros."""
    rows = [
        (
            kind,
            f"{100 * found['nonzeros']:.1f} %",
            size(found["bytes"]),
            size(found["float32"]),
            f"{round(100 * (1 - found['bytes'] / found['float32']), 1) + 0.0} %",  # + 0.0: never "-0.0"
        )
        for kind, found in sparsity.items()
    ]
    return table((f"last models, {codec}", "not zero", "a message", "as float32", "saved"), rows, right=True)


def groups_text(found: dict[str, Any]) -> str:
    """The groups of clients that a method has learned, and what to try if they divide nothing."""
    text = f"{counted(found['groups'], 'group')} learned"
    if "clients" in found:
        text += f" of {counted(found['clients'], 'client')}"
    if "adjusted_rand_index" in found:
        match = f"adjusted Rand index {found['adjusted_rand_index']:.2f}, contrast {found['contrast'] or 0:.2f}"
        text += f"; against the true ones: {match}"
    return text + (f"\n{found['advice']}" if found.get("advice") else "")


def title(config: dict[str, Any]) -> str:
    """The method, the data and the model."""
    models = config.get("models")
    if not models:
        return f"{config['algorithm']} on {config['data']} with {config['model']}"
    return f"{config['algorithm']} of " + ", ".join(f"{k} ({v.get('data', config['data'])})" for k, v in models.items())


def print_summary(console: Console, config: dict[str, Any], summary: dict[str, Any], folder: Path) -> None:
    """Print the result of a run."""
    teams = f" in {counted(summary['teams'], 'team')}" if summary["teams"] else ""
    line(console, f"{title(config)}, seed {summary['seed']}", style="bold")
    who = f"{counted(summary['devices'], 'device')}{teams}"
    line(console, f"{who}, {counted(summary['parameters'], 'parameter')}, {counted(summary['rounds'], 'round')}\n")
    metric, *others = RunRecord(folder).metrics
    models = summary.get("models")
    if models or any(summary[kind] for kind in KINDS):
        console.print(models_table(models, metric) if models else result_table(summary, metric))
    else:
        line(console, "no device has test samples; the training loss is in metrics.jsonl")
    if others or any((summary[kind] or {}).get(f"{metric.name}_undefined") for kind in KINDS):
        console.print()
        console.print(other_metrics_table(summary, [metric, *others]))
    console.print()
    console.print(traffic_table(summary))
    console.print()
    if summary.get("sparsity"):
        console.print(sparsity_table(summary["sparsity"], config["codec"]))
        console.print()
    speed = summary["device_steps_per_second"] or 0
    line(console, f"{duration(summary['seconds'])} of training, {speed:,.0f} device steps per second")
    if "collaboration" in summary:
        line(console, groups_text(summary["collaboration"]))
    if summary["never_took_part"]:
        line(
            console,
            f"the initial model is kept by {counted(summary['never_took_part'], 'device')} that never took part",
        )
    line(console, f"run folder: {folder}")


def print_until(console: Console, run: RunRecord, level: float) -> None:
    """Print the bytes that were sent until the leading metric reached a level, for each kind of model."""
    rows, metric = [], run.metric
    for model in (m for m in KINDS if any(metric.name in r.get(m, {}).get("test", {}) for r in run.history)):
        found = bytes_until(run.history, level, model, metric=metric)
        rows.append((model, "never", "-") if found is None else (model, f"round {found[0]}", size(found[1])))
    columns = (f"until {metric.short(level)} test {metric.name}", "reached in", "bytes")
    console.print(table(columns, rows, right=True))


def print_unfinished(console: Console, run: RunRecord) -> None:
    """Print the progress of a run that has no results yet."""
    line(console, f"{title(run.config)}: round {run.rounds} of {run.wanted}", style="bold")
    if run.last:
        rows = [(m, score(run.last[m].get("test"), run.metric)) for m in KINDS if m in run.last]
        console.print(table((f"test {run.metric.name}", f"round {run.last['round']}"), rows, right=True))
    if run.state["state"] == RUNNING and not run.abandoned:
        line(console, f"no results yet; process {run.state.get('pid')} is running it")
    else:
        line(console, f"no results yet; continue with: polytier resume {run.folder}")


# -- the gain of training several models together -----------------------------------------------------


def gain_table(found: dict[str, Any]) -> Table:
    """One line per seed, and their mean with its interval."""
    rows = [
        (f"seed {seed}", "not reached" if rounds is None else str(rounds), number(found["gains"].get(seed)))
        for seed, rounds in found["rounds"].items()
    ]
    low, high = found["interval"] or (None, None)
    spread = "" if low is None else f" ({number(low)} to {number(high)})"
    rows.append(("mean", "", f"{number(found['mean'])}{spread}"))
    columns = (f"{found['models']} models, T1 = {found['single']}", "TM", "gain (95 % interval; two seeds: range)")
    return table(columns, rows, right=True)
