"""A search over fields of a method.

A trial is a setting of these fields. It is trained once per seed and evaluated after the last round on validation
samples, with the kind of model that the method is judged by. The next trial depends only on the settings, the seed and
the trials before it, so an interrupted search continues with the same trials. Test samples are removed beforehand.

Unless the fields to search over are named, the steps of teams and of the server of PerMFL, pFedMT and sFedHP are not
searched for: in every trial but the first they follow from the pulls (`first_fields.exact_steps`).

The folder contains tune.json, the requested search; trials.jsonl, a line per trial; best.toml, the best setting so far.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from polytier._errors import FAULT, INTERRUPTED, Stopped
from polytier._terminal import Interrupt, log, wide_console
from polytier.data.federation import Federation
from polytier.files.read import Damaged, read_bytes, read_json, read_line
from polytier.files.write import json_line, write_json, write_text
from polytier.method.call import Diverged, NodesLost
from polytier.method.parameters import check_fit
from polytier.models.metrics import LOSS, MetricInfo
from polytier.report.comparison import DONE, FAILED
from polytier.runs.assemble import Objectives, assemble
from polytier.runs.evaluate import metrics_of
from polytier.runs.first_fields import exact_steps, team_tiers, with_first_fields
from polytier.runs.loop import Loop
from polytier.runs.make_data import make_federation
from polytier.runs.methods import fields_of, make_method, method_of, wraps_others
from polytier.runs.read import judge_of
from polytier.runs.read_files import FORMAT
from polytier.runs.spec import RunSpec, to_toml
from polytier.studies.search_space import Lags, Space, propose, read_space
from polytier.studies.study_folder import stem, study_folder
from polytier.studies.tune_table import Record, Watch, print_search, ranked

FILE, TRIALS, BEST = "tune.json", "trials.jsonl", "best.toml"
PRUNED = "pruned"


def tune_method(
    spec: RunSpec, over: Sequence[str], trials: int, seeds: int, out: Path | None, quiet: bool, as_json: bool
) -> None:
    """The command `polytier tune`; `over` are FIELD[=SPEC] texts."""
    need_optuna()
    search = make_search(spec, over, seeds)
    with study_folder(out, stem(f"tune-{spec.algorithm}", spec), FILE, "a search") as out:
        records = open_folder(out, search)
        again = f"continue with the same command and --out {out}"
        try:
            complete = run_trials(search, records, trials, out, show=not (quiet or as_json))
        except KeyboardInterrupt:
            complete = False
        except NodesLost as error:
            raise Stopped(f"{error}; {again}", FAULT) from None
    best = next((r for r in ranked(records, search.metric) if r["state"] == DONE), None)
    if as_json:
        winner = best and {"fields": best["fields"], "score": best["score"], "trial": best["number"]}
        print(json.dumps({"best": winner, "trials": records}, indent=2))
    elif quiet:
        print(out)
    elif records:
        print_search(wide_console(), records, search.metric, out / BEST)
    if not complete:
        raise Stopped(f"interrupted after {len(records)} of {trials} trials; {again}", INTERRUPTED)
    if best is None:
        why = records[-1]["reason"]
        raise Stopped(f"no trial finished; the last one: {why}. Try another range and another --out", FAULT)


def tuned_fields(spec: RunSpec, fixed: Collection[str], trials: int, out: Path, show: bool) -> dict[str, Any]:
    """The best fields of a search in a folder of a comparison.

    Args:
        spec: The settings of the method.
        fixed: Fields that are not searched over.
        trials: Number of settings to try.
        out: The folder of the search. A search that was interrupted continues.
        show: Whether to show the progress.

    Raises:
        ValueError: The method has nothing to search over, cannot run, or no trial finished.
        Stopped: The search was interrupted.
    """
    need_optuna()
    search = make_search(spec, (), 1)
    search.space = {name: own for name, own in search.space.items() if name not in fixed}
    search.following = [name for name in search.following if name not in fixed]
    if not search.space:
        return {}
    out.mkdir(exist_ok=True)
    records = open_folder(out, search)
    if not run_trials(search, records, trials, out, show):
        raise Stopped(f"interrupted; continue with the same command and --out {out.parent}", INTERRUPTED)
    best = ranked(records, search.metric)[0]
    if best["state"] != DONE:
        raise ValueError(f"no trial finished; the last one: {records[-1]['reason']}")
    return best["fields"]


def need_optuna() -> None:
    """Raise an error if Optuna is not installed; otherwise let it print warnings only."""
    try:
        import optuna
    except ImportError:
        raise ValueError("tune needs Optuna, which is not installed: pip install 'polytier[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)


# -- a search -----------------------------------------------------------------------------------------


@dataclass
class Search:
    """What a trial depends on, in addition to the trials before it.

    config      | the complete settings; their fields are the current setting
    space       | the values to try, by field
    federations | the data by seed, without test samples
    metric      | the leading metric, by which trials are compared
    following   | fields that follow from the pulls
    tiers       | the names of the tiers of teams, the outermost first
    objectives  | a cache, so that graphs are traced once for all trials
    """

    spec: RunSpec
    space: Space
    federations: dict[int, Federation]
    metric: MetricInfo
    following: Sequence[str] = ()
    tiers: Sequence[str] = ()
    objectives: Objectives = field(default_factory=dict)

    def propose(self, records: Sequence[Record]) -> tuple[dict[str, Any], Lags] | None:
        """The next trial; the first one is the current setting."""
        if not records:
            names = [*self.space, *self.following]
            return {name: self.spec.set[name] for name in names}, lambda step, value: False
        # the steps of the first trial may be others than those that follow from its pulls; it then teaches nothing
        known = [record for record in records if record["fields"] == self.complete(record["fields"])]
        known = [{**record, "fields": {name: record["fields"][name] for name in self.space}} for record in known]
        proposed = propose(self.space, known, self.metric, self.spec.seed, self.spec.rounds // 3)
        return proposed and (self.complete(proposed[0]), proposed[1])

    def complete(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a trial with those that follow from them."""
        if not self.following:
            return dict(fields)
        tied = exact_steps(make_method(self.spec.algorithm, {**self.spec.set, **fields}), self.tiers)
        return {**fields, **{name: tied[name] for name in self.following if name in tied}}

    def begin(self, seed: int, fields: Mapping[str, Any]) -> Loop:
        """The run of a trial with one of the seeds."""
        spec = self.spec.replace(seed=seed, set={**self.spec.set, **fields})
        return Loop(assemble(spec, federation=self.federations[seed], objectives=self.objectives))

    def judge(self, loop: Loop) -> float | None:
        """The score of the last round; None if it was not evaluated or is not finite."""
        last = loop.history[-1] if loop.history else {}
        value = last.get(judge_of(last), {}).get("validation", {}).get(self.metric.name)
        return value if value is not None and math.isfinite(value) else None


