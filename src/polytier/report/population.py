"""What a page shows of nodes and links: accuracies by device, traffic, zeros, collaboration, labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from polytier._text import size
from polytier.report import comparison, curves
from polytier.report.blocks import Cell, Heat, Histogram, Lines, Matrices, Panels, Table, Text, Tree
from polytier.report.comparison import interval, judge_of
from polytier.report.heatmap import matrices
from polytier.report.runs import Run, Study, Variant
from polytier.runs.read import KINDS
from polytier.tree.collaboration import FILE

CELLS = 350  # columns of coloured cells; more devices share cells
BARS = 20
FRAMES, CLIENTS = 16, 96  # of a collaboration matrix
OPENED = 64  # nodes whose models are looked at for zeros
VALUE_BYTES = {"float16": 2, "sparse16": 2, "float64": 8, "sparse64": 8, "paper": 8}  # by codec; others 4


# -- accuracies ---------------------------------------------------------------------------------------


def by_device(run: Run) -> dict[str, float]:
    """Test accuracy of the model that speaks for the method, by id, in percent."""
    found = comparison.accuracies(run.devices, judge_of(run.summary or {})) if run.devices else {}
    return {name: 100 * value for name, value in found.items()}


def accuracies(study: Study, local: Variant | None) -> Iterator[Any]:
    found = {variant: {run.seed: by_device(run) for run in variant.runs} for variant in study.finished}
    found = {variant: seeds for variant, seeds in found.items() if any(seeds.values())}
    if not found:
        return
    edges = np.linspace(0, 100, BARS + 1)
    bars = []
    for variant, seeds in found.items():
        values = np.array([value for own in seeds.values() for value in own.values()])
        bars.append((variant.name, (100 * np.histogram(values, edges)[0] / len(values)).tolist(), float(values.mean())))
    note = "All devices of all seeds, judged on their own test samples. The mark is the mean."
    yield Histogram("Accuracy of the devices", "test accuracy, %", "devices, %", edges.tolist(), bars, note)
    yield strip(found, local)


def strip(found: Mapping[Variant, Mapping[int, Mapping[str, float]]], local: Variant | None) -> Heat | None:
    """A column a device (or some, where there are many), in the order of what Local gives it; one seed."""
    compared = len(found) > 1 and local in found
    ruler = local if compared and local else next(iter(found))  # whose accuracies sort the devices
    # data are drawn anew with each seed: the first one of those that most methods have
    seed = max(sorted(found[ruler]), key=lambda seed: sum(seed in seeds for seeds in found.values()))
    base = found[ruler][seed]
    cells = np.array_split(np.array(sorted(base, key=lambda name: base[name]), dtype=object), min(CELLS, len(base)))
    rows = [variant for variant in found if seed in found[variant] and not (compared and variant is ruler)]
    values, ends = [], []
    for variant in rows:
        own = found[variant][seed]
        if compared:
            own = {name: value - base[name] for name, value in own.items() if name in base}
            ends.append(gains(found[variant], found[ruler]))
        values.append([fmean(there) if (there := [own[n] for n in cell if n in own]) else None for cell in cells])
    if not rows or not cells:
        return None
    names, columns = [variant.name for variant in rows], [whose(cell) for cell in cells]
    each = "a device" if len(cells) == len(base) else f"the mean of about {len(base) // len(cells)} devices"
    text = f"A column is {each}, sorted by the accuracy with {ruler.name}, the worst first; seed {seed}."
    if not compared:
        return Heat("Who gets what", names, columns, values, x="devices", unit="%", note=text)
    text += " Shares of those who gain and lose are of all devices and seeds."
    return Heat(
        "Who gains and who loses against Local", names, columns, values, ends=ends, unit="% points",
        x="devices, those worst off alone first", diverging=True, note=text,
    )  # fmt: skip


def whose(ids: Any) -> str:
    """The name of a column."""
    return f"device {ids[0]}" if len(ids) == 1 else f"{len(ids)} devices, {ids[0]} .. {ids[-1]}"


def gains(own: Mapping[int, Mapping[str, float]], base: Mapping[int, Mapping[str, float]]) -> str:
    pairs = [pair for seed in own if seed in base for pair in comparison.paired(own[seed], base[seed])]
    more, less = (
        fmean(compare) if compare else 0.0 for compare in ([a > b for a, b in pairs], [a < b for a, b in pairs])
    )
    return f"{100 * more:.0f} % gain, {100 * less:.0f} % lose"


# -- traffic ------------------------------------------------------------------------------------------


def traffic(study: Study) -> Iterator[Tree | Lines]:
    methods = []
    for variant in study.variants:
        run, totals = variant.runs[0], [run.traffic() for run in variant.runs]
        tiers = [(tier["tier"], len(tier["ids"])) for tier in run.tiers]
        links = [
            (link, *(fmean(total.get(link, {}).get(way, 0) for total in totals) for way in ("down", "up")))
            for link in totals[0]
        ]
        if links:
            methods.append((variant.name, tiers, links))
    if methods:
        yield Tree("Traffic by link", methods, "Bytes of all rounds, the mean over seeds; all bars have one scale.")
    costs = curves.against_bytes(study)
    if costs.series:
        yield costs


def sparsity(study: Study) -> Iterator[Panels | Table | Text | None]:
    """Zeros of the models at the end, counted in their files; sizes of messages on the way."""
    rows, any_zero = [], False
    for variant in study.finished:
        shares = [zeros(run.folder / "models") for run in variant.runs]
        kinds = {kind: interval(share.get(kind) for share in shares) for kind in KINDS}
        any_zero |= any(found and found["mean"] >= 0.001 for found in kinds.values())
        config, parameters = variant.runs[0].config, (variant.runs[0].summary or {}).get("parameters", 0)
        codec = str(config.get("codec", ""))
        dense = parameters * VALUE_BYTES.get(codec, 4)
        cells = [Cell(comparison.shown(f, "accuracy"), f["mean"] if f else None) for f in kinds.values()]
        rows.append([variant.name, *cells, Cell(f"{parameters:,}", parameters), codec, Cell(size(dense), dense)])
    sizes = curves.message_sizes(study)
    if any_zero or sizes is not None:
        columns = ["method", *(f"zeros: {kind}" for kind in KINDS)]
        note = f"Parameters that are exactly zero in the models saved at the end (of at most {OPENED} nodes a tier)."
        yield Table("Zeros in the models", [*columns, "parameters", "codec", "a dense model"], rows, note)
        yield sizes


def zeros(folder: Path) -> dict[str, float]:
    """By kind of model, the share of parameters that are zero; of several models, all together."""
    from safetensors import SafetensorError, safe_open

    counts: dict[str, tuple[int, int]] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        none, total = counts.get(path.stem, (0, 0))
        try:
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118  it is no dict
                    rows = file.get_slice(name)
                    values = rows[: min(OPENED, rows.get_shape()[0])]
                    none, total = none + int((values == 0).sum()), total + values.size
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        counts[path.stem] = none, total
    return {kind: none / total for kind, (none, total) in counts.items() if total}


# -- collaboration ------------------------------------------------------------------------------------


def collaboration(study: Study) -> Iterator[Matrices]:
    for variant in study.finished:
        run = next((run for run in variant.runs if (run.folder / FILE).exists()), None)
        if run is not None:
            found = matrices(run.folder / FILE, FRAMES, CLIENTS)
            yield Matrices(
                f"{variant.name}, seed {run.seed}", found.frames, found.groups, f"{found.title}. {found.note}"
            )


# -- data ---------------------------------------------------------------------------------------------


def labels(study: Study) -> Iterator[Heat | Text]:
    """Who holds which labels, from the first finished run; of several models, one by one."""
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
            yield from shares(counts[:, there], rows, devices["id"], devices.get("team", []), what, run)


def shares(
    counts: np.ndarray, rows: Sequence[str], ids: Sequence[str], teams: Sequence[str], what: str, run: Any
) -> Iterator[Heat]:
    teams = teams if any(teams) else [""] * len(ids)
    place = {team: k for k, team in enumerate(sorted(set(teams), key=natural))}
    mostly = counts.argmax(1).tolist()
    order = sorted(range(len(ids)), key=lambda k: (place[teams[k]], mostly[k]))
    cells = np.array_split(np.array(order), min(CELLS, len(order)))
    names = [whose([ids[k] for k in cell]) for cell in cells]
    groups = [f"team {teams[cell[0]]}" if teams[cell[0]] else "" for cell in cells]
    sums = np.stack([counts[cell].sum(0) for cell in cells])
    note = f"Share of a device's samples, all splits, seed {run.seed}."
    by_team = " by team" if len(place) > 1 else ""
    yield Heat(
        f"Labels by device{what}", [f"label {row}" for row in rows], names, percent(sums), groups if by_team else (),
        x=f"devices{by_team}", unit="% of samples", note=note,
    )  # fmt: skip
    if by_team:
        member = np.array([place[team] for team in teams])
        sums = np.stack([counts[member == k].sum(0) for k in range(len(place))])
        names = [f"team {team}" for team in place]
        note = f"Share of a team's samples, all splits, seed {run.seed}."
        yield Heat(
            f"Labels by team{what}", [f"label {row}" for row in rows], names, percent(sums),
            x="teams", unit="% of samples", note=note,
        )  # fmt: skip


def natural(text: str) -> tuple[bool, int, str]:
    """Numbers by size, before words."""
    return (False, int(text), "") if text.isdigit() else (True, 0, text)


def percent(sums: np.ndarray) -> list[list[float]]:
    """[columns, labels] counts as shares by column, a row a label."""
    return (100 * sums / np.maximum(sums.sum(1, keepdims=True), 1)).T.tolist()
