"""The search space of `polytier tune`, read from FIELD[=SPEC] texts, and the choice of the next trial.

The space of a field is {"low", "high", "log"}, a range of integers or floats, or {"choices"}.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from polytier._errors import unknown
from polytier.models.metrics import MetricInfo
from polytier.report.comparison import DONE, FAILED
from polytier.runs.spec import plain, read_value

if TYPE_CHECKING:
    from polytier.method.algorithm import Algorithm

Space = dict[str, dict[str, Any]]
Lags = Callable[[int, float], bool]  # (rounds, score) -> whether the trial should be stopped


def read_space(name: str, algorithm: Algorithm, texts: Sequence[str], following: Collection[str] = ()) -> Space:
    """The search space around the current setting; without texts, all step sizes and pulls that are one number.

    Without texts, fields in `following` are left out: their values follow from those of other fields.
    """
    known = {f.name: f for f in dataclasses.fields(algorithm) if f.metadata}
    if not texts:
        steps = {n: getattr(algorithm, n) for n in known if n.endswith(("_lr", "_pull")) and n not in following}
        texts = [n for n, value in steps.items() if isinstance(value, int | float) and value]
        if not texts:
            raise ValueError(f"{name} has no step size or pull to search over; give a field: --over FIELD=LOW:HIGH")
    space: Space = {}
    for text in texts:
        key, equals, given = (part.strip() for part in text.partition("="))
        if key not in known:
            raise unknown(f"field of {name}", key, list(known))
        if key in space or (equals and not given):
            raise ValueError(f"--over {text!r}: write each field once, as FIELD, FIELD=LOW:HIGH or FIELD=A,B,C")
        space[key] = read_spec(known[key], given, getattr(algorithm, key))
    return space


def read_spec(known: dataclasses.Field, given: str, present: Any) -> dict[str, Any]:
    """The space of one field; `given` is the text after "=", `present` the current value."""
    from polytier.method.parameters import check_value

    name, kind, meta = known.name, type(known.default), known.metadata
    words = meta["choices"] or ((False, True) if kind is bool else ())
    if words and not given:
        return {"choices": list(words)}
    if "," in given:
        values = [check_value(name, read_value(part.strip()), known.default, meta) for part in given.split(",")]
        if len(set(values)) < len(values):
            raise ValueError(f"--over {name}={given} has the same value twice; write each value once")
        return {"choices": values}
    if words or (given and given.count(":") != 1):
        how = f"{name}={','.join(map(str, words))}" if words else f"{name}=LOW:HIGH or {name}=A,B,C"
        raise ValueError(f"--over {name}={given}: write --over {how}")
    ends = [read_value(end.strip()) for end in given.split(":")] if given else around(name, present, meta)
    low, high = (check_value(name, end, known.default, meta) for end in ends)
    if isinstance(low, str) or isinstance(high, str) or not low < high:  # texts are schedules
        raise ValueError(f"the range from {low} to {high} is empty; write --over {name}=LOW:HIGH")
    return {"low": low, "high": high, "log": kind is float and low > 0 and round(high / low, 9) >= 10}


def around(name: str, present: Any, meta: Mapping[str, Any]) -> list[float]:
    """A range around the current value, within the limits of the field.

    It is 0.1 to 10 times a float, and 0.25 to 4 times an integer.
    """
    if not isinstance(present, int | float) or not present:
        raise ValueError(f"{name} is {plain(present)}, so it has no default range; write --over {name}=LOW:HIGH")
    ends = (present // 4, present * 4) if isinstance(present, int) else (present / 10, present * 10)
    least = -math.inf if meta["least"] is None else meta["least"]
    most = math.inf if meta["most"] is None else meta["most"]
    return sorted(min(max(end, least), most) for end in ends)


def propose(
    space: Space, records: Sequence[Mapping[str, Any]], metric: MetricInfo, seed: int, warmup: int
) -> tuple[dict[str, Any], Lags] | None:
    """The next fields to try, and a function that decides whether to stop early; None if all were tried.

    Trials are not stopped before `warmup` rounds. The study is rebuilt from the records, with one sampler per trial,
    so that the result depends only on the records and the settings.
    """
    import numpy as np
    from optuna import create_study
    from optuna.pruners import MedianPruner
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState, create_trial

    key = np.random.SeedSequence((seed, len(records))).generate_state(1)
    study = create_study(
        direction="maximize" if metric.better == "higher" else "minimize",
        sampler=TPESampler(seed=int(key[0])),
        pruner=MedianPruner(n_warmup_steps=warmup),
    )
    known = distributions(space)
    for record in records:
        # a failed trial counts as one stopped before its first score, which ranks last
        reported = {} if record["state"] == FAILED else {int(k): v for k, v in record["reported"].items()}
        state = TrialState.COMPLETE if record["state"] == DONE else TrialState.PRUNED
        shared = {"params": record["fields"], "distributions": known, "intermediate_values": reported}
        with suppress(ValueError):  # the first setting may be outside the range
            study.add_trial(create_trial(state=state, value=record["score"], **shared))
    trial, tried = study.ask(known), [record["fields"] for record in records]
    if trial.params in tried and not any(isinstance(spec.get("low"), float) for spec in space.values()):
        values = (spec.get("choices") or range(spec["low"], spec["high"] + 1) for spec in space.values())
        settings = (dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*values))
        other = next((setting for setting in settings if setting not in tried), None)
        if other is None:
            return None
        study.tell(trial, state=TrialState.FAIL)
        study.enqueue_trial(other)
        trial = study.ask(known)

    def lags(step: int, value: float) -> bool:
        trial.report(value, step)
        return trial.should_prune()

    return trial.params, lags


def distributions(space: Space) -> dict[str, Any]:
    """The search space as Optuna's distributions."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    return {
        name: CategoricalDistribution(spec["choices"])
        if "choices" in spec
        else IntDistribution(**spec)
        if isinstance(spec["low"], int)
        else FloatDistribution(**spec)
        for name, spec in space.items()
    }
