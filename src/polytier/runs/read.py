"""Reads the files of a run folder for reports and other commands: `RunRecord`. Does not import torch.

A folder of version 0.1 does not name its leading metric: it is the accuracy if there is one, otherwise the loss.
"""

from __future__ import annotations

import csv
import io
import logging
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from polytier.files import lock
from polytier.files.read import CHECKED_LINE, Damaged, digest_of, read_bytes, read_json, read_line
from polytier.models.metrics import ACCURACY, LOSS, MetricInfo, describe
from polytier.runs.csv_cells import from_cell
from polytier.runs.spec import check_spec, identity

log = logging.getLogger("polytier")

# The format of a run folder. 1: version 0.1, without state.json; 2: without digests; 3: every file can be checked
FORMAT = 3
STATE, SUMMARY = "state.json", "summary.json"
CHECKPOINTS, STORE = "checkpoints", "store"  # folders: checkpoints, and rows that are too large for them
STATES = RUNNING, DONE, STOPPED, DIVERGED = "running", "done", "stopped", "diverged"
KINDS = ("personal", "team", "global")  # kinds of models that a run may have
JUDGES = ("personal", "global", "team")  # a method is judged by the first of these kinds that it has

Record = dict[str, Any]


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run folder. Each file is read when it is first used.

    Args:
        folder: The run folder; the run may still be in progress.

    Example:
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
        return self.state["state"] == RUNNING and not lock.is_locked(self.folder)

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

    Example:
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


# -- files --------------------------------------------------------------------------------------------

# settings that readers use, with the types they need
CONFIG = {"algorithm": str, "data": str, "model": str, "rounds": int, "seed": int, "set": dict}


def read_config(folder: Path) -> Record:
    """The configuration of a run, with its versions."""
    path = folder / "config.toml"
    if not folder.is_dir():
        raise ValueError(f"the run folder {folder} does not exist; `polytier run` makes one, by default in runs/")
    if not path.is_file():
        ours = (folder / lock.FILE).exists() or not any(folder.iterdir())
        started = ours and not any((folder / CHECKPOINTS).glob("round-*"))
        nothing = ": nothing was saved before the run stopped; start it again" if started else ""
        raise ValueError(f"{folder} is not a run folder: it has no config.toml{nothing}")
    try:
        values = tomllib.loads(read_bytes(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} cannot be read: {error}; restore it, or repeat the run") from None
    if "algorithm" not in values:
        raise Damaged(f"{path} is not what a run writes: it names no algorithm; restore it, or repeat the run")
    for name, kind in CONFIG.items():
        if not isinstance(values.get(name, kind()), kind):
            raise Damaged(f"{path}: {name} = {values[name]!r} is not what a run writes; restore it, or repeat the run")
    return values


def repair(folder: Path) -> str:
    """Advice for a damaged file that a run can write again."""
    return f"`polytier resume {folder}` writes it again from the last checkpoint"


def read_own(folder: Path, name: str) -> Record:
    """The content of a JSON file that the run can write again."""
    try:
        return read_json(folder / name)
    except Damaged as error:
        raise Damaged(f"{error}; {repair(folder)}") from None


def check_result(folder: Path, name: str) -> Path:
    """The path of a result, after its content was compared with the digest in summary.json.

    Raises:
        Damaged: The file is missing or does not have the content that was written.
    """
    digest, path = ((read_summary(folder) or {}).get("files") or {}).get(name), folder / name
    try:
        if digest is None or digest_of(path) == digest:
            return path
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}; {repair(folder)}") from None
    raise Damaged(f"{path} is damaged: its content does not match its digest; {repair(folder)}")


def read_state(folder: Path) -> Record:
    """The state of a run: `state` (one of `STATES`), `reason`, `round`, `format`."""
    if (folder / STATE).exists():
        found = read_own(folder, STATE)
        if found.get("state") not in STATES:
            raise Damaged(f"{folder / STATE} is damaged: it names no state; {repair(folder)}")
        return found
    summary = read_summary(folder)
    known = {"state": STOPPED, "round": 0} if summary is None else {"state": DONE, "round": summary.get("rounds", 0)}
    return {"format": 1, "reason": "", **known}


def read_summary(folder: Path) -> Record | None:
    """The summary, or None if the run is not finished."""
    path, state = folder / SUMMARY, read_own(folder, STATE) if (folder / STATE).exists() else {}
    done = state.get("state") == DONE
    if not path.exists():
        if done:
            raise Damaged(f"{path} is missing, but by {folder / STATE} the run is done; {repair(folder)}")
        return None
    found = read_own(folder, SUMMARY)
    if not isinstance(found.get("rounds", 0), int):
        raise Damaged(f"{path} is damaged: rounds = {found['rounds']!r}; {repair(folder)}")
    if other_run(found, state) or (done and found.get("rounds") != state.get("round")):
        raise Damaged(f"{path} is not of the run that {folder / STATE} describes; {repair(folder)}")
    return found


def other_run(found: Record, state: Record) -> bool:
    """Whether the content of a file is not of the run that state.json describes."""
    return "run" in found and "run" in state and found["run"] != state["run"]


