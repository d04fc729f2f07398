"""Gradients as traced graphs, the pieces they come in, and the steps that are made of them."""

from __future__ import annotations

import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polytier.data.batches import Batch, Group, share_of_batch
from polytier.models import zoo as models
from polytier.models.losses import cross_entropy, squared_error
from polytier.stack import tracing as graphs
from polytier.stack.held import Live, bytes_per_sample
from polytier.stack.objective import BATCHINGS, Objective, choose_batching, columns, stacks_of
from polytier.stack.optimizers import LocalOptimizer
from polytier.stack.rows import aligned, aligned_copy, fold
from polytier.stack.solvers import proximal_sgd, sgd, step

DOUBLE = torch.float64
CLOSE = 1e-12
LARGE = 20  # instead of the real limit, so that small layers come as products
RAGGED = (5, 1, 5, 1, 1, 5, 1)  # the widths of a stack in two groups, of 3 and 4 rows
EVEN = (5,) * 7


# -- modules, batches, and what autograd says ---------------------------------------------------------


class Unused(nn.Module):
    """Two parameters have no part in the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(2))
        self.head = nn.Linear(4, 3)
        self.last = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class Twins(nn.Module):
    """The gradients of `a` and `b` are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.a + self.b)


class InPlace(nn.Module):
    """Changes what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.shift, self.head = nn.Linear(4, 5), nn.Parameter(torch.randn(5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        hidden += self.shift
        return self.head(hidden.mul_(0.5).relu_())


class Level(nn.Module):
    """The gradient of `level` is one number, shown three times; `scale` goes with a constant of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.scale = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(1, 4))
        self.fixed: Tensor
        self.register_buffer("fixed", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale * self.fixed.unsqueeze(0).expand_as(x)).sum(-1) + self.level.sum()


