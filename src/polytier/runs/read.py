"""A run folder as reports and other commands see it: `RunRecord`, and the values in its records. Does not import torch.

A folder of version 0.1 does not name its leading metric: it is the accuracy if there is one, otherwise the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from polytier.models.metrics import ACCURACY, LOSS, MetricInfo, describe
from polytier.runs.read_files import (
    FORMAT,
    KINDS,
    Record,
    is_abandoned,
    read_config,
    read_devices,
    read_network,
    read_rounds,
    read_state,
    read_summary,
    read_tiers,
)
from polytier.runs.spec import identity

JUDGES = ("personal", "team", "global")  # a method is judged by the first of these kinds that it has


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run folder. Each file is read when it is first used.

    Args:
        folder: The run folder; the run may still be in progress.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = '{"round": 1, "bytes": {}, "global": {"test": {"loss": 0.5, "accuracy": 0.8}}}'
        ...     _ = (Path(folder) / "metrics.jsonl").write_text(text)
        ...     record = RunRecord(Path(folder))
        ...     record.rounds, record.metric.name, record.metric.text(record.value(record.history[0]["global"]["test"]))
        (1, 'accuracy', '80.00 %')
    """

    folder: Path

    # -- files ---------------------------------------------------------------------------------------

    @cached_property
    def config(self) -> Record:
        """config.toml: the settings of the run, and the versions it was made with."""
        return read_config(self.folder)

    @cached_property
    def summary(self) -> Record | None:
        """summary.json: the results; None if the run is not finished."""
        return read_summary(self.folder)

    @cached_property
    def _rounds(self) -> tuple[list[Record], bool]:
        return read_rounds(self.folder)

    @property
    def history(self) -> list[Record]:
        """metrics.jsonl: one record per round."""
        return self._rounds[0]

    @property
    def whole(self) -> bool:
        """Whether the last line of metrics.jsonl is complete."""
        return self._rounds[1]

    @cached_property
    def devices(self) -> dict[str, list[str]]:
        """The columns of devices.csv; empty until the run is finished."""
        there = self.summary is not None or (self.folder / "devices.csv").exists()
        return read_devices(self.folder) if there else {}

    @cached_property
    def tiers(self) -> list[Record]:
        """topology.json: for each tier its name, the nodes' ids and their parents, the server first."""
        there = (self.folder / "topology.json").exists() or self.state["format"] >= FORMAT
        return read_tiers(self.folder) if there else []

    @cached_property
    def network(self) -> Record | None:
        """present.json and absences.csv: who is there, and who was absent; None unless it is a run over a network."""
        return read_network(self.folder)

    @cached_property
    def state(self) -> Record:
        """state.json: whether the run is running, done, stopped or diverged, and why."""
        return read_state(self.folder)

    @cached_property
    def changed(self) -> list[str]:
        """The settings that somebody has changed in config.toml since the run was started."""
        before, now = self.state.get("settings"), identity(self.config)
        return [name for name in {**(before or {}), **now} if before is not None and before.get(name) != now.get(name)]

    @property
    def abandoned(self) -> bool:
        """Whether the process of a run that is not finished no longer exists on this machine."""
        return is_abandoned(self.folder)

    # -- their content -------------------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.config.get("seed", 0)

    @property
    def rounds(self) -> int:
        """Number of rounds completed."""
        return self.history[-1]["round"] if self.history else 0

    @property
    def wanted(self) -> int:
        """Number of rounds requested."""
        return self.config.get("rounds", 0)

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return self.summary is not None and self.summary["rounds"] >= self.wanted

    @cached_property
    def metrics(self) -> tuple[MetricInfo, ...]:
        """The metrics of the run, the leading one first."""
        if self.summary and self.summary.get("metrics"):
            return tuple(map(describe, self.summary["metrics"]))
        asked = self.state.get("metrics") or asked_in(self.folder)
        return tuple(map(describe, asked)) or (ACCURACY if has_accuracy(self.summary) else leading(self.history),)

    @property
    def metric(self) -> MetricInfo:
        """The leading metric, used for best rounds, tables, charts and comparisons."""
        return self.metrics[0]

    @property
    def judge(self) -> str:
        """The kind of model that the method is judged by, from its results or the last evaluated round."""
        return judge_of(self.summary or self.last)

    @property
    def last(self) -> Record:
        """The record of the last evaluated round; empty if there is none."""
        return next((r for r in reversed(self.history) if any(kind in r for kind in KINDS)), {})

    def value(self, figures: Mapping[str, Any] | None, suffix: str = "") -> float | None:
        """The leading metric among the figures of a model.

        Args:
            figures: Of one model on one split.
            suffix: "", "_std", "_worst_decile" or "_pooled".
        """
        return (figures or {}).get(f"{self.metric.name}{suffix}")

    def by_device(self, kind: str | None = None, metric: MetricInfo | None = None) -> dict[str, float]:
        """The test value of every device that has one, by its id; the mean of several models.

        Args:
            kind: "personal", "team" or "global"; by default the one that the method is judged by.
            metric: By default the leading one.
        """
        ending = f"_{kind or self.judge}_{(metric or self.metric).name}"
        own = [values for name, values in self.devices.items() if f"_{name}".endswith(ending)]
        rows = ([float(value) for value in row if value] for row in zip(*own, strict=True))
        ids = self.devices["id"] if own else []
        return {name: fmean(values) for name, values in zip(ids, rows, strict=True) if values}

    def traffic(self) -> dict[str, dict[str, int]]:
        """Bytes by link and direction, of all rounds."""
        if self.summary is not None and self.finished:
            return self.summary["traffic"]
        total: dict[str, dict[str, int]] = {}
        for record in self.history:
            for link, ways in record["bytes"].items():
                sums = total.setdefault(link, dict.fromkeys(ways, 0))
                for way, amount in ways.items():
                    sums[way] += amount
        return total


