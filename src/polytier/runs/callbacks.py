"""What can watch a run: a progress bar, the run folder, TensorBoard, MLflow."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from polytier._errors import missing
from polytier._text import size
from polytier.method import mapped_memory
from polytier.runs import checkpoint
from polytier.runs.folder import claim, described, json_line, write_end, write_start, write_text
from polytier.runs.loop import PATIENCE, Callback, Training
from polytier.runs.read import score
from polytier.runs.run import Run

IN_FILES = 1 << 30  # bytes of rows at devices from which these are kept in files, not in memory and checkpoints


class RunFolder(Callback):
    """Writes the run folder: a line a round, checkpoints on the way, the results at the end.

    config  | settings for config.toml; by default what is known of a run made in Python
    resumed | the folder is there and the training was restored from it
    """

    def __init__(self, folder: str | Path, config: dict[str, Any] | None = None, resumed: bool = False) -> None:
        self.folder, self.config, self.resumed = Path(folder), config, resumed
        self.saved = -1  # the round of the last checkpoint, when it was written, and how long that took
        self.saved_at = self.cost = 0.0
        self._metrics: Any = None
        self._made: list[Path] = []  # folders that were not there before

    def on_start(self, training: Training) -> None:
        config = self.config or described(training.algorithm, training.settings, training.rounds)
        if not self.resumed:
            self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            claim(self.folder)
            if training.round == 0 and rows_bytes(training) > IN_FILES:
                training.keep_in(self.folder / mapped_memory.FOLDER)
        write_start(self.folder, config, training.context.topology)
        # the checkpoint's history: lines of later rounds, or half a line, are of a run that was cut short
        write_text(self.folder / "metrics.jsonl", "".join(map(json_line, training.history)))
        self._metrics = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")
        self.checkpoint(training)

    def on_round(self, training: Training, record: dict[str, Any]) -> None:
        self._metrics.write(json_line(record))
        self._metrics.flush()
        if training.round == 1 or time.perf_counter() - self.saved_at > PATIENCE * self.cost:
            self.checkpoint(training)

    def on_end(self, training: Training, run: Run) -> None:
        if self.saved != training.round:
            self.checkpoint(training)
        if training.round >= training.rounds:  # else it was interrupted and is to go on
            write_end(self.folder, run)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def checkpoint(self, training: Training) -> None:
        started = time.perf_counter()
        checkpoint.save(self.folder / "checkpoints", training.round, *training.snapshot())
        for kept in training.stores:
            kept.forget()
        self.saved, self.saved_at = training.round, time.perf_counter()
        self.cost = self.saved_at - started

    def discard(self) -> None:
        """Remove what a run wrote that could not start, and the folders made for it."""
        self.close()
        if self._metrics is None or self.resumed:
            return
        shutil.rmtree(self.folder)
        for parent in self._made[1:]:
            if not any(parent.iterdir()):
                parent.rmdir()


def rows_bytes(training: Training) -> int:
    """A model for every device."""
    parts = training.context.parts
    return sum(p.topology.size(p.topology.leaf) * p.objective.dimension * p.objective.dtype.itemsize for p in parts)


class Progress(Callback):
    """A bar on a terminal; nothing elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bar: Any = None

    def on_start(self, training: Training) -> None:
        from rich import progress

        if not self.console.is_terminal:
            return
        self._bar = progress.Progress(
            progress.TextColumn("round {task.completed}/{task.total}"), progress.BarColumn(None),
            progress.TextColumn("{task.fields[shown]}"), progress.TimeRemainingColumn(), console=self.console,
        )  # fmt: skip
        self._bar.add_task("", total=training.rounds, completed=training.round, shown="")
        self._bar.start()

    def on_round(self, training: Training, record: dict[str, Any]) -> None:
        if self._bar is None:
            return
        parts = [f"{m} {score(record[m].get('test'))}" for m in ("personal", "global") if m in record]
        total = sum(sum(ways.values()) for ways in training.ledger.total().values())
        fields = {"shown": "  ".join([*parts, size(total)])} if parts else {}
        self._bar.update(self._bar.task_ids[0], completed=training.round, **fields)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def figures(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a round, by names such as personal/test/accuracy."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from ((f"{key}/{name}", v) for name, v in figures(value))
        elif isinstance(value, int | float) and key != "round":
            yield key, value


class TensorBoard(Callback):
    """Writes every round's numbers for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own dependencies
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise missing("tensorboard") from None
        self._make, self._writer = lambda: SummaryWriter(str(folder)), None

    def on_start(self, training: Training) -> None:
        self._writer = self._make()

    def on_round(self, training: Training, record: dict[str, Any]) -> None:
        assert self._writer is not None
        for name, value in figures(record):
            self._writer.add_scalar(name, value, record["round"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow(Callback):
    """Logs a run to an MLflow server or folder: fields and settings as parameters, every round's numbers."""

    def __init__(self, uri: str | None = None, experiment: str = "polytier") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own dependencies
            try:
                from mlflow import MlflowClient
                from mlflow.exceptions import MlflowException
            except ImportError:
                raise missing("mlflow") from None
            try:
                self._client = MlflowClient(uri)
            except MlflowException as error:
                raise ValueError(f"MLflow does not open {uri or 'its default place'}: {error}") from None
        self.experiment, self.run_id = experiment, ""

    def on_start(self, training: Training) -> None:
        found = self._client.get_experiment_by_name(self.experiment)
        number = found.experiment_id if found else self._client.create_experiment(self.experiment)
        self.run_id = self._client.create_run(number).info.run_id
        config = described(training.algorithm, training.settings, training.rounds)
        for name, value in {**config, **config.pop("set")}.items():
            self._client.log_param(self.run_id, name, value)

    def on_round(self, training: Training, record: dict[str, Any]) -> None:
        for name, value in figures(record):
            self._client.log_metric(self.run_id, name, value, step=record["round"])

    def on_end(self, training: Training, run: Run) -> None:
        self._client.set_terminated(self.run_id)
        self.run_id = ""

    def close(self) -> None:
        if self.run_id:  # it did not come to its end
            self._client.set_terminated(self.run_id, "FAILED")