def near_three(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss with ones of its own."""
    ones = torch.ones_like(outputs)
    wide = ones * outputs.mean(-1, keepdim=True)  # what it is multiplied with is narrower than the product
    return ((outputs - 3 * ones).square() * ones).sum(-1) + wide.cumsum(-1).square().sum(-1)


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose ones do not stay ones."""
    weights = torch.ones_like(outputs)
    weights[:, 0] = 2
    return (weights * outputs).square().sum(-1) + cross_entropy(outputs, targets)


def small(name: str) -> tuple[nn.Module, Any]:
    """A module for inputs [4] and 3 classes, and its loss."""
    torch.manual_seed(3)
    kinds: dict[str, Any] = {
        "mclr": lambda: (models.mclr((4,), 3), cross_entropy),
        "dnn": lambda: (models.dnn((4,), 3, hidden=(6,)), cross_entropy),
        "wider": lambda: (models.dnn((4,), 3, hidden=(120,)), cross_entropy),
        "unused": lambda: (Unused(), cross_entropy),
        "twins": lambda: (Twins(), cross_entropy),
        "in place": lambda: (InPlace(), cross_entropy),
        "level": lambda: (Level(), squared_error),
        "ones": lambda: (models.mclr((4,), 3), near_three),
        "ones in place": lambda: (models.mclr((4,), 3), weighted),
    }
    return kinds[name]()


@cache
def objective_of(name: str, batching: str = "stacked", dtype: torch.dtype = DOUBLE) -> Objective:
    """One for all tests: tracing is what takes them long."""
    return Objective(*small(name), dtype=dtype, batching=batching)


@pytest.fixture(autouse=True)
def _small_layers_count_as_large(monkeypatch):
    monkeypatch.setattr(graphs, "LARGE", LARGE)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """As in every run: some processors round the products of two threads differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


NAMES = ("mclr", "dnn", "unused", "twins", "in place", "level", "ones", "ones in place")


def batch_of(widths: tuple[int, ...], inputs: int = 4, classes: int = 3, dtype: torch.dtype = DOUBLE) -> Batch:
    """Rows with batches of these widths; every other row has a sample less, which is padded."""
    generator = torch.Generator().manual_seed(5)
    groups = []
    for width in sorted(set(widths)):
        rows = torch.tensor([i for i, w in enumerate(widths) if w == width])
        count = (width - rows % 2).clamp(min=1).unsqueeze(1)
        x = torch.randn(len(rows), width, inputs, generator=generator, dtype=DOUBLE).to(dtype)
        y = torch.randint(classes, (len(rows), width), generator=generator)
        everybody = len(rows) == len(widths)
        groups.append(Group(slice(None) if everybody else rows, x, y, share_of_batch(count, width, dtype)))
    return Batch(groups, len(widths))


def rows_for(objective: Objective, n: int, seed: int = 7) -> Tensor:
    noise = torch.randn(n, objective.dimension, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    return (0.3 * noise).to(objective.dtype)


def by_autograd(module: nn.Module, loss: Any, theta: Tensor, batch: Batch) -> Tensor:
    """The gradient of each row's mean loss over its own samples, by the module's own parameters."""
    own, found = copy.deepcopy(module).to(theta.dtype), torch.zeros_like(theta)
    for i, row in enumerate(theta):
        group = batch.row(i).groups[0]
        there = group.weight[0] > 0
        nn.utils.vector_to_parameters(row.clone(), own.parameters())
        own.zero_grad()
        loss(own(group.x[0][there]), group.y[0][there]).mean().backward()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in own.parameters()]
        found[i] = torch.cat([p.reshape(-1) for p in parts])
    return found


def assert_close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=CLOSE, atol=CLOSE)


def copies(theta: Tensor, batch: Batch, *others: Any) -> list[Tensor]:
    """All numbers that a solver is given, as they are now."""
    data = [t for g in batch.groups for t in (g.x, g.y, g.weight)]
    return [t.clone() for t in (theta, *data, *(o for o in others if isinstance(o, Tensor)))]


def assert_unchanged(before: list[Tensor], theta: Tensor, batch: Batch, *others: Any) -> None:
    for was, now in zip(before, copies(theta, batch, *others), strict=True):
        assert torch.equal(was, now)


def targets_of(graph: Any) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


# -- the gradient -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_traced_gradient_is_autograds(name):
    (module, loss), objective = small(name), objective_of(name)
    for widths in [(5,) * n for n in (1, 2, 3, 4, 5, 8)] + [RAGGED]:
        theta, batch = rows_for(objective, len(widths)), batch_of(widths)
        before = copies(theta, batch)
        assert_close(objective.grad(theta, batch), by_autograd(module, loss, theta, batch))
        assert_unchanged(before, theta, batch)


@pytest.mark.parametrize("batching", ["single", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_row_by_row_it_is_the_same(name, batching):
    (module, loss), objective = small(name), objective_of(name, batching)
    theta, batch = rows_for(objective, 4), batch_of((5, 1, 5, 5))
    before = copies(theta, batch)
    assert_close(objective.grad(theta, batch), by_autograd(module, loss, theta, batch))
    assert_unchanged(before, theta, batch)
    pieces = list(objective.grad_pieces(theta, batch))
    assert len(pieces) == 1
    assert torch.equal(torch.cat([columns(p) for p in pieces[0][1]], 1), objective.grad(theta, batch)[pieces[0][0]])


@pytest.mark.parametrize("batching", BATCHINGS)
def test_the_gradient_of_l2_is_a_multiple_of_the_row(batching):
    module, loss = small("dnn")
    objective = Objective(module, loss, dtype=DOUBLE, l2=0.3, batching=batching)
    theta, batch = rows_for(objective, 4), batch_of((5, 1, 5, 5))
    before = copies(theta, batch)
    whole = by_autograd(module, loss, theta, batch) + 0.3 * theta
    assert_close(objective.grad(theta, batch), whole)
    for rows, pieces in objective.grad_pieces(theta, batch):
        assert_close(torch.cat([columns(piece) for piece in pieces], 1), whole[rows])
    assert_close(objective.grad(theta, batch, lambda apply, row, *_: (row * row).sum()), 2 * theta)  # replaces l2 too
    assert_unchanged(before, theta, batch)


def test_the_graph_of_a_gradient_computes_no_loss():
    objective = Objective(*small("mclr"), dtype=DOUBLE, l2=0.1)
    objective.grad(rows_for(objective, 2), batch_of((5, 5)))
    (compiled,) = objective._compiled.values()
    found = targets_of(compiled.__self__.graph)  # type: ignore[attr-defined]
    assert graphs.aten.scatter_add_.default in found  # straight into its zeros
    assert not {graphs.aten.ones_like.default, graphs.aten.gather.default, graphs.aten.expand.default} & set(found)


def test_few_shapes_are_traced():
    sizes = {n: [s.stop - s.start for s in stacks_of(n)] for n in (0, 1, 2, 3, 4, 7, 8, 13)}
    assert sizes == {0: [], 1: [1], 2: [2], 3: [2, 1], 4: [4], 7: [4, 2, 1], 8: [8], 13: [12, 1]}
    for n in range(20):
        assert [i for s in stacks_of(n) for i in range(n)[s]] == list(range(n))
    objective = Objective(*small("mclr"), dtype=DOUBLE)
    for n in range(1, 8):
        objective.grad(rows_for(objective, n), batch_of((2,) * n))
    assert len(objective._compiled) == 3


@pytest.mark.parametrize("batching", ["stacked", "eager"])
def test_losses_of_samples_are_those_of_each_row(batching):
    generator = torch.Generator().manual_seed(11)
    outputs = torch.randn(5, 6, 3, generator=generator, dtype=DOUBLE)
    targets = torch.randint(3, (5, 6), generator=generator)
    before = outputs.clone(), targets.clone()
    for loss in (cross_entropy, near_three):
        objective = Objective(nn.Linear(4, 3), loss, dtype=DOUBLE, batching=batching)
        found = objective.sample_losses(outputs, targets)
        assert found.shape == (5, 6)
        assert torch.equal(found, torch.stack([loss(o, t) for o, t in zip(outputs, targets, strict=True)]))
    assert torch.equal(outputs, before[0])
    assert torch.equal(targets, before[1])


def test_inputs_may_lie_in_any_order():
    objective = Objective(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), dtype=DOUBLE)
    theta, x = rows_for(objective, 2), torch.arange(40, dtype=DOUBLE).reshape(2, 5, 2, 2)
    plain = objective.outputs(theta, x.transpose(2, 3).contiguous())
    assert torch.equal(objective.outputs(theta, x.transpose(2, 3)), plain)


def test_a_module_that_changes_its_inputs_is_refused():
    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x -= 0.5
            return super().forward(x)

    objective = Objective(Centred(4, 3), dtype=DOUBLE)
    with pytest.raises(ValueError, match="changes its inputs in place"):
        choose_batching(objective, batch_of((5, 5)))


# -- pieces -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [EVEN, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("name", NAMES)
def test_pieces_side_by_side_are_the_gradient(name, widths):
    objective = objective_of(name)
    theta, batch = rows_for(objective, len(widths)), batch_of(widths)
    whole = objective.grad(theta, batch)
    found, seen = torch.zeros_like(whole), []
    for rows, pieces in objective.grad_pieces(theta, batch):
        found[rows] = torch.cat([columns(p) for p in pieces], 1)
        seen += torch.arange(len(theta))[rows].tolist()
    assert torch.equal(found, whole)
    assert sorted(seen) == list(range(len(theta)))


@pytest.mark.parametrize("widths", [(5,) * 4, (1,) * 4], ids=["five samples", "one sample"])
@pytest.mark.parametrize("name", NAMES)
def test_pieces_can_be_written_over(name, widths):
    objective = objective_of(name)
    theta, batch = rows_for(objective, len(widths)), batch_of(widths)
    before, whole = copies(theta, batch), objective.grad(theta, batch)
    constants = copy.deepcopy(objective.module.state_dict())
    ((_, pieces),) = objective.grad_pieces(theta, batch)
    expected = [columns(p).clone() for p in pieces]
    for k, piece in enumerate(pieces):
        if isinstance(piece, Tensor):
            piece += torch.arange(piece.numel()).reshape(piece.shape)  # a number shown twice would be changed twice
            expected[k] += torch.arange(piece.numel()).reshape(piece.shape)
        for now, then in zip(pieces, expected, strict=True):
            assert torch.equal(columns(now), then)
    assert_unchanged(before, theta, batch)
    assert all(torch.equal(value, constants[key]) for key, value in objective.module.state_dict().items())
    assert torch.equal(objective.grad(theta, batch), whole)


def test_gradients_that_are_one_tensor_come_in_one_piece():
    number = {}
    for name in ("dnn", "twins"):
        objective = objective_of(name)
        ((_, pieces),) = objective.grad_pieces(rows_for(objective, 2), batch_of((5, 5)))
        number[name] = len(pieces)
    assert number == {"dnn": 4, "twins": 1}


def test_a_large_layer_comes_as_two_factors(monkeypatch):
    monkeypatch.undo()
    assert LARGE < graphs.LARGE <= 300 * 250
    torch.manual_seed(3)
    module = models.dnn((300,), 3, hidden=(250,))
    objective = Objective(module, dtype=DOUBLE)
    theta, batch = rows_for(objective, 2), batch_of((5, 5), inputs=300)
    ((_, pieces),) = objective.grad_pieces(theta, batch)
    factors: Any = pieces[0]
    rest: Any = pieces[1:]
    assert [tuple(f.shape) for f in factors] == [(2, 250, 5), (2, 5, 300)]
    assert [tuple(p.shape) for p in rest] == [(2, 250), (2, 3 * 250), (2, 3)]
    assert_close(torch.cat([columns(p) for p in pieces], 1), by_autograd(module, cross_entropy, theta, batch))


@pytest.mark.parametrize(("limit", "whole"), [(12, False), (13, True)])
def test_what_counts_as_large(limit, whole, monkeypatch):
    monkeypatch.setattr(graphs, "LARGE", limit)
    objective = Objective(*small("mclr"), dtype=DOUBLE)
    ((_, pieces),) = objective.grad_pieces(rows_for(objective, 2), batch_of((5, 5)))
    assert isinstance(pieces[0], Tensor) is whole
    assert isinstance(pieces[1], Tensor)


def test_a_part_of_a_large_product_is_no_product(monkeypatch):
    class Partly(nn.Module):
        """Some rows of the matrix are not trained."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 4))
            self.register_buffer("fixed", torch.randn(1, 4))

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, torch.cat([self.weight, self.fixed]))  # type: ignore[list-item]

    monkeypatch.setattr(graphs, "LARGE", 12)
    torch.manual_seed(3)
    module = Partly()
    objective = Objective(module, dtype=DOUBLE)
    theta, batch = rows_for(objective, 2), batch_of((5, 5))
    assert_close(objective.grad(theta, batch), by_autograd(module, cross_entropy, theta, batch))


