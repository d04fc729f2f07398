"""The run folder: what a run writes; loading.py reads it back.

config.toml      resolved configuration and versions; `polytier run` repeats the run from it
metrics.jsonl    a line a round
summary.json     the result in numbers; written last, so that it is there only if all the rest is
devices.csv      a line a device: samples, labels, accuracy of each model
topology.json    the tree
traffic.csv      bytes by round, link and direction
collaboration.npz  who listened to whom, over time, if the method learned that; .png the same as a picture
models/          {personal,team,global}.safetensors; of several models, in a folder each
checkpoints/     what is needed to go on
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from polytier.algorithms import ALGORITHMS
from polytier.data.federation import SPLITS, Federation
from polytier.data.pack import dtype_name
from polytier.messages.ledger import add_up
from polytier.method.algorithm import Algorithm
from polytier.runs import checkpoint
from polytier.runs.config import PYTHON, fields_of, to_toml
from polytier.runs.run import Run
from polytier.stack.rows import pack
from polytier.tree import collaboration
from polytier.tree.topology import Topology

KINDS = ("personal", "team", "global")
PART = 1 << 14  # nodes that are Python objects at a time


# -- writing ------------------------------------------------------------------------------------------


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A place to write to that takes the file's name once all is written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        checkpoint.flush(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    with atomic(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: null instead."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_line(record: dict[str, Any]) -> str:
    return json.dumps(finite(record)) + "\n"


def check_free(folder: Path) -> None:
    """A run never writes into a folder that holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        advice = f"name another one, or go on with `polytier resume {folder}`"
        raise ValueError(f"the run folder {folder} exists and is not empty; {advice}")


def claim(folder: Path) -> None:
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the run folder {folder} cannot be made: {error.strerror}; name another one") from None


def next_free(parent: Path, stem: str) -> Path:
    """parent/stem-1, or the first number that is not taken."""
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


def algorithm_name(algorithm: Algorithm) -> str:
    kind = type(algorithm)
    own = f"{kind.__module__}:{kind.__qualname__}"
    return next((name for name, known in ALGORITHMS.items() if known is kind), own)


