"""The charts of a page about devices: the leading metric of each one, gains and losses against Local, and labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from polytier.models.metrics import MetricInfo
from polytier.report import comparison
from polytier.report.blocks import Heat, Histogram, Text
from polytier.report.grouping import Study, Variant
from polytier.runs.read import RunRecord

CELLS = 350  # columns of coloured cells; where there are more devices, several share a cell
BARS = 20

ByDevice = Mapping[str, float]  # values in the unit shown, by the device's id


# -- the leading metric -------------------------------------------------------------------------------


def by_device(run: RunRecord, metric: MetricInfo) -> dict[str, float]:
    """The test value of each device, in the unit shown, of the model that the method is judged by."""
    return {name: metric.factor * value for name, value in run.by_device(metric=metric).items()}


def metric_charts(study: Study, local: Variant | None) -> Iterator[Histogram | Heat | None]:
    """The distribution of the leading metric over devices, and the devices that gain and lose against Local."""
    metric = study.metric
    found = {variant: {run.seed: by_device(run, metric) for run in variant.runs} for variant in study.finished}
    found = {variant: seeds for variant, seeds in found.items() if any(seeds.values())}
    if not found:
        return
    all_values = {v: np.array([x for own in seeds.values() for x in own.values()]) for v, seeds in found.items()}
    edges = edges_of(np.concatenate(list(all_values.values())), metric)
    bars = [
        (variant.name, (100 * np.histogram(values, edges)[0] / len(values)).tolist(), float(values.mean()))
        for variant, values in all_values.items()
    ]
    note = "All devices of all seeds, judged on their own test samples. The mark is the mean."
    title = f"{metric.name[0].upper()}{metric.name[1:]} of the devices"
    yield Histogram(title, f"test {metric.axis}", "devices, %", edges.tolist(), bars, note)
    yield strip(found, local, metric)


def edges_of(values: np.ndarray, metric: MetricInfo) -> np.ndarray:
    """The edges of the bars: 0 to 100 for percent, otherwise from the lowest to the highest value."""
    low, high = (0.0, 100.0) if metric.unit == "%" else (float(values.min()), float(values.max()))
    return np.linspace(low, high if high > low else low + 1, BARS + 1)


def strip(found: Mapping[Variant, Mapping[int, ByDevice]], local: Variant | None, metric: MetricInfo) -> Heat | None:
    """One column per device (or per several, if there are many), sorted by its value with Local, for one seed."""
    compared = len(found) > 1 and local in found
    ruler = local if compared and local else next(iter(found))  # the variant whose values sort the devices
    # each seed has different data, so one seed is shown: the first of those that most methods have
    seed = max(sorted(found[ruler]), key=lambda seed: sum(seed in seeds for seeds in found.values()))
    base = found[ruler][seed]
    order = sorted(base, key=lambda name: metric.sign * base[name])
    cells = np.array_split(np.array(order, dtype=object), min(CELLS, len(base)))
    rows = [variant for variant in found if seed in found[variant] and not (compared and variant is ruler)]
    if not rows or not cells:
        return None
    values = []
    for variant in rows:
        own = found[variant][seed]
        if compared:
            own = {name: metric.sign * (value - base[name]) for name, value in own.items() if name in base}
        values.append([fmean(there) if (there := [own[n] for n in cell if n in own]) else None for cell in cells])
    names, columns = [variant.name for variant in rows], [column_name(cell) for cell in cells]
    each = "one device" if len(cells) == len(base) else f"the mean of about {len(base) // len(cells)} devices"
    text = f"A column is {each}, sorted by the {metric.name} with {ruler.name}, the worst first; seed {seed}."
    if not compared:
        unit = metric.unit or metric.name
        return Heat("Values of the devices", names, columns, values, x="devices", unit=unit, note=text)
    return Heat(
        "Who gains and who loses against Local",
        names,
        columns,
        values,
        ends=[gains(found[variant], found[ruler], metric) for variant in rows],
        unit="% points" if metric.unit == "%" else f"gain in {metric.name}",
        x="devices, sorted by their value with Local, the worst first",
        diverging=True,
        note=f"{text} Shares of those who gain and lose are of all devices and seeds.",
    )


def column_name(ids: Any) -> str:
    """The device or devices of a column, as text."""
    return f"device {ids[0]}" if len(ids) == 1 else f"{len(ids)} devices, {ids[0]} .. {ids[-1]}"


def gains(own: Mapping[int, ByDevice], base: Mapping[int, ByDevice], metric: MetricInfo) -> str:
    """The shares of devices whose value is better and worse than that of `base`."""
    pairs = [pair for seed in own if seed in base for pair in comparison.paired(own[seed], base[seed])]
    differences = [metric.sign * (a - b) for a, b in pairs]
    more, less = (fmean(some) if some else 0.0 for some in ([d > 0 for d in differences], [d < 0 for d in differences]))
    return f"{100 * more:.0f} % gain, {100 * less:.0f} % lose"


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