class Shifted(nn.Module):
    """Of a single sample, the gradient of `shift` is a factor of that of `weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.weight = nn.Parameter(torch.randn(1, 3)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) + self.shift


def test_factors_are_not_written_over(monkeypatch):
    monkeypatch.setattr(graphs, "LARGE", 12)
    torch.manual_seed(3)
    module = Shifted()
    objective = Objective(module, dtype=DOUBLE)
    theta, batch = rows_for(objective, 2), batch_of((1, 1))
    after = proximal_sgd(local_of(objective), theta, theta, 0.1, 0.0, 1, batch)
    assert_close(after, theta - 0.1 * by_autograd(module, cross_entropy, theta, batch))


# -- products -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "outputs", "turned"),
    [(5, 3, True), (5, 1, True), (4, 4, True), (3, 18, True), (3, 19, False), (1, 7, False)],
)
def test_products_with_few_outputs_are_turned(samples, outputs, turned):
    generator = torch.Generator().manual_seed(13)
    x, w = (torch.randn(2, k, 6, generator=generator, dtype=DOUBLE) for k in (samples, outputs))
    before = x.clone(), w.clone()
    traced: Any = graphs.trace(torch.vmap(functional.linear), (x, w))
    assert_close(traced(x, w), torch.einsum("nbi,noi->nbo", x, w))
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])
    graph = traced.__self__.graph
    given_x, given_w = (node for node in graph.nodes if node.op == "placeholder")
    (product,) = (node for node in graph.nodes if node.target is graphs.aten.bmm.default)
    assert product.args[0] is (given_w if turned else given_x)
    assert product.args[1].target is graphs.aten.transpose.int
    assert product.args[1].args[0] is (given_x if turned else given_w)


@pytest.mark.parametrize(("outputs", "turned"), [(4, True), (30, False)])
def test_errors_that_go_back_lie_as_the_outputs_do(outputs, turned):
    generator = torch.Generator().manual_seed(13)
    w, e = (torch.randn(2, 3, k, generator=generator, dtype=DOUBLE) for k in (outputs, 4))
    traced: Any = graphs.trace(lambda w, e: torch.bmm(e.transpose(1, 2), w), (w, e))
    assert_close(traced(w, e), torch.einsum("nob,noi->nbi", e, w))
    (product,) = (node for node in traced.__self__.graph.nodes if node.target is graphs.aten.bmm.default)
    assert [graphs.is_turned(factor) for factor in product.args] == [True, False]
    assert (graphs.source(product.args[0]) is graphs.first_input(traced.__self__.graph)) == turned
    # of a weight's gradient neither factor is the weight: it stays as it lies in the row
    traced = graphs.trace(lambda w, e, h: torch.bmm(e.transpose(1, 2), h), (w, e, w.clone()))
    (product,) = (node for node in traced.__self__.graph.nodes if node.target is graphs.aten.bmm.default)
    assert [graphs.is_turned(factor) for factor in product.args] == [True, False]
    assert product.args[1].op == "placeholder"


def test_a_product_of_two_turned_factors_stays():
    a, b = (torch.randn(2, *s, generator=torch.Generator().manual_seed(13), dtype=DOUBLE) for s in ((6, 5), (3, 6)))
    traced: Any = graphs.trace(lambda a, b: torch.bmm(a.transpose(1, 2), b.transpose(1, 2)), (a, b))
    assert_close(traced(a, b), torch.einsum("nib,noi->nbo", a, b))
    assert targets_of(traced.__self__.graph).count(graphs.aten.transpose.int) == 2


def test_other_axes_may_be_turned_too():
    a, b = (torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(s), dtype=DOUBLE) for s in (13, 17))
    traced = graphs.trace(lambda a, b: torch.bmm(a, b.transpose(0, 1)), (a, b))
    assert_close(traced(a, b), torch.bmm(a, b.transpose(0, 1)))


# -- steps --------------------------------------------------------------------------------------------


def local_of(objective: Objective) -> Any:
    """As much of a device as a solver needs."""
    return SimpleNamespace(grad_pieces=objective.grad_pieces, optimizer=LocalOptimizer())


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=DOUBLE).unsqueeze(1)


LR, PULL = column(0.1, 0.2, 0.3, 0.05, 0.15, 0.25, 0.35), column(0.5, 0.0, 1.5, 2.0, 0.1, 0.7, 0.0)


@pytest.mark.parametrize("pull", [0.0, 0.7, PULL], ids=["no pull", "one pull", "pull a row"])
@pytest.mark.parametrize("lr", [0.2, LR], ids=["one lr", "lr a row"])
@pytest.mark.parametrize("widths", [EVEN, RAGGED], ids=["even", "ragged"])
def test_steps_follow_the_formula(widths, lr, pull):
    """The first layer comes as two factors, the second one does not."""
    (module, loss), objective = small("dnn"), objective_of("dnn")
    theta, anchor, batch = rows_for(objective, 7), rows_for(objective, 7, seed=8), batch_of(widths)
    before = copies(theta, batch, anchor, lr, pull)
    found = proximal_sgd(local_of(objective), theta, anchor, lr, pull, 3, batch)
    assert_unchanged(before, theta, batch, anchor, lr, pull)
    expected = theta
    for _ in range(3):
        gradient = by_autograd(module, loss, expected, batch)
        expected = expected - lr * (gradient + pull * (expected - anchor))
    assert_close(found, expected)


def test_steps_of_a_really_large_layer_follow_the_formula(monkeypatch):
    monkeypatch.undo()
    torch.manual_seed(3)
    module = nn.Linear(300, 250)
    objective = Objective(module, dtype=DOUBLE)
    batch = batch_of((3, 2), inputs=300, classes=250)
    theta, anchor = rows_for(objective, 2), rows_for(objective, 2, seed=8)
    found = proximal_sgd(local_of(objective), theta, anchor, LR[:2], PULL[:2], 1, batch)
    gradient = by_autograd(module, cross_entropy, theta, batch)
    assert_close(found, theta - LR[:2] * (gradient + PULL[:2] * (theta - anchor)))


@pytest.mark.parametrize("batching", ["single", "eager"])
def test_steps_row_by_row_are_the_same(batching):
    stacked, other = objective_of("dnn"), objective_of("dnn", batching)
    theta, anchor, batch = rows_for(stacked, 7), rows_for(stacked, 7, seed=8), batch_of(RAGGED)
    found = [proximal_sgd(local_of(o), theta, anchor, LR, PULL, 2, batch) for o in (stacked, other)]
    assert_close(*found)


@pytest.mark.parametrize("name", NAMES)
def test_plain_steps_follow_the_gradient(name):
    """Also where gradients share memory, or are shown more than once."""
    (module, loss), objective = small(name), objective_of(name)
    theta, batch = rows_for(objective, 7), batch_of(RAGGED)
    before = copies(theta, batch)
    held = SimpleNamespace(grad_pieces=lambda rows, _: objective.grad_pieces(rows, batch), optimizer=LocalOptimizer())
    found: Tensor = sgd(held, theta, LR, 2)  # type: ignore[arg-type]
    assert_unchanged(before, theta, batch)
    expected = theta
    for _ in range(2):
        expected = expected - LR * by_autograd(module, loss, expected, batch)
    assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("widths", [EVEN, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("each", [True, False], ids=["lr a row", "one lr"])
def test_a_row_has_the_same_bits_in_any_stack(widths, dtype, each, monkeypatch):
    monkeypatch.setattr(graphs, "LARGE", 400)  # torch has another way for stacks of smaller products
    objective = objective_of("wider", dtype=dtype)
    theta, anchor, batch = rows_for(objective, 7), rows_for(objective, 7, seed=8), batch_of(widths, dtype=dtype)

    def solved(rows: slice, batch: Batch) -> Tensor:
        lr, pull = (LR[rows].to(dtype), PULL[rows].to(dtype)) if each else (0.2, 0.7)
        return proximal_sgd(local_of(objective), theta[rows], anchor[rows], lr, pull, 2, batch)

    together = solved(slice(0, 7), batch)
    for i in range(7):
        assert torch.equal(solved(slice(i, i + 1), batch.row(i)), together[i : i + 1])
    if widths == EVEN:
        (group,) = batch.groups
        for part in (slice(0, 3), slice(3, 7), slice(1, 6)):
            some = Batch([Group(slice(None), group.x[part], group.y[part], group.weight[part])], part.stop - part.start)
            assert torch.equal(solved(part, some), together[part])


@pytest.mark.parametrize("lr", [0.2, LR[:3]], ids=["one lr", "lr a row"])
@pytest.mark.parametrize("space", [0, 4], ids=["close", "apart"])
def test_a_step_by_a_product(lr, space):
    generator = torch.Generator().manual_seed(19)
    x = torch.randn(3, 20 + space, generator=generator, dtype=DOUBLE)[:, :20]
    left, right = (torch.randn(3, *s, generator=generator, dtype=DOUBLE) for s in ((4, 2), (2, 5)))
    given = [t.clone() for t in (left, right)]
    expected = x - lr * torch.einsum("nac,ncb->nab", left, right).flatten(1)
    step(x, (left, right), lr)
    assert_close(x, expected)
    assert all(torch.equal(a, b) for a, b in zip(given, (left, right), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
def test_aligned_rows_start_at_lines_of_the_cache(dtype):
    for d in (1, 16, 21):
        rows = torch.arange(3 * d, dtype=dtype).reshape(d, 3).T
        found = aligned(rows), aligned_copy(rows), aligned(aligned_copy(rows)[1:])
        assert all(row.data_ptr() % 64 == 0 for some in found for row in some)
        assert torch.equal(found[0], rows)
        assert torch.equal(found[1], rows)
        assert torch.equal(found[2], rows[1:])


def test_large_rows_are_summed_as_small_ones_are(monkeypatch):
    generator = torch.Generator().manual_seed(23)
    values, shares = (torch.randn(5, *s, generator=generator, dtype=DOUBLE) for s in ((7,), ()))
    blocks = torch.tensor([0, 0, 1, 1, 1])
    small_ = fold(values, shares, blocks)
    monkeypatch.setattr("polytier.stack.rows.LARGE", 7)
    whole, parts = fold(values, shares, blocks), None
    for part in (slice(0, 1), slice(1, 4), slice(4, 5)):
        parts = fold(values[part], shares[part], blocks[part], 2, parts)
    assert parts is not None
    for weight in ("", "samples"):
        one, other, before = (found.sums[weight] for found in (whole, parts, small_))
        assert isinstance(one, Tensor)
        assert isinstance(other, Tensor)
        torch.testing.assert_close(one, before, rtol=0, atol=CLOSE)
        assert torch.equal(one, other)


def test_aligned_rows_are_copied_only_if_need_be():
    rows = aligned_copy(torch.arange(6.0).reshape(2, 3))
    assert aligned(rows) is rows
    assert aligned(rows[:, 1:]).data_ptr() != rows[:, 1:].data_ptr()
    aligned_copy(rows).zero_()
    assert rows.tolist() == [[0, 1, 2], [3, 4, 5]]


# -- recording ----------------------------------------------------------------------------------------


def test_what_is_recorded_is_done_again_with_other_numbers():
    """Lists, steps in place, what stands in a kwarg, and constants, which keep the value that they will have then."""
    offset = torch.zeros(3, dtype=DOUBLE)

    def function(x: Tensor, y: Tensor) -> Tensor:
        low, high = x.split([1, 2], dim=1)
        total = torch.cat([high, low], dim=1).add_(y, alpha=2.0)
        total[:, 0] = 7
        mean = torch.tensor(0.5, dtype=DOUBLE).add_(y.mean())
        return torch.where(total > 0, total, torch.full_like(total, -1.0)) + offset + mean

    generator = torch.Generator().manual_seed(3)
    x, y, other = (torch.randn(4, 3, generator=generator, dtype=DOUBLE) for _ in range(3))
    before = x.clone(), y.clone()
    traced = graphs.trace(function, (x, y))
    assert torch.equal(traced(x, y), function(x, y))
    offset.fill_(10.0)
    assert torch.equal(traced(other, x), function(other, x))
    assert (torch.equal(x, before[0]), torch.equal(y, before[1])) == (True, True)


class Branches(nn.Linear):
    """Its steps depend on the numbers that it sees."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x if bool(x.sum() > 0) else -x)


