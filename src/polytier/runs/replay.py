"""What a network run left behind: its state, and the simulation with the absences that it had."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polytier.data.federation import Federation
from polytier.engines.network.absences import FILE, Replayed, read_absences
from polytier.files.read import read_json
from polytier.runs.admission import those_counted
from polytier.runs.callbacks import RunFolder
from polytier.runs.folder import check_free
from polytier.runs.job import Job, make_job
from polytier.runs.loop import Loop
from polytier.runs.read_files import PRESENT, STATE, read_config
from polytier.runs.roster import FILE as CHANGES
from polytier.runs.roster import moved, read_changes, stages
from polytier.runs.serve import JOB, NETWORK, SCALING


def read_status(folder: Path) -> dict[str, Any]:
    """The state of a network run, from its folder.

    Raises:
        ValueError: It is no folder of such a run.
    """
    if not (folder / NETWORK).is_file():
        raise ValueError(f"{folder} is no run folder of `polytier serve`; give the folder that its --out names")
    state = read_json(folder / STATE) if (folder / STATE).is_file() else {"state": "waiting", "round": 0}
    there = read_json(folder / PRESENT) if (folder / PRESENT).is_file() else {"present": [], "round": 0}
    counts = Counter(f"{line.tier}/{line.name}" for line in read_absences(folder / FILE))
    children = job_of_folder(folder).tree
    return {
        "state": state["state"],
        "round": max(state["round"], there["round"]),  # state.json has that of the start while the server runs
        "present": there["present"],
        "children": children.size(1),
        "absences": dict(sorted(counts.items())),
    }


def job_of_folder(folder: Path) -> Job:
    """The job of a network run."""
    about = read_json(folder / NETWORK)
    config = {key: value for key, value in read_config(folder).items() if key != "versions"}
    job = make_job({**about[JOB]["spec"], **config}, about[JOB]["network"], str(folder / NETWORK))
    return replace(job, scaling=about.get(SCALING))


def replay_run(folder: Path, data: Path, out: Path) -> None:
    """Simulate a network run with its absences, and write a run folder.

    Args:
        folder: The run folder of the server.
        data: A folder with NAME.npz of every device.
        out: A new run folder.

    Raises:
        ValueError: Files are missing, or the data are not those of the run.
    """
    check_free(out)
    job, about = job_of_folder(folder), read_json(folder / NETWORK)
    absences, changed = read_absences(folder / FILE), read_changes(folder / CHANGES)
    rounds = read_json(folder / STATE)["round"]
    saved: Any = None
    for until, there in stages(about.get("first", about["counts"]), changed, rounds):
        tree = those_counted(job.tree, dict.fromkeys(there))
        federation = pooled(job, data, sorted(there), about["counts"])
        with Loop(job.assemble(tree, federation, partial(Replayed, absences=absences))) as loop:
            if saved is not None:
                tensors, facts, before = saved
                loop.restore(moved(tensors, before, tree), facts)
            writers = [RunFolder(out)] if until == rounds else []
            loop.run(rounds, writers, lambda loop=loop, until=until: loop.round >= until)
            saved = *loop.snapshot(), tree


def pooled(job: Job, folder: Path, names: list[str], counts: dict[str, list[int]]) -> Federation:
    """The data of all devices in one place, each split as on the device itself."""
    parts = [job.federation(name, folder / f"{name}.npz") for name in names]
    for name, part in zip(names, parts, strict=True):
        if part.population.counts[0].tolist() != counts[name]:
            raise ValueError(f"{folder / name}.npz has other numbers of samples than in the run; give the same data")
    split = [np.repeat(np.arange(3), part.population.counts[0].numpy()) for part in parts]
    federation = Federation.from_arrays(
        torch.cat([part.x for part in parts]),
        torch.cat([part.y for part in parts]),
        np.concatenate([np.full(len(part.x), name) for name, part in zip(names, parts, strict=True)]),
        split=np.concatenate(split),
        num_classes=job.network["classes"] or None,
    )
    return job.rescaled(federation)
