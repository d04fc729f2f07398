"""Compares several methods on the same data with the same settings: the runs and their processes.

The folder of a comparison contains, for every method and seed, METHOD-SEED.toml, the requested settings, and
METHOD-SEED, the run folder; with --tune, tune-METHOD, the search for the fields of a method; then compare.json,
compare.csv and report.html. Repeating the command continues the comparison: finished runs are reused, others are
resumed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from polytier._errors import FAULT, Stopped
from polytier._errors import INTERRUPTED as EXIT_INTERRUPTED
from polytier._terminal import log, say, silence, wide_console
from polytier.files.read import read_json
from polytier.method.algorithm import Algorithm
from polytier.report import comparison, page_contents
from polytier.report.comparison import DONE, FILE, INTERRUPTED, NOT_APPLICABLE, WAITING
from polytier.runs.assemble import assemble
from polytier.runs.defaults import settings
from polytier.runs.first_fields import data_advice, is_own, with_first_fields
from polytier.runs.make_data import make_data, make_federation
from polytier.runs.methods import field_names, make_method, method_class, wraps_others
from polytier.runs.spec import RunSpec, is_file, merge_fields, read_spec
from polytier.studies.run_queue import Task, check_same, run_tasks
from polytier.studies.study_folder import slug, stem, study_folder
from polytier.studies.tune import tuned_fields, without_test

COUNTS = {"device_steps", "team_rounds", "local_rounds"}  # fields that divide the gradients of a round


def compare_methods(
    shared: RunSpec,
    names: Sequence[str],
    fields: Sequence[str],
    steps: int | None,
    trials: int | None,
    seeds: int,
    out: Path | None,
    until: float,
    jobs: int,
    quiet: bool,
    as_json: bool,
) -> None:
    """The command `polytier compare`; `fields` are FIELD=VALUE and METHOD.FIELD=VALUE texts."""
    specs, notes = settle(shared, names, fields, steps)
    show = not (quiet or as_json)
    with study_folder(out, stem("compare", shared), FILE, "a comparison") as out:
        chosen = start_fields(specs, out)
        best = chosen if trials is None else tune_all(specs, chosen, trials, out, show)
        specs = {name: started(spec, best) for name, spec in specs.items()}
        tasks = make_tasks(specs, seeds, out)
        check(tasks)
        for note in notes if show else ():
            say(note)
        settings = {
            "methods": list(names),
            "seeds": sorted({task.spec.seed for task in tasks}),
            "until": until,
            "steps": steps,
            "trials": trials,
            "set": {name: spec.set for name, spec in specs.items()},
            "chosen": chosen,
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
        if name is not None:
            own[name].append(text.removeprefix(f"{name}."))
    for text in reversed([text for text in texts if not text.startswith(tuple(f"{name}." for name in names))]):
        for name in having(text, kinds):
            own[name].insert(0, text)  # METHOD.FIELD=VALUE wins over FIELD=VALUE
    if shared.models is not None and not any("models" in kind.__dataclass_fields__ for kind in kinds.values()):
        raise ValueError("--models needs mfa-rr or mfa-rand among the methods")
    tiers = 0 if steps is None else team_tiers(make_federation(shared)[1].teams)
    specs, notes = {}, []
    for name, kind in kinds.items():
        given = merge_fields({}, own[name])
        fields = dict(shared.set) if name == shared.algorithm else {}
        spec = shared.replace(algorithm=name)
        if steps is not None:
            tuned = tuned_for(name, shared, steps, {**fields, **given})
            wanted = step_fields(kind, {**fields, **tuned, **given}.get("device_steps"), steps, tiers)
            spec, note = with_budget(spec, kind, {**fields, **wanted, **tuned, **given}, steps, tiers)
            fields |= wanted | tuned if note else tuned | wanted
            if note is None and any(given.get(key, value) != value for key, value in wanted.items()):
                note = f"{name} uses the fields of --set: its number of steps per round may differ from {steps}"
            notes += [note] if note else []
        spec = spec.replace(set=merge_fields(fields, own[name]))
        if not wraps_others(spec.replace(models=None)):
            spec = spec.replace(models=None)  # only methods that train several models use these
            make_method(name, spec.set)  # raises an error for invalid fields
        specs[name] = spec
    return specs, notes


def tuned_for(name: str, shared: RunSpec, steps: int, said: Collection[str]) -> dict[str, Any]:
    """The fields of the table of defaults for this number of steps, without those that the user gives.

    Numbers of steps and of rounds belong together: who gives one of them has none of the table.
    """
    table = {field: value for field, (value, _) in settings(name, shared.data, shared.model, steps).items()}
    left_out = {*said, *(COUNTS if COUNTS & set(said) else ())}
    return {field: value for field, value in table.items() if field not in left_out}


def having(text: str, kinds: Mapping[str, type[Algorithm]]) -> list[str]:
    """The methods that have the field of a text FIELD=VALUE."""
    field = text.partition("=")[0].partition(".")[0].strip()
    found = [name for name, kind in kinds.items() if field in field_names(kind)]
    if not found:
        example = next(iter(kinds))
        raise ValueError(
            f"--set {text!r}: none of {', '.join(kinds)} has a field {field!r}; write FIELD=VALUE for all methods that "
            f"have it, or METHOD.FIELD=VALUE for one, for example --set {example}.device_lr=0.05"
        )
    return found


def start_fields(specs: Mapping[str, RunSpec], out: Path) -> dict[str, dict[str, Any]]:
    """The fields of each method that are chosen for the user's own data, on the first seed; those of before, if any."""
    own = {name: spec for name, spec in specs.items() if is_own(spec) and not wraps_others(spec)}
    if not own:
        return {}
    before = (read_json(out / FILE)["settings"].get("chosen") or {}) if (out / FILE).exists() else {}
    federations, complete = make_data(own, dict.fromkeys(own))
    for text in data_advice(next(iter(federations.values()))):
        log.warning("%s", text)
    found = {name: before.get(name) or with_first_fields(complete[name], federations[name]).set for name in own}
    return {name: {k: v for k, v in each.items() if k not in specs[name].set} for name, each in found.items()}


