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
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from polytier.data.pack import dtype_name
from polytier.data.population import Population
from polytier.files import lock
from polytier.files.lock import FolderLock
from polytier.files.read import digest_of, refuse_links
from polytier.files.write import (
    PARTIAL,
    atomic,
    json_line,
    make_folder,
    next_folder,
    remove_partials,
    sync_folder,
    write_bytes,
    write_json,
    write_sealed,
    write_text,
)
from polytier.method.context import Context
from polytier.runs import checkpoint, snapshot
from polytier.runs.csv_cells import csv_lines
from polytier.runs.evaluate import metrics_of
from polytier.runs.read_files import CHECKPOINTS, DONE, FORMAT, KINDS, STATE, STATES, STORE, SUMMARY, check_exists
from polytier.runs.run import Run
from polytier.runs.spec import RunSpec, identity, to_toml
from polytier.runs.summary import PART, device_table, summary, traffic
from polytier.runs.write_tensors import pieces
from polytier.tree import collaboration
from polytier.tree.topology import Topology

# files and folders that a run writes before its first checkpoint is complete
STARTED = (STATE, "config.toml", "topology.json", "metrics.jsonl", CHECKPOINTS, STORE)

# -- whose folder it is -------------------------------------------------------------------------------


def check_free(folder: Path) -> None:
    """Raise an error if a run must not be written to this folder: a run never overwrites files.

    A folder is free if it does not exist, is empty, or belongs to a run that stopped before its first checkpoint.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"the run folder {folder} is a file; give another path")
    if not any(path.name != lock.FILE for path in folder.iterdir()) or nothing_saved(folder):
        return
    advice = f"give another one, or continue with `polytier resume {folder}`"
    raise ValueError(f"the run folder {folder} exists and is not empty; {advice}")


def nothing_saved(folder: Path) -> bool:
    """Whether this is the folder of a run that stopped before its first checkpoint was complete."""
    ours = (*STARTED, lock.FILE)
    others = any(path.name not in ours and path.suffix != PARTIAL for path in folder.iterdir())
    return not others and (folder / lock.FILE).exists() and not checkpoint.found(folder / CHECKPOINTS)


def claim(folder: Path) -> FolderLock:
    """Create the run folder, or take one in which nothing was saved, and lock it."""
    check_free(folder)
    made = make_folder(folder)
    refuse_links(folder)
    held = FolderLock(folder, made)
    try:
        check_free(folder)  # another process may have used the folder and ended since
        for name in STARTED:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        remove_partials(folder)
    except BaseException:
        held.release()
        raise
    return held


def claim_next(parent: Path, stem: str) -> FolderLock:
    """Create and lock the run folder parent/stem-N with the first number that is free."""
    made = make_folder(parent)
    folder = next_folder(parent, stem)
    return FolderLock(folder, [folder, *made])


def discard(held: FolderLock) -> None:
    """Remove the folder of a run that could not start, and the folders that were created for it."""
    shutil.rmtree(held.folder)
    held.release()
    for parent in held.made[1:]:
        if not any(parent.iterdir()):
            parent.rmdir()


def reopen(folder: Path) -> FolderLock:
    """Lock the folder of a run that is to be continued, and remove what a killed process left behind."""
    check_exists(folder)
    refuse_links(folder)
    held = FolderLock(folder)
    try:
        for place in (folder, folder / CHECKPOINTS, folder / "models"):
            remove_partials(place)
    except BaseException:
        held.release()
        raise
    return held


# -- files --------------------------------------------------------------------------------------------


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file atomically."""
    lines = csv_lines(rows)
    write_bytes(path, ("".join(part).encode() for part in iter(lambda: list(islice(lines, PART)), [])))


def tree(topology: Topology, run: str) -> Iterator[str]:
    """The tree as pieces of JSON for `write_sealed`, and the name of the run.

    By tier: the ids and the id of each parent; for devices also `row`, their index in the data.
    """
    for tier, name in enumerate(topology.tier_names):
        columns = {"ids": topology.names[tier]}
        if tier:
            columns["parents"] = topology.names[tier - 1][topology.parents[tier].numpy()]
        if tier == topology.leaf:
            columns["row"] = topology.order.numpy()
        start = f'{{"format": {FORMAT}, "run": "{run}", "tiers": ['
        yield (", " if tier else start) + f'{{"tier": {json.dumps(name)}'
        for key, values in columns.items():
            yield f', "{key}": ['
            for start in range(0, len(values), PART):
                yield (", " if start else "") + json.dumps(values[start : start + PART].tolist())[1:-1]
            yield "]"
        yield "}"
    yield "]"


