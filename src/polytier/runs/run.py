"""The result of training: models that people can use, and how they came about."""

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
from polytier.runs.evaluate import Evaluation, personal, personal_models, published_rows, shared_rows
from polytier.runs.spec import RunSpec
from polytier.stack.rows import Rows
from polytier.tree.topology import Topology

if TYPE_CHECKING:
    from polytier.runs.loop import Loop
    from polytier.tree.collaboration import Collaboration


class Scaled(nn.Module):
    """A model that takes inputs as they are in the data (images 0 .. 255) and scales them as training did."""

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
    """The result of a run.

    Attributes:
        spec: The settings.
        context: What the programs shared: method, tree, objective, data, ledger.
        state: What the server kept; with the team models it serves to adapt a new device.
        history: One record per round, as in metrics.jsonl.
        seconds: Wall time of training, without evaluation.
        personal: [n, d] the devices' models in the order of `device_ids`, or None.
        team: [m, d] the innermost teams' models in the order of `team_ids`, or None.
        global_: [d] the server's model, or None.
        evaluation: The last evaluation; None for a run that was read from its folder.
        models: Where several models were trained on one pool of devices: a run for each, by name.
        collaboration: By round, who listened to whom, if the method learned that.
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

    @property
    def algorithm(self) -> Algorithm:
        """The method."""
        return self.context.algorithm

    @property
    def module(self) -> nn.Module:
        """The model as it was given, with the parameters of the start."""
        return self.context.module

    @property
    def ledger(self) -> Ledger:
        """The bytes of every message; where there are several models, each has its own."""
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
        """How many rounds were run."""
        return self.history[-1]["round"] if self.history else 0

    @classmethod
    def of(cls, loop: Loop) -> Run:
        """The result of a loop as it stands."""
        learned, context = loop.collaboration | loop.learned(), loop.context
        if not context.scopes:
            return cls.of_context(context, loop, loop.spec, collaboration=learned)
        assert isinstance(loop.spec.models, dict)
        models = {
            name: cls.of_context(each, loop, loop.spec.replace(models=None, **loop.spec.models[name]))
            for name, each in context.scopes.items()
        }
        return cls(loop.spec, context, loop.state, loop.history, loop.seconds, models=models, collaboration=learned)

    @classmethod
    def of_context(cls, context: Context, loop: Loop, spec: RunSpec, **more: Any) -> Run:
        """The same of one model."""
        state = loop.part_state(context.name)
        everywhere = context.algorithm.global_model(state)
        history = [record_of(record, context.name) for record in loop.history] if context.name else loop.history
        return cls(
            spec,
            context,
            state,
            history,
            loop.seconds,
            personal=personal_models(context, state, loop.round),
            team=shared_rows(context, state)[0].get("team"),
            global_=None if everywhere is None else everywhere[0],
            evaluation=loop.evaluations.get(context.name),
            **more,
        )

    @property
    def parts(self) -> list[Run]:
        """The runs of several models, or this one."""
        return list(self.models.values()) or [self]

    # -- models --------------------------------------------------------------------------------------

    def row(self, *, device: Any = None, team: Any = None) -> Tensor:
        """[d] the model of a device, of a team or, with neither, of the server."""
        if self.models:
            raise ValueError(f"this run has several models, {', '.join(self.models)}; say which one")
        if device is not None:
            return pick(self.personal, self.device_ids, device, "device", "personal")
        if team is not None:
            return pick(self.team, self.team_ids, team, "team", "team")
        if self.global_ is None:
            raise ValueError(f"{type(self.algorithm).__name__} has no global model; ask for device=ID")
        return self.global_

    def model(self, *, device: Any = None, team: Any = None) -> nn.Module:
        """An ordinary module with that model's parameters, for inputs as they are in the data."""
        return self.as_module(self.row(device=device, team=team))

    def as_module(self, row: Tensor) -> nn.Module:
        """A module with the parameters `row` [d]; frozen parameters are those of the run, to the bit."""
        if type(self.algorithm).predict is not Algorithm.predict:
            name = type(self.algorithm).__name__
            raise ValueError(f"{name} predicts from a device's training data too; its network alone is no classifier")
        objective, population = self.context.objective, self.context.population
        module = copy.deepcopy(self.module).to(objective.dtype)
        module.load_state_dict({k: v.clone() for k, v in objective.all_parameters(row).items()}, strict=False)
        if population.scale is not None or population.shift is not None:
            zero, one = torch.zeros(()), torch.ones(())
            scale = one if population.scale is None else population.scale
            shift = zero if population.shift is None else population.shift
            module = Scaled(module, scale.to(objective.dtype), shift.to(objective.dtype))
        return module.eval()

    def adapt(self, x: Any, y: Any, team: Any = None) -> nn.Module:
        """The personal model of a device that was not in training, by the method's own device step.

        It starts from its team's model (or the server's) as a member of the team would in the next round.
        """
        if self.models:
            raise ValueError(f"this run has several models; adapt one of run.models: {', '.join(self.models)}")
        newcomer = Federation.from_arrays(x, y, np.zeros(len(x), dtype=np.int64), shares=(1, 0, 0))
        known, objective = self.context.population, self.context.objective
        newcomer = replace(newcomer, num_classes=known.num_classes, scale=known.scale, shift=known.shift)
        topology = Topology.build(newcomer.ids)
        sent = None
        if self.team is not None:
            if team is None:
                raise ValueError(
                    f"team= names the team that the device joins; there are {', '.join(map(str, self.team_ids))}"
                )
            sent = self.row(team=team).unsqueeze(0)
        elif self.collaboration:
            name = type(self.algorithm).__name__
            raise ValueError(f"{name} makes a model only with those a device listens to; let it join: schedule:FILE")
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
        return self.as_module(made[""][0])

    # -- files ---------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write the run folder of a run made in Python; the folder must be new or empty."""
        from polytier.runs.folder import write_results

        write_results(Path(folder), self)

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module | Mapping[str, nn.Module] | None = None) -> Run:
        """A run from its folder. `model`: the module (of several models, by name), if it was given in Python."""
        from polytier.runs.load import load_run

        return load_run(Path(folder), model)


def record_of(record: dict[str, Any], model: str) -> dict[str, Any]:
    """A round's record with the figures of one of several models in the place of their means."""
    shared = {k: record[k] for k in ("round", "bytes", "seconds", "participants") if k in record}
    return {**shared, **record.get("models", {}).get(model, {})}


def pick(rows: Tensor | None, ids: np.ndarray, name: Any, what: str, kind: str) -> Tensor:
    if rows is None:
        raise ValueError(f"this run has no {kind} models")
    found = np.flatnonzero(ids.astype(str) == str(name))
    if not len(found):
        raise ValueError(
            f"no {what} {name!r}; there are {', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}"
        )
    return rows[found[0]]
