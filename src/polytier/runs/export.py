"""Use of trained models: predictions for a file, and export of a model to a file."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from polytier._errors import missing
from polytier.data.federation import as_tensor
from polytier.data.own_npz import own_column, read_arrays
from polytier.files.read import reading
from polytier.files.write import atomic, make_folder, write_bytes, write_text
from polytier.models.lora import LoRA, is_conv1d, merged
from polytier.models.pretrained import CausalLM
from polytier.runs.folder import about_inputs
from polytier.runs.run import Run, Scaled
from polytier.runs.write_tensors import pieces

CHUNK = 512  # samples in one forward pass


def check_target(path: Path, *endings: str) -> None:
    """Raise an error if the file to write has a wrong ending, exists, or is in a folder that does not exist."""
    if path.suffix not in endings:
        raise ValueError(f"{path}: the name of the output file must end in {' or '.join(endings)}")
    if path.exists():
        raise ValueError(f"{path} exists; remove it or name another file")
    if not path.parent.is_dir():
        raise ValueError(f"{path.name} cannot be written: the folder {path.parent} does not exist")


def read_inputs(path: Path) -> Tensor:
    """The array `x` of an .npz file."""
    with reading(path, "an .npz file", "write it by np.savez(file, x=...)"):
        return torch.from_numpy(own_column(read_arrays(path, ("x",), ("x",))["x"], "x", "biuf"))


def outputs(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    """The outputs of the model, one row per sample."""
    if x.is_floating_point():
        x = x.to(run.context.objective.dtype)
    with torch.no_grad():
        return torch.cat([module(part) for part in x.split(CHUNK)]) if len(x) else torch.zeros(0)


def predict(run: Run, row: Tensor, data: Path, target: Path) -> int:
    """Write y (the class, if there are classes) and scores (the outputs) for x; returns the number of samples."""
    check_target(target, ".npz")
    labels, scores = predictions(run, row, read_inputs(data), f"{data}, x")
    with atomic(target) as partial, partial.open("wb") as file:
        np.savez(file, y=labels, scores=scores)
    return len(scores)


def predictions(run: Run, row: Tensor, x: Any, what: str = "x") -> tuple[np.ndarray, np.ndarray]:
    """The classes (the outputs, if targets are not classes) and the outputs of a model, one row per sample."""
    given = as_tensor(x, "x")
    given = given.float() if given.is_floating_point() else given  # as `Federation.from_arrays` does
    scores = outputs(run, run.as_module(row), run.context.population.inputs(given, what))
    classes = run.context.population.num_classes is not None and len(scores)
    return (scores.argmax(-1) if classes else scores).numpy(), scores.numpy()


def export(run: Run, row: Tensor, target: Path, owner: str, form: str = "whole") -> str:
    """Write one model: its parameters (.safetensors), or a program that runs without this package (.pt2, .onnx).

    Args:
        run: The run.
        row: The model, from `Run.whole_row`.
        target: The file to write; for "peft" a new folder.
        owner: Whose model it is.
        form: "whole": all parameters. "parts": only those that were trained (.safetensors). "peft": a folder that
            `peft.PeftModel.from_pretrained` loads, of a model that was trained with LoRA.

    Returns:
        What was written, in words.

    Raises:
        ValueError: The form is unknown, or the model cannot be written in it.
    """
    if form not in FORMS:
        raise ValueError(f"format {form!r} is unknown; allowed: {', '.join(FORMS)}")
    if form == "peft":
        return export_peft(run, row, target)
    check_target(target, ".safetensors", *(PROGRAMS if form == "whole" else ()))
    if target.suffix == ".onnx" and None in map(find_spec, ("onnx", "onnxscript")):
        raise missing("onnx")
    objective = run.context.objective
    trained, frozen = objective.dimension, objective.frozen_size
    if target.suffix in PROGRAMS:
        export_program(run, row, target)
    else:
        export_parameters(run, row, target, owner, form)
    if form == "parts":
        return f"what was trained, {trained:,} numbers; the other {frozen:,} parameters of the model are not in it"
    return (
        f"the whole model, {trained + frozen:,} parameters, of which {trained:,} were trained"
        if frozen
        else "the model"
    )


def export_parameters(run: Run, row: Tensor, target: Path, owner: str, form: str) -> None:
    """Write the parameters of a model as .safetensors: all of them, or those that were trained."""
    objective, module = run.context.objective, inner_module(run, row)
    if form == "parts":
        statistics = row[objective.dimension :]
        found = objective.parameters(row[: objective.dimension])
        found |= objective.statistics(statistics if len(statistics) else None)
    else:
        found = merged(module)
    parts = {plain_name(module, k): v.clone() for k, v in found.items()}
    about = json.dumps(about_inputs(run.context.population))
    write_bytes(target, pieces(parts, model=run.spec.model, of=owner, inputs=about, format="pt"))
    again = load_file(target)
    assert all(torch.equal(again[k], parts[k]) for k in parts)


def plain_name(module: nn.Module, name: str) -> str:
    """The name of a parameter of a run's module; in a model of Transformers, the one it has there."""
    return name.removeprefix("model.") if isinstance(module, CausalLM) else name


