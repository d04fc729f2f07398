"""What the runs of a plan cost: device steps, evaluations and hours on one core, estimated without their data.

A step and an evaluation are timed on a few devices with samples of the same form, because the data may be large; short
rounds are timed as a whole, with the method and the number of devices of the run. Times are processor times, so that
other work on the machine matters little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polytier._terminal import say, silence, wide_console
from polytier._text import counted, duration
from polytier.algorithms.fedavg import FedAvg
from polytier.data.build import build_federation, load_source
from polytier.data.federation import Federation
from polytier.data.sources import Source, default_dir
from polytier.papers.plan import PlannedRun
from polytier.report.comparison import DONE
from polytier.report.tables import line, table
from polytier.runs.assemble import assemble
from polytier.runs.estimate import steps_a_round
from polytier.runs.loop import Loop
from polytier.runs.methods import method_of, wraps_others
from polytier.runs.spec import RunSpec, read_teams
from polytier.studies.run_queue import Task

TIMED_DEVICES, FEW_DEVICES = 40, 2  # devices whose steps are timed; few if the model has more than LARGE parameters
LARGE = 100_000
TIMED_BATCH = 128  # the size of a batch that grows
TIMED_STEPS = 4  # steps that are timed together
SHORT = 0.3  # seconds; a round that seems shorter is timed as a whole, because more than its steps counts
MOST_BYTES = 1 << 28  # of the samples and models of a round that is timed as a whole

REPEATS = 3  # measurements, of which the least counts: other work on the machine only adds time


@dataclass(frozen=True)
class Sample:
    """What the samples of a data set look like, and how many there are."""

    shape: tuple[int, ...]
    dtype: np.dtype
    classes: int | None
    tokens: bool = False  # whether each number of a sample has a class
    number: int = 0


@dataclass(frozen=True)
class Cost:
    """Device steps of a run, and seconds on one core for training and evaluation; None: not known."""

    steps: float | None = None
    training: float | None = None
    evaluation: float | None = None

    @property
    def seconds(self) -> float | None:
        """Both together."""
        return None if self.training is None or self.evaluation is None else self.training + self.evaluation


# -- the data -----------------------------------------------------------------------------------------


def data_of(spec: RunSpec) -> list[str]:
    """The data sets of a run, each once."""
    tables = spec.models.values() if isinstance(spec.models, dict) else ()
    return list(dict.fromkeys([table.get("data", spec.data) for table in tables] or [spec.data]))


class Samples:
    """Looks at data sets once each: what their samples look like, or why they cannot be read."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Sample | str] = {}

    def of(self, name: str, spec: RunSpec) -> Sample | str:
        """What the samples of a data set look like for a run (some data are generated for its devices)."""
        devices = spec.devices or 40
        if (name, devices) not in self._known:
            self._known[name, devices] = look_at(name, spec.data_dir, devices)
        return self._known[name, devices]

    def missing(self, spec: RunSpec) -> str:
        """Why the data of a run are not available; empty if they are."""
        return next((found for name in data_of(spec) if isinstance(found := self.of(name, spec), str)), "")


def look_at(name: str, data_dir: str | None, devices: int) -> Sample | str:
    """The form of a data set's samples, or why it cannot be read."""
    try:
        source = load_source(name, default_dir() if data_dir is None else Path(data_dir), devices, 0)
    except ValueError as error:
        return str(error)
    return Sample(source.x.shape[1:], source.x.dtype, source.num_classes, source.is_tokens, len(source.x))


# -- the plan -----------------------------------------------------------------------------------------


