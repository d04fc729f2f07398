"""Use of trained models: predictions for a file, and export of a model to a file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from polytier.data.federation import as_tensor
from polytier.data.own import own_column, read_arrays
from polytier.data.pack import dtype_name
from polytier.data.sources import reading
from polytier.files.write import atomic, write_bytes
from polytier.runs.folder import about_inputs
from polytier.runs.run import Run, Scaled
from polytier.runs.tensors import pieces

CHUNK = 512  # samples in one forward pass


def check_target(path: Path, *endings: str) -> None:
    """Raise an error if the file to write has a wrong ending, exists, or is in a folder that does not exist."""
    if path.suffix not in endings:
        raise ValueError(f"{path}: the name of the output file must end in {' or '.join(endings)}")
    if path.exists():
        raise ValueError(f"{path} exists; remove it or name another file")
    if not path.parent.is_dir():
        raise ValueError(f"{path.name} cannot be written: the folder {path.parent} does not exist")


def read_inputs(path: Path, run: Run) -> Tensor:
    """The array `x` of an .npz file, after a check that the model accepts it."""
    with reading(path, "an .npz file", "write it by np.savez(file, x=...)"):
        x = torch.from_numpy(own_column(read_arrays(path, ("x",), ("x",))["x"], "x", "biuf"))
    wanted = run.context.population
    x = x.unsqueeze(1) if x.ndim == 1 else x
    if tuple(x.shape[1:]) != wanted.shape:
        raise ValueError(f"{path}: a sample is {tuple(x.shape[1:])}; the model was trained on {wanted.shape}")
    if kind_of(x.dtype) != kind_of(wanted.dtype):
        # inputs in another scale would give wrong predictions without an error
        trained = f"the model was trained on {dtype_name(wanted.dtype)}"
        raise ValueError(f"{path}: x is {dtype_name(x.dtype)}; {trained}, scaled as those were")
    bad = ~torch.isfinite(x.reshape(len(x), -1)).all(1)
    if bad.any():
        first = int(bad.nonzero()[0])
        raise ValueError(f"{path}: x has NaN or infinity in {int(bad.sum())} rows, the first is row {first}")
    return x


def kind_of(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "image" if dtype == torch.uint8 else "whole number"


def outputs(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    """The outputs of the model, one row per sample."""
    if x.is_floating_point():
        x = x.to(run.context.objective.dtype)
    with torch.no_grad():
        return torch.cat([module(part) for part in x.split(CHUNK)]) if len(x) else torch.zeros(0)


def predict(run: Run, row: Tensor, data: Path, target: Path) -> int:
    """Write y (the class, if there are classes) and scores (the outputs) for x; returns the number of samples."""
    check_target(target, ".npz")
    labels, scores = predictions(run, row, read_inputs(data, run))
    with atomic(target) as partial, partial.open("wb") as file:
        np.savez(file, y=labels, scores=scores)
    return len(scores)


def predictions(run: Run, row: Tensor, x: Any) -> tuple[np.ndarray, np.ndarray]:
    """The classes (the outputs, if targets are not classes) and the outputs of a model, one row per sample."""
    given = as_tensor(x)
    inputs = run.context.population.inputs(given.float() if given.is_floating_point() else given)
    scores = outputs(run, run.as_module(row), inputs)
    classes = run.context.population.num_classes is not None and len(scores)
    return (scores.argmax(-1) if classes else scores).numpy(), scores.numpy()


def export(run: Run, row: Tensor, target: Path, owner: str) -> None:
    """Write one model: its parameters (.safetensors), or a program that runs without this package (.pt2)."""
    check_target(target, ".safetensors", ".pt2")
    if target.suffix == ".pt2":
        export_program(run, row, target)
    else:
        export_parameters(run, row, target, owner)


def export_parameters(run: Run, row: Tensor, target: Path, owner: str) -> None:
    """Write the parameters of a model as .safetensors."""
    module = run.as_module(row)
    inner = module.model if isinstance(module, Scaled) else module
    assert isinstance(inner, nn.Module)
    parts = {k: v.clone() for k, v in run.context.objective.all_parameters(row).items()}
    parts |= {k: v.clone() for k, v in inner.named_buffers()}
    about = json.dumps(about_inputs(run.context.population))
    write_bytes(target, pieces(parts, model=run.spec.model, of=owner, inputs=about))
    again = load_file(target)
    assert all(torch.equal(again[k], parts[k]) for k in parts)


def export_program(run: Run, row: Tensor, target: Path) -> None:
    """Write a model as a .pt2 program."""
    module = run.as_module(row)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about tracing internals
        with atomic(target) as partial:
            try:
                batch = torch.export.Dim("batch")
                program = torch.export.export(module, (example(run, 2),), dynamic_shapes=({0: batch},))
                with partial.open("wb") as file:
                    torch.export.save(program, file)
                with partial.open("rb") as file:
                    again: Any = torch.export.load(file).module()
                for size in (1, 3):
                    x = example(run, size)
                    with torch.no_grad():
                        torch.testing.assert_close(again(x), module(x))
            except (RuntimeError, ValueError, AssertionError, TypeError, NotImplementedError) as error:
                reason = str(error).strip().splitlines()[0]
                raise ValueError(
                    f"this model cannot be exported as a .pt2 file: {reason}; export it as .safetensors"
                ) from error


def example(run: Run, size: int) -> Tensor:
    like, dtype = run.context.population, run.context.objective.dtype
    generator = torch.Generator().manual_seed(size)
    shape = (size, *like.shape)
    if like.dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=dtype)
    return torch.randint(0, 2, shape, generator=generator, dtype=like.dtype)
