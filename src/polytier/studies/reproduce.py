"""Reproduces a paper's tables and figures: trains its runs, compares the values, and writes a page.

The folder contains runs/, with a run folder per run and seed (finished ones are reused, others are resumed); results/,
with one JSON file per finished run (papers/stored_runs.py);
reproduction.json and results.md, our values beside the paper's; figures/; and report.html, a page with all of them.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polytier import papers
from polytier._errors import FAULT, Stopped
from polytier._errors import INTERRUPTED as EXIT_INTERRUPTED
from polytier._terminal import wide_console
from polytier.files.write import make_folder, write_text
from polytier.papers import verdicts as reproduction
from polytier.papers.plan import Item, PlannedRun
from polytier.report.blocks import Cell, Panels, Section, Table, Text
from polytier.report.comparison import DONE, INTERRUPTED, NOT_APPLICABLE, WAITING
from polytier.report.figures import save
from polytier.report.markdown_latex import markdown
from polytier.report.page import render
from polytier.report.tables import line, table
from polytier.runs.make_data import needs_files
from polytier.runs.spec import check_spec
from polytier.studies.plan_cost import Samples, data_of, print_plan
from polytier.studies.run_queue import Task, check_same, run_tasks
from polytier.studies.store_runs import Store, origin
from polytier.studies.study_folder import slug, study_folder

FILE = "reproduction.json"


@dataclass(frozen=True)
class Plan:
    """What is to be reproduced.

    Args:
        what: PAPER, or PAPER/ITEM,ITEM.
        scale: "quick" or "full".
        only: Patterns of names of runs; None: all runs.
        seeds: Number of seeds of every run; None: as many as the plan has.
        model: The path of a pretrained model, for those plans that need one; None: their default.
    """

    what: str
    scale: str
    only: str | None = None
    seeds: int | None = None
    model: str | None = None

    @property
    def paper(self) -> str:
        """The name of the paper."""
        return self.what.partition("/")[0]

    def command(self) -> str:
        """The command that reproduces it."""
        only = [] if self.only is None else ["--only", self.only]
        seeds = [] if self.seeds is None else ["--seeds", str(self.seeds)]
        start = ["polytier", "reproduce", self.what, "--scale", self.scale, *self.given_model]
        return shlex.join([*start, *only, *seeds, "--data-dir", "DIR"])

    @property
    def given_model(self) -> list[str]:
        """The words of a command that name the model."""
        return [] if self.model is None else ["--model", self.model]

    def items(self) -> list[Item]:
        """The items, with those rows, curves and claims that were asked for."""
        return papers.restricted(papers.chosen(self.what, self.scale, self.model)[1], self.only)


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
    samples = Samples()
    tasks = make_tasks(list(runs.values()), data_dir, out / "runs", samples, plan.seeds)
    if dry_run:
        print_plan(runs, tasks, samples)
        return
    with study_folder(out, "", FILE, "a reproduction"):
        check_same(tasks)
        make_folder(out / "runs")
        if not (out / FILE).exists():
            write_text(out / FILE, "{}\n")  # this file marks the folder as a reproduction
        store = Store(results or out / "results", plan.paper, plan.scale, items, plan.given_model)
        for task in tasks:
            store(task)  # runs that were finished before
        try:
            run_tasks(tasks, out / "runs", jobs or os.cpu_count() or 1, not quiet, store)
        finally:
            tables = write(out, plan, items, tasks)
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
    samples: Samples,
    seeds: int | None = None,
) -> list[Task]:
    """The runs of all items with the first seed, then with the next; runs without data have the reason.

    `samples` keeps what is found out about the data sets. `seeds` replaces the number of seeds of every run.
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
            if task.state == WAITING and (reason := samples.missing(spec)):
                task.state, task.reason = NOT_APPLICABLE, reason
            tasks.append(task)
    return tasks


# -- results ------------------------------------------------------------------------------------------


def write(out: Path, plan: Plan, items: Sequence[Item], tasks: Sequence[Task]) -> list[Table]:
    """Write the results of all finished runs; returns the tables for the terminal."""
    folders: dict[str, dict[int, Path]] = {}
    for task in tasks:
        if task.state == DONE:
            folders.setdefault(task.method, {})[task.spec.seed] = task.folder
    why = {t.method: f"{t.state}: {t.reason}" if t.reason else t.state for t in tasks if t.state != DONE}
    judged = [reproduction.judge(item, folders) for item in items]
    sections = [reproduction.section(item, found, folders, why) for item, found in zip(items, judged, strict=True)]
    overview = reproduction.overview(judged)
    title = f"{plan.paper}, {plan.scale}"
    found = {"title": title, "command": plan.command(), **origin(), "rule": reproduction.RULE, "items": judged}
    write_text(out / FILE, json.dumps(found, indent=2) + "\n")
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
