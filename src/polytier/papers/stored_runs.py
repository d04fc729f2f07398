"""A finished run of a reproduction as one small JSON file: where it comes from, and what the papers' plans read of it.

The functions that read values of a plan take the path of such a file in the place of a run folder (`open_run`), so
tables can be made, and claims judged, from files that are kept when the run folders are gone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from polytier.papers.plan import Item, PlannedRun
from polytier.runs.read import RunRecord

Record = dict[str, Any]
FORMAT = 1
MODELS = ("personal", "global")
KEPT = {"train": ("loss", "accuracy"), "validation": ("accuracy",), "test": ("accuracy", "accuracy_pooled")}
TOLD = ("rounds", "seed", "seconds", "device_steps", "parameters")  # of summary.json
DIGITS = {"loss": 8, "accuracy": 5, "accuracy_pooled": 5}  # significant digits of a value


def open_run(path: Path) -> RunRecord | StoredRun:
    """What is known of a run, from its folder or from its JSON file."""
    return StoredRun(path) if path.suffix == ".json" else RunRecord(path)


# -- writing ------------------------------------------------------------------------------------------


def figures_of(folder: Path) -> Record:
    """The values of a finished run that a plan may read."""
    run = RunRecord(folder)
    summary = run.summary or {}
    found: Record = {"summary": {key: summary[key] for key in TOLD if key in summary}}
    for how in ("best", "chosen"):
        kept = summary.get(how) or {}
        accuracies = {m: {"accuracy": kept[m]["accuracy"]} for m in MODELS if "accuracy" in (kept.get(m) or {})}
        found["summary"][how] = {"round": kept["round"], **accuracies} if accuracies else None
    if shares := most_frequent_label(run.devices):
        found["most_frequent_label"] = shares
    rows = [{"round": r["round"], **dict(values(r))} for r in run.history if any(key in r for key in MODELS)]
    names = dict.fromkeys(name for row in rows for name in row)
    found["evaluated"] = {name: [row.get(name) for row in rows] for name in names}
    if run.config.get("codec") == "paper":
        found["traffic"] = server_traffic(run.history)
    return found


def values(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The values of an evaluated round, each with its path such as global/test/accuracy."""
    for model in MODELS:
        for split, metrics in KEPT.items():
            there = record.get(model, {}).get(split, {})
            yield from ((f"{model}/{split}/{m}", rounded(there[m], DIGITS[m])) for m in metrics if m in there)
    for name, own in record.get("models", {}).items():
        for split in KEPT:
            there = own.get("global", {}).get(split, {})
            metric = "accuracy" if "accuracy" in there else "loss"
            if metric in there:
                yield f"models/{name}/global/{split}/{metric}", rounded(there[metric], DIGITS[metric])


def rounded(value: float, digits: int = 5) -> float:
    """The value with so many significant digits."""
    return float(f"{value:.{digits}g}")


def most_frequent_label(devices: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """The share of samples that have the most frequent label of their device: of all samples together (pooled), and
    the mean over devices. Empty without labels.

    Args:
        devices: The columns of devices.csv.

    Examples:
        >>> most_frequent_label({"label_0": ["3", "0"], "label_1": ["1", "6"]})
        {'pooled': 0.9, 'mean': 0.875}
    """
    labels = [list(map(int, column)) for name, column in devices.items() if name.startswith("label_")]
    if not labels:
        return {}
    counts = list(zip(*labels, strict=True))
    most, samples = [max(each) for each in counts], [sum(each) for each in counts]
    mean = fmean(m / n for m, n in zip(most, samples, strict=True))
    return {"pooled": rounded(sum(most) / sum(samples)), "mean": rounded(mean)}


def server_traffic(history: Sequence[Record]) -> Record:
    """The bytes between the server and its children in each round; equal numbers are written once."""
    link = next(name for name in history[0]["bytes"] if name.startswith("server-"))
    child = link.removeprefix("server-")
    columns = {way: [r["bytes"][link][way] for r in history] for way in ("down", "up")}
    columns["children"] = [r["participants"][child] for r in history]
    kept = {key: column[0] if len(set(column)) == 1 else column for key, column in columns.items()}
    return {"child": child, "rounds": len(history), **kept}


# -- reading ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A run as `RunRecord` shows it, as far as its JSON file has it."""

    path: Path

    @cached_property
    def content(self) -> Record:
        """The whole file."""
        found = json.loads(self.path.read_text(encoding="utf-8"))
        if found.get("format") != FORMAT:
            raise ValueError(f"{self.path} has format {found.get('format')}, not {FORMAT}; store the run again")
        return found

    @property
    def summary(self) -> Record:
        """As summary.json has it, with fewer keys."""
        return self.content["figures"]["summary"]

    @property
    def most_frequent_label(self) -> dict[str, float]:
        """See `most_frequent_label`."""
        return self.content["figures"].get("most_frequent_label", {})

    @cached_property
    def history(self) -> list[Record]:
        """One record per evaluated round; if traffic is kept, one per round."""
        figures = self.content["figures"]
        records: dict[int, Record] = {}
        if traffic := figures.get("traffic"):
            records = {r: traffic_of(traffic, r) for r in range(1, traffic["rounds"] + 1)}
        columns = figures["evaluated"]
        for k, number in enumerate(columns["round"]):
            record = records.setdefault(number, {"round": number, "bytes": {}})
            for name, column in columns.items():
                if name != "round" and column[k] is not None:
                    put(record, name.split("/"), column[k])
        return list(records.values())


def traffic_of(traffic: Record, number: int) -> Record:
    """The record of a round with its bytes."""
    at = {key: v[number - 1] if isinstance(v := traffic[key], list) else v for key in ("down", "up", "children")}
    child = traffic["child"]
    bytes_ = {f"server-{child}": {"down": at["down"], "up": at["up"]}}
    return {"round": number, "bytes": bytes_, "participants": {child: at["children"]}}


def put(record: Record, path: Sequence[str], value: Any) -> None:
    """Put a value into nested dicts."""
    *outer, name = path
    for key in outer:
        record = record.setdefault(key, {})
    record[name] = value


def stored_runs(folder: Path, items: Sequence[Item], scale: str) -> dict[str, dict[int, Path]]:
    """The files in a folder that belong to the runs of these items: {name of the run: {seed: path}}.

    Raises:
        ValueError: A file of one of these runs was made with other settings than those of the plan.
    """
    planned = {run.name: run for item in items for run in item.runs()}
    found: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.glob("*.json")):
        content = StoredRun(path).content
        run = planned.get(content["run"])
        if run is None or content["scale"] != scale:
            continue
        if content["settings"] != plain(run):
            raise ValueError(f"{path} was made with other settings than the plan has now; run it again or remove it")
        found.setdefault(run.name, {})[content["seed"]] = path
    return found


def plain(run: PlannedRun) -> Record:
    """The settings of a run as JSON has them."""
    return json.loads(json.dumps(run.settings))
