"""Losses: functions of outputs and targets that give one value per sample.

A custom loss may also be a usual torch loss that returns the mean over a batch; `per_sample` turns it into one value
per sample.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from polytier.data import IGNORED

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs [B, ...], targets [B, ...]) -> one value per sample [B]
TOLERANCE = 1e-4  # largest relative difference between the mean over samples and the mean of single values
ALLOWED = "allowed: a tensor [B] with one value per sample, or the mean over the samples as a scalar"


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of class scores; for sequences ([B, T, C] with [B, T]) the mean over the positions that count.

    Positions whose target is `IGNORED` do not count; a sample without any other has the loss 0.
    """
    # log_softmax and gather instead of F.cross_entropy: its parts give a row the same bits in any stack. The classes
    # come first because products with few classes are computed that way (stack/tracing.py), and because it is faster.
    scores = torch.log_softmax(outputs.transpose(-1, -2), -2)
    if targets.ndim == 1:
        return -scores.gather(-2, targets.unsqueeze(-2)).squeeze(-2)
    counts = targets != IGNORED
    chosen = scores.gather(-2, targets.clamp(min=0).unsqueeze(-2)).squeeze(-2)
    number = counts.to(outputs.dtype).flatten(1).sum(1)
    return -torch.where(counts, chosen, 0).flatten(1).sum(1) / number.clamp(min=1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared distance."""
    difference = outputs.reshape(targets.shape) - targets
    return 0.5 * (difference * difference).reshape(len(targets), -1).sum(1)


def quadratic_loss(output: Tensor, target: Tensor) -> Tensor:
    """1/2 theta'A theta - b'theta of each sample, [B]."""
    theta, product = output[:, 0], output[:, 1]
    return (theta * (0.5 * product - target)).sum(-1)


def default_loss(model: nn.Module, classes: bool) -> Loss:
    """Cross-entropy for classes, half the squared error for numbers, `quadratic_loss` for the model `quadratic`."""
    if type(model).__name__ == "Quadratic":
        return quadratic_loss
    return cross_entropy if classes else squared_error


# -- losses given in Python ---------------------------------------------------------------------------


class Adapted:
    """A loss applied to single samples (`each`) or with outputs in the shape of the targets (`reshape`).

    Args:
        loss: The loss as it was given.
        each: "" applies it to the whole batch; "vmap" to each sample by `torch.vmap`, which batches it; "loop" to one
            sample after another, for a loss that vmap does not support.
        reshape: Whether outputs are first reshaped to the shape of the targets.
    """

    def __init__(self, loss: Loss, each: str = "", reshape: bool = False) -> None:
        self.loss, self.each, self.reshape = loss, each, reshape

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = outputs.reshape(targets.shape) if self.reshape else outputs
        if self.each == "vmap":
            return torch.vmap(self._single)(outputs, targets)
        if self.each == "loop":
            return torch.stack([self._single(o, t) for o, t in zip(outputs, targets, strict=True)])
        return self.loss(outputs, targets)

    def _single(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of one sample."""
        return self.loss(output.unsqueeze(0), target.unsqueeze(0)).reshape(())


def per_sample(loss: Loss, outputs: Tensor, targets: Tensor) -> Loss:
    """The loss as a function that gives one value per sample, after trying it on a few samples.

    Args:
        loss: A function (outputs, targets), or a module such as `torch.nn.CrossEntropyLoss()`, that returns one value
            per sample or the mean over the samples.
        outputs: [B, ...] of the model, B >= 2; samples with different targets find more mistakes.
        targets: [B, ...] those of the same samples.

    Returns:
        The loss itself if it gives one value per sample. A loss that returns the mean is applied to single samples.
        If outputs and targets have the same number of elements in different shapes ([B, 1] and [B]), outputs are
        reshaped to the shape of the targets.

    Raises:
        ValueError: The loss fails, returns anything else, or mixes the samples of a batch (a sum, class weights that
            are divided by their sum, a contrastive loss).

    Examples:
        >>> outputs, targets = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 0, 1])
        >>> loss = per_sample(nn.CrossEntropyLoss(label_smoothing=0.1), outputs, targets)
        >>> loss(outputs, targets).shape
        torch.Size([3])
        >>> bool(loss(outputs, targets).mean().isclose(nn.CrossEntropyLoss(label_smoothing=0.1)(outputs, targets)))
        True
    """
    assert len(outputs) == len(targets) >= 2, "a loss must be tried on at least two samples"
    shapes = f"outputs {list(outputs.shape)} and targets {list(targets.shape)}"
    fault = ""
    for reshape in (False, True) if may_reshape(outputs, targets) else (False,):
        whole = Adapted(loss, reshape=reshape)
        try:
            value = applied(whole, outputs, targets)
            if (
                value.shape == targets.shape[:1]
                and applied(whole, outputs[1:], targets[1:]).numel() == len(targets) - 1
            ):
                return whole if reshape else loss
            if value.ndim > 0:
                fault = fault or f"gave shape {list(value.shape)} for {shapes}; {ALLOWED}; {advice_on(value, targets)}"
                continue
            return of_single_samples(whole, outputs, targets)
        except MixesSamples as error:
            fault = fault or f"{error}; {ALLOWED}"
        except Exception as error:  # a user's loss may raise any exception
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            fault = (
                fault or f"failed on {shapes} ({reason}); {ALLOWED}; make the shape of the outputs match the targets"
            )
    raise ValueError(f"the loss {name_of(loss)} {fault}")


class MixesSamples(ValueError):
    """The mean that a loss returns is not the mean of its values for single samples."""


def applied(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The value of the loss. Warnings of torch that shapes do not fit or that vmap has no rule are raised as errors."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", "Using a target size")
        warnings.filterwarnings("error", "There is a performance drop")
        value = loss(outputs.clone(), targets.clone())
    if not isinstance(value, Tensor):
        raise TypeError(f"it returned {type(value).__name__}, not a tensor")
    return value


def of_single_samples(whole: Adapted, outputs: Tensor, targets: Tensor) -> Loss:
    """A loss that returns the mean, applied to each sample."""
    looped = Adapted(whole.loss, "loop", whole.reshape)
    for some in (outputs, spread(outputs)):
        mean, single = applied(whole, some, targets), applied(looped, some, targets)
        if some is not outputs and not torch.isfinite(single).all():
            continue  # the loss may not be defined for these artificial outputs
        if not torch.allclose(mean, single.mean(), rtol=TOLERANCE, atol=TOLERANCE):
            together, alone = f"{float(mean):.6g} for {len(targets)} samples together", f"{float(single.mean()):.6g}"
            raise MixesSamples(
                f"gave {together}, but {alone} is the mean of its values for single samples: it sums over samples, "
                'divides by weights or compares samples; try reduction="none", or "mean" without weights'
            )
    batched = Adapted(whole.loss, "vmap", whole.reshape)
    try:
        stacked = applied(batched, outputs, targets)
    except Exception:  # vmap does not support every loss
        return looped
    same = torch.allclose(stacked, applied(looped, outputs, targets), rtol=TOLERANCE, atol=TOLERANCE)
    return batched if same else looped


def spread(outputs: Tensor) -> Tensor:
    """Outputs that differ from sample to sample, even if those of a new model are all equal."""
    noise = torch.sin(torch.arange(1, outputs.numel() + 1, device=outputs.device)).reshape(outputs.shape)
    return outputs + noise.to(outputs.dtype)


def may_reshape(outputs: Tensor, targets: Tensor) -> bool:
    """Whether both have the same number of elements in different shapes."""
    return targets.is_floating_point() and outputs.shape != targets.shape and outputs.numel() == targets.numel()


def advice_on(value: Tensor, targets: Tensor) -> str:
    """Advice for a loss that returned this value."""
    if value.ndim > 1 and value.shape[:1] == targets.shape[:1]:
        return "take the mean over the other axes: .flatten(1).mean(1)"
    return "keep the first axis, the samples"


def name_of(loss: Loss) -> str:
    """The name of a loss, for messages."""
    return getattr(loss, "__name__", type(loss).__name__)