def metric_lines(history: Sequence[dict[str, Any]], run: str) -> str:
    """The text of metrics.jsonl; `run` is the name of the run."""
    return "".join(json_line(record, run) for record in history)


def write_state(
    folder: Path, state: str, context: Context, spec: RunSpec, reason: str = "", round_: int = 0, lines: int = 0
) -> None:
    """Write state.json: one of `STATES`, the reason, what identifies the run, and known lines of metrics.jsonl."""
    assert state in STATES
    about = {
        "format": FORMAT,
        "state": state,
        "run": snapshot.run_name(context, spec),
        "reason": reason,
        "round": round_,
        "pid": os.getpid(),
        "metrics": [metric.as_dict() for metric in metrics_of(context)],
        "settings": identity(spec.values()),
        **({"lines": lines} if lines else {}),
    }
    write_json(folder / STATE, about)


def write_start(folder: Path, spec: RunSpec, context: Context) -> None:
    """Write the files that are known before the first round: config.toml and topology.json."""
    write_text(folder / "config.toml", to_toml(spec.values()))
    write_sealed(folder / "topology.json", tree(context.topology, snapshot.run_name(context, spec)))


def write_end(folder: Path, run: Run) -> None:
    """Write the results, and last summary.json, which contains their digests."""
    (folder / SUMMARY).unlink(missing_ok=True)  # that of fewer rounds: its digests are those of earlier files
    sync_folder(folder)
    for name, part in run.models.items() or [("", run)]:
        write_models(folder / "models" / name, part)
    write_csv(folder / "devices.csv", device_table(run))
    write_csv(folder / "traffic.csv", traffic(run))
    if run.collaboration:
        write_collaboration(folder, run)
    files = [*folder.glob("*.csv"), *folder.glob("*.npz"), *(folder / "models").rglob("*.safetensors")]
    digests = {path.relative_to(folder).as_posix(): digest_of(path) for path in sorted(files)}
    run_name = snapshot.run_name(run.context, run.spec)
    write_json(folder / SUMMARY, {**summary(run), "format": FORMAT, "run": run_name, "files": digests})


def write_results(folder: Path, run: Run) -> None:
    """Write the complete folder of a run that was made in Python."""
    if any(part.evaluation is None for part in run.parts):
        raise ValueError("this run was loaded from a folder and has no evaluation; copy that folder instead")
    with claim(folder):
        write_start(folder, run.spec.replace(rounds=run.rounds), run.context)
        write_text(folder / "metrics.jsonl", metric_lines(run.history, snapshot.run_name(run.context, run.spec)))
        checkpoint.save(folder / CHECKPOINTS, run.rounds, *snapshot.of_run(run))
        write_end(folder, run)
        write_state(folder, DONE, run.context, run.spec, round_=run.rounds)


def write_collaboration(folder: Path, run: Run) -> None:
    """Write collaboration.npz."""
    with atomic(folder / collaboration.FILE) as partial:
        collaboration.save(partial, run.collaboration, run.context.true_groups(1))


# -- models -------------------------------------------------------------------------------------------


def write_models(folder: Path, run: Run) -> None:
    """Write {personal,team,global}.safetensors: one tensor per trained parameter, its first axis is the nodes.

    Running statistics of BatchNorm layers that train are beside them.

    Frozen parameters are not in the files. Their digest is, so that `Run.load` can compare them with the given model.
    """
    make_folder(folder)
    ids = {"personal": run.device_ids, "team": run.team_ids, "global": np.array(["server"])}
    about = json.dumps(about_inputs(run.context.population))
    frozen = run.context.objective.frozen_digest
    meta = {"inputs": about, **({"frozen": frozen} if frozen else {})}
    for kind, rows in ((kind, run.rows(kind)) for kind in KINDS):
        if rows is not None:
            objective = run.context.objective
            parameters = {**objective.parameters(rows), **objective.statistics(run.statistics.get(kind))}
            content = pieces(parameters, ids=json.dumps(ids[kind].tolist()), **meta)
            write_bytes(folder / f"{kind}.safetensors", content)


def about_inputs(population: Population) -> dict[str, Any]:
    """The form of inputs (shape, dtype, scaling) and targets (classes, shape), to use a run folder without the data."""
    scaling = {
        name: None if value is None else [dtype_name(value.dtype), value.tolist()]
        for name, value in (("scale", population.scale), ("shift", population.shift))
    }
    shape, dtype = list(population.shape), dtype_name(population.dtype)
    targets = {"classes": population.num_classes, "targets": list(population.target_shape)}
    return {"shape": shape, "dtype": dtype, **targets, **scaling}
