"""Callbacks for a run: a progress bar, the run folder, TensorBoard, MLflow."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from polytier._errors import missing
from polytier._text import size
from polytier.files.lock import FolderLock
from polytier.files.write import Appended, json_line
from polytier.method.call import Diverged
from polytier.runs import checkpoint
from polytier.runs.evaluate import metrics_of
from polytier.runs.folder import claim, metric_lines, reopen, write_end, write_start, write_state
from polytier.runs.loop import PATIENCE, Callback, Loop
from polytier.runs.read import score
from polytier.runs.read_files import CHECKPOINTS, DIVERGED, DONE, RUNNING, STOPPED, STORE
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
        self._epochs: list[int] | None = None  # of the stores, at the checkpoint before the last one

    def on_start(self, loop: Loop) -> None:
        if self._lock is None:
            self._lock = reopen(self.folder) if self.resumed else claim(self.folder)
        if not self.resumed and loop.round == 0 and rows_bytes(loop) > IN_FILES:
            loop.keep_in(self.folder / STORE)
        self._name = run_name(loop.context, loop.spec)
        write_start(self.folder, loop.spec.replace(rounds=loop.rounds), loop.context)
        write_state(self.folder, RUNNING, loop.context, loop.spec, round_=loop.round)
        self._write_rounds(loop)
        self.checkpoint(loop)

    def on_round(self, loop: Loop, record: dict[str, Any]) -> None:
        assert self._lines is not None
        if self._lines.intact:
            self._lines.append(json_line(record, self._name))
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
        if not self._lines.intact:
            self._write_rounds(loop)
        if loop.round < loop.rounds:
            reason = f"asked to stop after round {loop.round} of {loop.rounds}"
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
            write_state(self.folder, state, loop.context, loop.spec, reason, loop.round)

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


def figures(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a round, with names such as personal/test/loss."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from ((f"{key}/{name}", v) for name, v in figures(value))
        elif isinstance(value, int | float) and key != "round":
            yield key, value


class TensorBoard(Callback):
    """Writes the numbers of every round to a folder for `tensorboard --logdir FOLDER`.

    Args:
        folder: The folder for the event files. It is created when the run starts.

    Raises:
        ValueError: The package tensorboard is not installed.

    Examples:
        >>> callback = TensorBoard("runs/board")  # written when the run starts
    """

    def __init__(self, folder: str | Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from its own dependencies
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise missing("tensorboard") from None
        self._make, self._writer = lambda: SummaryWriter(str(folder)), None

    def on_start(self, loop: Loop) -> None:
        self._writer = self._make()

    def on_round(self, loop: Loop, record: dict[str, Any]) -> None:
        assert self._writer is not None
        for name, value in figures(record):
            self._writer.add_scalar(name, value, record["round"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow(Callback):
    """Logs a run to MLflow: settings and fields as parameters, the numbers of every round as metrics.

    Args:
        uri: Address of the tracking server, or a folder; by default the one that MLflow is configured with.
        experiment: Name of the experiment. It is created if it does not exist.

    Raises:
        ValueError: The package mlflow is not installed, or MLflow cannot open `uri`.

    Examples:
        >>> callback = MLflow("http://localhost:5000")  # connects when the run starts
    """

    def __init__(self, uri: str | None = None, experiment: str = "polytier") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from its own dependencies
            try:
                from mlflow import MlflowClient
                from mlflow.exceptions import MlflowException
            except ImportError:
                raise missing("mlflow") from None
            try:
                self._client = MlflowClient(uri)
            except MlflowException as error:
                raise ValueError(f"MLflow cannot open {uri or 'its default location'}: {error}") from None
        self.experiment, self.run_id = experiment, ""

    def on_start(self, loop: Loop) -> None:
        found = self._client.get_experiment_by_name(self.experiment)
        number = found.experiment_id if found else self._client.create_experiment(self.experiment)
        self.run_id = self._client.create_run(number).info.run_id
        config = loop.spec.replace(rounds=loop.rounds).values()
        for name, value in {**config, **config.pop("set")}.items():
            self._client.log_param(self.run_id, name, value)

    def on_round(self, loop: Loop, record: dict[str, Any]) -> None:
        for name, value in figures(record):
            self._client.log_metric(self.run_id, name, value, step=record["round"])

    def on_end(self, loop: Loop, run: Run) -> None:
        self._client.set_terminated(self.run_id)
        self.run_id = ""

    def close(self) -> None:
        if self.run_id:  # the run did not finish
            self._client.set_terminated(self.run_id, "FAILED")
