"""`Children`: what the programs of the server and of teams are given, to call the tier below them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier._errors import unknown
from polytier.data.federation import SPLITS
from polytier.method.call import Call, Clock
from polytier.method.node import Node
from polytier.method.parameters import Step
from polytier.method.travel import OWN_PROGRAMS, STATISTICS, without_statistics
from polytier.stack.rows import Answered, Answers, Rows, Sums, as_dict, cat_rows, map_rows, share_of_samples
from polytier.tree import random
from polytier.tree.topology import Kids, starts_of


class Children(Node):
    """A server or a team: it calls the programs of its children. It stands for `ids` [m] nodes of one tier.

    Polytier creates it and passes it to `Algorithm.server` and `Algorithm.team`. In simulation a team program
    runs for all teams at once, m rows; in a network it runs for one team, m = 1, with the same lines.

    Args:
        context: what the programs of a run share.
        tier: the tier of these nodes.
        ids: [m] their numbers in the tier.
        clock: the round and the number of the call.
        quiet: True during an evaluation.
        only: [devices] bool, the devices that may be reached; None: all.

    Examples:
        A server that sends its model to the devices and averages their answers:

        >>> from dataclasses import dataclass
        >>> from polytier import Algorithm, Federation, train
        >>> @dataclass(frozen=True)
        ... class Average(Algorithm):
        ...     def server(self, x, devices):  # x [1, d]
        ...         print("round", devices.round, "samples", devices.device_samples().tolist())
        ...         return devices.solve(x).mean("samples")
        ...
        ...     def device(self, x, local):  # x [n, d]
        ...         return x - 0.1 * local.grad(x)
        >>> x, y, device = [[0.0], [1.0], [2.0]], [0, 1, 1], ["a", "b", "b"]
        >>> federation = Federation.from_arrays(x, y, device, shares=(1, 0, 0))
        >>> run = train(Average(), federation, "mclr", rounds=2)
        round 0 samples [1, 2]
        round 1 samples [1, 2]
    """

    @cached_property
    def _calls(self) -> Counter[str]:
        """How often each method was called by this node."""
        return Counter()

    # -- running statistics of BatchNorm layers, see `Travel` -------------------------------------

    _statistics: Tensor | None = None

    @property
    def statistics(self) -> Tensor:
        """[m, s] the running statistics of these nodes."""
        if self._statistics is None:
            self._statistics = self.memory(STATISTICS, self._context.travel.statistics.expand(len(self.ids), -1))
        return self._statistics

    def set_statistics(self, shared: Tensor) -> None:
        """Replace those that travel, [m, ...], and keep them."""
        full = self.statistics.clone()
        full[:, ~self._context.travel.home_statistics] = shared.to(full)
        self._statistics = full
        self.keep(**{STATISTICS: full})

    # -- who is below ----------------------------------------------------------------------------

    @cached_property
    def kids(self) -> tuple[Tensor, Tensor]:
        """All registered children: their numbers in their tier [k], and the position in `ids` of each parent [k]."""
        return self._context.topology.kids(self.tier, self.ids)

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole tree."""
        return self._context.topology.size(self._context.topology.leaf)

    def device_samples(self, split: str = "train") -> Tensor:
        """[devices] number of samples of each device of the tree in a split: train, validation or test.

        Raises:
            ValueError: if there is no such split.
        """
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        return self._context.population.count(split)[self._context.topology.order]

    def device_values(self, field: Step) -> Tensor:
        """[devices] float64, the value of a hyper-parameter at each device of the tree.

        The order of the devices is that of `device_samples`.

        Raises:
            ValueError: if the field has no value for devices, or not one per device.
        """
        everyone = torch.arange(self.num_devices)
        found = Node(self._context, self._context.topology.leaf, everyone, self.clock).value(field)
        return torch.as_tensor(found, dtype=torch.float64).reshape(-1).expand(self.num_devices)

    @property
    def true_groups(self) -> Tensor | None:
        """[k] the true group of each of `kids`, numbered from 0.

        None if the data have no true groups (`Federation.cluster`), or if a child has devices of several groups.
        """
        found = self._context.true_groups(self.tier + 1)
        return None if found is None else torch.from_numpy(np.unique(found, return_inverse=True)[1])[self.kids[0]]

    def by_name(self, kids: Tensor) -> Tensor:
        """[k] an order of `kids` [k] that depends on their names and not on their numbers: positions in `kids`."""
        return torch.from_numpy(self._context.topology.keys[self.tier + 1].numpy()[kids.numpy()].argsort())

    def below(self, device: Step, team: Step) -> Any:
        """The value of a hyper-parameter at the children: `device` if they are devices, else `team` at their tier."""
        child = self.tier + 1
        return self.value(device if child == self._context.topology.leaf else team, child)

    # -- who takes part --------------------------------------------------------------------------

    @property
    def stale_answers(self) -> bool:
        """Whether children that do not take part count with their last answer (``absent="stale"``)."""
        return self._context.absent == "stale"

    def draw(self, method: str = "solve") -> tuple[Tensor, Tensor]:
        """Who takes part in the next call of a method, if it is made without `to`.

        Returns:
            The children [k] and the position in `ids` of each one's parent [k].
        """
        kids, position = self.kids
        if self._everybody:
            return kids, position
        if self.only is not None:
            chosen = self._reached[kids]
        else:
            rule = self._context.participation[self.tier + 1]
            purpose = "participation" if method == "solve" else f"participation:{method}"
            base = random.key(self._context.seed, purpose, self.clock.round, self._next_clock(method).call)
            keys = self._context.topology.keys[self.tier + 1][kids]
            chosen = rule.draw(base, self.clock.round, keys, kids, position, len(self.ids))
        which = torch.from_numpy(chosen.numpy().nonzero()[0])
        return kids[which], position[which]

    def participants(self, round_: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Who takes part in the first calls of a round, from the children down to the devices.

        Every node gets the same answer, at any time of the round. A method that calls its children several times in
        a round and always means the same ones passes them to `call` as `to`.

        Args:
            round_: a round, counted from 0; by default the current one.

        Returns:
            For each tier below this one: the nodes that take part [k] and, for each, the position of its parent [k]
            among those of the tier above (for the first tier: in `ids`).
        """
        clock, ids, found = Clock(self.round if round_ is None else round_), self.ids, []
        for tier in range(self.tier, self._context.topology.leaf):
            found.append(Children(self._context, tier, ids, clock, self.quiet, self.only).draw())
            ids = found[-1][0]
        return found

    def shuffled_devices(self, purpose: str, round_: int) -> Tensor:
        """[k] the devices that take part in the first calls of a round, in random order, as numbers in the federation.

        Args:
            purpose: any text; the order is drawn for this purpose.
            round_: a round, counted from 0.
        """
        topology, ids = self._context.topology, self.participants(round_)[-1][0]
        base = random.key(self._context.seed, purpose, round_)
        draws = random.bits(random.node_keys(base, topology.keys[topology.leaf][ids]), 1).squeeze(1)
        return topology.order[ids[draws.argsort()]]

    # -- calls -----------------------------------------------------------------------------------

    def solve(self, rows: Rows, where: Tensor | None = None) -> Sums:
        """Run the program of the next tier at the children that take part, and sum their answers.

        The answers are added up as they arrive and not all held in memory.

        Args:
            rows: [m, ...] what each parent sends to its children.
            where: [m] bool, which parents call their children; by default all.

        Returns:
            The sums by parent; ``.mean(weight)`` is their mean, and the rows sent where nobody answered.
        """
        kids, position = self._present("solve", where)
        if self.stale_answers and not self._everybody:
            self.remember("answer", self._answers("solve", rows, kids, position))
            return self.recall("answer", self._spread(rows))
        sums = Sums.zeros(rows, len(self.ids))
        if kids is self._whole.ids:
            blocks, parent_of_block = self._whole.blocks, self._whole.parents
        else:
            blocks = self._blocks(kids, position)
            parent_of_block = position[starts_of(blocks)]
        for folded in self._deliver("solve", self._packed("solve", rows), kids, position, blocks):
            sums.add(folded, parent_of_block[folded.first : folded.first + folded.count])
        return self._unpacked(sums) if self._context.travel.active else sums

    def call(
        self,
        method: str,
        rows: Rows,
        to: Tensor | None = None,
        each: bool = False,
        where: Tensor | None = None,
    ) -> Answers:
        """Run any method of the algorithm at the children and hold every answer.

        A method of devices, whose last parameter is `local`, can be called at teams too: each team then calls it at
        its own devices and answers the mean of their answers, weighted by samples.

        Args:
            method: the name of the method; ``"solve"`` is the program of the next tier.
            rows: [m, ...] what each parent sends, or [k, ...] with `each`.
            to: [k] the children to call; by default those that take part, drawn for this call.
            each: `rows` has one row for each child in `to` instead of one for each parent.
            where: [m] bool, which parents call their children; by default all. Not used with `to`.

        Returns:
            The answers [k, ...] as ``.rows``, the children [k] as ``.ids``, and the same sums as `solve` returns.
        """
        if to is None:
            kids, position = self._present(method, where)
        else:
            kids = to
            place = torch.full((self._context.topology.size(self.tier),), -1)
            place[self.ids] = torch.arange(len(self.ids))
            position = place[self._context.topology.parents[self.tier + 1][kids]]
        return self._answers(method, rows, kids, position, each)

    def remember(self, name: str, answers: Answers) -> None:
        """Keep answers at this node, one row per child, for `recall`."""
        if not self.quiet:
            for field, value in as_dict(answers.rows).items():
                self._context.memory.write(self.tier + 1, name, answers.ids, value, field)

    def recall(self, name: str, default: Rows) -> Answers:
        """What was remembered about all registered children.

        Args:
            name: the name given to `remember`.
            default: [k, ...] the rows of children about which nothing was remembered, in the order of `kids`.
        """
        kids, position = self.kids
        rows = {
            field: self._context.memory.read(self.tier + 1, name, kids, value, field)
            for field, value in as_dict(default).items()
        }
        return self._as_answers(rows if isinstance(default, dict) else rows[""], kids, position, default)

    def anew(self) -> Children:
        """The same node as before its first call: children that it calls draw the same mini-batches again."""
        return Children(self._context, self.tier, self.ids, self.clock, self.quiet, self.only)

    def scoped(self, name: str, only: Tensor) -> Children:
        """The server of one of several models that are trained on the same devices.

        Args:
            name: the name of the model in `Algorithm.parts`.
            only: [devices] bool, in the order of the federation: the devices that its calls reach.
        """
        server = torch.zeros(1, dtype=torch.int64)
        return Children(self._context.scopes[name], 0, server, self.clock, self.quiet, only)

    # -- how a call becomes messages -------------------------------------------------------------

    @cached_property
    def _reached(self) -> Tensor:
        """[nodes of the tier below] bool, the nodes that are, or have below them, one of the devices `only`."""
        assert self.only is not None
        topology = self._context.topology
        devices = self.only[topology.order]
        return devices if self.tier + 1 == topology.leaf else topology.summed(devices.long())[self.tier + 1] > 0

    @property
    def _everybody(self) -> bool:
        """Whether all children take part in all calls."""
        return self.only is None and self._context.participation[self.tier + 1].everybody

    @property
    def _whole(self) -> Kids:
        """The children of all nodes of this tier."""
        return self._context.topology.all_kids[self.tier]

    def _next_clock(self, method: str) -> Clock:
        return Clock(self.clock.round, (self.clock.call << 16) + self._calls[method])

    def _present(self, method: str, where: Tensor | None) -> tuple[Tensor, Tensor]:
        kids, position = self.draw(method)
        return (kids, position) if where is None else (kids[where[position]], position[where[position]])

    def _spread(self, rows: Rows) -> Rows:
        return map_rows(lambda r: r[self.kids[1]], rows)

    def _blocks(self, kids: Tensor, position: Tensor) -> Tensor:
        """[k] the block of each of these children, numbered from 0."""
        if kids is self._whole.ids:
            return self._whole.blocks
        return self._context.topology.numbered_blocks(self.tier + 1, kids, position)

    def _packed(self, method: str, rows: Rows, position: Tensor | None = None) -> Rows:
        """What is sent: without what stays at home, and with the statistics of these nodes.

        Args:
            method: what is called; only the programs of a tier are sent models.
            rows: what the program sends, one row per node, or per child.
            position: [k] for one row per child, the position of its parent.
        """
        travel = self._context.travel
        if not travel.active or method not in OWN_PROGRAMS or self.quiet:
            return rows
        models = {*self._context.algorithm.model_fields} & {*as_dict(rows)}
        rows, shared = travel.thin(rows), self.statistics[:, ~travel.home_statistics]
        if not models or not shared.shape[1]:
            return rows
        return {**as_dict(rows), STATISTICS: shared if position is None else shared[position]}

    def _unpacked(self, sums: Sums) -> Sums:
        """The sums of the answers with all columns, without the statistics, which these nodes keep."""
        travel = self._context.travel
        if any(STATISTICS in as_dict(rows) for rows in sums.sums.values()):
            found = Sums(self.statistics[:, ~travel.home_statistics], sums.num, {}, sums.totals)
            found.sums = {weight: as_dict(rows)[STATISTICS] for weight, rows in sums.sums.items()}
            self.set_statistics(found.mean("samples"))
        for weight, rows in sums.sums.items():
            sums.sums[weight] = travel.widen_sums(without_statistics(rows), sums.totals[weight])
        return sums

    def _deliver(self, method: str, rows: Rows, kids: Tensor, sender: Tensor, blocks: Tensor | None) -> Iterator[Any]:
        shares = None
        if blocks is not None:
            everyone = kids is self._whole.ids
            own = self._context.samples[self.tier + 1]
            shares = self._context.shares[self.tier + 1] if everyone else share_of_samples(own[kids], sender)
        call = Call(
            tier=self.tier + 1,
            ids=kids,
            method=method,
            clock=self._next_clock(method),
            rows=rows,
            sender=sender,
            blocks=blocks,
            shares=shares,
            quiet=self.quiet,
            scope=self._context.name,
            only=self.only,
        )
        self._calls[method] += 1
        return self._context.engine.deliver(call)

    def _answers(self, method: str, rows: Rows, kids: Tensor, position: Tensor, each: bool = False) -> Answers:
        sender = torch.arange(len(kids)) if each else position
        sent = self._packed(method, rows, position if each else None)
        pieces = list(self._deliver(method, sent, kids, sender, None))
        if any(isinstance(piece, Answered) for piece in pieces):
            which = torch.cat([piece.which for piece in pieces])
            kids, position, pieces = kids[which], position[which], [piece.rows for piece in pieces]
        elif not pieces:
            kids, position = kids[:0], position[:0]
        answers = cat_rows(pieces) if pieces else map_rows(lambda r: r[:0], rows)
        if self._context.travel.active and pieces:
            answers = self._unpacked_answers(answers, kids, position)
        return self._as_answers(answers, kids, position, rows)

    def _unpacked_answers(self, rows: Rows, kids: Tensor, position: Tensor) -> Rows:
        """Answers with all columns, without the statistics, which these nodes keep."""
        travel = self._context.travel
        if STATISTICS in as_dict(rows):
            before = self.statistics[:, ~travel.home_statistics]
            self.set_statistics(self._as_answers(as_dict(rows)[STATISTICS], kids, position, before).mean("samples"))
        return travel.widen(without_statistics(rows))

    def _as_answers(self, rows: Rows, kids: Tensor, position: Tensor, sent: Rows) -> Answers:
        samples = self._context.samples[self.tier + 1][kids]
        return Answers(sent, len(self.ids), rows, kids, position, samples, self._blocks(kids, position))
