"""Writes the run folder; load.py and read.py read it.

config.toml      complete settings and versions; `polytier run` repeats the run from it
metrics.jsonl    a line per round
summary.json     the results; written last, so it exists only if all other files are complete
devices.csv      a line per device: samples, labels, the metrics of each model
topology.json    the tree
traffic.csv      bytes by round, link and direction
collaboration.npz  the learned collaboration over time, if the method learns one
state.json       the state of the run (running, done, stopped, diverged), the reason, and the version of this format
models/          {personal,team,global}.safetensors; one folder per model if there are several
checkpoints/     what a run needs to continue
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from polytier.data.pack import dtype_name
from polytier.data.population import Population
from polytier.method.context import Context
from polytier.models.trainable import digest
from polytier.runs import checkpoint, snapshot
from polytier.runs.csv_cells import csv_lines
from polytier.runs.evaluate import metrics_of
from polytier.runs.read import DONE, FORMAT, KINDS, STATE, STATES
from polytier.runs.run import Run
from polytier.runs.spec import RunSpec, to_toml
from polytier.runs.summary import PART, device_table, summary, traffic
from polytier.tree import collaboration
from polytier.tree.topology import Topology

# -- writing ------------------------------------------------------------------------------------------


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it is renamed to `path` once the file is complete."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        checkpoint.flush(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file atomically."""
    with atomic(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        file.writelines(csv_lines(rows))


def finite(value: Any) -> Any:
    """The same value with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_line(record: dict[str, Any]) -> str:
    """A record as one line of JSON."""
    return json.dumps(finite(record)) + "\n"


def check_free(folder: Path) -> None:
    """Raise an error if the folder is not empty: a run never overwrites files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        advice = f"give another one, or continue with `polytier resume {folder}`"
        raise ValueError(f"the run folder {folder} exists and is not empty; {advice}")


def claim(folder: Path) -> None:
    """Create the run folder."""
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the run folder {folder} cannot be created: {error.strerror}; give another one") from None


def next_free(parent: Path, stem: str) -> Path:
    """parent/stem-N with the first number that is not in use."""
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


def tree(topology: Topology) -> Iterator[str]:
    """The tree as pieces of JSON: by tier, the ids and the id of each parent; `row` is a device's index in the data."""
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


def write_state(folder: Path, state: str, context: Context, reason: str = "", round_: int = 0) -> None:
    """Write state.json: one of `STATES`, the reason, and the metrics of the run."""
    assert state in STATES
    metrics = [metric.as_dict() for metric in metrics_of(context)]
    about = {
        "format": FORMAT,
        "state": state,
        "reason": reason,
        "round": round_,
        "pid": os.getpid(),
        "metrics": metrics,
    }
    write_text(folder / STATE, json.dumps(about, indent=2) + "\n")


def write_start(folder: Path, spec: RunSpec, topology: Topology) -> None:
    """Write the files that are known before the first round: config.toml and topology.json."""
    write_text(folder / "config.toml", to_toml(spec.values()))
    with atomic(folder / "topology.json") as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(tree(topology))


def write_end(folder: Path, run: Run) -> None:
    """Write the results, summary.json last."""
    for name, part in run.models.items() or [("", run)]:
        write_models(folder / "models" / name, part)
    write_csv(folder / "devices.csv", device_table(run))
    write_csv(folder / "traffic.csv", traffic(run))
    if run.collaboration:
        write_collaboration(folder, run)
    write_text(folder / "summary.json", json.dumps(finite(summary(run)), indent=2) + "\n")


def write_results(folder: Path, run: Run) -> None:
    """Write the complete folder of a run that was made in Python."""
    if any(part.evaluation is None for part in run.parts):
        raise ValueError("this run was loaded from a folder and has no evaluation; copy that folder instead")
    claim(folder)
    write_start(folder, run.spec.replace(rounds=run.rounds), run.context.topology)
    write_text(folder / "metrics.jsonl", "".join(map(json_line, run.history)))
    checkpoint.save(folder / "checkpoints", run.rounds, *snapshot.of_run(run))
    write_end(folder, run)
    write_state(folder, DONE, run.context, round_=run.rounds)


def write_collaboration(folder: Path, run: Run) -> None:
    """Write collaboration.npz."""
    with atomic(folder / collaboration.FILE) as partial:
        collaboration.save(partial, run.collaboration, run.context.true_groups(1))


# -- models -------------------------------------------------------------------------------------------


def write_models(folder: Path, run: Run) -> None:
    """Write {personal,team,global}.safetensors: one tensor per trained parameter, its first axis is the nodes.

    Frozen parameters are not in the files. Their digest is, so that `Run.load` can compare them with the given model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    everywhere = None if run.global_ is None else run.global_.unsqueeze(0)
    ids = {"personal": run.device_ids, "team": run.team_ids, "global": np.array(["server"])}
    about = json.dumps(about_inputs(run.context.population))
    frozen = run.context.objective.frozen
    meta = {"inputs": about, **({"frozen": digest(frozen)} if frozen else {})}
    for kind, rows in zip(KINDS, (run.personal, run.team, everywhere), strict=True):
        if rows is not None:
            parts = {k: v.cpu().contiguous() for k, v in run.context.objective.parameters(rows).items()}
            write_tensors(folder / f"{kind}.safetensors", parts, ids=json.dumps(ids[kind].tolist()), **meta)


def write_tensors(path: Path, tensors: dict[str, Tensor], **meta: str) -> None:
    """Write a safetensors file; equal content gives equal bytes."""
    with atomic(path) as partial:
        save_file(tensors, partial, meta)
        with partial.open("r+b") as file:  # safetensors writes the metadata in random order, so they are sorted here
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            assert len(text) <= length
            file.seek(8)
            file.write(text.ljust(length))
        partial.chmod(0o644)  # save_file makes it readable by its owner only


def about_inputs(population: Population) -> dict[str, Any]:
    """Shape, dtype and scaling of the inputs, so that a run folder can be used without the data."""
    scaling = {
        name: None if value is None else [dtype_name(value.dtype), value.tolist()]
        for name, value in (("scale", population.scale), ("shift", population.shift))
    }
    shape, dtype = list(population.shape), dtype_name(population.dtype)
    return {"shape": shape, "dtype": dtype, "classes": population.num_classes, **scaling}
