"""Compares several methods on the same data with the same settings: the runs and their processes.

The folder of a comparison contains, for every method and seed, METHOD-SEED.toml, the requested settings, and
METHOD-SEED, the run folder; then compare.json, compare.csv and report.html. Repeating the command continues the
comparison: finished runs are reused, others are resumed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polytier._errors import FAULT, Stopped
from polytier._errors import INTERRUPTED as EXIT_INTERRUPTED
from polytier._terminal import say, silence, wide_console
from polytier.method.algorithm import Algorithm
from polytier.report import comparison, page_contents
from polytier.report.comparison import DONE, FILE, INTERRUPTED, NOT_APPLICABLE, WAITING
from polytier.runs.assemble import assemble
from polytier.runs.defaults import settings
from polytier.runs.make_data import make_federation
from polytier.runs.methods import make_method, method_class, wraps_others
from polytier.runs.spec import RunSpec, is_file, merge_fields, read_spec
from polytier.studies.run_queue import Task, check_same, run_tasks
from polytier.studies.study_folder import study_folder


def compare_methods(
    shared: RunSpec,
    names: Sequence[str],
    fields: Sequence[str],
    steps: int | None,
    seeds: int,
    out: Path | None,
    until: float,
    jobs: int,
    quiet: bool,
    as_json: bool,
) -> None:
    """The command `polytier compare`; `fields` are METHOD.FIELD=VALUE texts."""
    specs, notes = settle(shared, names, fields, steps)
    show = not (quiet or as_json)
    with study_folder(out, stem("compare", shared), FILE, "a comparison") as out:
        tasks = make_tasks(specs, seeds, out)
        check(tasks)
        for note in notes if show else ():
            say(note)
        settings = {
            "methods": list(names),
            "seeds": sorted({task.spec.seed for task in tasks}),
            "until": until,
            "steps": steps,
            "set": {name: spec.set for name, spec in specs.items()},
            "notes": notes,
            **shared.model_dump(exclude={"algorithm", "set", "seed", "out"}, exclude_none=True),
        }

        def write() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
            records = comparison.make_records(out, (task.entry() for task in tasks), until)
            methods = comparison.by_method(out, records)
            comparison.write(out, settings, records, methods)
            return methods, records

        write()  # this file marks the folder as a comparison
        try:
            run_tasks(tasks, out, jobs, show)
        finally:
            methods, records = write()
        if any(task.state == DONE for task in tasks):
            page_contents.write_page([out], out / comparison.PAGE)
    if as_json:
        print((out / FILE).read_text(encoding="utf-8"), end="")
    elif quiet:
        print(out)
    else:
        comparison.print_comparison(wide_console(), methods, records, until, out)
    states = {task.state for task in tasks}
    if states & {INTERRUPTED, WAITING}:
        raise Stopped(f"interrupted; continue with the same command and --out {out}", EXIT_INTERRUPTED)
    if DONE not in states:
        raise Stopped("no run finished", FAULT)


# -- the runs -----------------------------------------------------------------------------------------


def protocol(what: str | None, flags: Mapping[str, Any]) -> RunSpec:
    """The settings that all methods share. Fields in a file belong to the method of that file."""
    if what is not None and not is_file(what):
        raise ValueError(f"{what!r} is not a FILE.toml; methods come first, separated by commas: permfl,fedavg")
    spec = read_spec(what, flags)
    return spec.replace(out=None, workers=spec.workers or 1)


def settle(
    shared: RunSpec, names: Sequence[str], texts: Sequence[str], steps: int | None
) -> tuple[dict[str, RunSpec], list[str]]:
    """The settings of each method, and notes on settings that could not be the same for all."""
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"give different methods separated by commas, such as permfl,fedavg; got {','.join(names)!r}")
    kinds = {name: method_class(name) for name in names}
    own: dict[str, list[str]] = {name: [] for name in names}
    for text in texts:
        name = max((name for name in names if text.startswith(f"{name}.")), key=len, default=None)
        if name is None:
            there = f"where METHOD is one of {', '.join(names)}"
            raise ValueError(
                f"--set {text!r}: write METHOD.FIELD=VALUE, {there}, for example --set {names[0]}.device_lr=0.05"
            )
        own[name].append(text.removeprefix(f"{name}."))
    if shared.models is not None and not any("models" in kind.__dataclass_fields__ for kind in kinds.values()):
        raise ValueError("--models needs mfa-rr or mfa-rand among the methods")
    tiers = 0 if steps is None else team_tiers(make_federation(shared)[1].teams)
    specs, notes = {}, []
    for name, kind in kinds.items():
        given = merge_fields({}, own[name])
        fields = dict(shared.set) if name == shared.algorithm else {}
        spec = shared.replace(algorithm=name)
        if steps is not None:
            tuned = {field: value for field, (value, _) in settings(name, shared.data, shared.model, steps).items()}
            wanted = step_fields(kind, {**fields, **tuned, **given}.get("device_steps"), steps, tiers)
            fields |= wanted | tuned
            more = max(1, round(steps * kind.budget.get("rounds", 0)))
            spec = spec.replace(rounds=more * spec.rounds, eval_every=more * spec.eval_every)
            if more > 1:
                notes.append(
                    f"{name}: {more} of its rounds count as one round here, with about {steps} gradients per device"
                )
            elif any(given.get(key, value) != value for key, value in wanted.items()):
                notes.append(f"{name} uses the fields of --set: its number of steps per round may differ from {steps}")
        spec = spec.replace(set=merge_fields(fields, own[name]))
        if not wraps_others(spec.replace(models=None)):
            spec = spec.replace(models=None)  # only methods that train several models use these
            make_method(name, spec.set)  # raises an error for invalid fields
        specs[name] = spec
    return specs, notes


def team_tiers(teams: str | None) -> int:
    """The number of tiers of teams in the setting `teams`."""
    return 0 if teams in (None, "0", "none") else 1 + teams.count("x")


def step_fields(kind: type[Algorithm], inner: Any, steps: int, tiers: int) -> dict[str, int]:
    """Fields with which a device takes `steps` gradient steps per round, divided by the method's `budget`.

    Where rounds of teams (of every tier) or local rounds repeat device_steps, device_steps is kept (or `inner`, if
    that is given) as far as it divides `steps`, and the number of these rounds is changed.
    """
    known = {each.name: each.default for each in dataclasses.fields(kind)}
    depth = {"team_rounds": tiers, "local_rounds": 1}
    rounds = next((name for name in depth if name in known and depth[name]), None)
    if rounds is None:
        return {
            name: max(1, round(share * steps))
            for name, share in kind.budget.items()
            if name in known or "models" in known
        }
    inner = inner if isinstance(inner, int) else known["device_steps"]
    inner = steps if depth[rounds] > 1 else math.gcd(steps, inner)
    return {"device_steps": inner, rounds: steps // inner}


def make_tasks(specs: Mapping[str, RunSpec], seeds: int, out: Path) -> list[Task]:
    """The runs of all methods with the first seed, then of all methods with the next one."""
    first = next(iter(specs.values())).seed
    tasks = [
        Task(name, spec.replace(seed=seed), out / f"{slug(name)}-{seed}")
        for seed in range(first, first + seeds)
        for name, spec in specs.items()
    ]
    for task in tasks:
        task.look()
        if task.state == WAITING and task.spec.models is None and wraps_others(task.spec):
            task.state, task.reason = NOT_APPLICABLE, "it trains several models; give their number with --models"
    return tasks


def slug(text: str) -> str:
    """A text as the name of a folder."""
    return re.sub(r"[^\w.-]+", "-", text)


def stem(what: str, spec: RunSpec) -> str:
    """WHAT-DATA as the name of a folder."""
    return slug(f"{what}-{Path(spec.data).name.removesuffix('.npz')}")


def check(tasks: Sequence[Task]) -> None:
    """Raise errors about invalid input before anything is written."""
    check_same(tasks)
    if any(task.state == DONE for task in tasks):
        return  # the shared settings are valid
    faults = []
    with silence():  # the runs themselves log these messages
        for task in (t for t in tasks if t.state == WAITING and t.spec.seed == tasks[0].spec.seed):
            try:
                assemble(task.spec).close()
                return
            except ValueError as error:
                faults.append(error)
    if faults:
        raise faults[0]  # no method can start
