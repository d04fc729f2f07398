"""Which parameters of a module train; all others are frozen.

The parameters that train are the row of a model: they are sent, averaged, counted and saved. A frozen parameter
(`requires_grad=False`) stays in the module: it exists once per process, whatever the number of devices.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from polytier._errors import unknown
from polytier._text import bind, listed
from polytier.models.lora import add_lora, find_targets

KINDS = ("all", "head", "layers", "lora")
ALLOWED = ("all", "head", "layers=PATTERN", "lora:rank=4,alpha=32,targets=PATTERN")


@dataclass(frozen=True)
class Trainable:
    """Which parameters of a module train.

    A parameter that the module itself has frozen (`requires_grad=False`) is never trained.

    Args:
        kind: "all": every parameter. "head": the parameters of the submodule called `head` or, if there is none, of
            the last submodule that holds parameters itself. "layers": the parameters whose names match one of the
            patterns. "lora": new parameters of low rank, added to the layers whose names match one of the patterns;
            the model itself is frozen.
        patterns: for "layers", patterns as in :mod:`fnmatch` on the names that `named_parameters()` gives. For "lora",
            on those that `named_modules()` gives; without patterns every layer that LoRA knows, except the last one.
        rank: for "lora", the rank of the products.
        alpha: for "lora", products are multiplied by alpha / rank.
        dropout: for "lora", the probability with which a number that a product is multiplied with is set to 0.

    Raises:
        ValueError: the kind is unknown, or patterns are missing or given for another kind.

    Examples:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> Trainable.parse("head").names(model)
        ['2.weight', '2.bias']
        >>> frozen = Trainable.parse("layers=0.*+*.bias").apply(model)
        >>> [name for name, p in frozen.named_parameters() if p.requires_grad]
        ['0.weight', '0.bias', '2.bias']
        >>> Trainable.parse("lora:rank=2,targets=0").names(model)
        ['0.lora_A', '0.lora_B']
    """

    kind: str = "all"
    patterns: tuple[str, ...] = ()
    rank: int = 4
    alpha: float = 32.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("choice of parameters", self.kind, ALLOWED)
        if self.rank < 1 or not 0 < self.alpha < float("inf"):
            raise ValueError(f"lora: rank is 1 or more and alpha above 0; got rank={self.rank}, alpha={self.alpha:g}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora: dropout is a probability below 1, such as dropout=0.1; got {self.dropout:g}")
        needed = self.kind == "layers"
        if (needed and not self.patterns) or (self.patterns and self.kind in ("all", "head")) or not all(self.patterns):
            raise ValueError(
                f"which parameters train is {', '.join(ALLOWED[:-1])} or {ALLOWED[-1]} (several patterns are joined by "
                f"+, such as layers=head.*+*.bias); got {str(self)!r}"
            )

    @classmethod
    def parse(cls, text: str | Trainable) -> Trainable:
        """Read "all", "head", "layers=PATTERN" or "lora:rank=R,alpha=A,targets=PATTERN".

        Several patterns are joined by "+".

        Args:
            text: the text, or a `Trainable`, which is returned as it is.

        Raises:
            ValueError: the text is none of these.

        Examples:
            >>> Trainable.parse("layers=head.*+body.2.bias")
            Trainable(kind='layers', patterns=('head.*', 'body.2.bias'), rank=4, alpha=32.0, dropout=0.0)
        """
        if isinstance(text, Trainable):
            return text
        if not isinstance(text, str):
            raise ValueError(f"which parameters train is a text such as 'head', or a Trainable; got {text!r}")
        if text.strip().partition(":")[0] == "lora":
            values = bind(text.strip(), {"lora": lora_arguments}, "choice of parameters")[2]
            targets = values.pop("targets", None)
            return cls("lora", split_patterns(targets) if targets is not None else (), **values)
        kind, equals, patterns = text.strip().partition("=")
        return cls(kind, split_patterns(patterns) if equals else ())

    def __str__(self) -> str:
        if self.kind == "lora":
            targets = f",targets={'+'.join(self.patterns)}" if self.patterns else ""
            dropout = f",dropout={self.dropout:g}" if self.dropout else ""
            return f"lora:rank={self.rank},alpha={self.alpha:g}{dropout}{targets}"
        return f"{self.kind}={'+'.join(self.patterns)}" if self.patterns else self.kind

    def names(self, module: nn.Module) -> list[str]:
        """The names of the parameters of `module` that train, in the module's order.

        Raises:
            ValueError: the module has no parameters, a pattern matches none of them, or nothing would train.
        """
        parameters = dict(module.named_parameters())
        if not parameters:
            raise ValueError("the model has no parameters to train")
        if self.kind == "lora":
            return [f"{name}.lora_{part}" for name in self.targets(module) for part in "AB"]
        chosen = self._chosen(module)
        found = [name for name, p in parameters.items() if id(p) in chosen and p.requires_grad]
        if not any(parameters[name].numel() for name in found):
            frozen = [name for name, p in parameters.items() if id(p) in chosen]
            raise ValueError(
                f"with train = {str(self)!r} nothing would train: {listed(frozen)} "
                f"{'is' if len(frozen) == 1 else 'are'} frozen in the model (requires_grad=False) or empty; "
                "set requires_grad_(True) on the parameters to train, or choose others"
            )
        return found

    def targets(self, module: nn.Module) -> list[str]:
        """The names of the layers that LoRA is added to; none for other kinds."""
        return find_targets(module, self.patterns, head_of(module)) if self.kind == "lora" else []

    def apply(self, module: nn.Module, seed: int = 0, share: bool = False) -> nn.Module:
        """A copy of `module` in which all other parameters are frozen; `module` itself is left unchanged.

        Args:
            module: the model.
            seed: determines the first values of parameters that are new (LoRA).
            share: whether the frozen parameters of the copy use the memory of those of `module`, which must then not
                be changed.

        Raises:
            ValueError: as `names` does.
        """
        names = set(self.names(module))
        shared = {id(p): nn.Parameter(p.detach(), False) for n, p in module.named_parameters() if n not in names}
        copied = copy.deepcopy(module, shared if share else {})  # type: ignore[arg-type]
        if self.kind == "lora":
            add_lora(copied, self.targets(copied), self.rank, self.alpha, seed, self.dropout)
            return copied
        for name, parameter in copied.named_parameters():
            parameter.requires_grad_(name in names)
        return copied

    def _chosen(self, module: nn.Module) -> set[int]:
        """The ids of the chosen parameters, frozen or not. A parameter that has several names is known by each."""
        if self.kind == "all":
            return {id(p) for p in module.parameters()}
        if self.kind == "head":
            return {id(p) for p in head_of(module).parameters()}
        named = list(module.named_parameters(remove_duplicate=False))
        chosen = set()
        for pattern in self.patterns:
            found = {id(p) for name, p in named if fnmatchcase(name, pattern)}
            if not found:
                raise ValueError(
                    f"no parameter of the model matches the pattern {pattern!r}; available: "
                    f"{listed([name for name, _ in named])}"
                )
            chosen |= found
        return chosen


def lora_arguments(*, rank: int = 4, alpha: float = 32.0, targets: str = "", dropout: float = 0.0) -> None:
    """What a user may set in lora:..."""


def split_patterns(text: str) -> tuple[str, ...]:
    """The patterns of a text, which are joined by "+"."""
    return tuple(part.strip() for part in text.split("+"))


def head_of(module: nn.Module) -> nn.Module:
    """The submodule called `head`, or the last one that holds parameters itself."""
    head = getattr(module, "head", None)
    if isinstance(head, nn.Module) and any(True for _ in head.parameters()):
        return head
    return [part for part in module.modules() if any(True for _ in part.parameters(recurse=False))][-1]


def digest(parameters: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and values: equal for equal parameters, to the bit.

    Examples:
        >>> import torch
        >>> digest({"w": torch.zeros(2)}) == digest({"w": -torch.zeros(2)})
        False
    """
    found = hashlib.sha256()
    for name in sorted(parameters):
        values = parameters[name].detach().cpu().contiguous()
        found.update(f"{name} {values.dtype} {tuple(values.shape)} ".encode())
        found.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256:{found.hexdigest()}"
