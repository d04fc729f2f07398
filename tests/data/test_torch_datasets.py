"""Federations from data sets and loaders of torch, from frames of pandas and from Hugging Face data sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

from polytier import Federation


def samples(start: int, stop: int) -> TensorDataset:
    """Samples whose only feature is their number."""
    numbers = torch.arange(start, stop)
    return TensorDataset(numbers[:, None].float(), numbers % 3)


def held(federation: Federation, index: int, split: str = "train") -> list[int]:
    return federation.device(index, split)[0].flatten().int().tolist()


def same(one: Federation, other: Federation) -> bool:
    return torch.equal(one.x, other.x) and torch.equal(one.y, other.y) and torch.equal(one.bounds, other.bounds)


def test_one_data_set_per_device_is_that_of_the_arrays():
    made = Federation.from_datasets([samples(0, 20), samples(20, 50)], seed=3)
    x = torch.arange(50)[:, None].float()
    arrays = Federation.from_arrays(x, torch.arange(50) % 3, device=np.arange(50) >= 20, seed=3)
    assert same(made, arrays)
    assert made.ids.tolist() == [0, 1]


def test_names_teams_and_splits():
    made = Federation.from_datasets(
        {
            "b": {"train": samples(0, 4), "test": samples(4, 6)},
            "a": {"train": samples(10, 13), "validation": samples(13, 14), "test": samples(14, 15)},
            "c": (samples(20, 22), samples(22, 23), samples(23, 25)),
        },
        team={"a": "north", "b": "south", "c": "north"},
    )
    assert made.ids.tolist() == ["a", "b", "c"]
    assert made.team is not None
    assert made.team.tolist() == ["north", "south", "north"]
    assert held(made, 0) == [10, 11, 12]
    assert held(made, 1, "test") == [4, 5]
    assert held(made, 2, "validation") == [22]
    in_order = Federation.from_datasets([samples(0, 4), samples(4, 8)], team=["x", "y"])
    assert in_order.team is not None
    assert in_order.team.tolist() == ["x", "y"]


def test_a_loader_that_shuffles_gives_the_same_federation():
    data = samples(0, 20)
    plain = Federation.from_datasets([data])
    assert same(Federation.from_datasets([DataLoader(data, batch_size=3, shuffle=True, drop_last=True)]), plain)


def test_a_sampler_says_which_samples_a_device_has():
    everything = samples(0, 40)
    loaders = [DataLoader(everything, sampler=SubsetRandomSampler(range(s, s + 20))) for s in (0, 20)]
    parts = [Subset(everything, range(s, s + 20)) for s in (0, 20)]
    assert same(Federation.from_datasets(loaders), Federation.from_datasets(parts))


def test_data_sets_of_any_kind():
    class Squares(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, k):
            if k >= 8:
                raise IndexError
            return np.full((2, 2), k, dtype=np.uint8), float(k * k)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(Squares())

    made = Federation.from_datasets([Squares(), Stream(), DataLoader(Stream(), batch_size=3)])
    assert made.num_classes is None
    assert made.x.dtype == torch.uint8
    assert [len(made.device(k)[1]) + len(made.device(k, "test")[1]) for k in range(3)] == [8, 8, 8]


BAD: dict[str, tuple[Any, Any, str]] = {
    "nothing": ([], None, "there are no data sets"),
    "an empty one": ([samples(0, 4), samples(0, 0)], None, "the data of device 1 cannot be read: it is empty"),
    "no pair": ([[torch.zeros(2)] * 3], None, r"not a pair \(input, target\)"),
    "other shapes": ([samples(0, 4), TensorDataset(torch.zeros(4, 2), torch.zeros(4))], None, "different shapes"),
    "texts": ([[("a text", 1)] * 3], None, "the data of device 0 cannot be read"),
    "an unknown split": ([{"tain": samples(0, 4)}], None, "did you mean 'train'"),
    "four splits": ([(samples(0, 4),) * 4], None, r"give \(train, test\)"),
    "splits of some": ([samples(0, 4), (samples(0, 4), samples(0, 4))], None, "others have none"),
    "too few teams": ([samples(0, 4), samples(0, 4)], ["x"], "one entry per device; got 1 for 2"),
    "teams of others": ({"a": samples(0, 4)}, {"b": "x"}, "one entry per device"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_gets_advice(name):
    datasets, team, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        Federation.from_datasets(datasets, team=team)


def test_columns_of_a_frame_are_data():
    pandas: Any = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"a": [0.5] * 8, "b": range(8), "y": [0, 1] * 4, "who": list("ppppqqqq")}, index=range(8, 16)
    )
    made = Federation.from_arrays(frame[["a", "b"]], frame["y"], device=frame["who"], team=frame["who"])
    assert repr(made) == "<Federation: 2 devices in 2 teams, 8 samples of shape (2,), 2 classes>"
    whole = torch.cat([made.device(0)[0], made.device(0, "test")[0]])
    assert sorted(whole[:, 1].tolist()) == [0, 1, 2, 3]
    assert made.ids.dtype.kind == "U"  # names that are objects would give another fingerprint in every process
    frame.loc[9, "who"] = None
    with pytest.raises(ValueError, match="device has values of type .*; give integers or strings"):
        Federation.from_arrays(frame[["a", "b"]], frame["y"], device=frame["who"].astype(object))
