"""Checkpoints: everything that a run needs to continue. A process that is killed never leaves a damaged one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def save(folder: Path, number: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Path:
    """Write checkpoint `number` and remove the older ones once it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    final, partial = folder / f"round-{number:07d}", folder / f".round-{number:07d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    save_file({k: v.contiguous() for k, v in tensors.items()}, partial / "rows.safetensors")
    (partial / "facts.json").write_text(json.dumps(facts))
    for path in partial.iterdir():
        flush(path)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)  # the checkpoint is complete after this rename
    for old in folder.glob("round-*"):
        if old != final:
            shutil.rmtree(old, ignore_errors=True)
    return final


def flush(path: Path) -> None:
    """Write the content of a file to the disk."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def latest(folder: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
    """The newest complete checkpoint: its round, tensors and other values; None if there is none."""
    found = sorted(folder.glob("round-*"))
    if not found:
        return None
    tensors = load_file(found[-1] / "rows.safetensors")
    facts = json.loads((found[-1] / "facts.json").read_text())
    return int(found[-1].name.removeprefix("round-")), tensors, facts
