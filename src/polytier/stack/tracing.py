"""Functions of tensors as graphs of plain operations: traced once per shape, and simplified."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from operator import getitem
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten
# elements of a product from which it is faster to add it to a row than to compute it first (at least 400: below that
# torch uses another kernel, with other bits)
LARGE = 1 << 16
# (W x^T)^T is used instead of x W^T if W has at most so many times as many rows as x: it takes as long, or half as long
TURNED = 6
# torch's own Python functions for common operations: the same kernels, called in half the time of an operator by name
OF_TORCH = (
    "_log_softmax.default _log_softmax_backward_data.default add.Tensor bmm.default mul.Tensor neg.default "
    "permute.default relu.default select.int split_with_sizes.default stack.default sub.Tensor sum.dim_IntList "
    "transpose.int unsqueeze.default"
)
OF_TENSORS = "expand.default new_zeros.default scatter_add_.default view.default"
FUNCTIONS: dict[str, Callable] = {
    **{name: getattr(torch, name.partition(".")[0]) for name in OF_TORCH.split()},
    **{name: getattr(Tensor, name.partition(".")[0]) for name in OF_TENSORS.split()},
}
ELEMENTWISE = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor)
RESHAPING = (aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.unsqueeze.default)


def trace(function: Callable, inputs: Sequence[Tensor], pieces: bool = False) -> Callable:
    """Trace a function for inputs of these shapes.

    Args:
        function: of tensors, without branches on their values.
        inputs: examples; they are cloned, in case the function changes them.
        pieces: return the columns that the function concatenates at its end as a list (see `take_apart`).

    Returns:
        A function of tensors of these shapes that runs the same operations without autograd and without Python code in
        between. Tensors that are not inputs (parameters and buffers of a module) are referenced, not copied.

    Raises:
        TypeError: an operation does not return a tensor, so the next operations may depend on the values.
    """
    inputs = [i.clone() for i in inputs]
    record = Record(inputs)
    with torch.no_grad(), warnings.catch_warnings(), record:
        warnings.simplefilter("ignore")  # about tracing; users cannot avoid them
        found = function(*inputs)
    graph = record.graph
    graph.output(record.node_of(found))
    graph.eliminate_dead_code()
    turned_some = False
    # a graph in which the module itself has operations in place is not simplified
    if not any(schema.is_mutable for schema in map(schema_of, calls(graph)) if schema):
        drop_ones(graph)
        drop_idle(graph)
        drop_stacks(graph)
        turned_some = turn_products(graph)
        add_in_place(graph)
    if pieces:
        take_apart(graph)
    for node in graph.nodes:
        node.meta.clear()
    run = direct(graph, record.constants)
    if turned_some and not runs(run, inputs):
        reshape_views(graph)
        run = direct(graph, record.constants)
    return run


def runs(graph: Callable, inputs: Sequence[Tensor]) -> bool:
    """Whether no view in the graph fails: the results of turned products lie otherwise in memory than in the trace."""
    try:
        with torch.no_grad():
            graph(*inputs)
    except RuntimeError as error:
        if "view" not in str(error):
            raise
        return False
    return True


def reshape_views(graph: Any) -> None:
    """Let every view copy its argument where that does not lie in memory as a view needs it."""
    for node in calls(graph):
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    graph.lint()


class Form(NamedTuple):
    """What is known of the tensor that a node gives."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Record(TorchDispatchMode):
    """Records each operation in a graph while it is active. Values that are used no more are freed.

    torch's make_fx does more, and takes five times as long.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph, self.constants = torch.fx.Graph(), SimpleNamespace()
        self.nodes = WeakTensorKeyDictionary()  # by tensor, while it exists
        for k, tensor in enumerate(inputs):
            self.know(tensor, self.graph.placeholder(f"input_{k}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled, so torch need not import torch._dynamo, which takes as long as importing torch."""
        return False

    def know(self, value: Tensor, node: torch.fx.Node) -> None:
        """Remember that this node gave this tensor."""
        self.nodes[value] = node
        node.meta["form"] = Form(value.shape, value.dtype, value.device)

    def node_of(self, value: Any) -> Any:
        """The node that gave a tensor; if none did, a new constant. Other values are returned as they are."""
        if not isinstance(value, Tensor):
            return value
        if value not in self.nodes:
            name = f"constant_{len(vars(self.constants))}"
            setattr(self.constants, name, value.detach() if value.requires_grad else value)
            self.know(value, self.graph.create_node("get_attr", name))
        return self.nodes[value]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and append it to the graph."""
        kwargs = kwargs or {}
        with self:
            simpler = func.decompose(*args, **kwargs)
        if simpler is not NotImplemented:
            return simpler
        if func is aten.lift_fresh.default:  # a literal number: operations in place must not change it
            func = aten.lift_fresh_copy.default
        node = self.graph.call_function(func, *tree_map(self.node_of, (args, kwargs)))
        found = func(*args, **kwargs)
        if isinstance(found, Tensor):
            self.know(found, node)
        elif isinstance(found, list | tuple):
            for k, each in enumerate(found):
                if isinstance(each, Tensor):  # None for a gradient that nobody needs
                    self.know(each, self.graph.call_function(getitem, (node, k)))
        else:
            raise TypeError(f"{func} does not return a tensor, so the next operations may depend on the data")
        return found


def direct(graph: Any, constants: Any) -> Callable:
    """The graph as a function that calls each operation without its Python wrapper.

    The wrapper takes a fifth of the time of a small operation.
    """
    code = graph.python_code("self")
    names = dict(code.globals)

    def named(match: re.Match) -> str:
        library, *operation = match.groups()
        name, known = "_".join(match.groups()), FUNCTIONS.get(".".join(operation)) if library == "aten" else None
        names[name] = known or reduce(getattr, match.groups(), torch.ops)._op
        return f"{name}("

    exec(re.sub(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)\(", named, code.src), names)
    constants.graph = graph
    return MethodType(names["forward"], constants)


def calls(graph: Any) -> list[Any]:
    """The nodes that call an operation."""
    return [node for node in graph.nodes if node.op == "call_function"]


def schema_of(node: Any) -> Any:
    """The schema of a node's operation; None for the one that takes an element of a list."""
    return getattr(node.target, "_schema", None)