def inner_module(run: Run, row: Tensor) -> nn.Module:
    """The module of a row, without the scaling of inputs."""
    module = run.as_module(row)
    inner = module.model if isinstance(module, Scaled) else module
    assert isinstance(inner, nn.Module)
    return inner


def export_peft(run: Run, row: Tensor, target: Path) -> str:
    """Write a folder with an adapter as PEFT has it."""
    trainable, module = run.context.objective.trainable, inner_module(run, row)
    layers = {name: part for name, part in module.named_modules() if isinstance(part, LoRA)}
    if not layers:
        raise ValueError("the model of this run has no LoRA layers, which a PEFT folder holds; use train=lora:rank=4")
    if target.exists():
        raise ValueError(f"{target} exists; name a new folder")
    wrapped = isinstance(module, CausalLM)
    own = {plain_name(module, name): layer for name, layer in layers.items()}
    path = run.spec.model.partition(":")[2] if wrapped else None
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if wrapped else None,
        "base_model_name_or_path": path,
        "r": trainable.rank,
        "lora_alpha": trainable.alpha,
        "lora_dropout": trainable.dropout,
        "bias": "none",
        "fan_in_fan_out": all(is_conv1d(layer.base) for layer in own.values()),
        "inference_mode": True,
        "target_modules": sorted(own),
    }
    tensors = {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part).detach().contiguous()
        for name, layer in own.items()
        for part in ("lora_A", "lora_B")
    }
    make_folder(target)
    write_bytes(target / "adapter_model.safetensors", pieces(tensors, format="pt"))
    write_text(target / "adapter_config.json", json.dumps(about, indent=2) + "\n")
    number = run.context.objective.dimension
    return f"the adapter, {number:,} numbers, as PEFT loads it; the base is {path or 'your model'}"


def export_program(run: Run, row: Tensor, target: Path) -> None:
    """Write a model as a program, and check that the program gives the same outputs."""
    module = run.as_module(row)
    write, read = PROGRAMS[target.suffix]
    with warnings.catch_warnings(), atomic(target) as partial:
        warnings.simplefilter("ignore")  # warnings about tracing internals
        try:
            batch = ({0: torch.export.Dim("batch")},)
            write(torch.export.export(module, (example(run, 2),), dynamic_shapes=batch), partial)
            again = read(partial)
            for size in (1, 3):
                x = example(run, size)
                with torch.no_grad():
                    torch.testing.assert_close(again(x), module(x))
        except (RuntimeError, ValueError, AssertionError, TypeError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"this model cannot be exported as a {target.suffix} file: {reason}; export it as .safetensors"
            ) from error


def write_pt2(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program for torch."""
    with path.open("wb") as file:
        torch.export.save(program, file)


def read_pt2(path: Path) -> Callable[[Tensor], Tensor]:
    """The program in a .pt2 file as a function."""
    with path.open("rb") as file:
        return torch.export.load(file).module()


def write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program for ONNX runtimes; its input is named x, its output outputs."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns about operators that are not installed
    names: Any = {"input_names": ["x"], "output_names": ["outputs"]}
    made = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    assert made is not None
    path.write_bytes(made.model_proto.SerializeToString())


def read_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    """The program in an .onnx file as a function, by the reference implementation of ONNX."""
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(path.read_bytes())

    def call(x: Tensor) -> Tensor:
        found: Any = evaluator.run(None, {"x": x.numpy()})
        return torch.from_numpy(found[0])

    return call


FORMS = ("whole", "parts", "peft")
PROGRAMS = {".pt2": (write_pt2, read_pt2), ".onnx": (write_onnx, read_onnx)}  # how programs are written and read again


def example(run: Run, size: int) -> Tensor:
    like, dtype = run.context.population, run.context.objective.dtype
    generator = torch.Generator().manual_seed(size)
    shape = (size, *like.shape)
    if like.dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=dtype)
    return torch.randint(0, 2, shape, generator=generator, dtype=like.dtype)
