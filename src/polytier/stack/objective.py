"""Losses and gradients of a stack of models, for any torch module and any loss with one value per sample.

A model is a flat row [d] of the parameters that train; the module sees views of it. Parameters that do not train are
in the module, once for all rows. The gradient of a stack [n, d] is `vmap(grad(loss))`, traced once per shape and then
run without autograd. `batching` says how a stack is computed; `choose_batching` finds the right one:

    stacked | the traced graph of n rows
    single  | the traced graph of one row, row by row; for modules whose bits depend on the size of the stack
    eager   | autograd, row by row; for modules that cannot be traced
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from polytier.data.batches import Batch, Group
from polytier.data.pack import as_file, from_file
from polytier.models.losses import Loss, cross_entropy
from polytier.models.trainable import Trainable, digest
from polytier.stack.batch_norm import replace_batch_norms
from polytier.stack.dropout import key_dropouts
from polytier.stack.features import Boundary
from polytier.stack.gradient import grad
from polytier.stack.rows import LINE, aligned
from polytier.stack.tracing import trace
from polytier.tree import random

# k columns of a gradient: [n, k], or two factors [n, a, c] and [n, c, b] whose products have a * b = k numbers
Piece = Tensor | tuple[Tensor, Tensor]
BATCHINGS = ("stacked", "single", "eager")
ALL = Trainable()


class Objective:
    """f(theta) = mean loss over a batch + l2/2 |theta|^2, for every row theta of a stack.

    Args:
        module: the model; it is copied.
        loss: a function (outputs [B, ...], targets [B, ...]) -> one value per sample [B].
        l2: the weight of the squared norm of the parameters that train.
        dtype: all floating point parameters and inputs have this type.
        device: where gradients are computed, such as "cpu" or "cuda".
        batching: "stacked", "single" or "eager", see above.
        trainable: which parameters train.
        seed: determines the first values of parameters that `trainable` adds.
        share: whether frozen parameters use the memory of those of `module`, which must then not be changed (its
            parameters may be moved to other addresses).
        boundary: if it is given, inputs are features, and only the layers after this boundary are computed.
        micro_batch: samples of a device whose gradients are computed at once and then added up; None: all of a batch.
            A loss that a method brings along is always computed on all of them.

    Attributes:
        names: names of the parameters that train, in the order of the row.
        shapes, sizes: their shapes and numbers of elements.
        dimension: d, the length of a row.
        initial: [d] the row of the module as it was given.
        frozen_size: the number of elements of all other parameters.
        norms: the BatchNorm layers that train, by name. If there are some, rows are computed one by one ("eager").
        statistic_names, statistic_sizes: names and sizes of their running statistics, in the order of a row [s].
        initial_statistics: [s] those of the module as it was given.

    Raises:
        ValueError: the module has no parameters, nothing would train, or BatchNorm layers train with `micro_batch`.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from polytier import Trainable
        >>> module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> objective = Objective(module, trainable=Trainable("head"))
        >>> objective.names, objective.dimension, objective.frozen_size
        (['2.weight', '2.bias'], 27, 40)
        >>> theta = objective.initial.repeat(5, 1)  # the models of five devices
        >>> objective.outputs(theta, torch.zeros(5, 16, 4)).shape
        torch.Size([5, 16, 3])
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss = cross_entropy,
        *,
        l2: float = 0.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        batching: str = "stacked",
        trainable: Trainable = ALL,
        seed: int = 0,
        share: bool = False,
        boundary: Boundary | None = None,
        micro_batch: int | None = None,
    ) -> None:
        self.boundary, self.micro_batch = boundary, micro_batch
        for parameter in module.parameters() if share else ():
            parameter.data = at_line(parameter.data)
        self.module = trainable.apply(module, seed, share).to(device=device, dtype=dtype)
        self.sample_loss, self.l2, self.dtype, self.batching = loss, l2, dtype, batching
        self.device, self.trainable = torch.device(device), trainable
        parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.names = list(parameters)
        self.shapes = [tuple(p.shape) for p in parameters.values()]
        self.sizes = [p.numel() for p in parameters.values()]
        self.dimension = sum(self.sizes)
        self.initial = torch.cat([p.detach().reshape(-1) for p in parameters.values()]).cpu()  # [d]
        self.norms = replace_batch_norms(self.module, trainable)
        self.statistic_names = [f"{name}.running_{part}" for name in self.norms for part in ("mean", "var")]
        found = [self.module.get_buffer(name).detach() for name in self.statistic_names]
        self.statistic_sizes = [len(values) for values in found]
        self.initial_statistics = torch.cat(found).cpu() if found else self.initial.new_zeros(0)  # [s]
        self._statistics: Tensor | None = None  # [s] of the row that is computed; None: the initial ones
        self._mask: Tensor | None = None  # [B] bool, the samples of a training step that count
        if self.norms and batching == "stacked":
            self.batching = "eager"
        if self.norms and micro_batch:
            raise ValueError(
                f"micro_batch = {micro_batch}: the BatchNorm layers of this model need whole mini-batches; leave it "
                "out, or freeze these layers (--train head or layers=PATTERN)"
            )
        self.dropouts = key_dropouts(self.module)
        self.module.eval()  # in training mode other layers would draw from torch's global generator
        self.module.requires_grad_(False)
        self.frozen_size = sum(p.numel() for p in self.frozen.values())
        self.output_bytes: int | None = None  # of one sample, once it is known
        self._compiled: dict[Any, Callable] = {}
        self._expanded: dict[str, Tensor] = {}  # the frozen parameters as a stack sees them, while it is traced
        self._files: dict[str, tuple[Path, str, list[int]]] = {}  # where other processes find the frozen parameters
        self._light: tuple[Any, ...] | None = None  # the module and its layers without these, to be pickled
        self._place_frozen()

    # -- frozen parameters -----------------------------------------------------------------------

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The parameters that do not train, by name. They are shared by all rows and are never written to."""
        trained = set(self.names)
        return {name: p for name, p in self.module.named_parameters() if name not in trained}

    @cached_property
    def frozen_digest(self) -> str | None:
        """A digest of the frozen parameters, in which two models can be compared; None if all parameters train."""
        return digest(self.frozen) if self.frozen_size else None

    def all_parameters(self, row: Tensor) -> dict[str, Tensor]:
        """All parameters of the model `row` [d] by name, in the order of the module: the row's and the frozen ones."""
        own = self.parameters(row)
        return {name: own.get(name, p) for name, p in self.module.named_parameters()}

    def share_frozen(self, folder: Path) -> None:
        """Move the frozen parameters into files in `folder`.

        A pickle of the objective then names the files, and other processes map them instead of getting a copy.
        """
        if any(path.exists() for path, _, _ in self._files.values()):
            return  # several models share it, and it was moved for the first one
        for k, (name, values) in enumerate(self.frozen.items()):
            self._files[name] = as_file(values.detach().cpu(), folder / f"frozen-{k}")
        empty: dict[int, Any] = {id(p): nn.Parameter(p.new_empty(0), False) for p in self.frozen.values()}
        self._light = copy.deepcopy((self.module, self.dropouts, self.norms), empty)
        self._place_frozen()

    def _place_frozen(self) -> None:
        """Map the frozen parameters from their files; without files, give each an aligned address.

        The last bits of a product depend on the addresses and the strides of its factors (see `aligned`).
        """
        for name, parameter in self.frozen.items():
            values = from_file(*self._files[name]) if name in self._files else parameter.data
            parameter.data = at_line(values.to(self.device))

    def __copy__(self) -> Objective:
        """A copy that shares the module; graphs are traced again."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__, _compiled={})
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle, without graphs; frozen parameters in files are named, not copied."""
        state = {**self.__dict__, "_compiled": {}}  # graphs are traced again in another process
        if self._light and all(path.exists() for path, _, _ in self._files.values()):
            state["module"], state["dropouts"], state["norms"] = self._light
        else:
            state["_files"] = {}
        return {**state, "_light": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state; frozen parameters are mapped from their files."""
        self.__dict__.update(state)
        self._place_frozen()

    # -- one row ---------------------------------------------------------------------------------

    def parameters(self, row: Tensor) -> dict[str, Tensor]:
        """Views of a row [d], or of a stack [n, d], by the name of the parameter."""
        parts = row.split(self.sizes, dim=-1)
        lead = row.shape[:-1]
        return {n: p.reshape(*lead, *s) for n, p, s in zip(self.names, parts, self.shapes, strict=True)}

    def apply(self, row: Tensor, inputs: Tensor, key: Tensor | None = None) -> Tensor:
        """[B, ...] outputs of the model `row` [d] on inputs [B, ...]; with `key` [B], with dropout drawn from it."""
        for layer in self.dropouts:
            layer.key = key
        for layer in self.norms.values():
            layer.mask = self._mask
        try:
            values = {**self.parameters(row), **self.statistics(self._statistics), **self._expanded}
            if self.boundary is None:
                return functional_call(self.module, values, (inputs,))
            rest = self.boundary.rest(self.module)
            return functional_call(rest, self.boundary.own(values, rest), (inputs,))
        finally:
            for layer in self.dropouts:
                layer.key = None  # it may be a tensor of torch.func, which cannot be pickled
            for layer in self.norms.values():
                layer.mask = None

    def statistics(self, row: Tensor | None) -> dict[str, Tensor]:
        """Views of a row [s] of running statistics by name; none for None."""
        return {} if row is None else dict(zip(self.statistic_names, row.split(self.statistic_sizes, -1), strict=True))

    def mean_loss(self, row: Tensor, x: Tensor, y: Tensor, weight: Tensor, key: Tensor | None = None) -> Tensor:
        """The loss of one row, weighted over its samples, without the l2 term."""
        return (weight * self.sample_loss(self.apply(row, x, key), y)).sum()

    def row_loss(self, row: Tensor, x: Tensor, y: Tensor, weight: Tensor, key: Tensor | None = None) -> Tensor:
        """The objective of one row, with the l2 term."""
        value = self.mean_loss(row, x, y, weight, key)
        return value + 0.5 * self.l2 * (row * row).sum() if self.l2 else value

    # -- a stack of rows -------------------------------------------------------------------------

    def grad(
        self,
        theta: Tensor,
        batch: Batch,
        loss: Callable | None = None,
        extra: tuple = (),
        statistics: Tensor | None = None,
    ) -> Tensor:
        """[n, d] the gradient of each row on its own samples.

        Args:
            theta: [n, d] the models.
            batch: the samples of each.
            loss: replaces the objective, `loss(apply, row, x, y, weight, *extra)` for one row, where
                `apply(row, inputs)` are the outputs of the model.
            extra: rows [n, ...] that are passed to `loss`.
            statistics: [n, s] the running statistics of each row, which are changed to those after this batch.
        """
        if self.micro_batch and loss is None:
            pieces = (self._stack("grad", theta, piece, None, ()) for piece in batch.pieces(self.micro_batch))
            found = reduce(Tensor.add_, pieces)
        else:
            found = self._stack("grad", theta, batch, loss, extra, statistics)
        return found.add_(theta, alpha=self.l2) if self.l2 and loss is None else found

    def grad_pieces(
        self, theta: Tensor, batch: Batch, statistics: Tensor | None = None
    ) -> Iterator[tuple[Tensor | slice, list[Piece]]]:
        """The same gradients for some rows at a time, as adjacent columns, so that they need not be concatenated.

        Yields:
            Which rows, and their columns from left to right (see `Piece`). They are new tensors, which may be written
            to; the rows `theta` may be changed as soon as their columns are used.
        """
        if self.batching != "stacked" or self.micro_batch:
            whole: list[Piece] = [self.grad(theta, batch, statistics=statistics)]
            return iter([(slice(None), whole)])
        group = batch.groups[0]
        n = theta.shape[0]
        if group.x.shape[0] == n and len(stacks_of(n)) == 1:  # the usual case, without any slices
            pieces = self._graph("grad", None, (theta, *self._data(group)), True)
            return iter([(slice(None), self._with_l2(pieces, theta) if self.l2 else pieces)])
        return self._pieces_of_parts(theta, batch)

    def _pieces_of_parts(self, theta: Tensor, batch: Batch) -> Iterator[tuple[Tensor | slice, list[Piece]]]:
        """`grad_pieces` of one stack of rows after the other."""
        for group in batch.groups:
            everybody = len(group.x) == len(theta)
            for part in stacks_of(len(group.x)):
                rows = part if everybody else torch.arange(len(theta))[group.rows][part]
                x, data = theta[rows], [t[part] for t in self._data(group)]
                pieces = self._graph("grad", None, (x, *data), True)
                yield rows, self._with_l2(pieces, x) if self.l2 else pieces

    def _with_l2(self, pieces: list[Piece], theta: Tensor) -> list[Any]:
        """The columns plus l2 * theta."""
        whole = [columns(piece) for piece in pieces]
        for piece, x in zip(whole, theta.split([piece.shape[1] for piece in whole], 1), strict=True):
            piece.add_(x, alpha=self.l2)
        return whole

    def loss(
        self,
        theta: Tensor,
        batch: Batch,
        loss: Callable | None = None,
        extra: tuple = (),
        statistics: Tensor | None = None,
    ) -> Tensor:
        """[n] the value of the objective for each row; arguments as for `grad`. Running statistics are used."""
        return self._stack("loss", theta, batch, loss, extra, statistics)

    def outputs(self, theta: Tensor, inputs: Tensor, statistics: Tensor | None = None) -> Tensor:
        """[n, B, ...] outputs of each row on its own inputs [n, B, ...], with its own statistics [n, s]."""
        return self._run("outputs", None, (theta, inputs), statistics)

    def sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """[n, B] one loss per sample, from outputs and targets [n, B, ...]; computed row by row, as in training."""
        if self.batching == "stacked":
            return vmap(self.sample_loss)(outputs, targets)
        return torch.stack([self.sample_loss(o, t) for o, t in zip(outputs, targets, strict=True)])

    def _stack(
        self,
        kind: str,
        theta: Tensor,
        batch: Batch,
        loss: Callable | None,
        extra: tuple,
        statistics: Tensor | None = None,
    ) -> Tensor:
        """Gradients or values of all rows; each group of the batch is computed by itself."""
        if len(batch.groups) == 1 and len(batch.groups[0].x) == len(theta):
            return self._run(kind, loss, (theta, *self._data(batch.groups[0]), *extra), statistics)
        result = None
        for group in batch.groups:
            rows = group.rows
            own = None if statistics is None else statistics[rows]
            part = self._run(kind, loss, (theta[rows], *self._data(group), *(e[rows] for e in extra)), own)
            if own is not None and statistics is not None and kind == "grad":
                statistics[rows] = own
            result = part.new_zeros((len(theta), *part.shape[1:])) if result is None else result
            result[rows] = part
        assert result is not None, "a batch has at least one group"
        return result

    def _data(self, group: Group) -> tuple[Tensor, ...]:
        """The arguments of a loss after the row."""
        data = (group.x, group.y, group.weight)
        return data if group.key is None else (*data, group.key)

    def _run(
        self, kind: str, loss: Callable | None, stacks: tuple[Tensor, ...], statistics: Tensor | None = None
    ) -> Tensor:
        """Compute all rows as `batching` says; `stacks` are the arguments, each [n, ...]."""
        n = len(stacks[0])
        if self.norms:
            return torch.stack([self._with_norms(kind, loss, [s[i] for s in stacks], statistics, i) for i in range(n)])
        if self.batching == "eager":
            return torch.stack([self._eager(kind, loss, [s[i] for s in stacks]) for i in range(n)])
        if self.batching == "single":
            return torch.stack([self._traced(kind, loss, [s[i] for s in stacks], False) for i in range(n)])
        results = [self._traced(kind, loss, [s[part] for s in stacks], True) for part in stacks_of(n)]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _traced(self, kind: str, loss: Callable | None, inputs: Sequence[Tensor], stacked: bool) -> Tensor:
        """The result of a graph as one tensor."""
        found = self._graph(kind, loss, inputs, stacked)
        return found if isinstance(found, Tensor) else torch.cat([columns(piece) for piece in found], 1)

    def _graph(self, kind: str, loss: Callable | None, inputs: Sequence[Tensor], stacked: bool) -> Any:
        """Run the graph for inputs of these shapes, which is traced the first time; gradients come in pieces."""
        inputs = [aligned(inputs[0]) if stacked else inputs[0], *[i.contiguous() for i in inputs[1:]]]
        signature = (kind, loss, stacked, *[i.shape for i in inputs])
        compiled = self._compiled.get(signature)
        if compiled is None:
            function = self._function(kind, loss)
            function = grad(function) if kind == "grad" else function
            graph = trace(self._over_rows(function) if stacked else function, inputs, stacked and kind == "grad")
            compiled = self._compiled[signature] = graph
        if any(i.requires_grad for i in inputs):  # a graph is always run without autograd
            inputs = [i.detach() for i in inputs]
        return compiled(*inputs)

    def _over_rows(self, function: Callable) -> Callable:
        """`function` of one row for each row of a stack.

        A frozen parameter is seen as n rows at one address (strides of 0), so that products have the same shapes as
        if it were in the rows. Otherwise torch would multiply all rows at once, and the bits of a row could depend on
        the size of the stack.
        """
        if not self.frozen_size:
            return vmap(function)

        def of_row(expanded: dict[str, Tensor], *inputs: Tensor) -> Any:
            self._expanded = expanded
            with SharedLookup({id(expanded[name]): p for name, p in self.frozen.items()}):
                return function(*inputs)

        def of_stack(*inputs: Tensor) -> Any:
            n = len(inputs[0])
            try:
                return vmap(of_row)({name: p.expand(n, *p.shape) for name, p in self.frozen.items()}, *inputs)
            finally:
                self._expanded = {}

        return of_stack

    def _eager(self, kind: str, loss: Callable | None, inputs: list[Tensor]) -> Tensor:
        """Compute one row by autograd."""
        function = self._function(kind, loss)
        if kind != "grad":
            with torch.no_grad():
                return function(*inputs)
        # torch.autograd, because torch.func does not support every autograd function
        row = inputs[0].detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(function(row, *inputs[1:]), row)[0]

    def _with_norms(
        self, kind: str, loss: Callable | None, inputs: list[Tensor], statistics: Tensor | None, row: int
    ) -> Tensor:
        """Compute one row of a model with BatchNorm; after a gradient, its statistics are changed."""
        self._statistics = None if statistics is None else statistics[row].clone()
        self._mask = inputs[3] > 0 if kind == "grad" else None
        try:
            found = self._eager(kind, loss, inputs)
            if kind == "grad" and statistics is not None:
                pairs = [layer.running for layer in self.norms.values()]
                statistics[row] = torch.cat([part for pair in pairs if pair is not None for part in pair])
        finally:
            self._statistics = self._mask = None
            for layer in self.norms.values():
                layer.running = None
        return found

    def _function(self, kind: str, loss: Callable | None) -> Callable:
        """The function of one row that is computed or differentiated.

        For gradients it has no l2 term: `grad` adds the gradient of that.
        """
        if kind == "outputs":
            return self.apply
        if loss is None:
            return self.mean_loss if kind == "grad" else self.row_loss

        def own_loss(row: Tensor, x: Tensor, y: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
            key, more = (rest[0], rest[1:]) if self.dropouts else (None, rest)
            return loss(lambda r, i: self.apply(r, i, key), row, x, y, weight, *more)

        return own_loss


class SharedLookup(TorchFunctionMode):
    """Look up embeddings in the frozen table, because vmap would first copy the table once per row."""

    def __init__(self, tables: dict[int, Tensor]) -> None:
        super().__init__()
        self.tables = tables  # by the id of the expanded one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.functional.embedding, torch.embedding):
            args = [self.tables.get(id(a), a) for a in args]
            kwargs = {k: self.tables.get(id(a), a) for k, a in kwargs.items()}
        return func(*args, **kwargs)


@cache
def stacks_of(n: int) -> list[slice]:
    """Split n rows into a multiple of 4, then 2 and 1, so that few shapes are traced.

    Examples:
        >>> stacks_of(7)
        [slice(0, 4, None), slice(4, 6, None), slice(6, 7, None)]
    """
    ends = list(itertools.accumulate((n - n % 4, n & 2, n & 1), initial=0))
    return [slice(start, end) for start, end in itertools.pairwise(ends) if end > start]


def at_line(values: Tensor) -> Tensor:
    """The values, contiguous and at an aligned address; a copy if they are not."""
    values = values.contiguous()
    return values.clone() if values.data_ptr() % LINE else values


def columns(piece: Piece) -> Tensor:
    """[n, k] a piece as one tensor."""
    return piece if isinstance(piece, Tensor) else torch.bmm(*piece).flatten(1)


def choose_batching(objective: Objective, batch: Batch, generator_key: int = 0) -> str:
    """Find the fastest batching for which a row has the same bits in a stack and alone, and set it on the objective.

    Args:
        objective: its `batching` is changed.
        batch: a real batch of some devices. Each row is also computed alone, as a copy: its bits must not depend on
            its address either.
        generator_key: the key of the random models that are tried.

    Returns:
        "stacked", "single" or "eager".

    Raises:
        ValueError: the inputs hold NaN, or the module changes its inputs or frozen parameters in place.
    """
    if objective.norms:
        objective.batching = "eager"  # a graph of a stack has no place for their statistics
        return "eager"
    noise = random.uniform(random.node_keys(generator_key, torch.arange(batch.num_rows)), objective.dimension)
    theta = (objective.initial + (0.1 * (noise - 0.5)).to(objective.dtype)).to(objective.device)
    if not all(bool(torch.isfinite(group.x).all()) for group in batch.groups):
        raise ValueError("the inputs hold NaN or infinity; remove or fill these samples")
    found, before = "eager", [group.x.clone() for group in batch.groups]
    versions = [p._version for p in objective.frozen.values()]
    for batching in ("stacked", "single"):
        objective.batching = batching
        try:
            whole = objective.grad(theta, batch)
            alone = [objective.grad(theta[i : i + 1].clone(), batch.row(i)) for i in range(len(theta))]
            values = objective.loss(theta, batch)
            values_alone = [objective.loss(theta[i : i + 1].clone(), batch.row(i)) for i in range(len(theta))]
        except (RuntimeError, NotImplementedError, TypeError, ValueError, KeyError, AssertionError):
            continue  # the module cannot be traced, or not for a stack: try the next batching
        if torch.equal(whole, torch.cat(alone)) and torch.equal(values, torch.cat(values_alone)):
            found = batching
            break
    objective.batching = found
    objective.grad(theta, batch)
    if not all(torch.equal(x, group.x) for x, group in zip(before, batch.groups, strict=True)):
        raise ValueError(
            "the model changes its inputs in place, but they are used again; let its forward make new tensors"
        )
    if [p._version for p in objective.frozen.values()] != versions:
        raise ValueError(
            "the model changes frozen parameters in place, but all devices share them; let its forward make new tensors"
        )
    return found