def test_what_depends_on_the_data_is_not_traced():
    objective = Objective(Branches(4, 3), dtype=DOUBLE)
    with pytest.raises(TypeError, match="depend on the data"):
        graphs.trace(lambda x: x if bool(x.sum() > 0) else -x, (torch.ones(2),))
    assert choose_batching(objective, batch_of((5, 5))) == "eager"


def test_a_view_of_a_turned_product_is_a_reshape():
    """Traced from x W^T, whose result is contiguous, and run as (W x^T)^T, whose result is not: the view then fails."""
    module = nn.Sequential(nn.Linear(4, 3), nn.Flatten(1), nn.Linear(15, 2))  # [B, 5, 4] -> [B, 15] -> [B, 2]
    stacked, eager = (Objective(module, dtype=DOUBLE, batching=batching) for batching in ("stacked", "eager"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, 5, 4, generator=generator, dtype=DOUBLE)
    weight = torch.full((4, 6), 1 / 6, dtype=DOUBLE)
    batch = Batch([Group(slice(None), x, torch.randint(0, 2, (4, 6), generator=generator), weight)], 4)
    theta = stacked.initial + 0.1 * torch.randn(4, stacked.dimension, generator=generator, dtype=DOUBLE)
    torch.testing.assert_close(stacked.grad(theta, batch), eager.grad(theta, batch), rtol=0, atol=1e-12)
    assert choose_batching(stacked, batch) == "stacked"


def test_a_trace_frees_values_that_are_used_no_more():
    def function(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x * 2
        return x

    x = torch.zeros(1 << 16)
    with Live() as live:
        graphs.trace(function, (x,))
    assert live.most <= 4 * x.nbytes  # of 21 values


def test_the_memory_of_a_gradient_is_counted_per_sample():
    objective = Objective(nn.Sequential(nn.Linear(100, 1000), nn.Tanh(), nn.Linear(1000, 2)))
    x, y = torch.zeros(1, 100), torch.zeros(1, dtype=torch.int64)
    found = bytes_per_sample(objective, x, y)
    assert 2 * 4000 <= found <= 8 * 4000  # values of width 1000, not the 102,000 parameters