def print_plan(runs: Mapping[str, PlannedRun], tasks: Sequence[Task], samples: Samples) -> None:
    """Print every run with its settings, data, device steps and estimated time on this machine."""
    timed: dict[Any, tuple[float, float]] = {}
    rows, total, unknown = [], 0.0, []
    for task in (t for t in tasks if t.spec.seed == 0):
        with silence():  # the runs themselves log these messages
            found = cost(task, timed, samples)
        seeds = sum(t.method == task.method and t.state != DONE for t in tasks)
        total += seeds * (found.seconds or 0)
        if found.seconds is None and not task.reason:
            unknown.append(task.method)
        rows.append(tuple(cells(runs[task.method], task, found, sum(t.method == task.method for t in tasks))))
    columns = ("run", "seeds", "data", "model", "settings", "steps", "training per seed", "evaluation")
    wide_console().print(table(columns, rows))
    for reason in dict.fromkeys(task.reason for task in tasks if task.reason):
        say(reason)
    left = sum(task.state != DONE and not task.reason for task in tasks)
    line(wide_console(), f"{counted(len(tasks), 'run')}; {left} to do, about {total / 3600:.1f} hours on one core")
    if unknown:
        line(wide_console(), f"without an estimate, and not in these hours: {', '.join(unknown)}")


def cells(run: PlannedRun, task: Task, found: Cost, seeds: int) -> Iterator[str]:
    """The row of a run."""
    settings = {k: v for k, v in run.settings.items() if k not in ("data", "model", "set")}
    told = " ".join(f"{k}={v}" for k, v in (settings | dict(run.settings.get("set", {}))).items())
    yield from (task.method, str(seeds), task.spec.data, task.spec.model, told)
    yield "?" if found.steps is None else f"{found.steps:,.0f}"
    for seconds in (found.training, found.evaluation):
        state = DONE if task.state == DONE else "no data" if task.reason else "?"
        yield state if seconds is None or state != "?" else duration(seconds)


def cost(task: Task, timed: dict[Any, tuple[float, float]], samples: Samples) -> Cost:
    """What a run costs; `timed` keeps the seconds of a step and of an evaluated sample that were measured."""
    spec = task.spec
    if wraps_others(spec):
        return Cost() if task.reason else cost_of_several(spec)
    steps, models = counts_on_stand_in(spec)
    if task.reason:
        return Cost(spec.rounds * steps)
    sample, key = samples.of(spec.data, spec), (spec.data, spec.model, spec.batch_size, spec.dtype)
    if key not in timed:
        timed[key] = seconds_on_stand_in(spec, sample)
    step, judged = timed[key]
    each = judged * models * samples_of(spec, sample)
    round_ = steps * step
    if round_ < SHORT and (whole := sounds_alike(spec)) not in timed:
        timed[whole] = (seconds_of_round(spec, sample) or round_, 0.0)
    round_ = timed[whole][0] if round_ < SHORT else round_
    return Cost(spec.rounds * steps, spec.rounds * round_, evaluations(spec) * each)


def sounds_alike(spec: RunSpec) -> tuple[Any, ...]:
    """What the time of a round depends on: all but step sizes, pulls and the number of rounds."""
    fields = {k: v for k, v in spec.set.items() if not isinstance(v, float)}
    tree = (spec.devices, spec.teams, spec.team_participation, spec.device_participation, spec.codec)
    return (spec.algorithm, str(sorted(fields.items())), spec.data, spec.model, spec.batch_size, spec.dtype, *tree)


def samples_of(spec: RunSpec, sample: Sample | str) -> int:
    """Number of samples that a run evaluates."""
    assert not isinstance(sample, str)
    if spec.per_class is None or sample.classes is None:
        return sample.number
    return sample.classes * sum(map(int, spec.per_class.split(":")[:2]))


