"""Every method keeps the contract, and what breaks it is found, with advice."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from polytier import (
    ALGORITHMS,
    Algorithm,
    Children,
    FedAvg,
    Federation,
    HierFedAvg,
    LocalProblem,
    PerMFL,
    Rows,
    check_algorithm,
    parameter,
)
from short_methods import short


def with_validation() -> Federation:
    """Three or six samples a device for training, two each for validation and test."""
    sizes = np.array([7, 10, 7, 10, 7, 7, 10])
    rng = np.random.default_rng(1)
    device = np.repeat(np.arange(len(sizes)), sizes)
    split = np.concatenate([np.repeat([0, 1, 2], [n - 4, 2, 2]) for n in sizes])
    x, y = rng.normal(size=(len(device), 2)), rng.integers(0, 3, len(device))
    return Federation.from_arrays(x, y, device, split=split, num_classes=3)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method(name):
    check_algorithm(short(name), federation=with_validation() if name == "validation" else None)


def test_flat_and_stale_and_float32():
    check_algorithm(short("permfl"), absent="stale", dtype="float32")
    check_algorithm(short("fedavg"), device_participation="count:3", codec="float16")


@dataclass(frozen=True)
class Momentum(Algorithm):
    """A method of a user: a server with momentum, a personal model halfway between the device's and the server's."""

    lr: float = parameter(0.1, "eta", "step size", above=0)

    def init(self, x: Tensor) -> Rows:
        return {"model": x, "velocity": torch.zeros_like(x)}

    def server(self, state: Any, teams: Children) -> Rows:
        velocity = 0.9 * state["velocity"] + teams.solve(state["model"]).mean() - state["model"]
        return {"model": state["model"] + velocity, "velocity": velocity}

    def device(self, x: Any, local: LocalProblem) -> Rows:
        theta = x - self.lr * local.grad(x)
        local.keep(model=(theta + x) / 2)
        return theta


def test_a_method_of_a_user():
    check_algorithm(Momentum())
    check_algorithm(Momentum(lr=0.01), rounds=2, team_participation=1.0, device_participation=1.0)


@dataclass(frozen=True)
class MixesDevices(FedAvg):
    def device(self, x: Tensor, local: LocalProblem) -> Tensor:
        return x - 0.1 * (local.grad(x) - local.grad(x).mean(0))


@dataclass(frozen=True)
class MixesTeams(HierFedAvg):
    def team(self, x: Tensor, devices: Children) -> Rows:
        w: Any = devices.solve(x).mean()
        return w - 0.1 * w.mean(0)


@dataclass(frozen=True)
class ChangesItsArgument(FedAvg):
    def device(self, x: Tensor, local: LocalProblem) -> Tensor:
        x -= 0.1 * local.grad(x)
        return x


@dataclass(frozen=True)
class ChangesTheState(FedAvg):
    def server(self, x: Tensor, devices: Children) -> Rows:
        x.copy_(torch.as_tensor(devices.solve(x).mean()))
        return x


@dataclass(frozen=True)
class HidesState(FedAvg):
    seen: ClassVar[dict[int, Tensor]] = {}

    def device(self, x: Tensor, local: LocalProblem) -> Tensor:
        start = torch.stack([self.seen.get(int(i), row) for i, row in zip(local.ids, x, strict=True)])
        theta = start - 0.1 * local.grad(start)
        self.seen.update(zip(local.ids.tolist(), theta, strict=True))
        return theta


@dataclass(frozen=True)
class CountsItsCalls(FedAvg):
    calls: int = 0

    def server(self, x: Tensor, devices: Children) -> Rows:
        object.__setattr__(self, "calls", self.calls + 1)
        return super().server(x, devices)


class Undecorated(FedAvg):
    momentum: float = 0.9


@dataclass(frozen=True)
class WrongType(FedAvg):
    def device(self, x: Tensor, local: LocalProblem) -> Tensor:
        return super().device(x, local).float()


@dataclass(frozen=True)
class WrongShape(PerMFL):
    def personal(self, x: Rows | None, local: LocalProblem) -> Tensor:
        return local.initial[:, :2]


@dataclass(frozen=True)
class WritesElsewhere(FedAvg):
    def device(self, x: Tensor, local: LocalProblem) -> Tensor:
        theta = super().device(x, local)
        everyone = torch.arange(local._context.topology.size(local.tier))
        local._context.memory.write(local.tier, "model", everyone, theta[:1].expand(len(everyone), -1))
        return theta


@dataclass(frozen=True)
class LosesState(Momentum):
    def server(self, state: Any, teams: Children) -> Rows:
        return {"model": super().server({**state, "velocity": 0 * state["model"]}, teams)["model"]}  # type: ignore[index]


@dataclass(frozen=True)
class WritesWhenAsked(FedAvg):
    def publish(self, state: Any) -> Rows:
        return state.add_(1)


@dataclass(frozen=True)
class DrawsFromTorch(FedAvg):
    def device(self, w: Any, local: Any) -> Any:
        return w + 0.01 * torch.randn_like(w)


@dataclass(frozen=True)
class DrawsFromNumpy(FedAvg):
    def server(self, x: Any, devices: Any) -> Any:
        return devices.solve(x).mean() * float(np.random.rand())  # noqa: NPY002


BAD = [
    (MixesDevices(), "device mixes rows.*no mean or sum over the first axis"),
    (MixesTeams(device_steps=1), "team mixes rows"),
    (ChangesItsArgument(), r"ChangesItsArgument\.device changes its argument; return new rows"),
    (ChangesTheState(device_steps=1), r"server changes its argument"),
    (HidesState(), "a second run gives another .*local.keep"),
    (CountsItsCalls(device_steps=1), "changes its own fields"),
    (Undecorated(), "dataclass"),
    (WrongType(device_steps=1), r"answers torch.float32 in a run of torch.float64; use .to"),
    (WrongShape(device_steps=1, team_rounds=1), r"personal answers \(11, 2\); one model per node is \(11, 9\)"),
    (WritesElsewhere(device_steps=1), "took no part; write with keep"),
    (LosesState(), "return all of it"),
    (WritesWhenAsked(device_steps=1), "publish changes its argument"),
    (DrawsFromTorch(), r"DrawsFromTorch\.device draws random numbers from torch.*node\.uniform"),
    (DrawsFromNumpy(device_steps=1), r"DrawsFromNumpy\.server draws random numbers.*node\.shared"),
]


@pytest.mark.parametrize(("algorithm", "advice"), BAD, ids=[type(a).__name__ for a, _ in BAD])
def test_what_breaks_the_contract_is_found(algorithm, advice):
    with pytest.raises(AssertionError, match=advice):
        check_algorithm(algorithm)


def test_what_cannot_travel_is_found():
    @dataclass(frozen=True)
    class Inside(FedAvg):
        pass

    with pytest.raises(AssertionError, match="cannot be pickled for workers.*define it in a module"):
        check_algorithm(Inside())
    with pytest.raises(AssertionError, match="derive it from polytier.Algorithm"):
        check_algorithm(object())  # type: ignore[arg-type]
