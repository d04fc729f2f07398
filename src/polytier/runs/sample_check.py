"""Evaluates a given loss and given metrics on a few samples before the first round, to find errors early."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polytier.data.batches import Batches
from polytier.data.federation import Federation
from polytier.method.algorithm import Algorithm
from polytier.models.losses import per_sample
from polytier.models.metrics import Metric, check_metric
from polytier.models.zoo import LANGUAGE_MODELS, MODELS
from polytier.stack.objective import Objective

SAMPLES, LOOKED_AT = 4, 1024


def try_loss_and_metrics(objective: Objective, batches: Batches, metrics: Sequence[Metric]) -> None:
    """Make the objective's loss return one value per sample, and check the values of the metrics.

    Raises:
        ValueError: The loss or a metric cannot be used with this model and these data; the message says why.
    """
    index = different_samples(batches.federation.y)
    group = batches.gather(slice(None), index.unsqueeze(0), torch.ones(1, len(index), dtype=batches.dtype), None)
    with torch.no_grad():
        outputs = objective.apply(objective.initial.to(objective.device), group.x[0])
    objective.sample_loss = per_sample(objective.sample_loss, outputs, group.y[0])
    for metric in metrics:
        check_metric(metric, outputs, group.y[0])


def check_kinds(model: str, federation: Federation, default: bool) -> None:
    """Raise an error if a model of the package cannot be trained on inputs or targets of these types.

    Args:
        model: The name of the model; models of one's own are not judged.
        federation: The data.
        default: Whether the default loss is used.
    """
    x, y, name = federation.x, federation.y, model.partition(":")[0]
    if name not in MODELS:
        return
    if name in LANGUAGE_MODELS:
        if not federation.is_tokens:
            raise ValueError(
                f"model {model} takes token ids, int64 [N, T], with a target for each; these inputs are {x.dtype} "
                f"{tuple(x.shape)} with targets {tuple(y.shape)}; use text (--data text:FOLDER), or mclr or dnn"
            )
        return
    if federation.is_tokens:
        raise ValueError(
            f"model {model} takes numbers or images, but x holds tokens; try {' or '.join(LANGUAGE_MODELS)}"
        )
    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise ValueError(f"model {model} takes numbers or images, but x holds integers ({x.dtype}); save x as float32")
    if default and federation.num_classes is not None and y.ndim > 1:
        raise ValueError(
            f"model {model} predicts one class per sample, but y has shape {tuple(y.shape)}; keep one column of y"
        )


def check_tokens(module: nn.Module, federation: Federation) -> None:
    """Raise an error if samples of tokens are too long for a language model, or have ids that it does not know.

    A language model may tell its limits by the attributes `context` and `vocabulary`, two whole numbers.
    """
    if not federation.is_tokens:
        return
    length, tokens = federation.population.shape[0], federation.num_classes or 0
    longest, known = getattr(module, "context", None), getattr(module, "vocabulary", None)
    if isinstance(longest, int) and length > longest:
        raise ValueError(
            f"samples have {length} tokens, the model takes at most {longest}; write "
            f"--data text:FOLDER,context={longest}, or give the model a longer context"
        )
    if isinstance(known, int) and tokens > known:
        raise ValueError(
            f"the tokenizer has {tokens:,} tokens, the model knows {known:,}; use the tokenizer that the model was "
            "made with (--data text:FOLDER,tokenizer=PATH)"
        )


def predicts_outputs(algorithm: Algorithm) -> bool:
    """Whether a method's predictions are the outputs of the model; only these can be checked before training."""
    return getattr(type(algorithm), "predict", Algorithm.predict) is Algorithm.predict


def different_samples(targets: Tensor) -> Tensor:
    """The indices of a few samples with different targets, if there are any; a single sample is used twice."""
    few = targets[:LOOKED_AT].flatten(1) if targets.ndim > 1 else targets[:LOOKED_AT].unsqueeze(1)
    _, place = torch.unique(few, dim=0, return_inverse=True)
    first = torch.full((int(place.max()) + 1,), len(few)).scatter_reduce(0, place, torch.arange(len(few)), "amin")
    chosen = first.sort().values[:SAMPLES].tolist()
    others = [k for k in range(len(few)) if k not in chosen][: SAMPLES - len(chosen)]
    return torch.tensor((chosen + others) * 2 if len(few) == 1 else chosen + others)
