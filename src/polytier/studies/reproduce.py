"""Reproduces a paper's tables and figures: trains its runs, compares the values, and writes a page.

The folder contains runs/, with a run folder per run and seed (finished ones are reused, others are resumed); results/,
with one JSON file per finished run (papers/stored_runs.py);
reproduction.json and results.md, our values beside the paper's; figures/; and report.html, a page with all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polytier import papers
from polytier._errors import FAULT, Stopped
from polytier._errors import INTERRUPTED as EXIT_INTERRUPTED
from polytier._terminal import say, silence, wide_console
from polytier._text import counted, duration
from polytier.algorithms.fedavg import FedAvg
from polytier.data.build import build_federation, load_source
from polytier.data.federation import Federation
from polytier.data.sources import Source, default_dir
from polytier.files.write import make_folder, write_text
from polytier.papers import verdicts as reproduction
from polytier.papers.plan import Item, PlannedRun
from polytier.report.blocks import Cell, Panels, Section, Table, Text
from polytier.report.comparison import DONE, INTERRUPTED, NOT_APPLICABLE, WAITING
from polytier.report.figures import save
from polytier.report.markdown_latex import markdown
from polytier.report.page import render
from polytier.report.tables import line, table
from polytier.runs.assemble import assemble
from polytier.runs.estimate import seconds_a_round, seconds_a_step, steps_a_round
from polytier.runs.loop import Loop
from polytier.runs.make_data import needs_files
from polytier.runs.methods import method_of, wraps_others
from polytier.runs.spec import RunSpec, check_spec, read_teams
from polytier.studies.run_queue import Task, check_same, run_tasks
from polytier.studies.store_runs import Store
from polytier.studies.study_folder import slug, study_folder

FILE = "reproduction.json"
TIMED_DEVICES, TIMED_BATCH = 8, 128  # devices whose step is timed, and the size of a batch that grows


@dataclass(frozen=True)
class Plan:
    """What is to be reproduced.

    Args:
        what: PAPER, or PAPER/ITEM,ITEM.
        scale: "quick" or "full".
        only: Patterns of names of runs; None: all runs.
        seeds: Number of seeds of every run; None: as many as the plan has.
    """

    what: str
    scale: str
    only: str | None = None
    seeds: int | None = None

    @property
    def paper(self) -> str:
        """The name of the paper."""
        return self.what.partition("/")[0]

    def items(self) -> list[Item]:
        """The items, with those rows, curves and claims that were asked for."""
        return papers.restricted(papers.chosen(self.what, self.scale)[1], self.only)


def reproduce_paper(
    plan: Plan,
    *,
    data_dir: Path | None,
    out: Path | None,
    results: Path | None,
    jobs: int | None,
    dry_run: bool,
    quiet: bool,
) -> None:
    """The command `polytier reproduce`."""
    items = plan.items()
    out = out or Path("runs") / f"reproduce-{plan.paper}-{plan.scale}"
    runs = {run.name: run for item in items for run in item.runs()}
    samples: dict[str, Sample | str] = {}
    tasks = make_tasks(list(runs.values()), data_dir, out / "runs", samples, plan.seeds)
    if dry_run:
        print_plan(runs, tasks, samples)
        return
    with study_folder(out, "", FILE, "a reproduction"):
        check_same(tasks)
        make_folder(out / "runs")
        if not (out / FILE).exists():
            write_text(out / FILE, "{}\n")  # this file marks the folder as a reproduction
        store = Store(results or out / "results", plan.paper, plan.scale, items)
        for task in tasks:
            store(task)  # runs that were finished before
        try:
            run_tasks(tasks, out / "runs", jobs or os.cpu_count() or 1, not quiet, store)
        finally:
            tables = write(out, f"{plan.paper}, {plan.scale}", items, tasks)
    states = {task.state for task in tasks}
    if quiet:
        print(out)
    else:
        for found in tables:
            print_table(found)
        line(wide_console(), f"page: {out / 'report.html'}")
    if states & {INTERRUPTED, WAITING}:
        raise Stopped("interrupted; continue with the same command", EXIT_INTERRUPTED)
    if DONE not in states:
        raise Stopped("no run finished", FAULT)


# -- the runs -----------------------------------------------------------------------------------------


def make_tasks(
    runs: Sequence[PlannedRun],
    data_dir: Path | None,
    folder: Path,
    samples: dict[str, Sample | str],
    seeds: int | None = None,
) -> list[Task]:
    """The runs of all items with the first seed, then with the next; runs without data have the reason.

    What is found out about the data sets is added to `samples`. `seeds` replaces the number of seeds of every run.
    """
    where = {} if data_dir is None else {"data_dir": str(data_dir)}
    tasks = []
    for seed in range(seeds or max(run.seeds for run in runs)):
        for run in runs:
            if seed >= (seeds or run.seeds):
                continue
            spec = check_spec({**run.settings, "seed": seed, "workers": 1})
            spec = spec.replace(**where) if any(map(needs_files, data_of(spec))) else spec
            task = Task(run.name, spec, folder / f"{slug(run.name)}-{seed}")
            task.look()
            if task.state == WAITING and (reason := no_data(spec, samples)):
                task.state, task.reason = NOT_APPLICABLE, reason
            tasks.append(task)
    return tasks


def data_of(spec: RunSpec) -> list[str]:
    """The data sets of a run, each once."""
    tables = spec.models.values() if isinstance(spec.models, dict) else ()
    return list(dict.fromkeys([table.get("data", spec.data) for table in tables] or [spec.data]))


@dataclass(frozen=True)
class Sample:
    """What the samples of a data set look like."""

    shape: tuple[int, ...]
    dtype: np.dtype
    classes: int | None
    tokens: bool = False  # whether each number of a sample has a class


def no_data(spec: RunSpec, known: dict[str, Sample | str]) -> str:
    """Why the data of a run are not available; empty if they are. `known` caches what was found."""
    names = data_of(spec)
    for name in names:
        if name not in known:
            known[name] = look_at(name, spec.data_dir)
    return next((found for name in names if isinstance(found := known[name], str)), "")


def look_at(name: str, data_dir: str | None) -> Sample | str:
    """The form of a data set's samples, or why it cannot be read."""
    try:
        source = load_source(name, default_dir() if data_dir is None else Path(data_dir), 2, 0)
    except ValueError as error:
        return str(error)
    return Sample(source.x.shape[1:], source.x.dtype, source.num_classes, source.is_tokens)


