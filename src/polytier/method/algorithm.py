"""What a method is: a frozen dataclass whose methods are the programs of the tiers, written as functions of rows.

A program does not know how many rows it is given, where its children are or how messages travel. The same lines run for
ten thousand simulated devices and, with n = 1, on one real device.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from polytier.method.parameters import check_value
from polytier.stack.rows import Rows

if TYPE_CHECKING:
    from polytier.method.children import Children
    from polytier.method.local_problem import LocalProblem
    from polytier.tree.collaboration import Collaboration


@dataclass(frozen=True)
class Algorithm:
    """Base class of all methods.

    A method derives from it as a frozen dataclass. Its fields, made by `parameter`, are all its hyper-parameters; it
    has no other state. Its programs are `server`, `device` and, for trees with teams, `team`. Further methods can be
    run at the children by `Children.call`. The other methods of this class are optional.

    Programs must return new rows, leave their arguments unchanged and treat every row by itself; `check_algorithm`
    tests this.

    Attributes:
        tiers: 2 for a method without teams; deeper trees are flattened for it. None: any number of tiers.
        budget: for comparisons at equal cost, the share of the gradients per device and round that each field of steps
            gets. ``"rounds"``: the method has no such field and takes 1 / share gradients per device in one of its
            rounds; several of these rounds count as one.
        local_layers: patterns of the parameters that stay at the devices, joined by "+", unless the run has others.
        any_optimizer: whether every step of a device is one of `polytier.stack.solvers`, so that the run may have
            another local optimiser than sgd.

    Raises:
        ValueError: on construction, if the value of a field is not allowed.

    Examples:
        >>> from dataclasses import dataclass
        >>> from polytier import Algorithm, Federation, Step, parameter, train
        >>> @dataclass(frozen=True)
        ... class OneStep(Algorithm):
        ...     device_lr: Step = parameter(0.5, "alpha", "step size of a device", above=0, per="node")
        ...
        ...     def server(self, x, teams):  # x [1, d]
        ...         return teams.solve(x).mean()  # runs team() at every team that takes part
        ...
        ...     def team(self, x, devices):  # x [m, d]: what the server sent, one row per team
        ...         w = devices.solve(x).mean()  # runs device() at every device that takes part
        ...         devices.keep(model=w)  # evaluated as the model of the team
        ...         return w
        ...
        ...     def device(self, x, local):  # x [n, d]: one row per device
        ...         theta = x - local.value(self.device_lr) * local.grad(x)
        ...         local.keep(model=theta)  # evaluated as the personal model
        ...         return theta
        >>> x, y, device, team = [[0.0], [1.0], [2.0], [3.0]], [0, 0, 1, 1], [0, 1, 2, 3], ["a", "a", "b", "b"]
        >>> federation = Federation.from_arrays(x, y, device, team, shares=(1, 0, 0))
        >>> run = train(OneStep(device_lr=0.1), federation, "mclr", rounds=2)
        >>> run.rounds, tuple(run.personal.shape), tuple(run.team.shape), tuple(run.global_.shape)
        (2, (4, 4), (2, 4), (4,))
    """

    tiers: ClassVar[int | None] = None
    budget: ClassVar[dict[str, float]] = {"device_steps": 1.0}
    any_optimizer: ClassVar[bool] = False
    local_layers: ClassVar[str] = ""
    # Fields of an answer to `solve` that are models ("": the answer is a plain tensor). Transforms of uploads and
    # codecs of changes act on these fields alone. Empty if models or gradients are sent up that have no `reference`;
    # such transforms and codecs are then refused
    model_fields: ClassVar[tuple[str, ...]] = ("", "model")

    def __init_subclass__(cls, **given: Any) -> None:
        """Document a method by its module and its fields, unless its class has a docstring of its own."""
        super().__init_subclass__(**given)
        if cls.__doc__ is None:
            cls.__doc__ = documentation(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.metadata:
                value = check_value(field.name, getattr(self, field.name), field.default, field.metadata)
                object.__setattr__(self, field.name, value)

    @property
    def frame(self) -> int:
        """Number of rounds during which schedules keep their value."""
        return 1

    def parts(self) -> Mapping[str, Algorithm]:
        """The methods of several models by model name, if this method trains several models on one pool of devices."""
        return {}

    def check(self, server: Children) -> list[str]:
        """Check the settings on this tree and these data, before the first round.

        Returns:
            Warnings, which are logged.

        Raises:
            ValueError: if the method cannot run.
        """
        return []

    def init(self, x: Rows) -> Rows:
        """What the server keeps between rounds, its state; it is stored in checkpoints.

        Args:
            x: [1, d] the initial model (of several models: a dict by model name).
        """
        return x

    def server(self, state: Rows, children: Children) -> Rows:
        """Run one round at the server and return the new state."""
        raise NotImplementedError(f"{type(self).__name__} has no server program; define server(self, state, children)")

    def team(self, x: Rows, children: Children) -> Rows:
        """Run the program of the teams, of every tier between server and devices.

        Args:
            x: [m, ...] what the parent sent, one row per team.
            children: the children of these teams.

        Returns:
            [m, ...] what is sent to the parent.
        """
        return children.solve(x).mean()

    def device(self, x: Rows, local: LocalProblem) -> Rows:
        """Run the program of the devices. `local` is the only access to data.

        Args:
            x: [n, ...] what the parent sent, one row per device.
            local: the objective and the samples of these devices.

        Returns:
            [n, ...] what is sent to the parent.
        """
        raise NotImplementedError(f"{type(self).__name__} has no device program; define device(self, x, local)")

    def reference(self, field: str, sent: dict[str, Tensor], answer: dict[str, Tensor]) -> Tensor | None:
        """Return the model that the field of an answer started from, for the change of that model.

        The sender and the receiver of an answer both evaluate this, so it may use what was sent down, and fields of
        the answer that are not models.

        Args:
            field: One of `model_fields`.
            sent: [n, ...] what the nodes were sent, by field ("" for a plain tensor).
            answer: [n, ...] what they answer, by field.

        Returns:
            [n, ...] of the shape of `answer[field]`; by default what was sent under the same name. None if the rows
            sent have no such model: the run then stops with advice.
        """
        return sent.get(field)

    def global_model(self, state: Rows) -> Tensor | None:
        """[1, d] the model for all devices, from the state of the server; None if the method has none."""
        return state.get("model") if isinstance(state, dict) else state

    def publish(self, state: Rows) -> Rows | None:
        """[1, ...] what every device is given before `personal`; not counted as traffic."""
        return None

    def personal(self, x: Rows | None, local: LocalProblem) -> Tensor | None:
        """[n, d] the personal models, made from training samples alone; None if the method has none.

        Args:
            x: [n, ...] the row of `publish` for each device, or None.
            local: the devices.
        """
        return local.memory("model", local.initial)

    def collaboration(self, state: Rows) -> Collaboration | None:
        """Who learns from whom, for a method that learns it; ids are the positions of the server's children."""
        return None

    def advice_on_groups(self, groups: int, clients: int) -> str:
        """What to try if the learned weights divide the clients into too few or too many groups; "" for nothing."""
        return ""

    def predict(self, model: Tensor, local: LocalProblem, inputs: Tensor) -> Tensor:
        """[n, B, ...] the outputs of the models [n, d] on inputs [n, B, ...]."""
        return local.apply(model, inputs)