def evaluations(spec: RunSpec) -> int:
    """How often a run is evaluated; the last round always is."""
    return -(-spec.rounds // spec.eval_every)


def cost_of_several(spec: RunSpec) -> Cost:
    """The cost of a run of several models, whose data are generated or small."""
    with Loop.of(spec) as loop:
        steps, round_, each = steps_a_round(loop), seconds_of(loop.step), seconds_of(loop.evaluate)
    return Cost(None if steps is None else spec.rounds * steps, spec.rounds * round_, evaluations(spec) * each)


def counts_on_stand_in(spec: RunSpec) -> tuple[float, int]:
    """Device steps per round, and how many kinds of models are evaluated, with two samples per device."""
    data = stand_in(spec.devices or 40, 3, Sample((2,), np.dtype(np.float32), 2), read_teams(spec.teams))
    small = spec.replace(model="dnn:2", batching="eager", batch_size=spec.batch_size)
    with Loop(assemble(small, algorithm=method_of(spec), federation=data)) as loop:
        steps = steps_a_round(loop)
        if steps is None:  # the method cannot run with one device: it runs with all of them
            loop.step()
            steps = loop.context.device_steps
        loop.evaluate()
        return steps, len(loop.evaluations[""].models)


def seconds_on_stand_in(spec: RunSpec, sample: Sample | str, devices: int = TIMED_DEVICES) -> tuple[float, float]:
    """Seconds of one step of one device, and of one evaluated sample, on samples of the same form."""
    assert not isinstance(sample, str)
    if sample.classes is None:  # problems that are generated, and small
        with Loop.of(spec) as loop:
            steps = steps_a_round(loop)
            return seconds_of(loop.step) / max(1, steps or 1), seconds_of(loop.evaluate) / max(1, sample.number)
    devices = min(spec.devices or 40, devices)
    number, batches = samples_each(spec, sample, devices), 1
    plain = spec.replace(team_participation=1.0, device_participation=1.0, codec=None, upload=None)
    if is_pretrained(spec):  # single samples are timed
        number, batches, plain = 3, batch_of(spec), plain.replace(batch_size=1)
    data = stand_in(devices, number, sample, 0)
    with Loop(assemble(plain, algorithm=FedAvg(device_steps=TIMED_STEPS), federation=data)) as loop:
        if loop.context.objective.dimension > LARGE and devices > FEW_DEVICES:
            return seconds_on_stand_in(spec, sample, FEW_DEVICES)
        step = batches * seconds_of(loop.step) / (len(data) * TIMED_STEPS)
        return step, seconds_of(loop.evaluate) / len(data.x)


def seconds_of_round(spec: RunSpec, sample: Sample | str) -> float | None:
    """Seconds of a round with all devices, on samples of the same form; None if they would need much memory."""
    assert not isinstance(sample, str)
    devices = spec.devices or 40
    needed = devices * 3 * batch_of(spec) * np.prod(sample.shape) * 4
    if is_pretrained(spec) or sample.classes is None or needed > MOST_BYTES:
        return None
    data = stand_in(devices, samples_each(spec, sample, devices), sample, read_teams(spec.teams))
    with Loop(assemble(spec, algorithm=method_of(spec), federation=data)) as loop:
        models = 8 * 4 * loop.context.objective.dimension * devices  # rows, gradients and what a round makes of them
        return seconds_of(loop.step) if models <= MOST_BYTES else None


def is_pretrained(spec: RunSpec) -> bool:
    """Whether the model is pretrained: the gradient on a mini-batch may take more memory than there is."""
    return spec.model.startswith("hf:")


def samples_each(spec: RunSpec, sample: Sample, devices: int) -> int:
    """Samples per device of a stand-in: as many as the run has, at least three mini-batches, MOST_BYTES in all."""
    most = MOST_BYTES // (devices * int(np.prod(sample.shape)) * sample.dtype.itemsize)
    return max(3 * batch_of(spec), min(sample.number // (spec.devices or 40), most))


def batch_of(spec: RunSpec) -> int:
    """The size of a mini-batch."""
    return spec.batch_size if isinstance(spec.batch_size, int) else TIMED_BATCH


def seconds_of(action: Callable[[], Any]) -> float:
    """Processor seconds of an action, the least of a few; the first one, which traces the model, does not count."""
    action()
    found = []
    for _ in range(REPEATS):
        started = time.process_time()
        action()
        found.append(time.process_time() - started)
    return min(found)


def stand_in(devices: int, each: int, sample: Sample, teams: int | tuple[int, ...] | None) -> Federation:
    """Devices with so many samples each, a third for training, in two true groups.

    The samples are ones, because the system keeps zeros in a single page of memory, which is read faster.
    """
    device = np.repeat(np.arange(devices), each)
    x, classes = np.ones((len(device), *sample.shape), sample.dtype), sample.classes or 2
    y = np.zeros_like(x) if sample.tokens else np.arange(len(device)) % classes
    source = Source(x, y, classes, device, cluster=device % 2)
    return build_federation(source, teams=teams, split=(1, 1, 1))
