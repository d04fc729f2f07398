"""Which model, which devices, which split: every device is judged on its own samples.

personal | the device's own model
team     | the model of its (innermost) team; outer tiers of teams go by their own names: team1, ...
global   | the server's model
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier.data.federation import SPLITS
from polytier.method.algorithm import Algorithm
from polytier.method.call import Call, Clock
from polytier.method.context import Context
from polytier.method.node import LocalProblem
from polytier.stack.rows import Rows, as_dict, cat_rows

PUBLISHED = "published."
CHUNK = 128  # samples of a device that are put through the model at once


@dataclass(frozen=True)
class Evaluation:
    """Sums over each device's samples, devices in the topology's order.

    counts[split] [n]; sums[model, split][metric] [n], with "loss" among the metrics
    """

    counts: dict[str, np.ndarray]
    sums: dict[tuple[str, str], dict[str, np.ndarray]]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(model for model, _ in self.sums))

    def by_device(self, model: str, split: str, metric: str) -> np.ndarray:
        """[n] the mean over each device's samples; NaN for a device that has none in this split."""
        count = self.counts[split]
        if (model, split) not in self.sums:
            return np.full(len(count), np.nan)
        return np.where(count > 0, self.sums[model, split][metric] / np.maximum(count, 1), np.nan)

    def summary(self, model: str, split: str = "test") -> dict[str, float | None]:
        """Mean over devices, deviation, mean of the worst tenth of the devices, mean over all samples."""
        if (model, split) not in self.sums:
            return {}
        result: dict[str, float | None] = {}
        count = self.counts[split]
        for metric, sums in self.sums[model, split].items():
            values = self.by_device(model, split, metric)
            values = np.sort(values[~np.isnan(values)])
            if not len(values):
                continue
            result[metric] = float(values.mean())
            if metric != "loss":
                tenth = max(1, round(0.1 * len(values)))
                result[f"{metric}_std"] = float(values.std())
                result[f"{metric}_worst_decile"] = float(values[:tenth].mean())
                result[f"{metric}_pooled"] = float(sums.sum() / count.sum())
        return result

    def figures(self) -> dict[str, Any]:
        """By model and split, for a round's record."""
        result: dict[str, Any] = {}
        for model, split in self.sums:
            result.setdefault(model, {})[split] = self.summary(model, split)
        return result


def personal(algorithm: Algorithm, rows: dict[str, Tensor], local: LocalProblem) -> dict[str, Tensor]:
    """Runs at the devices: their own models as the field "", or nothing if the method has none."""
    published = {k.removeprefix(PUBLISHED): v for k, v in rows.items() if k.startswith(PUBLISHED)}
    own = algorithm.personal(published.get("", published or None), local)
    return {} if own is None else {"": own}


def measure(algorithm: Algorithm, rows: dict[str, Tensor], local: LocalProblem) -> Rows:
    """Runs at the devices: the sums of loss and metrics of every model on every split, [n, metrics]."""
    models = {k: v for k, v in rows.items() if not k.startswith(PUBLISHED)}
    models = {**{f"personal{k}": v for k, v in personal(algorithm, rows, local).items()}, **models}
    measured = {}
    for split in present_splits(local._context):
        for name, sums in measure_split(algorithm, models, split, local).items():
            measured[f"{name}.{split}"] = sums
    return measured


def present_splits(context: Context) -> list[str]:
    spans = {s: context.batches.federation.span(s) for s in SPLITS}
    return [s for s, (start, end) in spans.items() if bool((end > start).any())]


def measure_split(
    algorithm: Algorithm, models: dict[str, Tensor], split: str, local: LocalProblem
) -> dict[str, Tensor]:
    """[n, metrics] for each model; a chunk of samples is read once for all of them."""
    context = local._context
    total = {name: torch.zeros(len(local.ids), 1 + len(context.metrics), dtype=torch.float64) for name in models}
    start, end = (b[local.rows] for b in context.batches.federation.span(split))
    for part in range(-(-int((end - start).max()) // CHUNK)):
        for group in context.batches.whole(local.rows, split, CHUNK, part).groups:
            some = LocalProblem(context, local.tier, local.ids[group.rows], local.clock, quiet=True)
            targets, inside = group.y.flatten(0, 1), group.weight > 0
            for name, model in models.items():
                outputs = algorithm.predict(model[group.rows], some, group.x)
                flat = outputs.flatten(0, 1)
                values = [f(flat, targets).reshape(inside.shape) for f in context.metrics.values()]
                losses = context.objective.sample_losses(outputs, group.y)
                sums = [torch.where(inside, v, 0).double().sum(1) for v in (losses, *values)]
                total[name][group.rows] += torch.stack(sums, 1).cpu()
    return total


def ask_devices(context: Context, state: Rows, round_: int, program: Any) -> Iterator[dict[str, Tensor]]:
    """Run a program of this page at all devices, in the topology's order; nothing is written, no traffic counted."""
    rows, sender = shared_rows(context, state)
    everyone = torch.arange(context.topology.size(context.topology.leaf))
    leaf = context.topology.leaf
    call = Call(leaf, everyone, program, Clock(round_), rows, sender, quiet=True, scope=context.name)
    return context.engine.deliver(call)


def evaluate(context: Context, state: Rows, round_: int) -> Evaluation:
    """Judge all models of a run at all devices."""
    names = ["loss", *context.metrics]
    sums: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    measured = as_dict(cat_rows(list(ask_devices(context, state, round_, measure))))
    for key, value in measured.items():
        model, split = key.rsplit(".", 1)
        sums[model, split] = {name: value[:, k].numpy() for k, name in enumerate(names)}
    bounds = context.batches.federation.bounds[context.topology.order]
    counts = {s: (bounds[:, k + 1] - bounds[:, k]).numpy() for k, s in enumerate(SPLITS)}
    return Evaluation(counts, sums)


def personal_models(context: Context, state: Rows, round_: int) -> Tensor | None:
    """[n, d] every device's own model, in the federation's order; None if the method has none."""
    own, start = None, 0
    for answer in ask_devices(context, state, round_, personal):
        if "" not in answer:
            return None
        rows, order = answer[""], context.topology.order
        own = rows.new_empty(len(order), rows.shape[1]) if own is None else own
        own[order[start : start + len(rows)]] = rows
        start += len(rows)
    return own


def shared_rows(context: Context, state: Rows) -> tuple[dict[str, Tensor], Tensor]:
    """What devices are given to be judged: a row for each innermost parent, and who gets which."""
    topology, algorithm = context.topology, context.algorithm
    inner = topology.leaf - 1
    num = topology.size(inner)
    rows: dict[str, Tensor] = {}
    for tier in range(inner, 0, -1):
        if "model" in context.memory.names(tier):
            everyone = torch.arange(topology.size(tier))
            default = context.objective.initial.expand(len(everyone), -1)
            model = context.memory.read(tier, "model", everyone, default)
            rows["team" if tier == inner else topology.tier_names[tier]] = model[topology.ancestor(tier, inner)]
    everywhere = algorithm.global_model(state)
    if everywhere is not None:
        rows["global"] = everywhere.expand(num, -1)
    rows |= {k: v.expand(num, *v.shape[1:]) for k, v in published_rows(algorithm, state).items()}
    return rows, topology.parents[topology.leaf]


def published_rows(algorithm: Algorithm, state: Rows) -> dict[str, Tensor]:
    """[1, ...] what the method gives every device for its personal model, as fields of a message."""
    published = algorithm.publish(state)
    return {} if published is None else {f"{PUBLISHED}{k}": v for k, v in as_dict(published).items()}