def form(node: Any) -> Form:
    """Shape, type and place of the tensor that a node gave for the example."""
    return node.meta["form"]


def alike(a: Any, b: Any) -> bool:
    """Whether two nodes give tensors of the same shape and type."""
    return form(a).shape == form(b).shape and form(a).dtype == form(b).dtype


def drop_ones(graph: Any) -> None:
    """Remove multiplications by ones.

    A gradient starts with ones of the shape of the loss; without them the loss itself need not be computed.
    """
    ones = set()
    for node in calls(graph):
        if node.target is aten.ones_like.default or (node.target in RESHAPING and node.args[0] in ones):
            ones.add(node)
        elif node.target is aten.mul.Tensor:
            for one, other in (node.args, node.args[::-1]):
                if one in ones and isinstance(other, torch.fx.Node) and alike(other, node):
                    node.replace_all_uses_with(other)
                    break
    graph.eliminate_dead_code()


def drop_idle(graph: Any) -> None:
    """Remove operations that return their argument; in small models each takes as long as a product."""
    for node in calls(graph):
        source = node.args[0]
        idle = node.target in RESHAPING and form(source).shape == form(node).shape
        idle |= node.target is aten.mul.Scalar and node.args[1] == 1
        idle |= node.target is aten.permute.default and list(node.args[1]) == list(range(value(node).ndim))
        idle |= node.target is aten.expand.default and all(broadcasts(user, node) for user in node.users)
        if node.target is aten.transpose.int and source.target is aten.transpose.int:
            there, back = ({d % len(form(node).shape) for d in n.args[1:]} for n in (source, node))
            idle, source = there == back, source.args[0]
        if node.target is getitem and source.target is aten.split_with_sizes.default and len(source.args[1]) == 1:
            idle, source = True, source.args[0]  # a model with one parameter
        if idle:
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code()


def broadcasts(user: Any, node: Any) -> bool:
    """Whether an operation element by element gives the same if `node`, an expansion, is not expanded."""
    shapes = [value(node.args[0]).shape if a is node else value(a).shape for a in user.args if hasattr(a, "meta")]
    return user.target in ELEMENTWISE and torch.broadcast_shapes(*shapes) == value(user).shape


