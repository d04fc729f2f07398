"""Features: what the frozen layers before the first layer that trains make of a sample.

A model is cut at a submodule whose outputs are the outputs of the model, such as its last layer, or inside of an
`nn.Sequential` whose outputs are. If a frozen part always gives the same outputs for a sample, they can be computed
once and kept in place of the samples.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polytier._text import listed
from polytier.stack.dropout import KeyedDropout

WITHOUT = "or leave out cache_features"


@dataclass(frozen=True)
class Boundary:
    """Where a model is cut in two: frozen layers, and the rest, which takes their outputs (features).

    Args:
        path: The name of the submodule that the rest is in, "" for the model itself. Its outputs are the model's.
        first: If the submodule is an `nn.Sequential`, the name of the first of its layers in the rest, which may be
            inside of another one ("body.2"); None: all of it.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> boundary = Boundary("", first="2")
        >>> rest = boundary.rest(model)
        >>> rest
        Sequential(
          (2): Linear(in_features=3, out_features=2, bias=True)
        )
        >>> boundary.features(model, torch.zeros(5, 4)).shape
        torch.Size([5, 3])
        >>> list(boundary.own(dict(model.named_parameters()), rest))
        ['2.weight', '2.bias']
    """

    path: str
    first: str | None = None

    @property
    def entry(self) -> str:
        """The name of the layer whose input are the features."""
        return ".".join(part for part in (self.path, self.first) if part)

    def rest(self, module: nn.Module) -> nn.Module:
        """The layers after the boundary."""
        part = module.get_submodule(self.path)
        return part if self.first is None else layers_from(part, self.first)

    def own(self, values: Mapping[str, Tensor], rest: nn.Module) -> dict[str, Tensor]:
        """Of parameters and buffers by their names in the model, those of the rest, by their names in it."""
        start = f"{self.path}." if self.path else ""
        known = {name for name, _ in (*rest.named_parameters(remove_duplicate=False), *rest.named_buffers())}
        own = {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}
        return {name: value for name, value in own.items() if name in known}

    def features(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """[B, ...] the features of inputs [B, ...]; the layers after the boundary are not computed."""

        def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            raise Reached(args[0])

        handle = module.get_submodule(self.entry).register_forward_pre_hook(stop)
        try:
            with torch.no_grad():
                module(inputs)
        except Reached as reached:
            return reached.features
        finally:
            handle.remove()
        raise AssertionError("the boundary was found in a pass through this module")


def layers_from(part: nn.Module, name: str) -> nn.Sequential:
    """The layers of an `nn.Sequential` from `name` on, which may be inside of another one in it; names are kept."""
    first, _, inner = name.partition(".")
    names = list(part._modules)
    kept = OrderedDict((each, part.get_submodule(each)) for each in names[names.index(first) :])
    if inner:
        kept[first] = layers_from(kept[first], inner)
    return nn.Sequential(kept)


class Reached(Exception):
    """Ends a forward pass at the boundary."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features


@dataclass
class Calls:
    """The calls of one submodule: their arguments and outputs."""

    seen: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.seen.append((args, kwargs, output))

    def gives(self, output: Tensor) -> bool:
        """Whether it was called once and gave this tensor."""
        return len(self.seen) == 1 and self.seen[0][2] is output

    @property
    def input(self) -> Tensor | None:
        """The tensor that it was called with; None if there were several calls or arguments."""
        if len(self.seen) != 1:
            return None
        args, kwargs, _ = self.seen[0]
        return args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) else None


@contextmanager
def recorded(module: nn.Module) -> Iterator[dict[str, Calls]]:
    """Record the calls of all submodules by name."""
    found = {name: Calls() for name, _ in module.named_modules()}
    handles = [part.register_forward_hook(found[name], with_kwargs=True) for name, part in module.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def find_boundary(module: nn.Module, trained: Collection[str], inputs: Tensor) -> Boundary:
    """The boundary with the fewest layers after it.

    Args:
        module: A module in evaluation mode whose dropout layers are keyed.
        trained: The names of the parameters and layers that change in training.
        inputs: [2, ...] two samples.

    Raises:
        ValueError: There is no boundary, no frozen parameters before it, or what is before it changes.
    """
    check_tied(module, trained)
    with recorded(module) as calls, torch.no_grad():
        output = module(inputs)
    for boundary in candidates(module, trained):
        features = calls[boundary.entry].input
        if not calls[boundary.path].gives(output) or features is None or len(features) != len(inputs):
            continue
        rest = boundary.rest(module)
        if len(list(rest.parameters())) == len(list(module.parameters())):
            continue  # nothing is frozen before it
        check_dropouts(module, rest, boundary)
        alone = boundary.features(module, inputs[:1])
        if not torch.allclose(alone, features[:1], rtol=1e-3, atol=1e-4 * float(features.abs().max())):
            raise ValueError(
                f"the input of {boundary.entry} for one sample depends on the other samples of its batch, so that "
                f"features cannot be kept; use a model that treats each sample by itself, {WITHOUT}"
            )
        return boundary
    raise ValueError(
        f"features cannot be kept for a model of which {listed(sorted(trained))} train: these must be in one submodule "
        "whose outputs are those of the model, called once with the outputs of frozen layers (such as the last layer, "
        "train = head), or in the last layers of an nn.Sequential, with frozen parameters before them; put them into "
        f"such a submodule, train fewer layers, {WITHOUT}"
    )


def candidates(module: nn.Module, trained: Collection[str]) -> Iterator[Boundary]:
    """Possible boundaries, those with few layers after them first."""
    parts = {name for name, _ in module.named_modules()}
    owners = [name if name in parts else name.rpartition(".")[0] for name in trained]
    paths = [owner.split(".") if owner else [] for owner in owners]
    longest = max(k for k in range(len(paths[0]) + 1) if all(path[:k] == paths[0][:k] for path in paths))
    for k in range(longest, -1, -1):
        name = ".".join(paths[0][:k])
        first = first_trained(module.get_submodule(name), [path[k:] for path in paths])
        if name or first:
            yield Boundary(name, first)


def first_trained(part: nn.Module, paths: list[list[str]]) -> str | None:
    """The first layer of an `nn.Sequential`, or of one inside of it, that is on one of the paths; None for others."""
    if type(part).forward is not nn.Sequential.forward:
        return None
    name = next((name for name in part._modules if any(path[:1] == [name] for path in paths)), None)
    if name is None:
        return None
    inner = first_trained(part.get_submodule(name), [path[1:] for path in paths if path[0] == name])
    return f"{name}.{inner}" if inner else name


def check_tied(module: nn.Module, trained: Collection[str]) -> None:
    """Raise an error if a parameter that trains is used in two layers: one of them may be before the boundary."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for several in names.values():
        if len(several) > 1 and not set(several).isdisjoint(trained):
            raise ValueError(
                f"{' and '.join(several)} are one parameter, which trains, so that the layers before the last one "
                f"change; use a model without tied weights (such as gpt:tied=false), {WITHOUT}"
            )


def check_dropouts(module: nn.Module, rest: nn.Module, boundary: Boundary) -> None:
    """Raise an error if there is dropout before the boundary."""
    after = set(rest.modules())
    for name, part in module.named_modules():
        if isinstance(part, KeyedDropout) and part.p > 0 and part not in after:
            raise ValueError(
                f"dropout {name!r} (p = {part.p:g}) is before {boundary.entry}, so that features differ from step to "
                f"step; set it to 0, {WITHOUT}"
            )
