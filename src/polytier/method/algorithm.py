"""The seam: a method is what each tier runs, written as functions of rows.

A program never sees how many rows it is given, where its children live or how messages travel. The
same lines run for ten thousand simulated devices and, with n = 1, on one real device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from polytier.method.parameters import check_value
from polytier.stack.rows import Rows

if TYPE_CHECKING:
    from polytier.method.node import Children, LocalProblem
    from polytier.tree.collaboration import Collaboration


@dataclass(frozen=True)
class Algorithm:
    """A method. Its fields are all its hyper-parameters; its functions are what each tier runs."""

    tiers: ClassVar[int | None] = None  # 2: a flat method; deeper trees are collapsed for it
    # which fields share out the gradients that a device may take in a round; "rounds": it takes 1 / share in one of its
    # own rounds, and several of these make one of other methods
    budget: ClassVar[dict[str, float]] = {"device_steps": 1.0}
    # Fields of an answer to `solve` that are models ("": the answer is a plain tensor). Transforms of uploads and
    # codecs of changes act on these fields alone. Empty if models or gradients are sent up that have no `reference`;
    # such transforms and codecs are then refused
    model_fields: ClassVar[tuple[str, ...]] = ("", "model")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.metadata:
                value = check_value(field.name, getattr(self, field.name), field.default, field.metadata)
                object.__setattr__(self, field.name, value)

    @property
    def frame(self) -> int:
        """Rounds for which schedules keep their value."""
        return 1

    def parts(self) -> Mapping[str, Algorithm]:
        """The methods of several models on one pool, by name, for a wrapper of them."""
        return {}

    def check(self, server: Children) -> list[str]:
        """Before the first round: warnings about these settings on this tree; a ValueError if they cannot work."""
        return []

    def init(self, x: Rows) -> Rows:
        """What the server keeps between rounds, from the first model [1, d] (of several: by name); checkpointed."""
        return x

    def server(self, state: Rows, children: Children) -> Rows:
        """One round."""
        raise NotImplementedError(f"{type(self).__name__} needs a server program")

    def team(self, x: Rows, children: Children) -> Rows:
        """Runs at every inner tier; x is what the parent sent."""
        return children.solve(x).mean()

    def device(self, x: Rows, local: LocalProblem) -> Rows:
        """Runs at the devices, the only program that sees data."""
        raise NotImplementedError(f"{type(self).__name__} needs a device program")

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
        """[1, d], or None if the method has no model for the whole population."""
        return state.get("model") if isinstance(state, dict) else state

    def publish(self, state: Rows) -> Rows | None:
        """[1, ...] what every device is given before `personal`; counts no traffic."""
        return None

    def personal(self, x: Rows | None, local: LocalProblem) -> Tensor | None:
        """[n, d] the devices' own models, made from training data alone; None if the method has none."""
        return local.memory("model", local.initial)

    def collaboration(self, state: Rows) -> Collaboration | None:
        """Who listens to whom, for a method that learns it; ids are the positions of the server's children."""
        return None

    def predict(self, model: Tensor, local: LocalProblem, inputs: Tensor) -> Tensor:
        """Outputs [n, B, ...] of the models [n, d] on inputs [n, B, ...]."""
        return local.apply(model, inputs)


# -- what a program is given --------------------------------------------------------------------------


# -- how a call is run --------------------------------------------------------------------------------
