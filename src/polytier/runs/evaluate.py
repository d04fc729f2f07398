"""Evaluation of models on each device's own samples.

personal | the device's own model
team     | the model of its innermost team; the models of outer tiers have the names of the tiers: team1, ...
global   | the server's model
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier.data import IGNORED
from polytier.data.federation import SPLITS
from polytier.method.algorithm import Algorithm
from polytier.method.call import Call, Clock
from polytier.method.context import Context
from polytier.method.local_problem import LocalProblem
from polytier.method.travel import OF_STATISTICS, STATISTICS
from polytier.models.metrics import LOSS, TOKENS, Metric
from polytier.stack.rows import Answered, Rows, as_dict, cat_rows

PUBLISHED = "published."
TOKEN_LOSS = "token_loss"  # sums of the loss per token
CHUNK = 128  # samples per device in one forward pass
HELD = 16 << 20  # limit in bytes of outputs kept for metrics per device; a single device, or sample, may exceed it
LARGE = 1 << 16  # bytes of one sample's outputs from which the limit holds for every forward pass


@dataclass(frozen=True)
class Evaluation:
    """The measured values of all devices, in the order of the topology.

    counts[split]               | [n] number of samples
    sums[model, split][metric]  | [n] sums over each device's samples: the loss and the metrics per sample
    values[model, split][metric]| [n] the metrics per device; NaN if a metric is undefined
    metrics                     | the metrics, the leading one first
    """

    counts: dict[str, np.ndarray]
    sums: dict[tuple[str, str], dict[str, np.ndarray]]
    values: dict[tuple[str, str], dict[str, np.ndarray]] = field(default_factory=dict)
    metrics: tuple[Metric, ...] = ()

    @property
    def models(self) -> list[str]:
        """The kinds of models that were evaluated."""
        return list(dict.fromkeys(model for model, _ in self.sums))

    @property
    def measured(self) -> tuple[Metric, ...]:
        """The loss, which is always measured, and the metrics."""
        return (LOSS, *(metric for metric in self.metrics if metric.name != LOSS.name))

    def by_device(self, model: str, split: str, metric: str) -> np.ndarray:
        """[n] one value per device; NaN for a device without samples in this split, or if the value is undefined."""
        count = self.counts[split]
        if (model, split) not in self.sums:
            return np.full(len(count), np.nan)
        known = next(each for each in self.measured if each.name == metric)
        if known.per == "device":
            return np.where(count > 0, self.values[model, split][metric], np.nan)
        sums = self.sums[model, split][summed(known)]
        number = self.number(known, model, split)
        return known.finished(np.where(number > 0, sums / np.maximum(number, 1), np.nan))

    def number(self, metric: Metric, model: str, split: str) -> np.ndarray:
        """[n] what the sums of a metric are divided by: the number of samples, or of tokens."""
        return self.sums[model, split][TOKENS] if metric.per == "token" else self.counts[split]

    def summary(self, model: str, split: str = "test") -> dict[str, float | None]:
        """The mean loss of a model, and for each metric its mean over devices and more (`figures_of`)."""
        if (model, split) not in self.sums:
            return {}
        result: dict[str, float | None] = {}
        for metric in self.measured:
            values = self.by_device(model, split, metric.name)
            there = np.sort(values[~np.isnan(values)])
            undefined = int((self.counts[split] > 0).sum()) - len(there) if metric.per == "device" else 0
            if metric is LOSS and len(there):
                result[metric.name] = float(there.mean())
            elif len(there):
                result |= figures_of(metric, there)
                if metric.per != "device":  # the value over all samples cannot be computed from one value per device
                    number = self.number(metric, model, split).sum()
                    total = self.sums[model, split][summed(metric)].sum() / number
                    result[f"{metric.name}_pooled"] = float(metric.finished(total))
                    if metric.per == "token":
                        result[f"{metric.name}_tokens"] = int(number)
            if undefined:
                result.setdefault(metric.name, None)
                result[f"{metric.name}_undefined"] = undefined
        return result

    def figures(self) -> dict[str, Any]:
        """The values by model and split, for the record of a round."""
        result: dict[str, Any] = {}
        for model, split in self.sums:
            result.setdefault(model, {})[split] = self.summary(model, split)
        return result


def figures_of(metric: Metric, values: np.ndarray) -> dict[str, float | None]:
    """Mean, standard deviation and mean of the worst tenth over devices; `values` are in ascending order."""
    tenth = max(1, round(0.1 * len(values)))
    worst = values[:tenth] if metric.better == "higher" else values[::-1][:tenth]
    return {
        metric.name: float(values.mean()),
        f"{metric.name}_std": float(values.std()),
        f"{metric.name}_worst_decile": float(worst.mean()),
    }


def summed(metric: Metric) -> str:
    """The name under which the sums of a metric are stored; a metric of the loss uses those of the loss."""
    return {"loss": LOSS.name, "token": TOKEN_LOSS}.get(metric.per, metric.name)


def metrics_of(context: Context) -> tuple[Metric, ...]:
    """The metrics of a run, the leading one first. Several models: those that all have, or the loss if none."""
    first, *others = [part.metrics for part in context.parts]
    shared = tuple(m for m in first if all(m.name in {metric.name for metric in each} for each in others))
    return shared or (LOSS,)


def personal(algorithm: Algorithm, rows: dict[str, Tensor], local: LocalProblem) -> dict[str, Tensor]:
    """Program of devices: their personal models as the field ""; nothing if the method has none."""
    published = {k.removeprefix(PUBLISHED): v for k, v in rows.items() if k.startswith(PUBLISHED)}
    travel = local._context.travel
    if len(travel.statistics):  # of the server for models that are made of its model, else the device's own
        sent = rows.get(f"{OF_STATISTICS}global") if published else None
        local.statistics = travel.arrive_statistics(None if sent is None else sent[:, ~travel.home_statistics], local)
    own = algorithm.personal(published.get("", published or None), local)
    if own is None:
        return {}
    return {"": own} if local.statistics is None else {"": own, OF_STATISTICS: local.statistics}


def models_of(algorithm: Algorithm, rows: dict[str, Tensor], local: LocalProblem) -> dict[str, Tensor]:
    """[n, d] by kind: the models that devices are evaluated with; `rows` are those of `shared_rows`."""
    shared = {k: v for k, v in rows.items() if not k.startswith((PUBLISHED, OF_STATISTICS))}
    own = personal(algorithm, rows, local)
    return {**({"personal": own[""]} if own else {}), **shared}


def statistics_of(rows: dict[str, Tensor], local: LocalProblem) -> dict[str, Tensor]:
    """[n, s] by kind of model, the running statistics it is evaluated with; called after `models_of`."""
    if local.statistics is None:
        return {}
    travel, found = local._context.travel, {"personal": local.statistics}
    for key, sent in rows.items():
        if key.startswith(OF_STATISTICS):
            shared = sent[:, ~travel.home_statistics]
            found[key.removeprefix(OF_STATISTICS)] = travel.arrive_statistics(shared, local)
    return found


def measure(algorithm: Algorithm, rows: dict[str, Tensor], local: LocalProblem) -> Rows:
    """Program of devices: [n, columns] the values named by `columns`, for every model and split."""
    models = models_of(algorithm, rows, local)
    statistics = statistics_of(rows, local)
    measured = {}
    for split in present_splits(local._context):
        for name, answer in measure_split(algorithm, models, split, local, statistics).items():
            measured[f"{name}.{split}"] = answer
    return measured


def columns(metrics: Sequence[Metric]) -> list[tuple[str, str]]:
    """The columns (kind, metric) of a device's answer: sums over samples, then value and validity per metric."""
    summed_up = [("sum", LOSS.name), *(("sum", metric.name) for metric in metrics if metric.per == "sample")]
    if any(metric.per == "token" for metric in metrics):
        summed_up += [("sum", TOKEN_LOSS), ("sum", TOKENS)]
    return summed_up + [(kind, m.name) for m in metrics if m.per == "device" for kind in ("value", "defined")]


