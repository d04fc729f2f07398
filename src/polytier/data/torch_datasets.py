"""Data of devices from data sets and loaders of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from polytier._errors import unknown
from polytier.data.population import SPLITS

ROWS = 1024  # samples that are read at a time


def read_datasets(datasets: Iterable[Any] | Mapping[Any, Any], team: Any) -> dict[str, Any]:
    """The arguments of `Federation.from_arrays`: one row per sample of all devices.

    Args:
        datasets: One entry per device; the keys of a mapping are the names of the devices.
        team: The team of each device, in the order of the devices or by name; or None.

    Raises:
        ValueError: There are no data, teams do not fit the devices, or samples cannot be read.
    """
    named = dict(datasets) if isinstance(datasets, Mapping) else dict(enumerate(datasets))
    if not named:
        raise ValueError("there are no data sets; give one per device")
    teams = teams_of(team, list(named))
    x, y, device, split = [], [], [], []
    for name, entry in named.items():
        for part, source in splits_of(entry, name).items():
            inputs, targets = read_samples(source, name)
            x.append(inputs)
            y.append(targets)
            device += [name] * len(targets)
            split += [part] * len(targets)
    if len(whole := {part is None for part in split}) > 1:
        raise ValueError("some devices have splits and others have none; give all devices splits, or none of them")
    shapes = {tuple(inputs.shape[1:]) for inputs in x}
    if len(shapes) > 1:
        raise ValueError(f"samples have different shapes: {', '.join(map(str, sorted(shapes)))}; make them equal")
    return {
        "x": torch.cat(x),
        "y": torch.cat(y),
        "device": np.array(device),
        "team": None if teams is None else np.array([teams[name] for name in device]),
        "split": None if whole == {True} else split,
    }


def teams_of(team: Any, names: list[Any]) -> dict[Any, Any] | None:
    """The team of each device by name."""
    if team is None:
        return None
    teams = dict(team) if isinstance(team, Mapping) else dict(zip(names, team, strict=False))
    if set(teams) != set(names) or (not isinstance(team, Mapping) and len(team) != len(names)):
        raise ValueError(f"team needs one entry per device; got {len(team)} for {len(names)} devices")
    return teams


def splits_of(entry: Any, name: Any) -> dict[str | None, Any]:
    """The data sets of a device by split; the split is None if there is one data set for all splits."""
    if isinstance(entry, Mapping):
        for split in entry:
            if split not in SPLITS:
                raise unknown(f"split of device {name}", str(split), SPLITS)
        return dict(entry)
    if isinstance(entry, tuple):
        if len(entry) not in (2, 3):
            raise ValueError(
                f"device {name} has {len(entry)} data sets; give (train, test) or (train, validation, test)"
            )
        return dict(zip(("train", "test") if len(entry) == 2 else SPLITS, entry, strict=True))
    return {None: entry}


def read_samples(source: Any, name: Any) -> tuple[Tensor, Tensor]:
    """Inputs [N, ...] and targets [N, ...] of a data set or a loader.

    Samples are read in the order of the data set, so that a loader that shuffles gives the same federation every time.
    """
    inputs, targets = [], []
    try:
        for batch in batches_of(source):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise TypeError(f"a sample is a {type(batch).__name__}, not a pair (input, target)")
            inputs.append(torch.as_tensor(batch[0]))
            targets.append(torch.as_tensor(batch[1]))
        if not inputs:
            raise TypeError("it is empty")
        return torch.cat(inputs), torch.cat(targets)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        advice = "a data set gives pairs (input, target) of tensors, arrays or numbers of the same shape"
        raise ValueError(f"the data of device {name} cannot be read: {reason}; {advice}") from error


def batches_of(source: Any) -> Iterator[Any]:
    """The samples of a data set or a loader, many at a time."""
    loader = source if isinstance(source, DataLoader) else DataLoader(source, batch_size=ROWS)
    if isinstance(source, DataLoader) and not isinstance(source.dataset, IterableDataset):
        chosen = sorted(set(source.sampler))  # all samples, or those of a sampler for a part of them
        loader = DataLoader(Subset(source.dataset, chosen), batch_size=ROWS, collate_fn=source.collate_fn)
    return iter(loader)