# -- estimated time -----------------------------------------------------------------------------------


def print_plan(runs: Mapping[str, PlannedRun], tasks: Sequence[Task], samples: Mapping[str, Sample | str]) -> None:
    """Print every run with its settings, data, device steps and estimated hours on this machine."""
    total, timed, rows = 0.0, {}, []
    for task in (t for t in tasks if t.spec.seed == 0):
        with silence():  # the runs themselves log these messages
            run, (steps, seconds) = runs[task.method], cost(task, timed, samples)
        seeds = sum(t.method == task.method for t in tasks)
        total += seeds * (seconds or 0)
        settings = {k: v for k, v in run.settings.items() if k not in ("data", "model", "set")}
        told = " ".join(f"{k}={v}" for k, v in (settings | dict(run.settings.get("set", {}))).items())
        rows.append(
            (
                task.method,
                str(seeds),
                task.spec.data,
                task.spec.model,
                told,
                "?" if steps is None else f"{steps:,.0f}",
                DONE
                if task.state == DONE
                else "no data"
                if task.reason
                else "?"
                if seconds is None
                else duration(seconds),
            )
        )
    wide_console().print(table(("run", "seeds", "data", "model", "settings", "steps", "time per seed"), rows))
    for reason in dict.fromkeys(task.reason for task in tasks if task.reason):
        say(reason)
    line(wide_console(), f"{counted(len(tasks), 'run')}, about {total / 3600:.1f} hours of training on one core")


def cost(task: Task, timed: dict[Any, float], samples: Mapping[str, Sample | str]) -> tuple[float | None, float | None]:
    """Device steps of a run, and seconds on one core; `timed` caches the time of a step."""
    spec = task.spec
    if wraps_others(spec):
        if task.reason:
            return None, None
        with Loop.of(spec) as loop:
            seconds, steps = seconds_a_round(loop, 1), steps_a_round(loop)
        return (None if each is None else spec.rounds * each for each in (steps, seconds))  # type: ignore[return-value]
    steps = steps_on_stand_in(spec)
    key = (spec.data, spec.model, spec.batch_size, spec.dtype)
    if key not in timed and not task.reason:
        timed[key] = seconds_on_stand_in(spec, samples[spec.data])
    if steps is None:
        return None, None
    return spec.rounds * steps, None if task.reason else spec.rounds * steps * timed[key]