def tune_all(
    specs: Mapping[str, RunSpec], chosen: Mapping[str, dict[str, Any]], trials: int, out: Path, show: bool
) -> dict[str, dict[str, Any]]:
    """The fields of each method after a search with validation samples that starts from the chosen ones."""
    without_test(make_federation(next(iter(specs.values())))[0])  # raises an error if there are no such samples
    if not (out / FILE).exists():  # this file marks the folder as a comparison
        comparison.write(out, {"methods": list(specs), "chosen": chosen}, [], [])
    found = {}
    for name, spec in specs.items():
        folder = out / f"tune-{slug(name)}"
        try:
            best = tuned_fields(started(spec, chosen), spec.set, trials, folder, show)
        except ValueError as error:
            say(f"{name} is not tuned: {error}")
            best = {}
        found[name] = chosen.get(name, {}) | best
    return found


def started(spec: RunSpec, chosen: Mapping[str, Mapping[str, Any]]) -> RunSpec:
    """The settings of a method with the fields that were chosen for it; those that are set stay as they are."""
    return spec.replace(set={**chosen.get(spec.algorithm, {}), **spec.set})


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


def with_budget(
    spec: RunSpec, kind: type[Algorithm], fields: Mapping[str, Any], steps: int, tiers: int
) -> tuple[RunSpec, str | None]:
    """The settings with a number of rounds in which a device takes `steps` gradient steps per shared round.

    A method with one gradient per round has more rounds. A method whose team rounds or local rounds have several times
    `steps` gradients has fewer, if that divides the number of rounds. The note says so; it is None if the number of
    rounds is unchanged.
    """
    name, more = spec.algorithm, max(1, round(steps * kind.budget.get("rounds", 0)))
    if more > 1:
        note = f"{name}: {more} of its rounds count as one round here, with about {steps} gradients per device"
        return spec.replace(rounds=more * spec.rounds, eval_every=more * spec.eval_every), note
    depth = {"team_rounds": tiers, "local_rounds": 1}
    repeats = [fields[key] for key in depth if key in fields and depth[key] == 1]
    numbers = [fields.get("device_steps"), *repeats]
    taken = math.prod(numbers) if repeats and all(isinstance(number, int) for number in numbers) else steps
    fewer = taken // steps
    if fewer < 2 or taken % steps or spec.rounds % fewer:
        return spec, None
    note = f"{name}: one of its rounds counts as {fewer} rounds here, with {taken} gradients per device"
    return spec.replace(rounds=spec.rounds // fewer, eval_every=max(1, spec.eval_every // fewer)), note


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
