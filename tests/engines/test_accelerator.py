"""Device programs on an accelerator: no operation has tensors of two devices, and no program waits for the accelerator.

Without one, the programs run on torch's device "meta", whose tensors have a shape and no values: everything that needs
a value on the host fails. With a GPU, models are trained on it. The products of an accelerator have other last bits
than those of a CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import polytier
from polytier.runs.loop import make_loop

aten = torch.ops.aten
METHODS: dict[str, polytier.Algorithm] = {
    "fedavg": polytier.FedAvg(device_steps=3),
    "permfl": polytier.PerMFL(device_steps=3, team_rounds=2),
    "one step size per device": polytier.FedAvg(device_lr=[0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1], device_steps=2),
    "pfedme": polytier.PFedMe(local_rounds=2, device_steps=2),
    "scaffold": polytier.SCAFFOLD(device_steps=2),
    "ditto": polytier.Ditto(device_steps=2, personal_steps=2),
    "cobo": polytier.CoBo(sampling="all"),
    "local": polytier.LocalTraining(device_steps=2),
    "apfl": polytier.APFL(device_steps=2),
}


ACROSS = (aten._to_copy.default, aten.copy_.default, aten.index.Tensor, aten.index_put_.default)  # may have two devices


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices; numbers and copies are allowed."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.ndim]
        if func not in ACROSS and len({t.device.type for t in tensors}) > 1:
            raise RuntimeError(f"{func} has tensors of two devices")
        return func(*args, **(kwargs or {}))


class FakeGPU(TorchFunctionMode):
    """An accelerator without values: zeros come back. `waits` counts how often that was inside of a program."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.waits, self.downloads = 0, 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cpu and args[0].device.type == "meta":
            self.waits += self.inside
            self.downloads += 1
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **(kwargs or {}))


def on(fake: FakeGPU, method: polytier.Algorithm, monkeypatch) -> Any:
    """A run of the method whose device programs compute on an accelerator without values."""
    federation = polytier.build_federation("digits", devices=7, teams=2)
    training = make_loop(method, federation, "dnn:8", batch_size=16, workers=1)
    context = training.context
    context.objective.device, context.batches.device = torch.device("meta"), "meta"
    context.objective.module.to("meta")
    context.objective._compiled.clear()
    for name in ("device", "midpoint"):
        if hasattr(type(method), name):
            program = getattr(type(method), name)

            def counted(self, rows, local, program=program):
                fake.inside += 1
                try:
                    with OneDevice():
                        return program(self, rows, local)
                finally:
                    fake.inside -= 1

            monkeypatch.setattr(type(method), name, counted)
    return training


@pytest.mark.parametrize("name", METHODS)
def test_programs_use_one_device_and_do_not_wait(name, monkeypatch):
    gpu = FakeGPU()
    with on(gpu, METHODS[name], monkeypatch) as training, gpu:
        training.step()
        training.step()  # with what was kept in the first round
    assert gpu.downloads > 0  # what was kept or answered
    assert gpu.waits == 0


class Waits(polytier.FedAvg):
    def device(self, x, local):
        return x.cpu().to(local.device)


class Mixes(polytier.FedAvg):
    def device(self, x, local):
        return x + torch.ones(len(x), 1)


class Looks(polytier.FedAvg):
    def device(self, x, local):
        return x if bool((local.grad(x) > 0).any()) else x + 1


def test_what_the_check_finds(monkeypatch):
    gpu = FakeGPU()
    with on(gpu, Waits(), monkeypatch) as training, gpu:
        training.step()
    assert gpu.waits == 1
    for method, problem in ((Mixes(), "two devices"), (Looks(), "cannot be called on meta tensors")):
        with on(gpu, method, monkeypatch) as training, gpu, pytest.raises(RuntimeError, match=problem):
            training.step()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", METHODS)
def test_a_gpu_computes_what_a_cpu_computes(name):
    federation = polytier.build_federation("digits", devices=7, teams=2)
    runs = [
        polytier.train(METHODS[name], federation, "dnn:8", rounds=3, batch_size=16, on=on) for on in ("cpu", "cuda")
    ]
    for model in ("personal", "global_"):
        cpu, cuda = (getattr(run, model) for run in runs)
        if cpu is not None:
            torch.testing.assert_close(cuda, cpu, atol=1e-4, rtol=1e-3)
