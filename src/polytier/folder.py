"""The run folder: what a run writes, and how it is read back.

config.toml      resolved configuration and versions; `polytier run` repeats the run from it
metrics.jsonl    a line a round
summary.json     the result in numbers; written last, so that it is there only if all the rest is
devices.csv      a line a device: samples, labels, accuracy of each model
topology.json    the tree
traffic.csv      bytes by round, link and direction
models/          {personal,team,global}.safetensors
checkpoints/     what is needed to go on
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from polytier import checkpoint
from polytier.algorithm import Algorithm, World
from polytier.algorithms import ALGORITHMS
from polytier.config import PYTHON, make_algorithm, plain, to_toml
from polytier.data.batches import Batches
from polytier.data.federation import SPLITS, Federation
from polytier.ledger import Ledger
from polytier.memory import Memory
from polytier.models import make_model
from polytier.objective import Objective
from polytier.participation import Participation
from polytier.report.files import read_config, read_history, read_json
from polytier.rows import Rows
from polytier.run import Run
from polytier.topology import Topology
from polytier.training import default_loss

KINDS = ("personal", "team", "global")


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


def write_csv(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    with atomic(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: null instead."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
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
    fields = plain({k: v for k, v in asdict(algorithm).items() if v is not None})
    return {
        "algorithm": algorithm_name(algorithm),
        "data": PYTHON,
        **settings,
        "rounds": rounds,
        "set": fields,
    }


def tree(topology: Topology) -> dict[str, Any]:
    """By tier: ids, and the id of each one's parent; `row` is a device's place in the data."""
    tiers: list[dict[str, Any]] = []
    for tier, name in enumerate(topology.tier_names):
        tiers.append({"tier": name, "ids": topology.names[tier].tolist()})
        if tier:
            tiers[-1]["parents"] = topology.names[tier - 1][topology.parents[tier].numpy()].tolist()
    tiers[-1]["row"] = topology.order.tolist()
    return {"tiers": tiers}


def write_start(folder: Path, config: dict[str, Any], topology: Topology) -> None:
    write_text(folder / "config.toml", to_toml(config))
    write_text(folder / "topology.json", json.dumps(tree(topology)) + "\n")


def write_end(folder: Path, run: Run) -> None:
    """The results; summary.json comes last."""
    write_models(folder / "models", run)
    write_csv(folder / "devices.csv", list(device_table(run)))
    write_csv(folder / "traffic.csv", [("round", "link", "direction", "bytes"), *run.ledger.entries()])
    write_text(folder / "summary.json", json.dumps(finite(summary(run)), indent=2) + "\n")


def write_results(folder: Path, run: Run) -> None:
    """The whole folder of a run that was made in Python."""
    if run.evaluation is None:
        raise ValueError("this run was read from a folder and holds no evaluation; copy that folder instead")
    claim(folder)
    write_start(folder, described(run.algorithm, run.settings, run.rounds), run.world.topology)
    write_text(folder / "metrics.jsonl", "".join(map(json_line, run.history)))
    facts = {"round": run.rounds, "seconds": run.seconds, "device_steps": run.world.device_steps}
    tensors = checkpoint.pack("state", run.state) | run.ledger.state()
    checkpoint.save(folder / "checkpoints", run.rounds, tensors, facts)
    write_end(folder, run)


# -- results ------------------------------------------------------------------------------------------


def summary(run: Run) -> dict[str, Any]:
    """What summary.json holds."""
    world, topology = run.world, run.world.topology
    judged = [record for record in run.history if any(kind in record for kind in KINDS)]
    last = judged[-1] if judged else {}
    teams = [name for name in topology.tier_names[1:-1] if name in last]  # outer tiers of teams
    models = [*KINDS, *teams]
    return {
        "algorithm": algorithm_name(run.algorithm),
        "seed": world.seed,
        "rounds": run.rounds,
        "device_steps": world.device_steps,
        "seconds": run.seconds,
        "device_steps_per_second": world.device_steps / run.seconds if run.seconds else None,
        **{model: last.get(model, {}).get("test") for model in models},
        "best": best_of(judged, models, "test"),
        "chosen": best_of(judged, models, "validation"),
        "traffic": run.ledger.total(),
        "devices": topology.size(topology.leaf),
        "teams": len(run.team_ids),
        "parameters": world.objective.dimension,
        "never_took_part": int((~run.ledger.ever[topology.leaf]).sum()),
    }


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
    """The lines of devices.csv, in the order of the data."""
    federation, order, evaluation = (
        run.world.batches.federation,
        run.world.topology.order.numpy(),
        run.evaluation,
    )
    assert evaluation is not None
    split = np.diff(federation.bounds.numpy(), axis=1)
    labels = federation.label_counts()
    figures = {}
    for model in evaluation.models:
        for metric in run.world.metrics:
            values = np.empty(len(order))
            values[order] = evaluation.by_device(model, "test", metric)
            figures[f"{model}_{metric}"] = values
    counts = [f"label_{k}" for k in range(labels.shape[1])]
    yield ["id", "team", "samples", *SPLITS, *counts, *figures]
    for row, name in enumerate(run.device_ids.tolist()):
        team = "" if federation.team is None else federation.team[row]
        scores = ["" if np.isnan(v[row]) else float(v[row]) for v in figures.values()]
        yield [name, team, split[row].sum(), *split[row], *labels[row], *scores]


# -- models -------------------------------------------------------------------------------------------


def write_models(folder: Path, run: Run) -> None:
    """{personal,team,global}.safetensors: a tensor a parameter, the first axis is the nodes."""
    folder.mkdir(exist_ok=True)
    everywhere = None if run.global_ is None else run.global_.unsqueeze(0)
    ids = {"personal": run.device_ids, "team": run.team_ids, "global": np.array(["server"])}
    about = json.dumps(about_inputs(run.world.batches.federation))
    for kind, rows in zip(KINDS, (run.personal, run.team, everywhere), strict=True):
        if rows is not None:
            parts = {k: v.cpu().contiguous() for k, v in run.world.objective.parameters(rows).items()}
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


def dtype_name(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def read_models(folder: Path) -> tuple[dict[str, tuple[dict[str, Tensor], np.ndarray]], dict[str, Any]]:
    """By kind the parameters and ids; and what the models know of their inputs."""
    found, about = {}, None
    for path in (folder / f"{kind}.safetensors" for kind in KINDS):
        if path.exists():
            try:
                with safe_open(path, "pt") as file:
                    meta = file.metadata()
                    parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                    found[path.stem] = parts, np.array(json.loads(meta["ids"]))
                    about = json.loads(meta["inputs"])
            except (SafetensorError, OSError, KeyError, TypeError) as error:
                raise ValueError(f"{path} cannot be read: {error}; resume or repeat the run") from None
    if about is None:
        raise ValueError(f"{folder} holds no models; if the run was cut short, `polytier resume {folder.parent}`")
    return found, about


# -- reading ------------------------------------------------------------------------------------------


def load_run(folder: Path, model: nn.Module | None = None) -> Run:
    """A run as it was saved, without its data."""
    config = read_config(folder)
    parts, about = read_models(folder / "models")
    if model is None:
        if config["model"] == PYTHON:
            raise ValueError(f"the model of {folder} was given in Python; give it again: Run.load(DIR, model=...)")
        model = make_model(config["model"], tuple(about["shape"]), about["classes"], config["seed"])
    dtype: torch.dtype = getattr(torch, config["dtype"])
    topology = read_tree(folder)
    federation = without_samples(about, topology)
    loss = default_loss(model, about["classes"] is not None)
    objective = Objective(model, loss, l2=config["l2"], dtype=dtype, batching=config["batching"])
    world = World(
        make_algorithm(config["algorithm"], config["set"]), topology, objective,
        Batches(federation, config["seed"], dtype, keyed=bool(objective.dropouts)), Memory(topology),
        (Participation(),) * topology.num_tiers, config["seed"], config["batch_size"], config["absent"],
    )  # fmt: skip
    rows = {kind: flat_rows(objective, *found) for kind, found in parts.items()}
    nobody: tuple[None, np.ndarray] = (None, np.array([]))
    team, team_ids = rows.get("team", nobody)
    everywhere = rows.get("global", nobody)[0]
    state, ledger, facts = read_state(folder, topology, everywhere)
    world.device_steps = facts["device_steps"]
    return Run(
        world.algorithm, model, rows.get("personal", nobody)[0], team,
        None if everywhere is None else everywhere[0], federation.ids, team_ids,
        state, read_history(folder), world, ledger, None, facts["seconds"], config,
    )  # fmt: skip


def flat_rows(objective: Objective, parts: dict[str, Tensor], ids: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """[nodes, d] in the order of the module's own parameters."""
    shapes = {name: tuple(part.shape[1:]) for name, part in parts.items()}
    if shapes != dict(zip(objective.names, objective.shapes, strict=True)):
        raise ValueError("the model has other parameters than the ones that were saved; give the model of that run")
    return torch.cat([parts[name].reshape(len(ids), -1) for name in objective.names], 1), ids


