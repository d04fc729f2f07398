"""Features in place of samples: the outputs of frozen layers, computed once before the first round."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from polytier.data.federation import Federation
from polytier.models.trainable import Trainable
from polytier.models.zoo import checked, make_model
from polytier.runs.sample_check import check_kinds, check_tokens
from polytier.runs.spec import RunSpec
from polytier.stack.kept_features import features_of
from polytier.stack.objective import Objective


def with_features(
    specs: Mapping[str, RunSpec], federations: Mapping[str, Federation], modules: Mapping[str, nn.Module | None]
) -> dict[str, Federation]:
    """The data of each model, as features where its settings ask for them."""
    found, made = dict(federations), {}
    for name, spec in specs.items():
        federation, module = federations[name], modules[name]
        if not spec.cache_features or federation.origin is not None:
            continue
        key = id(federation), id(module), spec.model, spec.train, spec.seed, spec.dtype
        if key not in made:
            made[key] = features_of(federation, objective_of(spec, federation, module))
        found[name] = made[key]
    return found


def objective_of(spec: RunSpec, federation: Federation, module: nn.Module | None) -> Objective:
    """The objective of a model whose features are to be kept, for samples."""
    named = module is None
    if module is None:
        check_kinds(spec.model, federation, default=False)
        shape, targets = tuple(federation.x.shape[1:]), tuple(federation.y.shape[1:])
        module = make_model(spec.model, shape, federation.num_classes, spec.seed, targets)
    check_tokens(module, federation)
    return Objective(
        checked(type(module).__name__, module),
        dtype=getattr(torch, spec.dtype),
        device=spec.on,
        trainable=Trainable.parse(spec.train),
        seed=spec.seed,
        share=named,
    )
