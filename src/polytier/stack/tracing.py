"""Functions of tensors as graphs of plain operations, traced once a shape and made leaner."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from operator import getitem
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten
LARGE = 1 << 16  # numbers of a product that is better added to a row than made (at least 400, or torch has other bits)
TURNED = 6  # up to so many times the rows of x, W may have more and W x^T is as fast as x W^T or up to twice as fast
RESHAPING = (aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.unsqueeze.default)


def trace(function: Callable, inputs: Sequence[Tensor], pieces: bool = False) -> Callable:
    """The function for inputs of these shapes. `pieces`: what it would put side by side, as a list (`take_apart`)."""
    inputs = [i.clone() for i in inputs]
    record = Record(inputs)
    with torch.no_grad(), warnings.catch_warnings(), record:
        warnings.simplefilter("ignore")  # about tracing internals, nothing a user could act on
        found = function(*inputs)
    graph = record.graph
    graph.output(record.node_of(found))
    graph.eliminate_dead_code()
    if not any(schema.is_mutable for schema in map(schema_of, calls(graph)) if schema):  # a module's own steps in place
        drop_ones(graph)
        drop_idle(graph)
        turn_products(graph)
        add_in_place(graph)
    if pieces:
        take_apart(graph)
    for node in graph.nodes:
        node.meta.clear()  # the values of this call
    return direct(graph, record.constants)


class Record(TorchDispatchMode):
    """Writes down each operation that is done meanwhile. (torch's make_fx does more, and takes five times as long.)"""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph, self.constants = torch.fx.Graph(), SimpleNamespace()
        self.nodes: dict[int, torch.fx.Node] = {}  # by the id of a tensor, which lives as long as its node
        for k, tensor in enumerate(inputs):
            self.know(tensor, self.graph.placeholder(f"input_{k}"))

    def know(self, value: Tensor, node: torch.fx.Node) -> None:
        self.nodes[id(value)] = node
        node.meta["val"] = value

    def node_of(self, value: Any) -> Any:
        """The node that gave a tensor: a constant, if none did; other values are themselves."""
        if isinstance(value, Tensor) and id(value) not in self.nodes:
            name = f"constant_{len(vars(self.constants))}"
            setattr(self.constants, name, value)
            self.know(value, self.graph.create_node("get_attr", name))
        return self.nodes[id(value)] if isinstance(value, Tensor) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            simpler = func.decompose(*args, **kwargs)
        if simpler is not NotImplemented:
            return simpler
        if func is aten.lift_fresh.default:  # a number that was written out: steps in place must not change it
            func = aten.lift_fresh_copy.default
        node = self.graph.call_function(func, *tree_map(self.node_of, (args, kwargs)))
        found = func(*args, **kwargs)
        if isinstance(found, Tensor):
            self.know(found, node)
        elif isinstance(found, list | tuple):
            for k, each in enumerate(found):
                self.know(each, self.graph.call_function(getitem, (node, k)))
        else:
            raise TypeError(f"{func} gives no tensor, so what follows may depend on the data")
        return found


def direct(graph: Any, constants: Any) -> Callable:
    """The graph as a function that calls its operations without their shells: of small ones these are a fifth."""
    code = graph.python_code("self")
    names = dict(code.globals)

    def named(match: re.Match) -> str:
        name = "_".join(match.groups())
        names[name] = reduce(getattr, match.groups(), torch.ops)._op
        return f"{name}("

    exec(re.sub(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)\(", named, code.src), names)
    constants.graph = graph
    return MethodType(names["forward"], constants)


def calls(graph: Any) -> list[Any]:
    return [node for node in graph.nodes if node.op == "call_function"]


def schema_of(node: Any) -> Any:
    """None for what is no operation on tensors: taking one of a list."""
    return getattr(node.target, "_schema", None)


def value(node: Any) -> Tensor:
    """What the node gave when it was traced: its shape and type."""
    return node.meta["val"]


def alike(a: Any, b: Any) -> bool:
    return value(a).shape == value(b).shape and value(a).dtype == value(b).dtype


def drop_ones(graph: Any) -> None:
    """A gradient starts with a factor one for the loss: without it, the loss itself need not be computed."""
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
    """Remove steps that give back what they were given: on small models each costs as much as a product."""
    for node in calls(graph):
        source = node.args[0]
        idle = node.target in RESHAPING and value(source).shape == value(node).shape
        idle |= node.target is aten.mul.Scalar and node.args[1] == 1
        if node.target is aten.transpose.int and source.target is aten.transpose.int:
            there, back = ({d % value(node).ndim for d in n.args[1:]} for n in (source, node))
            idle, source = there == back, source.args[0]
        if idle:
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code()


def turn_products(graph: Any) -> None:
    """x W^T as (W x^T)^T, and errors e^T W that go back likewise: with ten classes that takes half the time.

    Unless W has far more rows than x. The gradient of a weight stays as it lies in its row.
    """
    for node in calls(graph):
        if node.target is not aten.bmm.default or value(node).shape[2] > TURNED * value(node).shape[1]:
            continue
        left, right = node.args
        if is_turned(left) == is_turned(right) or (is_turned(left) and source(right) is not first_input(graph)):
            continue
        with graph.inserting_before(node):
            product = graph.call_function(aten.bmm.default, (turned(graph, right), turned(graph, left)))
            back = graph.call_function(aten.transpose.int, (product, 1, 2))
        back.meta["val"] = value(node)
        node.replace_all_uses_with(back)
    graph.eliminate_dead_code()


def turned(graph: Any, node: Any) -> Any:
    return node.args[0] if is_turned(node) else graph.call_function(aten.transpose.int, (node, 1, 2))


def is_turned(node: Any) -> bool:
    """Whether each matrix of a stack is transposed here."""
    return node.target is aten.transpose.int and {d % 3 for d in node.args[1:]} == {1, 2}


def add_in_place(graph: Any) -> None:
    """Scatter into the zeros that were made for it, not into a copy of them."""
    for node in calls(graph):
        if node.target is aten.scatter_add.default:
            zeros = node.args[0]
            if zeros.target is aten.new_zeros.default and len(zeros.users) == 1:
                node.target = aten.scatter_add_.default


def take_apart(graph: Any) -> None:
    """Give the parts of a row instead of the row, which saves a copy of it, if each is a tensor of its own.

    A part that is a large product is given as its two factors.
    """
    (output,) = (node for node in graph.nodes if node.op == "output")
    (row,) = output.args
    parts = list(row.args[0]) if row.target is aten.cat.default and list(row.args[1:]) == [1] else [row]
    sources = [source(part) for part in parts]
    apart = all(node.op == "call_function" for node in sources) and len(set(sources)) == len(parts)
    written = {*sources, first_input(graph)}  # whoever steps along the parts changes these as he goes
    for k, node in enumerate(sources if apart else []):
        product = node.target is aten.bmm.default and len(node.users) == 1 and is_reshaped(parts[k], node)
        factors = product and not written & {source(factor) for factor in node.args}
        if factors and value(node)[0].numel() >= LARGE and value(node).device.type == "cpu":
            parts[k] = node.args
    output.args = (parts if apart else [row],)
    graph.eliminate_dead_code()


def source(node: Any) -> Any:
    """The node whose memory this one shows. Of numbers that are shown more than once: the graph's first input."""
    while node.op == "call_function":
        schema = schema_of(node) or schema_of(node.args[0])  # one of a list shares memory as the list does
        if not any(r.alias_info for r in schema.returns):
            break
        node = first_input(node.graph) if node.target is aten.expand.default else node.args[0]
    return node


def first_input(graph: Any) -> Any:
    return next(iter(graph.nodes))


def is_reshaped(node: Any, of: Any) -> bool:
    """Whether it shows all of that node, in another shape."""
    return node is of or (node.target in RESHAPING and is_reshaped(node.args[0], of))
