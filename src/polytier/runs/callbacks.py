"""Callbacks for a run: the run folder, a progress bar, early stopping."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from polytier._errors import unknown
from polytier._text import size
from polytier.files.lock import FolderLock
from polytier.files.write import Appended, json_line
from polytier.method.call import Diverged
from polytier.models.metrics import LOSS, Metric
from polytier.runs import checkpoint
from polytier.runs.evaluate import metrics_of
from polytier.runs.folder import claim, metric_lines, reopen, write_end, write_start, write_state
from polytier.runs.loop import PATIENCE, Callback, Loop
from polytier.runs.read import judge_of, score
from polytier.runs.read_files import CHECKPOINTS, DIVERGED, DONE, KINDS, RUNNING, STOPPED, STORE
from polytier.runs.run import Run
from polytier.runs.snapshot import run_name

log = logging.getLogger("polytier")
IN_FILES = 1 << 30  # if the devices' rows have more bytes, they are kept in files instead of in memory and checkpoints


class RunFolder(Callback):
    """Writes the run folder: a line per round, checkpoints during training, and the results at the end.

    Args:
        folder: Path of the run folder. It must be new or empty, unless `resumed` is True.
        resumed: Whether the run was restored from a checkpoint in this folder.
        lock: The lock of the folder, if the caller has it already; it is released when the run ends.

    Raises:
        ValueError: When the run starts, if the folder is not empty, is used by another run, or cannot be created.

    Examples:
        >>> import polytier, tempfile
        >>> federation = polytier.build_federation("digits", devices=8, teams=2)
        >>> folder = tempfile.mkdtemp()
        >>> run = polytier.train(polytier.FedAvg(device_steps=2), federation, "mclr", rounds=2,
        ...                      callbacks=[polytier.RunFolder(folder)])
        >>> polytier.Run.load(folder).rounds
        2
    """

    def __init__(self, folder: str | Path, resumed: bool = False, lock: FolderLock | None = None) -> None:
        self.folder, self.resumed = Path(folder), resumed
        self.saved = -1  # the round of the last checkpoint, when it was written, and how long that took
        self.saved_at = self.cost = 0.0
        self._lock, self._name = lock, ""
        self._lines: Appended | None = None
        self._written = 0  # complete lines of metrics.jsonl
        self._epochs: list[int] | None = None  # of the stores, at the checkpoint before the last one

    def on_start(self, loop: Loop) -> None:
        if self._lock is None:
            self._lock = reopen(self.folder) if self.resumed else claim(self.folder)
        if not self.resumed and loop.round == 0 and rows_bytes(loop) > IN_FILES:
            loop.keep_in(self.folder / STORE)
        self._name = run_name(loop.context, loop.spec)
        write_start(self.folder, loop.spec.replace(rounds=loop.rounds), loop.context)
        write_state(self.folder, RUNNING, loop.context, loop.spec, round_=loop.round)
        checkpoint.set_aside_after(self.folder / CHECKPOINTS, loop.round)
        self._write_rounds(loop)
        self.checkpoint(loop)

    def on_round(self, loop: Loop, record: dict[str, Any]) -> None:
        assert self._lines is not None
        if self._lines.intact:
            self._lines.append(json_line(record, self._name))
            self._written += 1
        else:
            log.warning("%s was changed by another program during the run; it is written again", self._lines.path)
            self._write_rounds(loop)
        if loop.round == 1 or time.perf_counter() - self.saved_at > PATIENCE * self.cost:
            self.checkpoint(loop)

    def on_end(self, loop: Loop, run: Run) -> None:
        assert self._lines is not None
        if self.saved != loop.round:
            self.checkpoint(loop)
        self._restore_start(loop)
        if loop.stop_reason or not self._lines.intact:  # a run that stops evaluates its last round afterwards
            self._write_rounds(loop)
        if loop.round < loop.rounds:
            if loop.stop_reason:
                write_end(self.folder, run)
            reason = loop.stop_reason or f"asked to stop after round {loop.round} of {loop.rounds}"
            write_state(self.folder, STOPPED, loop.context, loop.spec, reason, loop.round)
            return
        write_end(self.folder, run)
        write_state(self.folder, DONE, loop.context, loop.spec, round_=loop.round)

    def on_error(self, loop: Loop, error: BaseException) -> None:
        if self._lines is None:  # the folder was not written yet
            return
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        with suppress(OSError):  # a full disk may be the cause of the error
            state = DIVERGED if isinstance(error, Diverged) else STOPPED
            write_state(self.folder, state, loop.context, loop.spec, reason, loop.round, self._written)

    def close(self) -> None:
        with suppress(OSError):  # the rounds are in the checkpoint too
            if self._lines is not None:
                self._lines.close()
        self._lines = None
        if self._lock is not None:
            self._lock.release()

    def checkpoint(self, loop: Loop) -> None:
        """Write a checkpoint of the current round and record how long that took."""
        started = time.perf_counter()
        tensors, facts = loop.snapshot()
        checkpoint.save(self.folder / CHECKPOINTS, loop.round, tensors, facts)
        for store, epoch in zip(loop.stores, self._epochs or (), strict=False):
            store.forget(epoch)  # journals that only checkpoints before the last two need
        self._epochs = facts["epochs"]
        self.saved, self.saved_at = loop.round, time.perf_counter()
        self.cost = self.saved_at - started

    def _write_rounds(self, loop: Loop) -> None:
        """Write metrics.jsonl anew: it may have lines of later rounds than the checkpoint, or an incomplete one."""
        if self._lines is not None:
            self._lines.close()
        self._lines = Appended(self.folder / "metrics.jsonl", metric_lines(loop.history, self._name))
        self._written = len(loop.history)

    def _restore_start(self, loop: Loop) -> None:
        """Write config.toml and topology.json again if another program has removed them."""
        missing = [name for name in ("config.toml", "topology.json") if not (self.folder / name).is_file()]
        if missing:
            log.warning("%s of %s was removed during the run; it is written again", " and ".join(missing), self.folder)
            write_start(self.folder, loop.spec.replace(rounds=loop.rounds), loop.context)


def rows_bytes(loop: Loop) -> int:
    """Bytes of one model per device, over all models of the run."""
    parts = loop.context.parts
    return sum(p.topology.size(p.topology.leaf) * p.objective.dimension * p.objective.dtype.itemsize for p in parts)


class Progress(Callback):
    """Shows a progress bar with the leading metric if the output is a terminal; otherwise nothing.

    Args:
        console: The `rich` console to write to; by default standard error.

    Examples:
        >>> import polytier
        >>> federation = polytier.build_federation("digits", devices=8, teams=2)
        >>> method = polytier.FedAvg(device_steps=2)
        >>> run = polytier.train(method, federation, "mclr", rounds=1, callbacks=[polytier.Progress()])
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bar: Any = None

    def on_start(self, loop: Loop) -> None:
        from rich import progress

        if not self.console.is_terminal:
            return
        self._bar = progress.Progress(
            progress.TextColumn("round {task.completed}/{task.total}"),
            progress.BarColumn(None),
            progress.TextColumn("{task.fields[shown]}"),
            progress.TimeRemainingColumn(),
            console=self.console,
        )
        self._bar.add_task("", total=loop.rounds, completed=loop.round, shown="")
        self._bar.start()

    def on_round(self, loop: Loop, record: dict[str, Any]) -> None:
        if self._bar is None:
            return
        metric = metrics_of(loop.context)[0]
        parts = [f"{m} {score(record[m].get('test'), metric)}" for m in ("personal", "global") if m in record]
        total = sum(sum(ways.values()) for ways in loop.ledger.total().values())
        fields = {"shown": "  ".join([metric.name, *parts, size(total)])} if parts else {}
        self._bar.update(self._bar.task_ids[0], completed=loop.round, **fields)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class EarlyStopping(Callback):
    """Ends a run when a metric has not improved for some evaluations.

    A run that was interrupted and resumed stops in the same round as an uninterrupted one, because earlier rounds are
    taken from the history of the run.

    Args:
        patience: Number of evaluations in a row without an improvement, after which the run ends.
        metric: The name of a metric of the run; by default the leading one.
        tier: "personal", "team" or "global"; by default the first of personal, global and team that the method has.
        split: The samples on which the metric is measured: "validation", "train" or "test". Results on test samples
            that also decide when to stop are too good.

    Raises:
        ValueError: `patience` is below 1; or, when the run is evaluated, it has no such metric, tier or split.

    Examples:
        >>> import polytier
        >>> federation = polytier.build_federation("digits", devices=8, teams=2, split=(3, 1, 1))
        >>> method = polytier.FedAvg(device_lr=0.5, device_steps=20)
        >>> stopping = polytier.EarlyStopping(patience=3)
        >>> polytier.train(method, federation, "mclr", rounds=100, callbacks=[stopping]).rounds < 100
        True
    """

    def __init__(
        self, patience: int = 10, metric: str | None = None, tier: str | None = None, split: str = "validation"
    ) -> None:
        if patience < 1:
            raise ValueError(f"patience {patience} is too small; give the number of evaluations to wait, 1 or more")
        self.patience, self.metric, self.tier, self.split = patience, metric, tier, split
        self.best: float | None = None
        self.waited = 0  # evaluations since the best one
        self._best_text = "no value was measured"

    def on_start(self, loop: Loop) -> None:
        self.best, self.waited = None, 0
        for record in loop.history:
            self._look(loop, record)
        self._stop_if_due(loop)

    def on_round(self, loop: Loop, record: dict[str, Any]) -> None:
        self._look(loop, record)
        self._stop_if_due(loop)

    def _look(self, loop: Loop, record: dict[str, Any]) -> None:
        """Count an evaluation; a round without one is ignored."""
        if not any(kind in record for kind in KINDS):
            return
        metric = metrics_of(loop.context)[0] if self.metric is None else self._named(loop)
        tier = self.tier or judge_of(record)
        value = self._value(record, tier, metric.name)
        if value is not None and (self.best is None or metric.sign * value > metric.sign * self.best):
            self.best, self.waited = value, 0
            self._best_text = f"{tier} {metric.name} on {self.split} samples has not improved on {metric.text(value)}"
        else:
            self.waited += 1

    def _stop_if_due(self, loop: Loop) -> None:
        if self.waited >= self.patience:
            loop.stop(f"{self._best_text} for {self.waited} evaluations")

    def _named(self, loop: Loop) -> Metric:
        """The metric of the given name; the loss is always measured."""
        known = {metric.name: metric for metric in (*metrics_of(loop.context), LOSS)}
        if self.metric not in known:
            raise unknown("metric of this run", str(self.metric), list(known))
        return known[self.metric]

    def _value(self, record: dict[str, Any], tier: str, metric: str) -> float | None:
        """The value in the record of a round; None if it is undefined."""
        tiers = [name for name in record if name in (*KINDS, self.tier)]
        if tier not in tiers:
            raise unknown("model of tier", tier, tiers)
        if self.split not in record[tier]:
            there = f"the data have no {self.split!r} samples; available: {', '.join(record[tier])}"
            raise ValueError(f"EarlyStopping: {there}; give split=, or set validation samples aside (split 3:1:1)")
        return record[tier][self.split].get(metric)
