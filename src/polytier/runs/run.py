"""The result of training: the models, their metrics, and how to load and save them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from polytier.data.batches import Batches
from polytier.data.federation import Federation
from polytier.messages.ledger import Ledger
from polytier.method.algorithm import Algorithm
from polytier.method.call import Call, Clock
from polytier.method.context import Context
from polytier.method.execute import execute
from polytier.method.memory import Memory
from polytier.runs.evaluate import (
    Evaluation,
    personal,
    personal_models,
    published_rows,
    shared_rows,
    statistics_by_kind,
)
from polytier.runs.spec import RunSpec
from polytier.stack.kept_features import features_of
from polytier.stack.rows import Rows
from polytier.tree.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

    from polytier.runs.loop import Loop
    from polytier.tree.collaboration import Collaboration


class Scaled(nn.Module):
    """A model that takes inputs as they are in the data (images 0 .. 255) and scales them as in training."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.to(self.scale.dtype) * self.scale + self.shift)


@dataclass(frozen=True)
class Run:
    """The result of a run. `polytier.train` and `Run.load` return one.

    Attributes:
        spec: The complete settings of the run.
        context: The method, tree, objective, data and ledger that the programs of the run shared.
        state: The rows that the server kept. `adapt` uses them for a new device.
        history: One record per round, as in metrics.jsonl.
        seconds: Wall time of training, without evaluation.
        personal: [n, d] the models of the devices in the order of `device_ids`, or None.
        team: [m, d] the models of the innermost teams in the order of `team_ids`, or None.
        global_: [d] the model of the server, or None.
        evaluation: The last evaluation; None for a run that was loaded from its folder.
        models: If several models were trained: the run of each model by name. Otherwise empty.
        collaboration: By round, the learned collaboration between nodes; empty if the method does not learn one.
        objects: The parts of the run that were given as Python objects, by name; `polytier.resume` uses them.
        folder: The run folder, if the run was loaded from it.
        statistics: By kind of model (personal, team, global), [nodes, s] the running statistics of BatchNorm layers
            that train; empty if there are none.

    Examples:
        >>> import polytier, torch
        >>> federation = polytier.build_federation("digits", devices=8, teams=2)
        >>> run = polytier.train(polytier.PerMFL(), federation, "mclr", rounds=1)
        >>> model = run.model(device=run.device_ids[0])
        >>> model(torch.zeros(1, 64)).shape
        torch.Size([1, 10])
    """

    spec: RunSpec
    context: Context
    state: Rows
    history: list[dict[str, Any]]
    seconds: float
    personal: Tensor | None = None
    team: Tensor | None = None
    global_: Tensor | None = None
    evaluation: Evaluation | None = None
    models: dict[str, Run] = field(default_factory=dict)
    collaboration: dict[int, Collaboration] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    statistics: dict[str, Tensor] = field(default_factory=dict)

    @property
    def algorithm(self) -> Algorithm:
        """The method."""
        return self.context.algorithm

    @property
    def module(self) -> nn.Module:
        """The model as it was given, with its initial parameters."""
        return self.context.module

    @property
    def ledger(self) -> Ledger:
        """The bytes of every message. If there are several models, each has its own ledger."""
        return self.context.ledger

    @property
    def device_ids(self) -> np.ndarray:
        """[n] the names of the devices, in the order of the data."""
        return self.context.population.ids

    @property
    def team_ids(self) -> np.ndarray:
        """[m] the names of the innermost teams."""
        topology = self.context.topology
        return topology.names[topology.leaf - 1] if topology.num_tiers > 2 else np.array([])

    @property
    def rounds(self) -> int:
        """Number of rounds completed."""
        return self.history[-1]["round"] if self.history else 0

    @classmethod
    def of(cls, loop: Loop) -> Run:
        """The result of a loop in its current state."""
        context, spec = loop.context, loop.spec.replace(rounds=loop.rounds or loop.spec.rounds)
        more: dict[str, Any] = {
            "collaboration": loop.collaboration | loop.learned(),
            "objects": loop.assembly.objects,
        }
        if not context.scopes:
            return cls.of_context(context, loop, spec, **more)
        assert isinstance(spec.models, dict)
        models = {
            name: cls.of_context(each, loop, spec.replace(models=None, **spec.models[name]))
            for name, each in context.scopes.items()
        }
        return cls(spec, context, loop.state, list(loop.history), loop.seconds, models=models, **more)

    @classmethod
    def of_context(cls, context: Context, loop: Loop, spec: RunSpec, **more: Any) -> Run:
        """The result of one model of a loop."""
        state = loop.part_state(context.name)
        everywhere, own = context.algorithm.global_model(state), personal_models(context, state, loop.round)
        history = [record_of(record, context.name) for record in loop.history] if context.name else list(loop.history)
        return cls(
            spec,
            context,
            state,
            history,
            loop.seconds,
            personal=own.get(""),
            team=shared_rows(context, state)[0].get("team"),
            global_=None if everywhere is None else everywhere[0],
            evaluation=loop.evaluations.get(context.name),
            statistics=statistics_by_kind(context, own),
            **more,
        )

    @property
    def parts(self) -> list[Run]:
        """The runs of several models; a list of this run alone if there is one model."""
        return list(self.models.values()) or [self]

    # -- models --------------------------------------------------------------------------------------

    def rows(self, kind: str) -> Tensor | None:
        """[nodes, d] the models of a kind: "personal", "team" or "global"; None if there are none."""
        everywhere = None if self.global_ is None else self.global_.unsqueeze(0)
        return {"personal": self.personal, "team": self.team, "global": everywhere}[kind]

    def row(self, *, device: Any = None, team: Any = None) -> Tensor:
        """The parameters of one model as a vector.

        Args:
            device: ID of a device, for its personal model.
            team: ID of a team, for its model.

        Returns:
            [d] the parameters; those of the server's model if neither `device` nor `team` is given.

        Raises:
            ValueError: The run has no such model, both are given, or the run has several models and one of
                `run.models` must be used.
        """
        if self.models:
            raise ValueError(f"this run has several models, {', '.join(self.models)}; use run.models[NAME]")
        if device is not None and team is not None:
            raise ValueError(f"device={device!r} and team={team!r} are two models; give one of them")
        if device is not None:
            return pick(self.personal, self.device_ids, device, "device", "personal")
        if team is not None:
            return pick(self.team, self.team_ids, team, "team", "team")
        if self.global_ is None:
            kind = "device" if self.personal is not None else "team"
            raise ValueError(f"{type(self.algorithm).__name__} has no global model; give {kind}=ID")
        return self.global_

    def whole_row(self, *, device: Any = None, team: Any = None) -> Tensor:
        """The parameters of one model, followed by its running statistics if it has BatchNorm layers that train.

        Args, errors: as for `row`.
        """
        row = self.row(device=device, team=team)
        if not self.statistics:
            return row
        kind = "personal" if device is not None else "team" if team is not None else "global"
        ids = {"personal": self.device_ids, "team": self.team_ids, "global": np.array(["server"])}[kind]
        name = device if device is not None else team if team is not None else "server"
        return torch.cat([row, pick(self.statistics[kind], ids, name, kind, kind)])

    def model(self, *, device: Any = None, team: Any = None) -> nn.Module:
        """One model as an ordinary PyTorch module in evaluation mode, for inputs as they are in the data.

        Args:
            device: ID of a device, for its personal model.
            team: ID of a team, for its model.

        Returns:
            The module; with the parameters of the server's model if neither `device` nor `team` is given.

        Raises:
            ValueError: The run has no such model.
        """
        return self.as_module(self.whole_row(device=device, team=team))

    def as_module(self, row: Tensor) -> nn.Module:
        """A module with the trained parameters `row` [d]. Frozen parameters keep the values they had in training.

        Running statistics [s] may follow the parameters in the row; by default they are the initial ones.

        Raises:
            ValueError: The method needs more than the outputs of a module to predict.
        """
        if type(self.algorithm).predict is not Algorithm.predict:
            name = type(self.algorithm).__name__
            raise ValueError(f"{name} also needs a device's training data to predict; a module alone is not enough")
        objective, population = self.context.objective, self.context.population
        lora = objective.trainable.kind == "lora"
        module = objective.trainable.apply(self.module) if lora else copy.deepcopy(self.module)
        module = module.to(objective.dtype)
        row, statistics = row[: objective.dimension], row[objective.dimension :]
        values = {**objective.all_parameters(row), **objective.statistics(statistics if len(statistics) else None)}
        module.load_state_dict({k: v.clone() for k, v in values.items()}, strict=False)
        if population.scale is not None or population.shift is not None:
            zero, one = torch.zeros(()), torch.ones(())
            scale = one if population.scale is None else population.scale
            shift = zero if population.shift is None else population.shift
            module = Scaled(module, scale.to(objective.dtype), shift.to(objective.dtype))
        return module.eval()

    def predict(self, x: Any, *, device: Any = None, team: Any = None) -> np.ndarray:
        """Predict with the model of a device, of a team, or of the server, as `polytier predict` does.

        Args:
            x: Inputs, one row per sample, as they are in the data.
            device: ID of a device, for its personal model.
            team: ID of a team, for its model.

        Returns:
            [N] the class of every sample; the outputs of the model if the targets are not classes. The server's model
            predicts if neither `device` nor `team` is given.

        Raises:
            ValueError: The run has no such model, or the inputs are not like those of the training data.

        Examples:
            >>> import polytier
            >>> federation = polytier.build_federation("digits", devices=8, teams=2)
            >>> run = polytier.train("permfl", federation, "mclr", rounds=1)
            >>> x, y = federation.device(0, "test")
            >>> run.predict(x, device=federation.ids[0]).shape == y.shape
            True
        """
        from polytier.runs.export import predictions

        return predictions(self, self.whole_row(device=device, team=team), x)[0]

    def adapt(self, x: Any, y: Any, team: Any = None) -> nn.Module:
        """Train a personal model for a device that was not in training, with the method's own device program.

        The device starts from the model of its team (or of the server), like a member of that team in the next round.

        Args:
            x: Inputs of the device, one row per sample, as they are in the data.
            y: Targets, one per sample.
            team: ID of the team that the device joins; required if the run has team models.

        Returns:
            The personal model as a module in evaluation mode.

        Raises:
            ValueError: The team is missing or unknown, or the method has no personal model for a single new device.
        """
        if self.models:
            raise ValueError(f"this run has several models; call adapt on one of run.models: {', '.join(self.models)}")
        newcomer = Federation.from_arrays(x, y, np.zeros(len(x), dtype=np.int64), shares=(1, 0, 0))
        known, objective = self.context.population, self.context.objective
        newcomer = replace(newcomer, num_classes=known.num_classes, scale=known.scale, shift=known.shift)
        topology = Topology.build(newcomer.ids)
        if objective.boundary is not None:
            newcomer = features_of(newcomer, objective)
        sent = None
        if self.team is not None:
            if team is None:
                raise ValueError(
                    f"team= is missing: the team that the device joins; available: {', '.join(map(str, self.team_ids))}"
                )
            sent = self.row(team=team).unsqueeze(0)
        elif self.collaboration:
            name = type(self.algorithm).__name__
            raise ValueError(
                f"{name} needs the other devices to make a model; the device can join in training: schedule:FILE"
            )
        elif isinstance(self.state, dict) or self.global_ is not None:
            sent = self.state
        context = replace(
            self.context,
            topology=topology,
            memory=Memory(topology),
            engine=None,
            name="",
            population=newcomer.population,
            batches=Batches(
                newcomer, self.context.seed, objective.dtype, str(objective.device), bool(objective.dropouts)
            ),
        )
        first, clock = torch.zeros(1, dtype=torch.int64), Clock(len(self.history))
        execute(context, Call(1, first, "solve", clock, {} if sent is None else sent, first), 0, 1)
        rows = published_rows(self.algorithm, self.state)
        made: Any = execute(context, Call(1, first, personal, clock, rows, first, quiet=True), 0, 1)
        if not made:
            raise ValueError(f"{type(self.algorithm).__name__} has no personal models to adapt")
        return self.as_module(torch.cat([made[""][0], *(rows[0] for key, rows in made.items() if key)]))

    # -- results -------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """The results in numbers, as in summary.json. Accuracies are fractions.

        Returns:
            The method, rounds, metrics of each kind of model in the last and the best round, and the traffic. For one
            of several models: its entry in `models` of the whole run.

        Examples:
            >>> import polytier
            >>> federation = polytier.build_federation("digits", devices=8, teams=2)
            >>> run = polytier.train(polytier.FedAvg(), federation, "mclr", rounds=2)
            >>> run.summary()["rounds"]
            2
        """
        from polytier.runs import views

        return views.summary(self)

    def to_frame(self) -> DataFrame:
        """The rounds of the run as a pandas frame.

        Returns:
            One line per round: `round`, columns such as `personal/test/accuracy` (NaN in rounds without an
            evaluation), the bytes sent by link and direction, seconds and numbers of participants.

        Raises:
            ValueError: pandas is not installed.

        Examples:
            >>> import polytier
            >>> federation = polytier.build_federation("digits", devices=8, teams=2)
            >>> run = polytier.train(polytier.FedAvg(), federation, "mclr", rounds=2)
            >>> run.to_frame()[["round", "bytes/server-device/up"]]
               round  bytes/server-device/up
            0      1                   20800
            1      2                   20800
        """
        from polytier.runs import views

        return views.rounds_frame(self)

    def devices(self) -> DataFrame:
        """The devices as a pandas frame.

        Returns:
            One line per device: `device`, `team`, `samples`, and a column such as `personal_accuracy` for each metric
            and kind of model, measured on its test samples. Columns of several models begin with the model's name.

        Raises:
            ValueError: pandas is not installed.

        Examples:
            >>> import polytier
            >>> federation = polytier.build_federation("digits", devices=8, teams=2)
            >>> run = polytier.train(polytier.FedAvg(), federation, "mclr", rounds=1)
            >>> list(run.devices())
            ['device', 'team', 'samples', 'global_accuracy']
        """
        from polytier.runs import views

        return views.devices_frame(self)

    def plot(self, metric: str | None = None, ax: Axes | None = None) -> Axes:
        """Plot a metric on test samples over the rounds, one line for each kind of model.

        Args:
            metric: The name of a metric of the run; by default the leading one.
            ax: The Axes of matplotlib to draw on; by default those of a new figure.

        Returns:
            The Axes.

        Raises:
            ValueError: The run has no such metric, or matplotlib is not installed.

        Examples:
            >>> import polytier
            >>> federation = polytier.build_federation("digits", devices=8, teams=2)
            >>> run = polytier.train(polytier.FedAvg(), federation, "mclr", rounds=2)
            >>> run.plot().get_ylabel()
            'test accuracy, %'
        """
        from polytier.runs import views

        return views.plot(self, metric, ax)

    def __repr__(self) -> str:
        from polytier.runs import views

        return views.text(self)

    def _repr_html_(self) -> str:
        from polytier.runs import views

        return views.html(self)

    # -- files ---------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write a run folder.

        Args:
            folder: Path of the folder. It must be new or empty.

        Raises:
            ValueError: The folder is not empty, or this run was itself loaded from a folder.
        """
        from polytier.runs.folder import write_results

        write_results(Path(folder), self)

    @classmethod
    def load(
        cls, folder: str | Path, model: nn.Module | Mapping[str, nn.Module] | None = None, *, trust: bool = False
    ) -> Run:
        """Load a run from its folder. The data are not needed.

        Args:
            folder: Path of the run folder.
            model: The module, if it was given as a Python object; a mapping from names if there are several models.
            trust: Whether config.toml may name modules of the current folder. They are imported, which runs their code.

        Returns:
            The run, without its last evaluation.

        Raises:
            ValueError: The folder is not a complete run folder, `model` does not match the saved parameters, or the
                folder names code that is not trusted.
        """
        from polytier.runs.load import load_run

        return load_run(Path(folder), model, trust)


def record_of(record: dict[str, Any], model: str) -> dict[str, Any]:
    """The record of a round with the metrics of one model instead of the means over several models."""
    shared = {k: record[k] for k in ("round", "bytes", "seconds", "participants") if k in record}
    return {**shared, **record.get("models", {}).get(model, {})}


def pick(rows: Tensor | None, ids: np.ndarray, name: Any, what: str, kind: str) -> Tensor:
    """The row of the node `name`; an error lists the available names."""
    if rows is None:
        raise ValueError(f"this run has no {kind} models")
    found = np.flatnonzero(ids.astype(str) == str(name))
    if not len(found):
        raise ValueError(
            f"no {what} {name!r}; available: {', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}"
        )
    return rows[found[0]]