def steps_on_stand_in(spec: RunSpec) -> float | None:
    """Device steps per round, counted with two samples per device, because the data may not be available."""
    data = stand_in(spec.devices or 40, 3, Sample((2,), np.dtype(np.float32), 2), read_teams(spec.teams))
    small = spec.replace(model="dnn:2", batching="eager", batch_size=spec.batch_size)
    with Loop(assemble(small, algorithm=method_of(spec), federation=data)) as loop:
        return steps_a_round(loop)


def seconds_on_stand_in(spec: RunSpec, sample: Sample | str) -> float:
    """Seconds of one step of one device, measured on samples of the same form: the data may be large."""
    if isinstance(sample, str) or sample.classes is None:  # problems that are generated, and small
        with Loop.of(spec) as loop:
            return seconds_a_step(loop.context)
    size = spec.batch_size if isinstance(spec.batch_size, int) else TIMED_BATCH
    data = stand_in(min(spec.devices or 40, TIMED_DEVICES), 3 * size, sample, 0)
    plain = spec.replace(team_participation=1.0, device_participation=1.0, codec=None, upload=None)
    with Loop(assemble(plain, algorithm=FedAvg(), federation=data)) as loop:
        return seconds_a_step(loop.context)


def stand_in(devices: int, each: int, sample: Sample, teams: int | tuple[int, ...] | None) -> Federation:
    """Devices with so many samples each, a third for training, in two true groups."""
    device = np.repeat(np.arange(devices), each)
    x, classes = np.zeros((len(device), *sample.shape), sample.dtype), sample.classes or 2
    y = np.zeros_like(x) if sample.tokens else np.arange(len(device)) % classes
    source = Source(x, y, classes, device, cluster=device % 2)
    return build_federation(source, teams=teams, split=(1, 1, 1))


# -- results ------------------------------------------------------------------------------------------


def write(out: Path, title: str, items: Sequence[Item], tasks: Sequence[Task]) -> list[Table]:
    """Write the results of all finished runs; returns the tables for the terminal."""

    folders: dict[str, dict[int, Path]] = {}
    for task in tasks:
        if task.state == DONE:
            folders.setdefault(task.method, {})[task.spec.seed] = task.folder
    why = {t.method: f"{t.state}: {t.reason}" if t.reason else t.state for t in tasks if t.state != DONE}
    judged = [reproduction.judge(item, folders) for item in items]
    sections = [reproduction.section(item, found, folders, why) for item, found in zip(items, judged, strict=True)]
    overview = reproduction.overview(judged)
    write_text(out / FILE, json.dumps({"title": title, "rule": reproduction.RULE, "items": judged}, indent=2) + "\n")
    write_text(out / "report.html", render(f"Reproduction: {title}", [overview, Text(reproduction.RULE), *sections]))
    write_text(out / "results.md", "\n\n".join(as_markdown(sections, markdown)) + "\n")
    draw(out / "figures", items, sections)
    return [overview, *(block for each in sections for block in each.blocks if isinstance(block, Table))]


def as_markdown(sections: Sequence[Section], markdown: Any) -> Iterator[str]:
    """Titles, texts and tables as Markdown."""
    for section in sections:
        yield f"### {section.title}"
        for block in section.blocks:
            if isinstance(block, Table | Text):
                yield markdown(block) if isinstance(block, Table) else block.text


def draw(folder: Path, items: Sequence[Item], sections: Sequence[Section]) -> None:
    """Write the charts of every item as images, if matplotlib is available."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        return

    folder.mkdir(exist_ok=True)
    for item, section in zip(items, sections, strict=True):
        pictures = [block for block in section.blocks if not isinstance(block, Table | Text)]
        for k, block in enumerate(pictures):
            name = item.name if isinstance(block, Panels) or len(pictures) == 1 else f"{item.name}-{k}"
            save(block, folder / f"{name}.png")


def print_table(found: Table) -> None:
    """Print a table of the page on the terminal."""
    console = wide_console()
    line(console, f"\n{found.title}", style="bold")
    texts = [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in found.rows]
    console.print(table(found.columns, texts))
