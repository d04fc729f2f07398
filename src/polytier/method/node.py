"""What the program of a tier is given: `Children` on the server and on teams, `LocalProblem` on devices."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier._errors import unknown
from polytier._text import schedule
from polytier.data.batches import Batch, Walk, batch_sizes, share_of_batch
from polytier.data.federation import SPLITS
from polytier.method.call import Call, Clock, Diverged
from polytier.method.context import Context
from polytier.method.parameters import Step
from polytier.stack.objective import Piece
from polytier.stack.rows import Answered, Answers, Rows, Sums, as_dict, cat_rows, map_rows, share_of_samples, starts_of
from polytier.tree import random


class Node:
    """What the programs of all tiers are given. It stands for the nodes `ids` of one tier, one row per node.

    attribute | shape | meaning
    tier      |       | 0 is the server, the last tier are the devices
    ids       | [n]   | the numbers of these nodes in their tier
    clock     |       | the round and the number of the call
    quiet     |       | True during an evaluation: nothing is kept and no gradient is counted
    only      | [devices] or None | the devices that may be reached; None: all of them, as participation says

    Algorithms use the public attributes and methods alone. `_context` belongs to the package.
    """

    def __init__(
        self, context: Context, tier: int, ids: Tensor, clock: Clock, quiet: bool = False, only: Tensor | None = None
    ) -> None:
        self._context, self.tier, self.ids, self.clock, self.quiet, self.only = context, tier, ids, clock, quiet, only

    # -- the tree and the round ------------------------------------------------------------------

    @property
    def num_tiers(self) -> int:
        """Number of tiers of the tree, server and devices included: 2 if there are no teams."""
        return self._context.topology.num_tiers

    @property
    def round(self) -> int:
        """The current round, counted from 0."""
        return self.clock.round

    @property
    def held_round(self) -> int:
        """The round at which schedules are evaluated: the first round of the current frame (see `Algorithm.frame`)."""
        return self.round - self.round % self._context.hold

    @property
    def device(self) -> torch.device:
        """Where the rows of this node are computed: those of devices on the accelerator, all others on the CPU."""
        return torch.device("cpu")

    # -- the model and the data ------------------------------------------------------------------

    @property
    def initial(self) -> Tensor:
        """[n, d] the model that training starts from, the same at every node."""
        return self._context.objective.initial.to(self.device).expand(len(self.ids), -1)

    @property
    def samples(self) -> Tensor:
        """[n] number of training samples of each node: its own, or those of all devices below it."""
        return self._context.samples[self.tier][self.ids]

    @property
    def num_classes(self) -> int | None:
        """Number of classes if the target of each sample is one class, None for other targets."""
        federation = self._context.batches.federation
        return federation.num_classes if federation.y.ndim == 1 else None

    @property
    def parameter_names(self) -> list[str]:
        """Names of the model's parameters, in the order of their columns in a row."""
        return list(self._context.objective.names)

    @property
    def l2(self) -> float:
        """Coefficient of the term l2/2 |theta|^2 of the objective."""
        return self._context.objective.l2

    def columns(self, pattern: str) -> Tensor:
        """[d] bool, True for the columns of the parameters whose name matches `pattern`, e.g. ``"head.*"``."""
        objective = self._context.objective
        fits = [fnmatch.fnmatch(name, pattern) for name in objective.names]
        return torch.repeat_interleave(torch.tensor(fits), torch.tensor(objective.sizes)).to(self.device)

    # -- rows that last, random numbers, hyper-parameters ----------------------------------------

    def memory(self, name: str, default: Tensor) -> Tensor:
        """Read the rows that were kept under a name.

        Args:
            name: the name given to `keep`.
            default: [n, ...] the rows of nodes that have kept nothing under this name.

        Returns:
            [n, ...]
        """
        return self._context.memory.read(self.tier, name, self.ids, default.cpu()).to(self.device)

    def keep(self, /, **rows: Tensor) -> None:
        """Keep rows until they are replaced, in this round and in later ones.

        Args:
            rows: [n, ...] by name, which is any text of up to 100 characters. The row ``model`` is the model of this
                node that is evaluated.

        Raises:
            Diverged: if a row holds NaN or infinity.
            ValueError: if a name is too long, or rows of another shape were kept under it.
        """
        if not self.quiet:
            for name, value in rows.items():
                value = value.cpu()
                check_finite(self, value)
                self._context.memory.write(self.tier, name, self.ids, value)

    def uniform(self, purpose: str, k: int = 1) -> Tensor:
        """[n, k] random numbers in [0, 1), different for each node, round and call.

        Args:
            purpose: any text; draws for different purposes are independent.
            k: numbers per node.
        """
        base = random.key(self._context.seed, purpose, self.clock.round, self.clock.call)
        keys = random.node_keys(base, self._context.topology.keys[self.tier][self.ids])
        return random.uniform(keys, k).to(self.device)

    def shared(self, purpose: str, k: int = 1) -> Tensor:
        """[k] random numbers in [0, 1), the same at every node during a round."""
        base = random.key(self._context.seed, purpose, self.clock.round)
        return random.uniform(torch.tensor([random.signed(base)]), k)[0].to(self.device)

    def value(self, field: Step, tier: int | None = None) -> Any:
        """The value of a hyper-parameter at these nodes.

        Args:
            field: a number, a schedule, one number per node, or a mapping from tier names to these.
            tier: read the value of another tier; it must be one number there.

        Returns:
            A number, or a column [n, 1] if the field has one number per node.

        Raises:
            ValueError: if the field has no value for this tier, or not one number per node.
        """
        topology = self._context.topology
        name = topology.tier_names[self.tier if tier is None else tier]
        if isinstance(field, Mapping):
            if name not in field:
                raise ValueError(
                    f"a field is given by tier ({', '.join(field)}) and none is named {name}; add a value for {name}, "
                    "or give one value for all tiers"
                )
            field = field[name]
        if isinstance(field, str):
            return schedule(field)(self.held_round)
        if isinstance(field, int | float):
            return field
        size = topology.size(self.tier)
        if tier is not None and tier != self.tier:
            raise ValueError(f"{name}: this field takes one number per tier; got {len(field)} numbers; give one")
        if len(field) != size:
            raise ValueError(
                f"{name}: a field with one number per node needs {size}; got {len(field)}; give one number for each "
                f"{name}, or one number for all"
            )
        # devices are numbered as in the federation, in whichever team they are
        places = topology.order[self.ids] if self.tier == topology.leaf else self.ids
        return torch.tensor(field, dtype=self._context.objective.dtype)[places].unsqueeze(1).to(self.device)


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

    def __init__(
        self, context: Context, tier: int, ids: Tensor, clock: Clock, quiet: bool = False, only: Tensor | None = None
    ) -> None:
        super().__init__(context, tier, ids, clock, quiet, only)
        self._calls: Counter[str] = Counter()

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
        start, end = self._context.batches.federation.span(split)
        return (end - start)[self._context.topology.order]

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
        return self._context.topology.keys[self.tier + 1][kids].argsort()

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
        if self.only is not None:
            chosen = self._reached[kids]
        else:
            rule = self._context.participation[self.tier + 1]
            purpose = "participation" if method == "solve" else f"participation:{method}"
            base = random.key(self._context.seed, purpose, self.clock.round, self._next_clock(method).call)
            keys = self._context.topology.keys[self.tier + 1][kids]
            chosen = rule.draw(base, self.clock.round, keys, kids, position, len(self.ids))
        return kids[chosen], position[chosen]

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
        everybody = self.only is None and self._context.participation[self.tier + 1].everybody
        if self.stale_answers and not everybody:
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
        return topology.summed(self.only[topology.order].long())[self.tier + 1] > 0

    def _next_clock(self, method: str) -> Clock:
        return Clock(self.clock.round, (self.clock.call << 16) + self._calls[method])

    def _present(self, method: str, where: Tensor | None) -> tuple[Tensor, Tensor]:
        kids, position = self.draw(method)
        return (kids, position) if where is None else (kids[where[position]], position[where[position]])

    def _spread(self, rows: Rows) -> Rows:
        return map_rows(lambda r: r[self.kids[1]], rows)

    def _blocks(self, kids: Tensor, position: Tensor) -> Tensor:
        """[k] the block of each of these children, numbered from 0."""
        block = self._context.topology.blocks[self.tier + 1][kids]
        return torch.cat([block[:1] * 0, (block.diff() != 0) | (position.diff() != 0)]).cumsum(0)

    def _deliver(self, method: str, rows: Rows, kids: Tensor, sender: Tensor, blocks: Tensor | None) -> Iterator[Any]:
        shares = None
        if blocks is not None:
            shares = share_of_samples(self._context.samples[self.tier + 1][kids], sender)
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
        pieces = list(self._deliver(method, rows, kids, sender, None))
        if any(isinstance(piece, Answered) for piece in pieces):
            which = torch.cat([piece.which for piece in pieces])
            kids, position, pieces = kids[which], position[which], [piece.rows for piece in pieces]
        elif not pieces:
            kids, position = kids[:0], position[:0]
        answers = cat_rows(pieces) if pieces else map_rows(lambda r: r[:0], rows)
        return self._as_answers(answers, kids, position, rows)

    def _as_answers(self, rows: Rows, kids: Tensor, position: Tensor, sent: Rows) -> Answers:
        samples = self._context.samples[self.tier + 1][kids]
        return Answers(sent, len(self.ids), rows, kids, position, samples, self._blocks(kids, position))