def present_splits(context: Context) -> list[str]:
    """The splits in which some device has samples."""
    spans = {s: context.batches.federation.span(s) for s in SPLITS}
    return [s for s, (start, end) in spans.items() if bool((end > start).any())]


def measure_split(
    algorithm: Algorithm,
    models: dict[str, Tensor],
    split: str,
    local: LocalProblem,
    statistics: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """[n, columns] for each model.

    Sums are computed for all devices at once, and a chunk of samples is read once for all models. Metrics per device
    need the outputs of all samples, so these are kept for one model at a time and at most `devices_at_once` devices.
    """
    if not any(metric.per == "device" for metric in local._context.metrics) and not large_output(local, split):
        return measure_rows(algorithm, models, split, local, statistics)
    answers: dict[str, list[Tensor]] = {name: [] for name in models}
    for name, model in models.items():
        size = devices_at_once(algorithm, model, split, local)
        for start in range(0, len(local.ids), size):
            part = slice(start, start + size)
            some = LocalProblem(local._context, local.tier, local.ids[part], local.clock, quiet=True)
            own = {k: v[part] for k, v in statistics.items() if k == name}
            answers[name].append(measure_rows(algorithm, {name: model[part]}, split, some, own)[name])
    return {name: torch.cat(rows) for name, rows in answers.items()}


def devices_at_once(algorithm: Algorithm, model: Tensor, split: str, local: LocalProblem) -> int:
    """Number of devices, at least one, whose outputs fit into HELD bytes; measured with one sample."""
    start, end = (b[local.rows] for b in local._context.batches.federation.span(split))
    largest = int((end - start).argmax())
    samples = int((end - start)[largest])
    if not samples:
        return len(local.ids)
    alone = LocalProblem(local._context, local.tier, local.ids[largest : largest + 1], local.clock, quiet=True)
    (group,) = local._context.batches.whole(alone.rows, split, 1).groups
    outputs = algorithm.predict(model[largest : largest + 1], alone, group.x)
    held = samples if any(metric.per == "device" for metric in local._context.metrics) else chunk_of(local, split)
    return max(1, HELD // (held * outputs.numel() * outputs.element_size()))


def large_output(local: LocalProblem, split: str) -> int:
    """The bytes of a sample's outputs if they are many, as those of a language model with many tokens; else 0."""
    objective = local._context.objective
    if objective.output_bytes is None:
        groups = local._context.batches.whole(local.rows, split, 1).groups
        if not groups:
            return 0  # these devices have no samples
        with torch.no_grad():
            outputs = objective.apply(objective.initial.to(objective.device), groups[0].x[0])
        objective.output_bytes = outputs.numel() * outputs.element_size()
    return objective.output_bytes if objective.output_bytes > LARGE else 0


def chunk_of(local: LocalProblem, split: str) -> int:
    """Samples per device in one forward pass."""
    large = large_output(local, split)
    return max(1, min(CHUNK, HELD // large)) if large else CHUNK


def measure_rows(
    algorithm: Algorithm,
    models: dict[str, Tensor],
    split: str,
    local: LocalProblem,
    statistics: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """[n, columns] for each model, all devices at once; `statistics` [n, s] are its running statistics."""
    context = local._context
    sampled = [metric for metric in context.metrics if metric.per == "sample"]
    of_device = [metric for metric in context.metrics if metric.per == "device"]
    by_token = any(metric.per == "token" for metric in context.metrics)
    total = {name: torch.zeros(len(local.ids), 1 + len(sampled) + 2 * by_token, dtype=torch.float64) for name in models}
    held = {name: [Held() for _ in local.ids] if of_device else [] for name in models}
    start, end = (b[local.rows] for b in context.batches.federation.span(split))
    chunk = chunk_of(local, split)
    for part in range(-(-int((end - start).max()) // chunk)):
        for group in context.batches.whole(local.rows, split, chunk, part).groups:
            some = LocalProblem(context, local.tier, local.ids[group.rows], local.clock, quiet=True)
            targets, inside = group.y.flatten(0, 1), group.weight > 0
            for name, model in models.items():
                some.statistics = statistics[name][group.rows] if name in statistics else None
                outputs = algorithm.predict(model[group.rows], some, group.x)
                flat = outputs.flatten(0, 1)
                values = [metric(flat, targets).reshape(inside.shape) for metric in sampled]
                losses = context.objective.sample_losses(outputs, group.y)
                if by_token:
                    number = (group.y != IGNORED).flatten(2).sum(2) if group.y.ndim > 2 else torch.ones_like(group.y)
                    values += [losses.double() * number, number]
                sums = [torch.where(inside, v, 0).double().sum(1) for v in (losses, *values)]
                total[name][group.rows] += torch.stack(sums, 1).cpu()
                for k, place in enumerate(torch.arange(len(local.ids))[group.rows].tolist() if of_device else ()):
                    held[name][place].add(outputs[k][inside[k]], group.y[k][inside[k]])
    if of_device:
        values_of = {name: [each.values(of_device) for each in devices] for name, devices in held.items()}
        return {name: torch.cat([sums, torch.stack(values_of[name])], 1) for name, sums in total.items()}
    return total


class Held:
    """All outputs and targets of one device, for metrics per device."""

    def __init__(self) -> None:
        self.outputs: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the outputs and targets of a chunk of samples."""
        self.outputs.append(outputs.cpu().numpy())
        self.targets.append(targets.cpu().numpy())

    def values(self, metrics: Sequence[Metric]) -> Tensor:
        """[2 * metrics] value and validity (1) of each metric; 0 and 0 if the metric is undefined."""
        if not self.outputs:
            return torch.zeros(2 * len(metrics), dtype=torch.float64)
        outputs, targets = np.concatenate(self.outputs), np.concatenate(self.targets)
        found: list[float] = []
        for value in (metric(outputs, targets) for metric in metrics):
            found += [0.0, 0.0] if value is None or not math.isfinite(value) else [float(value), 1.0]
        return torch.tensor(found, dtype=torch.float64)


def ask_devices(context: Context, state: Rows, round_: int, program: Any) -> Iterator[Any]:
    """Run a program of this module on all devices, in the order of the topology, without changes or traffic."""
    rows, sender = shared_rows(context, state)
    everyone = torch.arange(context.topology.size(context.topology.leaf))
    leaf = context.topology.leaf
    call = Call(leaf, everyone, program, Clock(round_), rows, sender, quiet=True, scope=context.name)
    return context.engine.deliver(call)


def evaluate(context: Context, state: Rows, round_: int) -> Evaluation:
    """Evaluate all kinds of models on all devices."""
    sums: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    values: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    present, measured = answers_of(context, ask_devices(context, state, round_, measure))
    for key, answer in measured.items():
        model, split = key.rsplit(".", 1)
        found = {column: answer[:, k].numpy() for k, column in enumerate(columns(context.metrics))}
        sums[model, split] = {name: column for (kind, name), column in found.items() if kind == "sum"}
        values[model, split] = {
            name: np.where(found["defined", name] > 0, column, np.nan)
            for (kind, name), column in found.items()
            if kind == "value"
        }
    bounds = context.batches.federation.bounds[context.topology.order]
    counts = {s: ((bounds[:, k + 1] - bounds[:, k]) * present).numpy() for k, s in enumerate(SPLITS)}
    return Evaluation(counts, sums, values, context.metrics)


def answers_of(context: Context, pieces: Iterator[Rows | Answered]) -> tuple[Tensor, dict[str, Tensor]]:
    """[n] which devices answered, and the fields of their answers [n, ...] with zeros for those that did not."""
    n, whose, found = context.topology.size(context.topology.leaf), [], []
    for piece in pieces:
        if isinstance(piece, Answered):
            whose.append(piece.which)
        found.append(piece.rows if isinstance(piece, Answered) else piece)
    if not whose:
        return torch.full((n,), bool(found)), as_dict(cat_rows(found)) if found else {}
    which, rows = torch.cat(whose), as_dict(cat_rows(found))
    present = torch.zeros(n, dtype=torch.bool)
    present[which] = True
    return present, {k: v.new_zeros((n, *v.shape[1:])).index_copy(0, which, v) for k, v in rows.items()}


def personal_models(context: Context, state: Rows, round_: int) -> dict[str, Tensor]:
    """[n, d] the personal models in the federation's order as "", their running statistics as `OF_STATISTICS`.

    Empty if the method has no personal models.
    """
    own: dict[str, Tensor] = {}
    start, order = 0, context.topology.order
    for answer in ask_devices(context, state, round_, personal):
        if "" not in answer:
            return {}
        for field_, rows in answer.items():
            if field_ not in own:
                own[field_] = rows.new_empty(len(order), rows.shape[1])
            own[field_][order[start : start + len(rows)]] = rows
        start += len(answer[""])
    return own


def statistics_by_kind(context: Context, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """[nodes, s] the running statistics of personal, team and global models; `own` is from `personal_models`."""
    if not len(context.travel.statistics):
        return {}
    inner = context.topology.leaf - 1
    found = {"team": kept_statistics(context, inner)} if inner > 0 else {}
    found["global"] = kept_statistics(context, 0)
    return {**found, "personal": own[OF_STATISTICS]} if OF_STATISTICS in own else found


def shared_rows(context: Context, state: Rows) -> tuple[dict[str, Tensor], Tensor]:
    """The rows that devices receive for evaluation, one per innermost parent, and which device gets which."""
    topology, algorithm = context.topology, context.algorithm
    inner = topology.leaf - 1
    num = topology.size(inner)
    rows: dict[str, Tensor] = {}
    for tier in range(inner, 0, -1):
        if "model" in context.memory.names(tier):
            everyone = torch.arange(topology.size(tier))
            default = context.objective.initial.expand(len(everyone), -1)
            model = context.memory.read(tier, "model", everyone, default)
            kind, place = "team" if tier == inner else topology.tier_names[tier], topology.ancestor(tier, inner)
            rows[kind] = model[place]
            if len(context.travel.statistics):
                rows[f"{OF_STATISTICS}{kind}"] = kept_statistics(context, tier)[place]
    if len(context.travel.statistics):
        rows[f"{OF_STATISTICS}global"] = kept_statistics(context, 0).expand(num, -1)
    everywhere = algorithm.global_model(state)
    if everywhere is not None:
        rows["global"] = everywhere.expand(num, -1)
    rows |= {k: v.expand(num, *v.shape[1:]) for k, v in published_rows(algorithm, state).items()}
    return rows, topology.parents[topology.leaf]


def kept_statistics(context: Context, tier: int) -> Tensor:
    """[nodes, s] the running statistics of the nodes of a tier."""
    everyone = torch.arange(context.topology.size(tier))
    return context.memory.read(tier, STATISTICS, everyone, context.travel.statistics.expand(len(everyone), -1))


def published_rows(algorithm: Algorithm, state: Rows) -> dict[str, Tensor]:
    """[1, ...] what the method gives every device for its personal model, as fields of a message."""
    published = algorithm.publish(state)
    return {} if published is None else {f"{PUBLISHED}{k}": v for k, v in as_dict(published).items()}