def described(algorithm: Algorithm, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The configuration of a run that was made in Python: its data have no name."""
    result = {"algorithm": algorithm_name(algorithm), "data": PYTHON, **settings, "rounds": rounds}
    for name, method in algorithm.parts().items():
        own = {"algorithm": algorithm_name(method), **settings["models"][name], "set": fields_of(method)}
        result["models"] = {**result["models"], name: own}
    return {**result, "set": fields_of(algorithm)}


def tree(topology: Topology) -> Iterator[str]:
    """JSON, in pieces: by tier, ids and the id of each one's parent; `row` is a device's place in the data."""
    for tier, name in enumerate(topology.tier_names):
        columns = {"ids": topology.names[tier]}
        if tier:
            columns["parents"] = topology.names[tier - 1][topology.parents[tier].numpy()]
        if tier == topology.leaf:
            columns["row"] = topology.order.numpy()
        yield (", " if tier else '{"tiers": [') + f'{{"tier": {json.dumps(name)}'
        for key, values in columns.items():
            yield f', "{key}": ['
            for start in range(0, len(values), PART):
                yield (", " if start else "") + json.dumps(values[start : start + PART].tolist())[1:-1]
            yield "]"
        yield "}"
    yield "]}\n"


def write_start(folder: Path, config: dict[str, Any], topology: Topology) -> None:
    write_text(folder / "config.toml", to_toml(config))
    with atomic(folder / "topology.json") as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(tree(topology))


def write_end(folder: Path, run: Run) -> None:
    """The results; summary.json comes last."""
    for name, part in run.models.items() or [("", run)]:
        write_models(folder / "models" / name, part)
    write_csv(folder / "devices.csv", device_table(run))
    write_csv(folder / "traffic.csv", traffic(run))
    if run.collaboration:
        write_collaboration(folder, run)
    write_text(folder / "summary.json", json.dumps(finite(summary(run)), indent=2) + "\n")


def write_results(folder: Path, run: Run) -> None:
    """The whole folder of a run that was made in Python."""
    if any(part.evaluation is None for part in run.parts):
        raise ValueError("this run was read from a folder and holds no evaluation; copy that folder instead")
    claim(folder)
    write_start(folder, described(run.algorithm, run.settings, run.rounds), run.context.topology)
    write_text(folder / "metrics.jsonl", "".join(map(json_line, run.history)))
    facts: dict[str, Any] = {"round": run.rounds, "seconds": run.seconds, "device_steps": run.context.all_steps}
    tensors = pack("state", run.state)
    for name, part in run.models.items() or [("", run)]:
        its = {"device_steps": part.context.device_steps, "traffic": part.ledger.rounds}
        facts |= {"models": {**facts.get("models", {}), name: its}} if name else its
        tensors |= {f"{name}>{k}" if name else k: v for k, v in part.ledger.state().items()}
    checkpoint.save(folder / "checkpoints", run.rounds, tensors, facts)
    write_end(folder, run)


# -- results ------------------------------------------------------------------------------------------


def summary(run: Run) -> dict[str, Any]:
    """What summary.json holds."""
    context, topology = run.context, run.context.topology
    models = {name: of_model(part) for name, part in run.models.items()}
    last = max(run.collaboration, default=None)
    true = None if last is None else context.true_groups(1)
    return {
        "algorithm": algorithm_name(run.algorithm),
        "seed": context.seed,
        "rounds": run.rounds,
        "device_steps": context.all_steps,
        "seconds": run.seconds,
        "device_steps_per_second": context.all_steps / run.seconds if run.seconds else None,
        **figures(run),
        "traffic": add_up(part.ledger.total() for part in run.parts),
        "devices": topology.size(topology.leaf),
        "teams": len(run.team_ids),
        "parameters": sum(part.context.objective.dimension for part in run.parts),
        "never_took_part": never_took_part(run),
        **({"models": models} if models else {}),
        **({} if last is None or true is None else {"collaboration": run.collaboration[last].match(true)}),
    }


def figures(run: Run) -> dict[str, Any]:
    """Test figures of every kind of model in the last evaluated round and in the best ones; means of several models."""
    judged = [record for record in run.history if any(kind in record for kind in KINDS)]
    last = judged[-1] if judged else {}
    teams = [name for name in run.context.topology.tier_names[1:-1] if name in last]  # outer tiers of teams
    models = [*KINDS, *teams]
    return {
        **{model: last.get(model, {}).get("test") for model in models},
        "best": best_of(judged, models, "test"),
        "chosen": best_of(judged, models, "validation"),
    }


def of_model(run: Run) -> dict[str, Any]:
    """What summary.json holds of one of several models."""
    last: dict[str, Any] = next((r for r in reversed(run.history) if any(kind in r for kind in KINDS)), {})
    return {
        "algorithm": algorithm_name(run.algorithm),
        "device_steps": run.context.device_steps,
        **figures(run),
        "train": {kind: last[kind]["train"] for kind in KINDS if "train" in last.get(kind, {})},
        "traffic": run.ledger.total(),
        "parameters": run.context.objective.dimension,
    }


def never_took_part(run: Run) -> int:
    """Devices that no model ever reached."""
    reached = np.zeros(len(run.device_ids), dtype=bool)
    for part in run.parts:
        topology = part.context.topology
        reached[topology.order[part.ledger.ever[topology.leaf]].numpy()] = True
    return int((~reached).sum())


def traffic(run: Run) -> Iterator[Sequence[Any]]:
    """The lines of traffic.csv, of several models together."""
    yield "round", "link", "direction", "bytes"
    for number, amounts in enumerate(zip(*(p.ledger.rounds for p in run.parts), strict=True), 1):
        for link, ways in add_up(amounts).items():
            yield from ((number, link, way, amount) for way, amount in ways.items())


def write_collaboration(folder: Path, run: Run) -> None:
    with atomic(folder / collaboration.FILE) as partial:
        collaboration.save(partial, run.collaboration, run.context.true_groups(1))
    if find_spec("matplotlib") is not None:
        from polytier.report.heatmap import draw

        with atomic(folder / "collaboration.png") as partial:
            draw(folder / collaboration.FILE, partial)


def best_of(judged: list[dict[str, Any]], models: list[str], split: str) -> dict[str, Any] | None:
    """Each model's test figures at the round that was best on `split`; None if there is no such split."""
    result: dict[str, Any] = {"round": None, **dict.fromkeys(models)}
    for model in models:
        seen = [r for r in judged if r.get(model, {}).get(split) and "test" in r[model]]
        if not seen:
            continue
        # by accuracy; by the lowest loss where targets are no classes
        found = max(seen, key=lambda r: r[model][split].get("accuracy", -r[model][split]["loss"]))
        result[model] = {**found[model]["test"], "round": found["round"]}
        result["round"] = found["round"] if result["round"] is None else result["round"]
    return None if result["round"] is None else result


def device_table(run: Run) -> Iterator[Sequence[Any]]:
    """The lines of devices.csv, in the order of the data; columns of several models begin with the model's name."""
    team = run.context.batches.federation.team
    columns = {"id": run.device_ids, "team": np.full(len(run.device_ids), "") if team is None else team}
    for part in run.parts:
        prefix = f"{part.context.name}_" if part.context.name else ""
        columns |= {f"{prefix}{name}": values for name, values in device_columns(part)}
    yield list(columns)
    for start in range(0, len(run.device_ids), PART):
        yield from zip(*(shown(values[start : start + PART]) for values in columns.values()), strict=True)


def shown(values: np.ndarray) -> list[Any]:
    """What is no number is left empty."""
    return ["" if v != v else v for v in values.tolist()]


def device_columns(run: Run) -> Iterator[tuple[str, np.ndarray]]:
    federation, order, evaluation = (
        run.context.batches.federation,
        run.context.topology.order.numpy(),
        run.evaluation,
    )
    assert evaluation is not None
    split = np.diff(federation.bounds.numpy(), axis=1)
    yield "samples", split.sum(1)
    yield from zip(SPLITS, split.T, strict=True)
    yield from ((f"label_{k}", counts) for k, counts in enumerate(federation.label_counts().T))
    for model in evaluation.models:
        for metric in run.context.metrics:
            values = np.empty(len(order))
            values[order] = evaluation.by_device(model, "test", metric)
            yield f"{model}_{metric}", values


# -- models -------------------------------------------------------------------------------------------


def write_models(folder: Path, run: Run) -> None:
    """{personal,team,global}.safetensors: a tensor a parameter, the first axis is the nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    everywhere = None if run.global_ is None else run.global_.unsqueeze(0)
    ids = {"personal": run.device_ids, "team": run.team_ids, "global": np.array(["server"])}
    about = json.dumps(about_inputs(run.context.batches.federation))
    for kind, rows in zip(KINDS, (run.personal, run.team, everywhere), strict=True):
        if rows is not None:
            parts = {k: v.cpu().contiguous() for k, v in run.context.objective.parameters(rows).items()}
            write_tensors(folder / f"{kind}.safetensors", parts, ids=json.dumps(ids[kind].tolist()), inputs=about)


def write_tensors(path: Path, tensors: dict[str, Tensor], **meta: str) -> None:
    """A safetensors file that is the same to the byte whenever its content is."""
    with atomic(path) as partial:
        save_file(tensors, partial, meta)
        with partial.open("r+b") as file:  # the order of the metadata is left to chance: sort it
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            assert len(text) <= length
            file.seek(8)
            file.write(text.ljust(length))
        partial.chmod(0o644)  # save_file keeps it to its owner


def about_inputs(federation: Federation) -> dict[str, Any]:
    """What a model must know of its inputs: a run folder can be used without the data."""
    scaling = {
        name: None if value is None else [dtype_name(value), value.tolist()]
        for name, value in (("scale", federation.scale), ("shift", federation.shift))
    }
    shape = list(federation.x.shape[1:])
    return {"shape": shape, "dtype": dtype_name(federation.x), "classes": federation.num_classes, **scaling}
