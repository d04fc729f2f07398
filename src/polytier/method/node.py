"""What a tier's program is given: a node, its children, or a device's local problem."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from polytier._text import schedule
from polytier.data.batches import Batch, Walk, batch_sizes
from polytier.method.call import Call, Clock, Diverged
from polytier.method.context import Context
from polytier.method.parameters import Step
from polytier.stack.objective import Piece
from polytier.stack.rows import Answers, Rows, Sums, as_dict, cat_rows, map_rows, share_of_samples, starts_of
from polytier.tree import random


class Node:
    """What every tier's program has. All rows are of the nodes `ids` of one tier, in that order."""

    def __init__(
        self, context: Context, tier: int, ids: Tensor, clock: Clock, quiet: bool = False, only: Tensor | None = None
    ) -> None:
        self.context, self.tier, self.ids, self.clock, self.quiet, self.only = context, tier, ids, clock, quiet, only

    @property
    def round(self) -> int:
        return self.clock.round

    @property
    def held_round(self) -> int:
        """The round that schedules go by: where several models take turns, the first of the frame."""
        return self.round - self.round % self.context.hold

    @property
    def device(self) -> torch.device:
        """Where this node computes: devices on the accelerator, if there is one; all others on the CPU."""
        return torch.device("cpu")

    @property
    def initial(self) -> Tensor:
        """[n, d] the model that every node starts from."""
        return self.context.objective.initial.to(self.device).expand(len(self.ids), -1)

    @property
    def samples(self) -> Tensor:
        """[n] training samples at or below each node."""
        return self.context.samples[self.tier][self.ids]

    def memory(self, name: str, default: Tensor) -> Tensor:
        """Named rows that last from round to round; `default` at nodes that kept none yet. Names: see `keep`."""
        return self.context.memory.read(self.tier, name, self.ids, default.cpu()).to(self.device)

    def keep(self, /, **rows: Tensor) -> None:
        """Keep named rows; "model" is what is evaluated at this tier. A name is any text of up to 100 characters."""
        if not self.quiet:
            for name, value in rows.items():
                value = value.cpu()
                check_finite(self, value)
                self.context.memory.write(self.tier, name, self.ids, value)

    def uniform(self, purpose: str, k: int = 1) -> Tensor:
        """[n, k] draws in [0, 1), each node its own."""
        base = random.key(self.context.seed, purpose, self.clock.round, self.clock.call)
        keys = random.node_keys(base, self.context.topology.keys[self.tier][self.ids])
        return random.uniform(keys, k).to(self.device)

    def shared(self, purpose: str, k: int = 1) -> Tensor:
        """[k] draws in [0, 1), the same at all nodes of the round."""
        base = random.key(self.context.seed, purpose, self.clock.round)
        return random.uniform(torch.tensor([random.signed(base)]), k)[0].to(self.device)

    def columns(self, pattern: str) -> Tensor:
        """[d] True where the parameter's name fits the pattern, e.g. "head.*"."""
        objective = self.context.objective
        fits = [fnmatch.fnmatch(name, pattern) for name in objective.names]
        return torch.repeat_interleave(torch.tensor(fits), torch.tensor(objective.sizes)).to(self.device)

    def value(self, field: Step, tier: int | None = None) -> Any:
        """A field for these nodes: a number, or a column [n, 1] if it is one a node. `tier` reads another tier's."""
        name = self.context.topology.tier_names[self.tier if tier is None else tier]
        if isinstance(field, Mapping):
            if name not in field:
                raise ValueError(f"a field is given by tier ({', '.join(field)}) and none is named {name}")
            field = field[name]
        if isinstance(field, str):
            return schedule(field)(self.held_round)
        if isinstance(field, int | float):
            return field
        size = self.context.topology.size(self.tier)
        if tier is not None and tier != self.tier:
            raise ValueError(f"{name}: this field is one number a tier; got {len(field)} numbers")
        if len(field) != size:
            raise ValueError(f"{name}: a field with one number a node needs {size}; got {len(field)}")
        # devices are numbered as in the federation, whatever team they are in
        places = self.context.topology.order[self.ids] if self.tier == self.context.topology.leaf else self.ids
        return torch.tensor(field, dtype=self.context.objective.dtype)[places].unsqueeze(1).to(self.device)


