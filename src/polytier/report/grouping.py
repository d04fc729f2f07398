"""Finds run folders and groups them: by data and model into studies, then by method and settings into variants."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from polytier._text import counted
from polytier.models.metrics import MetricInfo
from polytier.runs.read import RunRecord, shared_metrics
from polytier.runs.read_files import Record
from polytier.runs.spec import PYTHON, of_scope

NO_FILES = "data_dir"  # the place of the data files does not change the result
DATA = (*(name for name in of_scope("data") if name != NO_FILES), "model")
NO_DATA = ("random", "learned")  # ways to form teams that do not change the devices' samples
# settings about where and how a run was computed and judged; runs of one variant may differ in these and in the seed
NO_SETTING = (*of_scope("compute"), NO_FILES, "seed", "metric", "versions")
SETTINGS_IN_A_NAME = 3


@dataclass(frozen=True, eq=False)
class Variant:
    """One line of a chart: the finished runs of a method with the same settings, or one unfinished run.

    Args:
        name: The method, and the settings in which it differs from other variants of the method.
        runs: One per seed.
        like: The name of the variant whose colour it uses; "" for its own.
    """

    name: str
    runs: Sequence[RunRecord]
    like: str = ""

    @property
    def finished(self) -> bool:
        """Whether its runs are finished."""
        return self.runs[0].finished


@dataclass(frozen=True, eq=False)
class Study:
    """Runs on the same data with the same model, by variant."""

    title: str
    variants: list[Variant]
    notes: list[str] = field(default_factory=list)

    @property
    def finished(self) -> list[Variant]:
        """The variants whose runs are finished."""
        return [variant for variant in self.variants if variant.finished]

    @property
    def single(self) -> bool:
        """Whether all runs are of one method with one setting; charts then compare its kinds of models."""
        return len({variant.like or variant.name for variant in self.variants}) == 1

    @cached_property
    def metrics(self) -> tuple[MetricInfo, ...]:
        """The metrics that all runs have, the leading one first."""
        return shared_metrics([run for variant in self.variants for run in variant.runs])

    @property
    def metric(self) -> MetricInfo:
        """The leading metric: the first one that all runs have."""
        return self.metrics[0]


# -- finding ------------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """Whether this is a run folder."""
    return (folder / "config.toml").is_file() and any((folder / f).exists() for f in ("topology.json", "metrics.jsonl"))


def find(folders: Iterable[Path]) -> list[Path]:
    """The run folders among and below these, without duplicates; run folders inside a run folder are left out."""
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; `polytier run` makes run folders, by default below runs/")
        there = list(below(folder))
        if not there:
            raise ValueError(
                f"there is no run folder in {folder} (a run folder holds config.toml and metrics.jsonl); "
                "`polytier run --out DIR` and `polytier compare --out DIR` make some"
            )
        for path in there:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def below(folder: Path) -> Iterator[Path]:
    """The run folders in a folder and below it, sorted by name."""
    for path, names, _ in os.walk(folder):
        if is_run(Path(path)):
            names.clear()  # do not search inside a run folder
            yield Path(path)
        names[:] = sorted(name for name in names if not name.startswith("."))


def read(folder: Path) -> RunRecord:
    """Read a run folder; raises a ValueError if it names no algorithm."""
    run = RunRecord(folder)
    if "algorithm" not in run.config:
        raise ValueError(f"{folder / 'config.toml'} does not belong to a run: it names no algorithm")
    return run


# -- putting together ---------------------------------------------------------------------------------


def studies(folders: Iterable[Path]) -> list[Study]:
    """All runs in these folders as studies; runs on different data are never in one study."""
    by_data: dict[str, list[RunRecord]] = {}
    for run in map(read, find(folders)):
        by_data.setdefault(json.dumps(data_of(run.config), sort_keys=True), []).append(run)
    result = []
    for runs in by_data.values():
        parts = apart(runs)
        for number, part in enumerate(parts, 1):
            result.append(make_study(part, f" ({number} of {len(parts)})" if len(parts) > 1 else ""))
    return result


def data_of(config: Mapping[str, Any]) -> Record:
    """The settings on which the devices' samples depend, and the model."""
    found = {name: config.get(name) for name in DATA}
    formation = str(config.get("team_formation", NO_DATA[0]))
    if formation.split(":")[0] not in NO_DATA:
        found |= {"team_formation": formation, "teams": config.get("teams")}
    models = config.get("models")
    if isinstance(models, Mapping):
        found["models"] = {name: {k: own.get(k) for k in DATA} for name, own in models.items()}
    return found