def documentation(kind: type[Algorithm]) -> str:
    """The docstring of a method: the first line of its module, and what its fields mean.

    Args:
        kind: The class, before `dataclass` has processed its own fields.

    Returns:
        Text with a section Args and, for the methods of this package that have defaults for all fields, Examples.
    """
    own = {name: value for name, value in vars(kind).items() if isinstance(value, dataclasses.Field)}
    fields = {**{field.name: field for field in dataclasses.fields(kind)}, **own}
    module = sys.modules.get(kind.__module__)  # None for a class that was sent to another process by value
    title = ((getattr(module, "__doc__", None) or kind.__name__).strip().splitlines() or [kind.__name__])[0]
    lines = [title, "", "Args:"]
    for name, field in fields.items():
        about = field.metadata
        letter = f" ({about['letter']})" if about.get("letter") else ""
        meaning = f"{about['meaning']}{letter}; default {field.default!r}." if about else "The methods, by name."
        lines.append(f"    {name}: {meaning}")
    if kind.__module__.startswith("polytier.algorithms") and fields and all(f.metadata for f in fields.values()):
        name, field = next(iter(fields.items()))
        call = f"polytier.{kind.__name__}({name}={field.default!r})"
        lines += ["", "Examples:", "    >>> import polytier", f"    >>> {call}.{name}", f"    {field.default!r}"]
    return "\n".join(lines)