class Children(Node):
    """A node that is not a device: it can call its children."""

    def __init__(
        self, context: Context, tier: int, ids: Tensor, clock: Clock, quiet: bool = False, only: Tensor | None = None
    ) -> None:
        super().__init__(context, tier, ids, clock, quiet, only)
        self._calls: Counter[str] = Counter()

    @cached_property
    def kids(self) -> tuple[Tensor, Tensor]:
        """Who is registered: children [k], and for each the position in `ids` of its parent [k]."""
        return self.context.topology.kids(self.tier, self.ids)

    def draw(self, method: str = "solve") -> tuple[Tensor, Tensor]:
        """Who takes part in the next untargeted call: children and their parents' positions."""
        kids, position = self.kids
        if self.only is not None:
            chosen = self._reached[kids]
        else:
            rule = self.context.participation[self.tier + 1]
            purpose = "participation" if method == "solve" else f"participation:{method}"
            base = random.key(self.context.seed, purpose, self.clock.round, self._next_clock(method).call)
            keys = self.context.topology.keys[self.tier + 1][kids]
            chosen = rule.draw(base, self.clock.round, keys, kids, position, len(self.ids))
        return kids[chosen], position[chosen]

    @property
    def num_devices(self) -> int:
        return self.context.topology.size(self.context.topology.leaf)

    def shuffled_devices(self, purpose: str, round_: int) -> Tensor:
        """[k] the devices that take part in the first calls of a round, in random order: places in the federation."""
        topology, ids = self.context.topology, self.ids
        for tier in range(self.tier, topology.leaf):
            ids = Children(self.context, tier, ids, Clock(round_)).draw()[0]
        base = random.key(self.context.seed, purpose, round_)
        draws = random.bits(random.node_keys(base, topology.keys[topology.leaf][ids]), 1).squeeze(1)
        return topology.order[ids[draws.argsort()]]

    def by_name(self, kids: Tensor) -> Tensor:
        """Places in `kids` in an order that depends on who they are, not on where they stand."""
        return self.context.topology.keys[self.tier + 1][kids].argsort()

    def anew(self) -> Children:
        """The same node before its first call: those it calls draw the same mini-batches again."""
        return Children(self.context, self.tier, self.ids, self.clock, self.quiet, self.only)

    def scoped(self, name: str, only: Tensor) -> Children:
        """The server of another model on the same pool, which reaches the devices `only` [devices] and no others."""
        return Children(self.context.scopes[name], 0, torch.zeros(1, dtype=torch.int64), self.clock, self.quiet, only)

    def below(self, device: Step, team: Step) -> Any:
        """The children's value of a field: of `device` if they are devices, else of `team` at their tier."""
        child = self.tier + 1
        return self.value(device if child == self.context.topology.leaf else team, child)

    def solve(self, rows: Rows, where: Tensor | None = None) -> Sums:
        """Send rows [m, ...], one a parent, to the children that take part; they run the next tier's program.

        The answers are summed as they come and never all held. `where` [m]: which parents call at all.
        """
        kids, position = self._present("solve", where)
        everybody = self.only is None and self.context.participation[self.tier + 1].everybody
        if self.context.absent == "stale" and not everybody:
            self.remember("answer", self._answers("solve", rows, kids, position))
            return self.recall("answer", self._spread(rows))
        blocks = self._blocks(kids, position)
        sums = Sums.zeros(rows, len(self.ids))
        parent_of_block = position[starts_of(blocks)]
        for folded in self._deliver("solve", rows, kids, position, blocks):
            sums.add(folded, parent_of_block[folded.first : folded.first + folded.count])
        return sums

    def call(
        self,
        method: str,
        rows: Rows,
        to: Tensor | None = None,
        each: bool = False,
        where: Tensor | None = None,
    ) -> Answers:
        """Run a method of the algorithm at the children ("solve": their own program) and hold every answer.

        `to` names the children (they are not redrawn); with `each`, rows hold one row for each of them. A team
        that is asked for a method of devices, `name(self, rows, local)`, asks its own and answers their mean.
        """
        if to is None:
            kids, position = self._present(method, where)
        else:
            kids = to
            place = torch.full((self.context.topology.size(self.tier),), -1)
            place[self.ids] = torch.arange(len(self.ids))
            position = place[self.context.topology.parents[self.tier + 1][kids]]
        return self._answers(method, rows, kids, position, each)

    def remember(self, name: str, answers: Answers) -> None:
        """Keep answers, a row a child, on the parents' side."""
        if not self.quiet:
            for field, value in as_dict(answers.rows).items():
                self.context.memory.write(self.tier + 1, name, answers.ids, value, field)

    def recall(self, name: str, default: Rows) -> Answers:
        """What was remembered, of all registered children; `default` [children, ...] where nothing was."""
        kids, position = self.kids
        rows = {
            field: self.context.memory.read(self.tier + 1, name, kids, value, field)
            for field, value in as_dict(default).items()
        }
        return self._as_answers(rows if isinstance(default, dict) else rows[""], kids, position, default)

    # -- below: how a call becomes messages ------------------------------------------------------

    @cached_property
    def _reached(self) -> Tensor:
        """[nodes of the tier below] who has one of the devices `only` at or below it."""
        assert self.only is not None
        topology = self.context.topology
        return topology.summed(self.only[topology.order].long())[self.tier + 1] > 0

    def _next_clock(self, method: str) -> Clock:
        return Clock(self.clock.round, (self.clock.call << 16) + self._calls[method])

    def _present(self, method: str, where: Tensor | None) -> tuple[Tensor, Tensor]:
        kids, position = self.draw(method)
        return (kids, position) if where is None else (kids[where[position]], position[where[position]])

    def _spread(self, rows: Rows) -> Rows:
        return map_rows(lambda r: r[self.kids[1]], rows)

    def _blocks(self, kids: Tensor, position: Tensor) -> Tensor:
        """[k] the blocks of these children, numbered from 0."""
        block = self.context.topology.blocks[self.tier + 1][kids]
        return torch.cat([block[:1] * 0, (block.diff() != 0) | (position.diff() != 0)]).cumsum(0)

    def _deliver(self, method: str, rows: Rows, kids: Tensor, sender: Tensor, blocks: Tensor | None) -> Iterator[Any]:
        shares = None
        if blocks is not None:
            shares = share_of_samples(self.context.samples[self.tier + 1][kids], sender)
        call = Call(
            self.tier + 1, kids, method, self._next_clock(method), rows, sender, blocks, shares, self.quiet,
            self.context.name, self.only,
        )  # fmt: skip
        self._calls[method] += 1
        return self.context.engine.deliver(call)

    def _answers(self, method: str, rows: Rows, kids: Tensor, position: Tensor, each: bool = False) -> Answers:
        sender = torch.arange(len(kids)) if each else position
        pieces = list(self._deliver(method, rows, kids, sender, None))
        answers = cat_rows(pieces) if pieces else map_rows(lambda r: r[:0], rows)
        return self._as_answers(answers, kids, position, rows)

    def _as_answers(self, rows: Rows, kids: Tensor, position: Tensor, sent: Rows) -> Answers:
        samples = self.context.samples[self.tier + 1][kids]
        return Answers(sent, len(self.ids), rows, kids, position, samples, self._blocks(kids, position))


