"""The charts of a page about traffic: bytes by link, the metric against bytes, message sizes, zeros in the models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from polytier._text import size
from polytier.report.blocks import Cell, Lines, Panels, Series, Table, Text, Tree
from polytier.report.comparison import SHARE
from polytier.report.curves import Pick, judge_of, kinds_of, line, metric_of, note, picker
from polytier.report.grouping import Study
from polytier.report.intervals import interval, interval_text
from polytier.runs.read import RunRecord
from polytier.runs.read_files import KINDS, Record, check_result

SPARSE = ("sparse", "paper")  # prefixes of codecs that leave out zeros
NODES_OPENED = 64  # nodes of a tier whose models are searched for zeros
VALUE_BYTES = {"float16": 2, "sparse16": 2, "float64": 8, "sparse64": 8, "paper": 8}  # by codec; others 4


def traffic(study: Study) -> Iterator[Tree | Lines]:
    """Bytes by link on the tree, and the leading metric against bytes."""
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
    costs = against_bytes(study)
    if costs.series:
        yield costs


def sent(run: RunRecord) -> dict[int, float]:
    """Bytes sent up to each round, on all links and in both directions."""
    total, found = 0, {}
    for record in run.history:
        total += sum(sum(ways.values()) for ways in record["bytes"].values())
        found[record["round"]] = float(total)
    return found


def against_bytes(study: Study) -> Lines:
    """The leading metric against the bytes sent so far; a method that sends nothing is a horizontal line."""
    kinds = kinds_of(study)
    metric, split = metric_of(study, kinds)
    lines: list[Series] = []
    for variant in study.variants:
        judge = judge_of(variant, kinds)
        found = line(variant, picker(judge, split, metric), sent, metric.axis_limits) if judge else None
        lines += [found] if found else []
    moving = [series for series in lines if max(series.x) > 0]
    low = min((x for series in moving for x in series.x if x > 0), default=1.0)
    high = max((max(series.x) for series in moving), default=1.0)
    level = [
        Series(series.name, [low, high], [series.y[-1]] * 2, dashed=True, like=series.like)
        for series in lines
        if max(series.x) == 0
    ]
    text = "Bytes on all links, both directions. " + ("Horizontal lines: methods that send nothing. " if level else "")
    title = f"{split.capitalize()} {metric.name} against bytes"
    order = {variant.name: k for k, variant in enumerate(study.variants)}
    both = sorted([*moving, *level], key=lambda series: order[series.name]) if moving else []
    return Lines(title, "bytes sent so far", f"{split} {metric.axis}", both, text + note(study), "bytes")


def sparsity(study: Study) -> Iterator[Panels | Table | Text | None]:
    """Zeros in the saved models, counted in their files; sizes of messages by round."""
    rows, any_zero = [], False
    for variant in study.finished:
        shares = [zeros(run.folder) for run in variant.runs]
        kinds = {kind: interval([share.get(kind) for share in shares], SHARE.limits) for kind in KINDS}
        any_zero |= any(found and found["mean"] >= 0.001 for found in kinds.values())
        config, parameters = variant.runs[0].config, (variant.runs[0].summary or {}).get("parameters", 0)
        codec = str(config.get("codec", ""))
        dense = parameters * VALUE_BYTES.get(codec, 4)
        cells = [Cell(interval_text(found, SHARE), found["mean"] if found else None) for found in kinds.values()]
        rows.append([variant.name, *cells, Cell(f"{parameters:,}", parameters), codec, Cell(size(dense), dense)])
    sizes = message_sizes(study)
    if any_zero or sizes is not None:
        columns = ["method", *(f"zeros: {kind}" for kind in KINDS), "parameters", "codec", "a dense model"]
        text = f"Parameters that are exactly zero in the saved models (of at most {NODES_OPENED} nodes per tier)."
        yield Table("Zeros in the models", columns, rows, text)
        yield sizes


def zeros(folder: Path) -> dict[str, float]:
    """The share of parameters that are zero by kind of model; several models are counted together."""
    from safetensors import SafetensorError, safe_open

    counts: dict[str, tuple[int, int]] = {}
    for path in sorted((folder / "models").rglob("*.safetensors")):
        check_result(folder, path.relative_to(folder).as_posix())
        none, total = counts.get(path.stem, (0, 0))
        try:
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118  not a dict
                    rows = file.get_slice(name)
                    values = rows[: min(NODES_OPENED, rows.get_shape()[0])]
                    none, total = none + int((values == 0).sum()), total + values.size
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        counts[path.stem] = none, total
    return {kind: none / total for kind, (none, total) in counts.items() if total}


def message_sizes(study: Study) -> Panels | None:
    """Bytes per round and participant by link, if a method has a codec that leaves out zeros."""
    if not any(str(v.runs[0].config.get("codec", "")).startswith(SPARSE) for v in study.variants):
        return None
    links = dict.fromkeys(link for v in study.variants for run in v.runs for r in run.history for link in r["bytes"])
    charts = []
    for link in links:
        found = [series for v in study.variants if (series := line(v, kilobytes(link))) is not None]
        lines = [series for series in found if any(series.y)]
        charts.append(Lines(link, "round", "kB per node and round", lines))
    text = "What a node below the link sends and receives in a round. The codecs sparse and paper leave out zeros. "
    return Panels("Size of messages by round", [each for each in charts if each.series], text + note(study))


def kilobytes(link: str) -> Pick:
    """A function that reads the kB per participant on a link from the record of a round."""

    def pick(record: Record) -> float | None:
        number = record.get("participants", {}).get(link.split("-")[-1])
        return sum(record["bytes"][link].values()) / number / 1000 if number and link in record["bytes"] else None

    return pick