class LocalProblem(Node):
    """A device: the only node with data. It stands for the devices `ids` [n], one row per device.

    Polytier creates it and passes it to `Algorithm.device` and to every method of an algorithm whose last parameter
    is named `local`. In simulation it stands for many devices at once; on a real device n is 1.

    Args:
        context: what the programs of a run share.
        tier: the tier of the devices.
        ids: [n] their numbers in the tier.
        clock: the round and the number of the call.
        quiet: True during an evaluation.
        only: [devices] bool, the devices that may be reached; None: all.

    Examples:
        A device program that takes two steps, one on a mini-batch and one on all training samples:

        >>> from dataclasses import dataclass
        >>> from polytier import Algorithm, Federation, train
        >>> @dataclass(frozen=True)
        ... class Alone(Algorithm):
        ...     def server(self, x, devices):
        ...         devices.solve({})  # an empty message: devices only have to run
        ...         return x
        ...
        ...     def device(self, sent, local):
        ...         theta = local.memory("model", local.initial)  # [n, d]
        ...         theta = theta - 0.1 * local.grad(theta)
        ...         theta = theta - 0.1 * local.grad(theta, local.full())
        ...         local.keep(model=theta)  # evaluated as the personal model of each device
        ...         return {}
        >>> x, y, device = [[0.0], [1.0], [2.0]], [0, 1, 1], ["a", "b", "b"]
        >>> federation = Federation.from_arrays(x, y, device, shares=(1, 0, 0))
        >>> run = train(Alone(), federation, "mclr", rounds=1)
        >>> tuple(run.personal.shape)  # 2 devices; weights and biases of 2 classes
        (2, 4)
    """

    def __init__(
        self, context: Context, tier: int, ids: Tensor, clock: Clock, quiet: bool = False, only: Tensor | None = None
    ) -> None:
        super().__init__(context, tier, ids, clock, quiet, only)
        self.rows = context.topology.order[ids]  # [n] their numbers in the federation
        self._walks: dict[tuple[int | str, str], Walk] = {}

    @property
    def device(self) -> torch.device:
        return self._context.objective.device

    def batch(self, size: int | None = None, stream: str = "") -> Batch:
        """The next mini-batch of each device.

        Args:
            size: samples per mini-batch; by default the batch size of the run. A device with fewer samples uses all.
            stream: mini-batches of different streams are drawn independently of each other.
        """
        rule = self._context.batch_size if size is None else size
        if (rule, stream) not in self._walks:
            sizes = batch_sizes(rule, self.samples, self.held_round)
            clock = self.clock
            self._walks[rule, stream] = self._context.batches.walk(self.rows, clock.round, clock.call, sizes, stream)
        return self._walks[rule, stream].next()

    def full(self, split: str = "train") -> Batch:
        """All samples of each device in a split: train, validation or test."""
        return self._context.batches.whole(self.rows, split)

    def subset(self, count: int, width: int | None = None) -> Batch:
        """A fixed choice of training samples of each device, spread evenly over all it has.

        Args:
            count: samples per device at most; a device with fewer uses all.
            width: the size to which the batch is padded; by default `count`.

        Returns:
            A batch of one group, x [n, width, ...], whose weights [n, width] are 0 where it is padded.
        """
        batches, samples = self._context.batches, self.samples.unsqueeze(1)
        number, slot = samples.clamp(max=count), torch.arange(count if width is None else width)
        place = batches.federation.bounds[self.rows, :1] + torch.minimum(slot, number - 1) * samples // number
        weight = share_of_batch(number, len(slot), batches.dtype)
        key = random.bits(batches.keys[self.rows], len(slot)) if batches.keyed else None
        return Batch([batches.gather(slice(None), place, weight, key)], len(self.ids))

    def grad(
        self, theta: Tensor, batch: Batch | None = None, loss: Callable | None = None, extra: tuple = ()
    ) -> Tensor:
        """Gradients of the objective, one per device. Counted as one device step per device.

        Args:
            theta: [n, d] the models.
            batch: the samples; by default the next mini-batch (``local.full()``: all training samples).
            loss: ``loss(apply, row, x, y, weight, *extra)``, which replaces the objective, without its l2 term;
                it sees one device: row [d], x [B, ...], y [B, ...], weight [B].
            extra: further arguments of `loss`, [n, ...] each.

        Returns:
            [n, d]
        """
        if not self.quiet:
            self._context.device_steps += len(theta)
        return self._context.objective.grad(theta, self.batch() if batch is None else batch, loss, extra)

    def grad_pieces(self, theta: Tensor, batch: Batch | None = None) -> Iterator[tuple[Tensor | slice, list[Piece]]]:
        """The same gradients for some rows at a time and by parameter, for the solvers (`Objective.grad_pieces`)."""
        if not self.quiet:
            self._context.device_steps += len(theta)
        return self._context.objective.grad_pieces(theta, self.batch() if batch is None else batch)

    def loss(
        self, theta: Tensor, batch: Batch | None = None, loss: Callable | None = None, extra: tuple = ()
    ) -> Tensor:
        """[n] values of the objective at theta [n, d], on all training samples or on the given batch.

        `loss` and `extra` are those of `grad`.
        """
        return self._context.objective.loss(theta, self.full() if batch is None else batch, loss, extra)

    def apply(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """[n, B, ...] the outputs of the models theta [n, d] on inputs [n, B, ...]."""
        return self._context.objective.outputs(theta, inputs)


def check_finite(node: Node, rows: Rows) -> None:
    """Raise `Diverged`, which names the nodes, if a row holds NaN or infinity."""
    for value in as_dict(rows).values():
        # the sum of all values is a fast first test; it can also overflow, so the rows are then looked at
        if value.is_floating_point() and not torch.isfinite(value.sum()):
            bad = ~torch.isfinite(value.reshape(len(value), -1)).all(1)
            if bad.any():
                names = node._context.topology.names[node.tier][node.ids[bad].numpy()]
                tier = node._context.topology.tier_names[node.tier]
                raise Diverged(node.clock.round + 1, tier, [str(n) for n in names])