class LocalProblem(Node):
    """A device: the only node with data."""

    def __init__(
        self, context: Context, tier: int, ids: Tensor, clock: Clock, quiet: bool = False, only: Tensor | None = None
    ) -> None:
        super().__init__(context, tier, ids, clock, quiet, only)
        self.rows = context.topology.order[ids]  # their place in the federation
        self._walks: dict[tuple[int | str, str], Walk] = {}

    @property
    def device(self) -> torch.device:
        return self.context.objective.device

    def batch(self, size: int | None = None, stream: str = "") -> Batch:
        """The next mini-batch of each device; a named stream walks on its own."""
        rule = self.context.batch_size if size is None else size
        if (rule, stream) not in self._walks:
            sizes = batch_sizes(rule, self.samples, self.held_round)
            clock = self.clock
            self._walks[rule, stream] = self.context.batches.walk(self.rows, clock.round, clock.call, sizes, stream)
        return self._walks[rule, stream].next()

    def full(self, split: str = "train") -> Batch:
        """All samples."""
        return self.context.batches.whole(self.rows, split)

    def grad(
        self, theta: Tensor, batch: Batch | None = None, loss: Callable | None = None, extra: tuple = ()
    ) -> Tensor:
        """[n, d] gradients on a fresh mini-batch, or on the one given (`local.full()`: all data)."""
        if not self.quiet:
            self.context.device_steps += len(theta)
        return self.context.objective.grad(theta, self.batch() if batch is None else batch, loss, extra)

    def grad_pieces(self, theta: Tensor, batch: Batch | None = None) -> Iterator[tuple[Tensor | slice, list[Piece]]]:
        """The gradients of some rows at a time as new columns side by side (objective.py), for a solver's steps."""
        if not self.quiet:
            self.context.device_steps += len(theta)
        return self.context.objective.grad_pieces(theta, self.batch() if batch is None else batch)

    def loss(
        self, theta: Tensor, batch: Batch | None = None, loss: Callable | None = None, extra: tuple = ()
    ) -> Tensor:
        """[n] values of the objective on all data, or on the batch given."""
        return self.context.objective.loss(theta, self.full() if batch is None else batch, loss, extra)

    def apply(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """[n, B, ...] outputs on inputs [n, B, ...]."""
        return self.context.objective.outputs(theta, inputs)


def check_finite(node: Node, rows: Rows) -> None:
    """A sum a row shows NaN and infinity; stop and name the nodes."""
    for value in as_dict(rows).values():
        if value.is_floating_point() and not torch.isfinite(value.sum()):
            bad = ~torch.isfinite(value.reshape(len(value), -1)).all(1)
            if bad.any():
                names = node.context.topology.names[node.tier][node.ids[bad].numpy()]
                tier = node.context.topology.tier_names[node.tier]
                raise Diverged(node.clock.round + 1, tier, [str(n) for n in names])