def make_search(spec: RunSpec, over: Sequence[str], seeds: int) -> Search:
    """The search for these settings; raises errors about invalid settings."""
    if wraps_others(spec):
        raise ValueError(f"{spec.algorithm} trains several models; tune the method of each model separately")
    numbers = range(spec.seed, spec.seed + seeds)
    made = {seed: make_federation(spec.replace(seed=seed)) for seed in numbers}
    algorithm = method_of(with_first_fields(made[spec.seed][1], made[spec.seed][0]))
    tiers = team_tiers(made[spec.seed][1], made[spec.seed][0])
    following = () if over else tuple(exact_steps(algorithm, tiers))
    space = read_space(spec.algorithm, algorithm, over, following)
    for name, own in space.items():
        for value in own.get("choices") or (own["low"], own["high"]):
            check_fit(name, value, (), float(np.finfo(spec.dtype).max))
    if "eval_every" not in spec.model_fields_set:  # often enough to stop bad trials early
        spec = spec.replace(eval_every=max(1, spec.rounds // 10))
    complete = made[spec.seed][1].replace(set=fields_of(algorithm), eval_every=spec.eval_every)
    federations = {seed: without_test(federation) for seed, (federation, _) in made.items()}
    search = Search(complete, space, federations, LOSS, following, tiers)
    with search.begin(spec.seed, {}) as loop:
        search.spec, search.metric = loop.spec, metrics_of(loop.context)[0]
    return search


def without_test(federation: Federation) -> Federation:
    """The data without test samples, which a search must not use."""
    begin, end = federation.span("validation")
    if not bool((end > begin).any()):
        own = "without --per-class; data sets with a fixed split must contain validation samples"
        raise ValueError(f"a search needs validation samples, but there are none; try --split 3:1:1, {own}")
    bounds = federation.bounds.clone()
    bounds[:, 3] = bounds[:, 2]
    return dataclasses.replace(federation, bounds=bounds)


def open_folder(out: Path, search: Search) -> list[Record]:
    """Create the folder, or read the trials in it."""
    asked = {"over": search.space, "seeds": len(search.federations)}
    settings = {**search.spec.model_dump(exclude={"out", "workers", "tile"}), **asked}
    if not (out / FILE).exists():
        write_json(out / FILE, {"format": FORMAT, **settings})
    try:
        before, settings = read_json(out / FILE), json.loads(json.dumps(settings))
    except Damaged as error:
        raise Damaged(f"{error}; give another --out") from None
    before.setdefault("format", 1)
    changed = [f"{k} {before.get(k)} (now {v})" for k, v in settings.items() if before.get(k) != v]
    if changed:
        raise ValueError(f"{out} was made with {', '.join(changed)}; use the same settings, or give another --out")
    records = []
    lines = read_bytes(out / TRIALS).decode().split("\n")[:-1] if (out / TRIALS).exists() else []
    for number, line in enumerate(lines, 1):
        try:
            records.append(read_line(line, checked=before["format"] >= FORMAT))
        except Damaged as error:
            raise Damaged(f"line {number} of {out / TRIALS} is damaged: {error}; give another --out") from None
    return records


# -- trials -------------------------------------------------------------------------------------------


def run_trials(search: Search, records: list[Record], trials: int, out: Path, show: bool) -> bool:
    """Add records until there are `trials` or no settings are left to try; returns False if interrupted."""
    watch = Watch(show, trials, search.metric)
    log.disabled = True  # messages about the current setting were logged before
    try:
        with Interrupt() as interrupt, watch.bar:
            write_best(search, records, out)  # a crash may have come between a trial and this file
            while (number := len(records)) < trials and (proposed := search.propose(records)):
                tell = partial(watch.moved, number)
                record = {"number": number, **attempt(search, *proposed, tell, interrupt)}
                if interrupt() and record["state"] == PRUNED:
                    return False
                # the same values as when it is read from the file
                records.append(read_line(json_line(record).rstrip("\n"), checked=True))
                write_text(out / TRIALS, "".join(map(json_line, records)))
                write_best(search, records, out)
                watch.ended(record, ranked(records, search.metric)[0])
    finally:
        log.disabled = False
    return True


def write_best(search: Search, records: Sequence[Record], out: Path) -> None:
    """Write best.toml, the settings of the best trial that finished, if there is one."""
    best = next((r for r in ranked(records, search.metric) if r["state"] == DONE), None)
    if best is not None:
        values = search.spec.model_dump(exclude={"eval_every"})  # set by the search, not by the user
        write_text(out / BEST, to_toml({**values, "set": {**values["set"], **best["fields"]}}))


def attempt(
    search: Search, fields: dict[str, Any], lags: Lags, tell: Callable[[float], None], stop: Callable[[], bool]
) -> Record:
    """Train with these fields. Before each round, `tell` receives the completed share and `stop` is called."""
    rounds, scores, reported = search.spec.rounds, [], {}
    record: Record = {"fields": fields, "state": DONE, "reason": "", "score": None, "scores": scores, "rounds": 0}
    started = time.perf_counter()

    def over(loop: Loop) -> bool:
        record["rounds"] = step = len(scores) * rounds + loop.round
        value = search.judge(loop)
        if value is not None:
            reported[step] = value
        tell(step / rounds / len(search.federations))
        return stop() or (value is not None and lags(step, value))

    try:
        for seed in search.federations:
            with search.begin(seed, fields) as loop:
                loop.run(rounds, stop=partial(over, loop))
                value = search.judge(loop)
            if loop.round < rounds:
                record["state"] = PRUNED
                break
            if value is None:
                raise ValueError(f"the validation {search.metric.name} is undefined or no longer finite")
            scores.append(value)
            record["rounds"] = len(scores) * rounds
        else:
            record["score"] = fmean(scores)
    except (Diverged, ValueError) as error:
        record |= {"state": FAILED, "reason": str(error)}
    return {**record, "seconds": time.perf_counter() - started, "reported": reported}