def drop_stacks(graph: Any) -> None:
    """Where an element is selected from a stack, use the element; likewise in the gradient of such a selection.

    The gradient of two selections is the sum of two stacks of zeros, each with one element filled in. An element of it
    is that element plus zero, which differs from the element alone if that is a negative zero.
    """
    for node in calls(graph):
        if node.target is not aten.select.int:
            continue
        stack, dim, place = node.args
        if stack.target is aten.stack.default and list(stack.args[1:]) == [dim]:
            if all(user.target in ELEMENTWISE for user in node.users):  # others may depend on how it lies in memory
                node.replace_all_uses_with(stack.args[0][place])
        elif stack.target is aten.add.Tensor and all(is_filled(part, dim) for part in stack.args):
            (one, i), (other, j) = ((part.args[0], part.args[3]) for part in stack.args)
            if i != j and place in (i, j):
                with graph.inserting_before(node):
                    found = graph.call_function(aten.add.Tensor, (one if place == i else other, 0))
                found.meta["val"] = value(node)
                node.replace_all_uses_with(found)
    graph.eliminate_dead_code()


def is_filled(node: Any, dim: int) -> bool:
    """Whether this is a stack of zeros along `dim` with one element filled in."""
    return getattr(node, "target", None) is aten.select_backward.default and node.args[2] == dim


def turn_products(graph: Any) -> bool:
    """Compute x W^T as (W x^T)^T, and products e^T W of the backward pass likewise.

    With ten classes this takes half the time. It is not done if W has many more rows than x. The gradient of a weight
    keeps the layout it has in the row.

    Returns:
        Whether there was such a product.
    """
    found = False
    for node in calls(graph):
        if node.target is not aten.bmm.default or form(node).shape[2] > TURNED * form(node).shape[1]:
            continue
        left, right = node.args
        if is_turned(left) == is_turned(right) or (is_turned(left) and source(right) is not first_input(graph)):
            continue
        with graph.inserting_before(node):
            product = graph.call_function(aten.bmm.default, (turned(graph, right), turned(graph, left)))
            back = graph.call_function(aten.transpose.int, (product, 1, 2))
        back.meta["form"] = form(node)
        node.replace_all_uses_with(back)
        found = True
    graph.eliminate_dead_code()
    return found


def turned(graph: Any, node: Any) -> Any:
    """The transposed matrices of a stack."""
    return node.args[0] if is_turned(node) else graph.call_function(aten.transpose.int, (node, 1, 2))


def is_turned(node: Any) -> bool:
    """Whether this node transposes each matrix of a stack."""
    return node.target is aten.transpose.int and {d % 3 for d in node.args[1:]} == {1, 2}


def add_in_place(graph: Any) -> None:
    """Scatter into new zeros in place, instead of into a copy of them."""
    for node in calls(graph):
        if node.target is aten.scatter_add.default:
            zeros = node.args[0]
            if zeros.target is aten.new_zeros.default and len(zeros.users) == 1:
                node.target = aten.scatter_add_.default


def take_apart(graph: Any) -> None:
    """Return the columns of a row as a list instead of concatenated, if each is a new tensor; this saves a copy.

    A part that is a large product is returned as its two factors.
    """
    (output,) = (node for node in graph.nodes if node.op == "output")
    (row,) = output.args
    parts = list(row.args[0]) if row.target is aten.cat.default and list(row.args[1:]) == [1] else [row]
    sources = [source(part) for part in parts]
    apart = all(node.op == "call_function" for node in sources) and len(set(sources)) == len(parts)
    written = {*sources, first_input(graph)}  # a solver changes these while it goes through the parts
    for k, node in enumerate(sources if apart else []):
        product = node.target is aten.bmm.default and len(node.users) == 1 and is_reshaped(parts[k], node)
        factors = product and not written & {source(factor) for factor in node.args}
        if factors and form(node).shape[1:].numel() >= LARGE and form(node).device.type == "cpu":
            parts[k] = node.args
    output.args = (parts if apart else [row],)
    graph.eliminate_dead_code()


def source(node: Any) -> Any:
    """The node whose memory a node is a view of; the graph's first input for a view that repeats elements (expand)."""
    while node.op == "call_function":
        schema = schema_of(node) or schema_of(node.args[0])  # an element of a list is a view if the list has views
        if not any(r.alias_info for r in schema.returns):
            break
        node = first_input(node.graph) if node.target is aten.expand.default else node.args[0]
    return node


def first_input(graph: Any) -> Any:
    """The node of the first input, the rows."""
    return next(iter(graph.nodes))


def is_reshaped(node: Any, of: Any) -> bool:
    """Whether `node` is all of `of`, possibly in another shape."""
    return node is of or (node.target in RESHAPING and is_reshaped(node.args[0], of))