def finished_rounds(folder: Path, wanted: int) -> int | None:
    """The rounds of a run that has completed at least `wanted` rounds and whose files are whole; otherwise None."""
    try:
        summary = read_summary(folder)
        if summary is None or summary.get("rounds", 0) < wanted:
            return None
        state = read_state(folder)
        if state["state"] == RUNNING or (state["state"] == STOPPED and state["round"] <= summary["rounds"]):
            return None  # the last thing that a run writes is the state that it is done
        for name in summary.get("files") or ():
            check_result(folder, name)
        read_tiers(folder)
        read_history(folder)
        check_checkpoint(folder / CHECKPOINTS / f"round-{summary['rounds']:07d}")
        return None if settings_changed(folder, state) else summary["rounds"]
    except Damaged as error:
        log.warning("%s", error)
        return None


def settings_changed(folder: Path, state: Record) -> bool:
    """Whether config.toml has other settings than the run was started with; `resume` says which."""
    values = {name: value for name, value in read_config(folder).items() if name != "versions"}
    try:
        return "settings" in state and identity(check_spec(values).values()) != state["settings"]
    except ValueError:
        return True


def check_checkpoint(place: Path) -> None:
    """Raise `Damaged` if a checkpoint is there and does not have the content that was written."""
    if not place.exists():
        return
    facts = place / "facts.json"
    for name, digest in (read_json(facts).get("files") or {}).items():
        try:
            if digest_of(place / Path(name).name) != digest:
                raise Damaged(f"{place / name} is damaged: its content does not match its digest")
        except OSError as error:
            raise Damaged(f"{place / name} cannot be read: {error.strerror}") from None


def read_tiers(folder: Path) -> list[Record]:
    """The tiers in topology.json, the server first."""
    whole = read_own(folder, "topology.json")
    if other_run(whole, read_state(folder)):
        path = folder / "topology.json"
        raise Damaged(f"{path} is not of the run that {folder / STATE} describes; {repair(folder)}")
    found = whole.get("tiers")
    if not isinstance(found, list) or not all(isinstance(tier, dict) and "ids" in tier for tier in found) or not found:
        raise Damaged(f"{folder / 'topology.json'} is damaged: it contains no tree; {repair(folder)}")
    return found


def read_history(folder: Path) -> list[Record]:
    """One record per round. An incomplete last line is left out."""
    return read_rounds(folder)[0]


def read_rounds(folder: Path) -> tuple[list[Record], bool]:
    """One record per round, and whether the last line is complete; a killed run may leave an incomplete one.

    Raises:
        Damaged: Another line does not have the content that was written, or rounds of a finished run are missing.
    """
    history, whole = read_lines(folder)
    summary = read_summary(folder)
    least = summary["rounds"] if summary is not None and "files" in summary else saved_rounds(folder)
    if len(history) < least:
        path = folder / "metrics.jsonl"
        raise Damaged(f"{path} is damaged: it has {len(history)} rounds of at least {least}; {repair(folder)}")
    return history, whole


def saved_rounds(folder: Path) -> int:
    """The round of the newest checkpoint, 0 before format 3. The line of a round is written before its checkpoint."""
    if not (folder / STATE).exists() or (read_state(folder).get("format") or 0) < FORMAT:
        return 0
    return max((int(path.name.removeprefix("round-")) for path in (folder / CHECKPOINTS).glob("round-*")), default=0)


def read_lines(folder: Path) -> tuple[list[Record], bool]:
    """The lines of metrics.jsonl, and whether the last one is complete."""
    path, history = folder / "metrics.jsonl", []
    if not path.exists():
        return [], True
    state = read_state(folder)
    checked, owner = (state.get("format") or 0) >= FORMAT, state.get("run", "")
    try:
        lines = read_bytes(path).decode("utf-8", "surrogateescape").split("\n")
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}; {repair(folder)}") from None
    for number, line in enumerate(lines, 1):
        try:
            record = read_line(line, checked, owner)
            if not {"round", "bytes"} <= set(record) or (checked and record["round"] != number):
                raise Damaged("it is not the record of this round")
            history.append(record)
        except Damaged as error:
            begun = number == len(lines) and not CHECKED_LINE.match(line)
            if begun:  # nothing, or the beginning of a line, follows the last end of a line
                return history, not line
            text = f"line {number} of {path} is damaged: {error}, or {folder / STATE} is of another run"
            raise Damaged(f"{text}; {repair(folder)}") from None
    return history, True


def read_devices(folder: Path) -> dict[str, list[str]]:
    """The columns of devices.csv. They are cached, so callers must not change them."""
    path = folder / "devices.csv"
    try:
        stat = path.stat()
        return read_columns(folder, stat.st_mtime_ns, stat.st_size)
    except (OSError, csv.Error) as error:
        raise Damaged(f"{path} cannot be read: {error}; {repair(folder)}") from None


@lru_cache(64)
def read_columns(folder: Path, *version: int) -> dict[str, list[str]]:
    """The columns of devices.csv, cached until the file changes."""
    path = check_result(folder, "devices.csv")
    names, *rows = csv.reader(io.StringIO(read_bytes(path).decode(errors="replace"), newline=""))
    if any(len(row) != len(names) for row in rows) or "id" not in names:
        raise Damaged(f"{path} is damaged: a line has too few or too many fields, or there is no column id")
    columns = map(list, zip(*(map(from_cell, row) for row in rows), strict=True)) if rows else ([] for _ in names)
    return dict(zip(map(from_cell, names), columns, strict=True))
