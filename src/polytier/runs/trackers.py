"""Callbacks that send the numbers of a run to other programs: TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polytier._errors import missing
from polytier.runs.loop import Callback, Loop
from polytier.runs.run import Run


def figures(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a round, with names such as personal/test/loss."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from ((f"{key}/{name}", v) for name, v in figures(value))
        elif isinstance(value, int | float) and key != "round":
            yield key, value


def settings_of(loop: Loop) -> dict[str, Any]:
    """The settings of a run and the fields of its method, by name."""
    config = loop.spec.replace(rounds=loop.rounds).values()
    return {**config, **config.pop("set")}


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
        for name, value in settings_of(loop).items():
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


class WandB(Callback):
    """Logs a run to Weights & Biases: settings and fields as its config, the numbers of every round as metrics.

    Args:
        project: Name of the project.
        **options: Other arguments of `wandb.init`, such as `name`, `group` or `mode="offline"`.

    Raises:
        ValueError: The package wandb is not installed.

    Examples:
        >>> callback = WandB("digits", mode="offline")  # connects when the run starts
    """

    def __init__(self, project: str = "polytier", **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from its own dependencies
            try:
                import wandb
            except ImportError:
                raise missing("wandb") from None
        self._start = lambda config: wandb.init(project=project, config=config, **options)
        self._run: Any = None

    def on_start(self, loop: Loop) -> None:
        self._run = self._start(settings_of(loop))

    def on_round(self, loop: Loop, record: dict[str, Any]) -> None:
        self._run.log(dict(figures(record)), step=record["round"])

    def on_end(self, loop: Loop, run: Run) -> None:
        self._run.finish()
        self._run = None

    def close(self) -> None:
        if self._run is not None:  # the run did not finish
            self._run.finish(exit_code=1)
            self._run = None