# -- metrics ------------------------------------------------------------------------------------------


def asked_in(folder: Path) -> list[str]:
    """The metrics that config.toml names; empty if it names none."""
    asked = read_config(folder).get("metric", ()) if (folder / "config.toml").is_file() else ()
    return asked.split(",") if isinstance(asked, str) else list(asked)


def leading(history: Sequence[Record]) -> MetricInfo:
    """The leading metric of a run that does not name it: the accuracy if there is one, otherwise the loss."""
    return ACCURACY if any(has_accuracy(own) for record in history for own in record.values()) else LOSS


def has_accuracy(figures: Any) -> bool:
    """Whether the values of several models or splits include an accuracy."""
    return isinstance(figures, dict) and any(isinstance(own, dict) and ACCURACY.name in own for own in figures.values())


def shared_metrics(records: Sequence[RunRecord]) -> tuple[MetricInfo, ...]:
    """The metrics of the first run that all of these runs have, in its order; the loss if there are none.

    Runs without any evaluated round are left out.
    """
    first, *others = [record.metrics for record in records if record.summary or record.last] or [(LOSS,)]
    names = [{metric.name for metric in metrics} for metrics in others]
    return tuple(metric for metric in first if all(metric.name in each for each in names)) or (LOSS,)


def judge_of(figures: Mapping[str, Any]) -> str:
    """The kind of model that a method is judged by, given the figures of those it has."""
    return next((kind for kind in JUDGES if figures.get(kind)), JUDGES[0])


def score(figures: Mapping[str, Any] | None, metric: MetricInfo, suffix: str = "") -> str:
    """The value of a metric as text, from the figures of one model.

    Args:
        figures: Of one model on one split; None if there are none.
        metric: The metric, usually the leading one.
        suffix: "", "_std", "_worst_decile" or "_pooled".

    Examples:
        >>> score({"loss": 0.5, "accuracy": 0.8}, ACCURACY)
        '80.00 %'
        >>> score(None, ACCURACY)
        '-'
    """
    return metric.text((figures or {}).get(f"{metric.name}{suffix}"))


def bytes_until(
    history: Sequence[Record],
    level: float,
    model: str = "personal",
    link: str | None = None,
    metric: MetricInfo | None = None,
) -> tuple[int, int] | None:
    """The first evaluated round in which a model's test value reaches a level, and the bytes sent until then.

    Args:
        history: One record per round.
        level: The value to reach, as it is in the files (0.9, not 90 %), from below or above as the metric says.
        model: "personal", "team" or "global".
        link: Count one link only, such as "team-device"; by default all, both directions.
        metric: By default the one that the history is judged by.

    Returns:
        Round and bytes; None if the level is never reached.
    """
    metric = metric or leading(history)
    if metric.unit == "%" and not 0 <= level <= 1:
        raise ValueError(f"{metric.name} is a fraction such as 0.9; got {level}")
    figures = [
        {
            k: v["test"][metric.name]
            for k, v in record.items()
            if isinstance(v, dict) and metric.name in v.get("test", ())
        }
        for record in history
    ]
    models, links = sorted(set().union(*figures)), sorted(set().union(*(record["bytes"] for record in history)))
    for what, name, there in (("model", model, models), ("link", link, links)):
        if there and name is not None and name not in there:
            raise ValueError(f"the history has no {what} {name!r}; available: {', '.join(there)}")
    sent = 0
    for record, found in zip(history, figures, strict=True):
        sent += sum(sum(ways.values()) for name, ways in record["bytes"].items() if link in (None, name))
        value = found.get(model)
        if value is not None and metric.sign * value >= metric.sign * level:
            return record["round"], sent
    return None
