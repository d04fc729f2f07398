"""What of a model travels, for models with layers that stay at home or with running statistics.

Two things are added to messages and taken out of them here, so that neither methods nor engines know of them:

home       | `--local-layers PATTERN`: the columns of these parameters are removed from every row that has a model's
           | length before it is sent, up and down. A device puts in its own ones; elsewhere they are the initial ones
statistics | the running statistics [s] of BatchNorm layers that train: a field of every message that has a model.
           | A parent sends its own and afterwards has the mean of its children's, weighted by samples

A node has one row of statistics, whichever of its models a gradient was computed at. They are never part of a model's
row: methods do not step, pull, clip or multiply them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polytier.stack.rows import Rows, as_dict

if TYPE_CHECKING:
    from polytier.method.node import Node
    from polytier.stack.objective import Objective

OF_STATISTICS = "statistics."  # begins the names of fields with the statistics that models are evaluated with
STATISTICS = "#statistics"  # the field of a message, and the name of the rows that nodes keep
HOME, HOME_STATISTICS = "#home", "#home statistics"  # the names of the rows that devices keep
OWN_PROGRAMS = ("solve", "team", "device")  # calls of the program of a tier, whose messages may hold models


@dataclass(frozen=True, eq=False)
class Travel:
    """What of models and statistics stays at the devices.

    field           | shape       | meaning
    initial         | [d]         | the initial model
    statistics      | [s]         | the initial statistics
    home            | [d] bool    | the columns of parameters that stay at home
    home_statistics | [s] bool    | the same for statistics
    """

    initial: Tensor
    statistics: Tensor
    home: Tensor
    home_statistics: Tensor

    @classmethod
    def of(cls, objective: Objective, patterns: str = "", needed: bool = True) -> Travel:
        """For the layers that match one of the patterns, which are joined by "+".

        Args:
            objective: The objective of the devices.
            patterns: As in :mod:`fnmatch`, on the names of parameters that train and of running statistics.
            needed: Whether a pattern that matches nothing is an error.

        Raises:
            ValueError: A pattern matches nothing, or everything would stay at home.
        """
        names, more = objective.names, objective.statistic_names
        chosen = [part.strip() for part in patterns.split("+")] if patterns else []
        for pattern in chosen:
            if needed and not any(fnmatchcase(name, pattern) for name in (*names, *more)):
                shown = ", ".join([*names, *more][:12])
                raise ValueError(
                    f"no parameter that trains matches the pattern {pattern!r} of local layers; available: {shown}"
                )
        home = columns(names, objective.sizes, chosen)
        if chosen and bool(home.all()):
            raise ValueError(
                f"local layers {patterns!r} are all parameters that train: nothing would be sent; use a narrower "
                "pattern, or the method local"
            )
        return cls(
            objective.initial, objective.initial_statistics, home, columns(more, objective.statistic_sizes, chosen)
        )

    @cached_property
    def active(self) -> bool:
        """Whether there is anything to do."""
        return self.has_home or bool(len(self.statistics))

    @cached_property
    def has_home(self) -> bool:
        """Whether some parameters stay at home."""
        return bool(self.home.any())

    # -- parameters ------------------------------------------------------------------------------

    def thin(self, rows: Rows) -> Rows:
        """The rows without the columns that stay at home."""
        if not self.has_home:
            return rows
        kept = ~self.home
        found = {k: v[..., kept] if is_model(v, len(self.home)) else v for k, v in as_dict(rows).items()}
        return found if isinstance(rows, dict) else found[""]

    def widen(self, rows: Rows, own: Tensor | None = None) -> Rows:
        """The rows with all columns; those that stay at home are `own` [n, home columns], by default the initial ones.

        Rows that have all columns already get `own` too.
        """
        if not self.has_home:
            return rows
        own = self.initial[self.home] if own is None else own
        length, kept = len(self.home), ~self.home
        found = {}
        for field, value in as_dict(rows).items():
            model = is_model(value, int(kept.sum())) or is_model(value, length)
            if model and not field.startswith(OF_STATISTICS):
                full = value.new_empty(*value.shape[:-1], length)
                full[..., kept] = value if value.shape[-1] < length else value[..., kept]
                full[..., self.home] = (own.unsqueeze(1) if own.ndim == 2 and value.ndim == 3 else own).to(value)
                found[field] = full
            else:
                found[field] = value
        return found if isinstance(rows, dict) else found[""]

    def widen_sums(self, rows: Rows, totals: Tensor) -> Rows:
        """The same for weighted sums of rows, whose weights have the sum `totals` [m]."""
        return (
            self.widen(rows, totals.unsqueeze(1).to(self.initial) * self.initial[self.home]) if self.has_home else rows
        )

    # -- at a device -----------------------------------------------------------------------------

    def arrive(self, rows: Rows, device: Node) -> Rows:
        """What a device works with: the rows it was sent, with its own layers."""
        if not self.has_home:
            return rows
        default = self.initial[self.home].expand(len(device.ids), -1).to(device.device)
        return self.widen(rows, device.memory(HOME, default))

    def leave(self, answer: Rows, model_fields: Iterable[str], device: Node) -> Rows:
        """What a device answers without its own layers, which it keeps."""
        if not self.has_home:
            return answer
        for field in model_fields:
            value = as_dict(answer).get(field)
            if value is not None and is_model(value, len(self.home)):
                device.keep(**{HOME: value[..., self.home.to(value.device)]})
        return self.thin(answer)

    def arrive_statistics(self, sent: Tensor | None, device: Node) -> Tensor:
        """[n, s] the statistics that a device starts from: those sent with its own at home, or its last ones."""
        default = self.statistics.expand(len(device.ids), -1).to(device.device)
        own = device.memory(STATISTICS, default)
        if sent is None:
            return own.clone()
        full = default.clone()
        full[:, ~self.home_statistics] = sent.to(full)
        full[:, self.home_statistics] = own[:, self.home_statistics]
        return full


def without_statistics(rows: Rows) -> Rows:
    """The rows as a program sent them, without the field of statistics."""
    if STATISTICS not in as_dict(rows):
        return rows
    found = {field: value for field, value in as_dict(rows).items() if field != STATISTICS}
    return found[""] if set(found) == {""} else found


def columns(names: list[str], sizes: list[int], patterns: list[str]) -> Tensor:
    """[columns] bool, True for those of the names that match a pattern."""
    fits = [any(fnmatchcase(name, pattern) for pattern in patterns) for name in names]
    return torch.repeat_interleave(torch.tensor(fits, dtype=torch.bool), torch.tensor(sizes, dtype=torch.int64))


def is_model(rows: Tensor, length: int) -> bool:
    """Whether these are rows [n, ..., length] of floating point numbers."""
    return rows.is_floating_point() and rows.ndim > 1 and rows.shape[-1] == length
