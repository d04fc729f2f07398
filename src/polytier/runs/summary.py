"""The content of summary.json, devices.csv and traffic.csv."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polytier.data.federation import SPLITS
from polytier.messages.codec import CODECS, Sparse, make_codec
from polytier.messages.ledger import add_up
from polytier.models.metrics import MetricInfo
from polytier.runs.csv_cells import as_cell
from polytier.runs.evaluate import metrics_of
from polytier.runs.methods import method_name
from polytier.runs.read_files import KINDS
from polytier.runs.run import Run

PART = 1 << 14  # devices converted to Python objects at once, to limit memory


def summary(run: Run) -> dict[str, Any]:
    """The content of summary.json."""
    context, topology = run.context, run.context.topology
    models = {name: of_model(part) for name, part in run.models.items()}
    return {
        "algorithm": method_name(run.algorithm),
        "seed": context.seed,
        "rounds": run.rounds,
        "device_steps": context.all_steps,
        "seconds": run.seconds,
        "device_steps_per_second": context.all_steps / run.seconds if run.seconds else None,
        "metrics": [metric.as_dict() for metric in metrics_of(context)],
        **figures(run),
        "traffic": add_up(part.ledger.total() for part in run.parts),
        "devices": topology.size(topology.leaf),
        "teams": len(run.team_ids),
        "parameters": sum(part.context.objective.dimension for part in run.parts),
        "never_took_part": never_took_part(run),
        **({"models": models} if models else {}),
        **({"collaboration": learned_groups(run)} if run.collaboration else {}),
        **({"sparsity": sparsity(run)} if isinstance(CODECS.get(run.spec.codec or ""), Sparse) else {}),
    }


def learned_groups(run: Run) -> dict[str, Any]:
    """The groups that follow from the last weights between clients, and advice if they divide nothing."""
    weights, true = run.collaboration[max(run.collaboration)], run.context.true_groups(1)
    found = {"groups": int(weights.groups().max()) + 1} if true is None else weights.match(true)
    advice = run.algorithm.advice_on_groups(int(found["groups"]), len(weights))
    return {**found, "clients": len(weights), **({"advice": advice} if advice else {})}


def sparsity(run: Run) -> dict[str, Any]:
    """By kind of model: the share of parameters that are not zero, and the mean bytes of a model, encoded and dense."""
    codec, found = make_codec(run.spec.codec or ""), {}
    for kind in KINDS:
        rows = [rows for part in run.parts if (rows := part.rows(kind)) is not None]
        if rows:
            number = sum(len(each) for each in rows)
            found[kind] = {
                "nonzeros": sum(int((each != 0).sum()) for each in rows) / sum(each.numel() for each in rows),
                "bytes": sum(int(codec.nbytes(each).sum()) for each in rows) / number,
                "float32": sum(int(CODECS["float32"].nbytes(each).sum()) for each in rows) / number,
            }
    return found


def figures(run: Run) -> dict[str, Any]:
    """Test values of every kind of model in the last evaluated and the best rounds; means over several models."""
    judged = [record for record in run.history if any(kind in record for kind in KINDS)]
    last = judged[-1] if judged else {}
    teams = [name for name in run.context.topology.tier_names[1:-1] if name in last]  # outer tiers of teams
    models, leading = [*KINDS, *teams], metrics_of(run.context)[0]
    return {
        **{model: last.get(model, {}).get("test") for model in models},
        "best": best_of(judged, models, "test", leading),
        "chosen": best_of(judged, models, "validation", leading),
    }


def of_model(run: Run) -> dict[str, Any]:
    """The entry of summary.json for one of several models."""
    last: dict[str, Any] = next((r for r in reversed(run.history) if any(kind in r for kind in KINDS)), {})
    return {
        "algorithm": method_name(run.algorithm),
        "device_steps": run.context.device_steps,
        "metrics": [metric.as_dict() for metric in run.context.metrics],
        **figures(run),
        "train": {kind: last[kind]["train"] for kind in KINDS if "train" in last.get(kind, {})},
        "traffic": run.ledger.total(),
        "parameters": run.context.objective.dimension,
    }


def never_took_part(run: Run) -> int:
    """Number of devices that never received a model."""
    reached = np.zeros(len(run.device_ids), dtype=bool)
    for part in run.parts:
        topology = part.context.topology
        reached[topology.order[part.ledger.ever[topology.leaf]].numpy()] = True
    return int((~reached).sum())


def traffic(run: Run) -> Iterator[Sequence[Any]]:
    """The lines of traffic.csv; bytes are summed over several models."""
    yield "round", "link", "direction", "bytes"
    for number, amounts in enumerate(zip(*(p.ledger.rounds for p in run.parts), strict=True), 1):
        for link, ways in add_up(amounts).items():
            yield from ((number, as_cell(link), way, amount) for way, amount in ways.items())


def best_of(judged: list[dict[str, Any]], models: list[str], split: str, metric: MetricInfo) -> dict[str, Any] | None:
    """Each model's test figures at the round whose value of the metric on `split` was best.

    Args:
        judged: The records of evaluated rounds.
        models: The kinds of models.
        split: "test" for the best round, "validation" for the chosen one.
        metric: The leading metric of the run.

    Returns:
        By model its figures and the round; None if no round has a value on that split.
    """
    result: dict[str, Any] = {"round": None, **dict.fromkeys(models)}
    for model in models:
        figures = [(record, record.get(model, {})) for record in judged]
        seen = [(r, own) for r, own in figures if own.get(split, {}).get(metric.name) is not None and "test" in own]
        if not seen:
            continue
        found, own = max(seen, key=lambda pair: metric.sign * pair[1][split][metric.name])
        result[model] = {**own["test"], "round": found["round"]}
        result["round"] = found["round"] if result["round"] is None else result["round"]
    return None if result["round"] is None else result


def device_table(run: Run) -> Iterator[Sequence[Any]]:
    """The lines of devices.csv, in the order of the data; columns of several models begin with the model's name."""
    columns = table_columns(run)
    yield [as_cell(name) for name in columns]
    for start in range(0, len(run.device_ids), PART):
        yield from zip(*(shown(values[start : start + PART]) for values in columns.values()), strict=True)


def table_columns(run: Run) -> dict[str, np.ndarray]:
    """The columns of devices.csv by name."""
    team = run.context.population.team
    columns = {"id": run.device_ids, "team": np.full(len(run.device_ids), "") if team is None else team}
    for part in run.parts:
        prefix = f"{part.context.name}_" if part.context.name else ""
        columns |= {f"{prefix}{name}": values for name, values in device_columns(part)}
    return columns


def shown(values: np.ndarray) -> list[Any]:
    """The values as cells, with NaN replaced by an empty text."""
    return ["" if v != v else as_cell(v) for v in values.tolist()]


def device_columns(run: Run) -> Iterator[tuple[str, np.ndarray]]:
    """The columns of devices.csv for one model."""
    federation, order, evaluation = (
        run.context.batches.federation,
        run.context.topology.order.numpy(),
        run.evaluation,
    )
    assert evaluation is not None
    split = run.context.population.counts.numpy()
    yield "samples", split.sum(1)
    yield from zip(SPLITS, split.T, strict=True)
    yield from ((f"label_{k}", counts) for k, counts in enumerate(federation.label_counts().T))
    for model in evaluation.models:
        for metric in run.context.metrics:
            values = np.empty(len(order))
            values[order] = evaluation.by_device(model, "test", metric.name)
            yield f"{model}_{metric.name}", values
