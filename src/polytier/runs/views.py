"""A run for people and for pandas: its text, its HTML in a notebook, its frames and its plot."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, Any

from polytier._errors import missing, unknown
from polytier._text import counted
from polytier.models.metrics import LOSS
from polytier.runs import summary as contents
from polytier.runs.evaluate import metrics_of
from polytier.runs.methods import method_name
from polytier.runs.read import RunRecord, score
from polytier.runs.read_files import KINDS
from polytier.runs.run import Run
from polytier.runs.spec import PYTHON
from polytier.runs.trackers import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

FILE_KEYS = ("format", "run", "files")  # in summary.json, about the folder and not about the run


def summary(run: Run) -> dict[str, Any]:
    """The content of summary.json; of one of several models, its entry there."""
    if run.folder is None:
        return contents.of_model(run) if run.context.name else contents.summary(run)
    found = RunRecord(run.folder).summary
    assert found is not None, "a folder without it cannot be loaded"
    whole = {key: value for key, value in found.items() if key not in FILE_KEYS}
    return whole["models"][run.context.name] if run.context.name else whole


def tiers(run: Run) -> list[str]:
    """The kinds of models that were evaluated: personal, team, global, and outer tiers of teams by name."""
    outer = run.context.topology.tier_names[1:-1]
    return [name for name in dict.fromkeys((*KINDS, *outer)) if any(name in record for record in run.history)]


# -- text ---------------------------------------------------------------------------------------------


def text(run: Run) -> str:
    """One line: method, data, model, rounds, devices, and the leading metric of every kind of model."""
    leading, last = metrics_of(run.context)[0], contents.figures(run)
    found = [f"{tier} {score(last[tier], leading)}" for tier in tiers(run) if last.get(tier)]
    results = f"; test {leading.name}: {', '.join(found)}" if found else ""
    return f"<Run: {about(run)}{results}>"


def about(run: Run) -> str:
    """What was trained, for how long and on how many devices."""
    modules = ", ".join(run.models) or (type(run.module).__name__ if run.spec.model == PYTHON else run.spec.model)
    data = "" if run.spec.data == PYTHON else f" on {run.spec.data}"
    teams = f" in {counted(len(run.team_ids), 'team')}" if len(run.team_ids) else ""
    who = f"{counted(len(run.device_ids), 'device')}{teams}"
    return f"{method_name(run.algorithm)} with {modules}{data}, {counted(run.rounds, 'round')}, {who}"


def html(run: Run) -> str:
    """The same as a table for notebooks."""
    leading, last = metrics_of(run.context)[0], contents.figures(run)
    best = last["best"] or {}
    lines = [f"<tr><th></th><th>test {escape(leading.name)}, last</th><th>best (round)</th></tr>"]
    for tier in tiers(run):
        top = best.get(tier)
        when = f"{score(top, leading)} ({top['round']})" if top else "-"
        cells = (tier, score(last.get(tier), leading), when)
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<p>Run: {escape(about(run))}</p><table>{''.join(lines)}</table>"


# -- frames and plot ----------------------------------------------------------------------------------


def frame_of(columns: Any) -> DataFrame:
    """A pandas frame; an error names the extra that installs pandas."""
    try:
        from pandas import DataFrame
    except ImportError:
        raise missing("pandas") from None
    return DataFrame(columns)


def rounds_frame(run: Run) -> DataFrame:
    """One line per round, with columns such as personal/test/accuracy."""
    return frame_of([{"round": record["round"], **dict(figures(record))} for record in run.history])


def devices_frame(run: Run) -> DataFrame:
    """One line per device: its name, team, number of samples, and the metrics of its models on test samples."""
    if run.folder is None:
        columns: dict[str, Any] = contents.table_columns(run)
        teams = columns["team"]
    else:
        columns = dict(RunRecord(run.folder).devices)
        whole = all(re.fullmatch(r"-?\d+", name) for name in columns["team"])
        teams = [int(name) if whole else name for name in columns["team"]]  # the file does not say which they were
    own = f"{run.context.name}_" if run.context.name else ""
    measured = tuple(f"{tier}_{metric.name}" for tier in tiers(run) for metric in metrics_of(run.context))
    found: dict[str, Any] = {"device": run.device_ids, "team": teams}
    for name, column in columns.items():
        if name.startswith(own) and name.endswith("samples"):
            found[name] = [int(value) for value in column]
        elif name.startswith(own) and name.endswith(measured):
            found[name] = [None if value == "" else float(value) for value in column]
    return frame_of(found)


def plot(run: Run, metric: str | None, ax: Axes | None) -> Axes:
    """The values of every kind of model on test samples, over the evaluated rounds."""
    known = {each.name: each for each in (*metrics_of(run.context), LOSS)}
    shown = metrics_of(run.context)[0] if metric is None else known.get(metric)
    if shown is None:
        raise unknown("metric of this run", str(metric), list(known))
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise missing("plots") from None
        ax = pyplot.subplots()[1]
    assert ax is not None
    for tier in tiers(run):
        values = [(r["round"], r[tier]["test"].get(shown.name)) for r in run.history if "test" in r.get(tier, {})]
        there = [(number, shown.factor * value) for number, value in values if value is not None]
        if there:
            ax.plot(*zip(*there, strict=True), label=tier, marker="." if len(there) < 30 else "")
    ax.set_xlabel("round")
    ax.set_ylabel(f"test {shown.axis}")
    if ax.lines:
        ax.legend()
    return ax
