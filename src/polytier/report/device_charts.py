"""What a page shows of devices: the leading metric of each one, gains and losses against Local, and labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from polytier.models.metrics import MetricInfo
from polytier.report import comparison
from polytier.report.blocks import Devices, Heat, Histogram, Text
from polytier.report.grouping import Study, Variant
from polytier.runs.read import RunRecord
from polytier.runs.read_files import KINDS

CELLS = 350  # columns of coloured cells; where there are more devices, several share a cell
BARS = 20
ROWS = 5_000  # of the table of devices; it keeps the page below 2 MB for ten methods

ByDevice = Mapping[str, float]  # values in the unit shown, by the device's id


# -- the leading metric -------------------------------------------------------------------------------


def by_device(run: RunRecord, metric: MetricInfo, kind: str | None = None) -> dict[str, float]:
    """The test value of each device, in the unit shown; by default of the model that the method is judged by."""
    return {name: metric.factor * value for name, value in run.by_device(kind, metric).items()}


def measured(study: Study) -> dict[str, dict[int, ByDevice]]:
    """The values of finished runs by seed: of each method the model that it is judged by, of one method all kinds."""
    found: dict[str, dict[int, ByDevice]] = {}
    for variant in study.finished:
        kinds = {kind: kind for kind in KINDS} if study.single else {variant.name: None}
        for name, kind in kinds.items():
            found[name] = {run.seed: own for run in variant.runs if (own := by_device(run, study.metric, kind))}
    return {name: seeds for name, seeds in found.items() if seeds}


def metric_charts(study: Study, local: Variant | None) -> Iterator[Histogram | Heat | Devices | None]:
    """The distribution of the leading metric over devices, who gains and loses against Local, and all devices."""
    metric, found = study.metric, measured(study)
    if not found:
        return
    all_values = {name: np.array([x for own in seeds.values() for x in own.values()]) for name, seeds in found.items()}
    edges = edges_of(np.concatenate(list(all_values.values())), metric)
    bars = [
        (name, (100 * np.histogram(values, edges)[0] / len(values)).tolist(), float(values.mean()))
        for name, values in all_values.items()
    ]
    note = "All devices of all seeds, judged on their own test samples. The dashed line is the mean."
    title = f"{metric.name[0].upper()}{metric.name[1:]} of the devices"
    yield Histogram(title, f"test {metric.axis}", "devices, %", edges.tolist(), bars, note)
    ruler = local.name if local and len(found) > 1 and local.name in found else None
    seed = shown_seed(found, ruler)
    yield strip(found, ruler, seed, metric)
    yield device_table(study, local, seed)


def edges_of(values: np.ndarray, metric: MetricInfo) -> np.ndarray:
    """The edges of the bars: 0 to 100 for percent, otherwise from the lowest to the highest value."""
    low, high = (0.0, 100.0) if metric.unit == "%" else (float(values.min()), float(values.max()))
    return np.linspace(low, high if high > low else low + 1, BARS + 1)


def shown_seed(found: Mapping[str, Mapping[int, ByDevice]], ruler: str | None) -> int:
    """Each seed has different data, so devices are shown for one: the first of those that most methods have."""
    seeds = found[ruler or next(iter(found))]
    return max(sorted(seeds), key=lambda seed: sum(seed in own for own in found.values()))


def strip(found: Mapping[str, Mapping[int, ByDevice]], local: str | None, seed: int, metric: MetricInfo) -> Heat | None:
    """One column per device (or per several, if there are many), sorted by its value with Local, for one seed."""
    ruler = local or next(iter(found))  # its values sort the devices
    base = found[ruler][seed]
    order = sorted(base, key=lambda name: metric.sign * base[name])
    cells = np.array_split(np.array(order, dtype=object), min(CELLS, len(base)))
    rows = {name: own[seed] for name, own in found.items() if seed in own and name != local}
    if not rows or not cells:
        return None
    ends = [gains(own, base, metric) for own in rows.values()]
    if local:
        rows = {
            name: {key: metric.sign * (value - base[key]) for key, value in own.items() if key in base}
            for name, own in rows.items()
        }
    values = [
        [fmean(there) if (there := [own[n] for n in cell if n in own]) else None for cell in cells]
        for own in rows.values()
    ]
    columns = [column_name(cell) for cell in cells]
    each = "one device" if len(cells) == len(base) else f"the mean of about {len(base) // len(cells)} devices"
    by = f"the {metric.name} with {local}" if local else "the first row"
    text = f"A column is {each}, sorted by {by}, the worst first; seed {seed}."
    if not local:
        unit = metric.unit or metric.name
        return Heat("Values of the devices", list(rows), columns, values, x="devices", unit=unit, zero=False, note=text)
    return Heat(
        "Who gains and who loses against Local",
        list(rows),
        columns,
        values,
        ends=ends,
        unit="points" if metric.unit == "%" else f"gain in {metric.name}",
        x="devices, the worst with Local first",
        diverging=True,
        note=f"{text} The shares of devices that gain and lose are of this seed.",
    )


def column_name(ids: Any) -> str:
    """The device or devices of a column, as text."""
    return f"device {ids[0]}" if len(ids) == 1 else f"{len(ids)} devices, {ids[0]} .. {ids[-1]}"


def gains(own: ByDevice, base: ByDevice, metric: MetricInfo) -> str:
    """The shares of devices whose value is better and worse than that of `base`."""
    differences = [metric.sign * (a - b) for a, b in comparison.paired(own, base)]
    more, less = (fmean(some) if some else 0.0 for some in ([d > 0 for d in differences], [d < 0 for d in differences]))
    return f"{100 * more:.0f} % gain, {100 * less:.0f} % lose"


# -- all devices --------------------------------------------------------------------------------------


def device_table(study: Study, local: Variant | None, seed: int) -> Devices | None:
    """All devices of one seed with the values of each method; of more than `ROWS` those that are worst off."""
    metric = study.metric
    runs = {variant.name: run for variant in study.finished for run in variant.runs if run.seed == seed}
    values = {name: {kind: by_device(run, metric, kind) for kind in KINDS} for name, run in runs.items()}
    judged = {name: own for name, run in runs.items() if (own := values[name][run.judge])}
    if not judged:
        return None
    best = max(judged, key=lambda name: metric.sign * fmean(judged[name].values()))
    devices, base = runs[best].devices, judged.get(local.name, {}) if local and len(judged) > 1 else {}
    rows = worst(devices["id"], judged[best], metric)
    ids = [devices["id"][k] for k in rows]
    methods = [
        (name, [(kind, shown(ids, own, metric)) for kind, own in values[name].items() if own], runs[name].judge)
        for name in sorted(judged, key=lambda name: name != best)
    ]
    note = f"Test {metric.name} of the last round, seed {seed}. Click a column to sort by it."
    note += " Gain: against Local with the same data and seed." if base else ""
    if len(rows) < len(devices["id"]):
        note += f" Shown are the {ROWS:,} devices of {len(devices['id']):,} that are worst off with {best}."
    alone = shown(ids, base, metric) if base else ()
    return Devices("All devices", ids, facts(devices, rows), methods, alone, metric.unit, metric.better, note)


def shown(ids: Sequence[str], values: ByDevice, metric: MetricInfo) -> list[float | None]:
    """The values of devices in this order, percentages with two decimals; None for a device without a value."""
    found = (values.get(name) for name in ids)
    return [value if value is None or metric.unit != "%" else round(value, 2) for value in found]


def worst(ids: Sequence[str], values: ByDevice, metric: MetricInfo) -> list[int]:
    """The places of the `ROWS` devices with the worst values, in the order of the devices; those without come last."""
    order = sorted(range(len(ids)), key=lambda k: metric.sign * values[ids[k]] if ids[k] in values else math.inf)
    return sorted(order[:ROWS])


def facts(devices: Mapping[str, Sequence[str]], rows: Sequence[int]) -> list[tuple[str, Sequence[str | int]]]:
    """The team, the number of samples and of test samples of devices; several models are counted together."""
    found: list[tuple[str, Sequence[str | int]]] = []
    if any(devices.get("team", ())):
        found.append(("team", [devices["team"][k] for k in rows]))
    for name, column in (("samples", "samples"), ("test samples", "test")):
        own = [values for title, values in devices.items() if f"_{title}".endswith(f"_{column}")]
        found += [(name, [sum(int(values[k]) for values in own) for k in rows])] if own else []
    return found


# -- labels -------------------------------------------------------------------------------------------


def labels(study: Study) -> Iterator[Heat | Text]:
    """The labels that each device holds, from the first finished run; several models one after the other."""
    run = next((variant.runs[0] for variant in study.finished), None)
    devices = {} if run is None else run.devices
    prefixes = dict.fromkeys(name.removesuffix("samples") for name in devices if name.endswith("samples"))
    for prefix in prefixes:
        what = f" of {prefix.removesuffix('_')}" if prefix else ""
        held = np.array(devices[f"{prefix}samples"], dtype=float)
        least, middle, most = (f"{value:,.0f}" for value in (held.min(), np.median(held), held.max()))
        yield Text(
            f"{len(held):,} devices hold {held.sum():,.0f} samples{what}: {least} to {most}, the median is {middle}."
        )
        names = [name for name in devices if name.startswith(f"{prefix}label_")]
        if names:
            counts = np.array([devices[name] for name in names], dtype=float).T  # [devices, labels]
            there = counts.sum(0) > 0
            rows = [name.removeprefix(f"{prefix}label_") for name, some in zip(names, there, strict=True) if some]
            yield from label_shares(counts[:, there], rows, devices["id"], devices.get("team", []), what, run)


def label_shares(
    counts: np.ndarray, labels: Sequence[str], ids: Sequence[str], teams: Sequence[str], what: str, run: Any
) -> Iterator[Heat]:
    """The share of each label among the samples of each device and, if there are several teams, of each team."""
    teams = teams if any(teams) else [""] * len(ids)
    place = {team: k for k, team in enumerate(sorted(set(teams), key=natural))}
    mostly = counts.argmax(1).tolist()
    order = sorted(range(len(ids)), key=lambda k: (place[teams[k]], mostly[k]))
    cells = np.array_split(np.array(order), min(CELLS, len(order)))
    names = [column_name([ids[k] for k in cell]) for cell in cells]
    groups = [f"team {teams[cell[0]]}" if teams[cell[0]] else "" for cell in cells]
    by_team = " by team" if len(place) > 1 else ""
    rows = [f"label {label}" for label in labels]
    yield Heat(
        f"Labels by device{what}",
        rows,
        names,
        percent(np.stack([counts[cell].sum(0) for cell in cells])),
        groups if by_team else (),
        x=f"devices{by_team}",
        unit="% of samples",
        note=f"Share of a device's samples, all splits, seed {run.seed}.",
    )
    if by_team:
        member = np.array([place[team] for team in teams])
        yield Heat(
            f"Labels by team{what}",
            rows,
            [f"team {team}" for team in place],
            percent(np.stack([counts[member == k].sum(0) for k in range(len(place))])),
            x="teams",
            unit="% of samples",
            note=f"Share of a team's samples, all splits, seed {run.seed}.",
        )


def natural(text: str) -> tuple[bool, int, str]:
    """A key that sorts numbers by size, before words."""
    return (False, int(text), "") if text.isdigit() else (True, 0, text)


def percent(sums: np.ndarray) -> list[list[float]]:
    """The share of each label in its column, one row per label, from counts [columns, labels]."""
    return (100 * sums / np.maximum(sums.sum(1, keepdims=True), 1)).T.tolist()
