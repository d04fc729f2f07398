"""Progress and results of a search on the terminal. Does not import torch.

A trial is a record: number, fields, state, score (None unless it is done), scores (by seed), rounds, seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from polytier._terminal import say
from polytier.models.metrics import MetricInfo
from polytier.report.comparison import DONE
from polytier.report.tables import line, table

MOST = 10  # trials in the table

Record = dict[str, Any]


def ranked(records: Iterable[Record], metric: MetricInfo) -> list[Record]:
    """The trials from best to worst: equal scores by number, trials without a score last."""
    return sorted(records, key=lambda record: (record["state"] != DONE, -metric.sign * (record["score"] or 0)))


def shown(value: Any) -> str:
    """A value with four significant digits if it is a float."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_search(console: Console, records: list[Record], metric: MetricInfo, best: Path) -> None:
    """Print the best trials and the command to train the best one."""
    order = ranked(records, metric)
    rows = [
        (str(r["number"]), *map(shown, r["fields"].values()), metric.text(r["score"]), r["state"]) for r in order[:MOST]
    ]
    console.print(table(("trial", *order[0]["fields"], f"validation {metric.name}", "state"), rows, right=True))
    if len(order) > MOST:
        line(console, f"{len(order) - MOST} more are in {best.with_name('trials.jsonl')}")
    if order[0]["state"] == DONE:
        what = f"trial {order[0]['number']}" if order[0]["number"] else "trial 0, the initial setting,"
        line(console, f"{what} is the best on validation; train it: polytier run {best}")


class Watch:
    """A progress bar on a terminal, a line per trial elsewhere; nothing unless `show`."""

    def __init__(self, show: bool, trials: int, metric: MetricInfo) -> None:
        console = Console(stderr=True)
        self.lines, self.trials, self.metric = show and not console.is_terminal, trials, metric
        columns = (TextColumn("{task.fields[done]}"), BarColumn(), TextColumn("{task.fields[best]}"))
        disable = not show or not console.is_terminal
        self.bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=disable)
        self.task = self.bar.add_task("", total=trials, done="", best="")

    def moved(self, done: int, share: float) -> None:
        """Update the number of finished trials and the completed share of the next."""
        self.bar.update(self.task, completed=done + share, done=f"{done} of {self.trials} trials")

    def ended(self, record: Record, best: Record) -> None:
        """Show the result of a trial and the best one so far."""
        so_far = f"best {self.metric.text(best['score'])}"
        self.bar.update(self.task, best=so_far)
        self.moved(record["number"] + 1, 0)
        if self.lines:
            fields = ", ".join(f"{name} = {shown(value)}" for name, value in record["fields"].items())
            how = self.metric.text(record["score"]) if record["state"] == DONE else record["state"]
            say(f"trial {record['number']}: {how} ({fields}); {so_far}")