def read_tree(folder: Path) -> Topology:
    tiers = read_json(folder / "topology.json")["tiers"]
    names = tuple(np.array(tier["ids"]) for tier in tiers)
    parents = [torch.zeros(1, dtype=torch.int64)]
    for above, tier in pairwise(tiers):
        place = {name: k for k, name in enumerate(above["ids"])}
        parents.append(torch.tensor([place[name] for name in tier["parents"]]))
    return Topology(names, tuple(parents), torch.tensor(tiers[-1]["row"]))


def without_samples(about: dict[str, Any], topology: Topology) -> Federation:
    """A federation of the run's devices that holds no data."""
    ids = np.empty_like(topology.names[-1])
    ids[topology.order.numpy()] = topology.names[-1]
    x = torch.zeros(0, *about["shape"], dtype=getattr(torch, about["dtype"]))
    bounds = torch.zeros(len(ids), 4, dtype=torch.int64)
    return Federation(
        x, torch.zeros(0, dtype=torch.int64), bounds, ids, num_classes=about["classes"],
        scale=read_tensor(about["scale"]), shift=read_tensor(about["shift"]),
    )  # fmt: skip


def read_tensor(value: list | None) -> Tensor | None:
    return None if value is None else torch.tensor(value[1], dtype=getattr(torch, value[0]))


def read_state(folder: Path, topology: Topology, everywhere: Tensor | None) -> tuple[Rows, Ledger, dict[str, Any]]:
    """What the server kept, the bytes and a few facts; checkpoints may have been removed to save space."""
    ledger = Ledger(topology)
    found = latest(folder)
    if found is None:
        figures = read_json(folder / "summary.json")
        return {} if everywhere is None else everywhere, ledger, figures
    _, tensors, facts = found
    ledger.load(tensors, [record["bytes"] for record in read_history(folder)])
    return checkpoint.unpack("state", tensors), ledger, facts


def latest(folder: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint of a run folder."""
    try:
        return checkpoint.latest(folder / "checkpoints")
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"the checkpoint in {folder} cannot be read: {error}; repeat the run") from None