def holdings(run: RunRecord) -> str:
    """A hash of the number of samples of each label at each device; empty while it is unknown."""
    kinds = ("id", "samples", "train", "validation", "test")
    columns = {k: v for k, v in run.devices.items() if k.endswith(kinds) or "label_" in k}
    return hashlib.sha256(json.dumps(columns).encode()).hexdigest() if columns else ""


def apart(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Runs with the same data settings, separated where their devices do not hold the same samples."""
    held = {run: holdings(run) for run in runs}
    seen: dict[int, set[str]] = {}
    for run in runs:
        if held[run]:
            seen.setdefault(run.seed, set()).add(held[run])
    if runs[0].config.get("data") != PYTHON and all(len(hashes) == 1 for hashes in seen.values()):
        return [list(runs)]
    parts: dict[str, list[RunRecord]] = {}
    for run in runs:
        parts.setdefault(held[run] or str(run.folder), []).append(run)
    return list(parts.values())


def make_study(runs: Sequence[RunRecord], suffix: str) -> Study:
    """A study of runs on the same data; `suffix` is appended to its title."""
    notes: list[str] = []
    copies: list[str] = []
    by_setting: dict[str, dict[int, RunRecord]] = {}
    for run in runs:
        if not run.whole:
            notes.append(
                f"{run.folder}: metrics.jsonl is cut in the middle of a line; it is used up to round {run.rounds}. "
                + (
                    "All other values are from the other files."
                    if run.finished
                    else f"Continue it with: polytier resume {run.folder}"
                )
            )
        same = by_setting.setdefault(json.dumps(settings_of(run.config), sort_keys=True), {})
        twin = same.get(run.seed)
        if twin is not None and (run.finished, run.rounds) <= (twin.finished, twin.rounds):
            run, twin = twin, run
        copies += [] if twin is None else [str(twin.folder)]
        same[run.seed] = run
    if copies:
        notes.append(f"Left out, because the same run with the same seed is here a second time: {', '.join(copies)}.")
    groups = [[same[seed] for seed in sorted(same)] for same in by_setting.values()]
    variants: list[Variant] = []
    for name, group in sorted(zip(names_of(groups), groups, strict=True), key=lambda pair: pair[0]):
        done = [run for run in group if run.finished]
        if done:
            variants.append(Variant(name, done))
        variants += [Variant(f"{name}, seed {run.seed}, unfinished", [run], name) for run in group if not run.finished]
    return Study(data_title(runs[0]) + suffix, variants, notes)


def settings_of(config: Mapping[str, Any], prefix: str = "") -> Record:
    """All settings except the seed on which the result depends, in one dict with keys such as set.device_lr."""
    found: Record = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and (prefix or name not in NO_SETTING):
            found |= settings_of(value, f"{prefix}{name}.")
        elif prefix or name not in NO_SETTING:
            found[f"{prefix}{name}"] = value
    return found


def names_of(groups: Sequence[Sequence[RunRecord]]) -> list[str]:
    """The method of each group, and the settings in which it differs from others of the same method."""
    flat = [settings_of(group[0].config) for group in groups]
    names: list[str] = []
    for own in flat:
        others = [other for other in flat if other["algorithm"] == own["algorithm"]]
        keys = dict.fromkeys(key for other in others for key in other)
        differ = [key for key in keys if len({json.dumps(other.get(key)) for other in others}) > 1]
        what = ", ".join(f"{key.removeprefix('set.')}={own.get(key, '-')}" for key in differ[:SETTINGS_IN_A_NAME])
        names.append(f"{own['algorithm']} ({what})" if what else own["algorithm"])
    return [name if names.count(name) == 1 else f"{name} #{names[: k + 1].count(name)}" for k, name in enumerate(names)]


def data_title(run: RunRecord) -> str:
    """The data, the model, the number of devices and the partition."""
    config, tiers = run.config, run.tiers
    models = config.get("models")
    if isinstance(models, Mapping):
        what = " and ".join(f"{own.get('data', config['data'])} ({own.get('model', '')})" for own in models.values())
    else:
        data = "data given in Python" if config["data"] == PYTHON else Path(config["data"]).name
        what = f"{data}, {config.get('model', 'a model given in Python')}"
    how = config.get("partition") or (f"{config['per_class']} a class" if config.get("per_class") else "")
    who = counted(len(tiers[-1]["ids"]), "device") if tiers else ""
    return ", ".join(part for part in (what, who, how) if part)
