"""Checkpoints: everything that a run needs to continue. The last two are kept; each is complete and checked.

FOLDER/round-N/rows.safetensors | the tensors
FOLDER/round-N/facts.json       | the other values, and the digest of the tensors
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from polytier.files.read import Damaged, read_json
from polytier.files.write import make_folder, partial_name, sync_folder, write_json, write_new
from polytier.runs.read_files import FORMAT, check_checkpoint
from polytier.runs.write_tensors import pieces

log = logging.getLogger("polytier")
ROWS, FACTS = "rows.safetensors", "facts.json"
KEPT = 2  # if the newest checkpoint is damaged, the run continues from the one before

Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]


def save(folder: Path, number: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Path:
    """Write checkpoint `number`, and remove older ones except the last before it."""
    make_folder(folder)
    final = folder / f"round-{number:07d}"
    if final.exists():
        if is_whole(final):
            return final  # a resumed run begins with the checkpoint that it was restored from
        set_aside(final)
    partial = partial_name(final)
    os.mkdir(partial)
    try:
        digest = write_new(partial / ROWS, pieces(tensors))
        write_json(partial / FACTS, {"format": FORMAT, **facts, "files": {ROWS: digest}})
        os.rename(partial, final)  # the checkpoint is complete after this
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(folder)
    for old in found(folder)[KEPT:]:
        gone = partial_name(old)
        os.rename(old, gone)  # so that it is never there in part
        shutil.rmtree(gone)
    return final


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    return sorted((path for path in folder.glob("round-*") if re.fullmatch(r"round-\d+", path.name)), reverse=True)


def number_of(path: Path) -> int:
    """The round of a checkpoint."""
    return int(path.name.removeprefix("round-"))


def read(path: Path) -> Checkpoint:
    """The tensors and the other values of a checkpoint.

    Raises:
        Damaged: It does not have the content that was written.
    """
    facts = read_json(path / FACTS)
    check_checkpoint(path)
    for name in ("format", "files"):
        facts.pop(name, None)
    try:
        return load_file(path / ROWS), facts
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{path / ROWS} cannot be read: {error}") from None


def latest(folder: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that is not damaged: its round, tensors and other values; None if there is none at all.

    Raises:
        Damaged: All checkpoints are damaged.
    """
    errors = []
    for path in found(folder):
        try:
            return number_of(path), *read(path)
        except Damaged as error:
            errors.append(str(error))
            log.warning("%s; using the checkpoint before it", error)
    if errors:
        raise Damaged(errors[0])
    return None


def is_whole(path: Path) -> bool:
    """Whether a checkpoint has the content that was written."""
    with suppress(Damaged):
        check_checkpoint(path)
        return True
    return False


def set_aside_after(folder: Path, number: int) -> None:
    """Set aside the checkpoints of later rounds: a run continues from one before if they are damaged."""
    for path in found(folder):
        if number_of(path) > number:
            set_aside(path)


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that nobody uses it."""
    os.rename(path, partial_name(path.with_name(f"damaged-{path.name}")))
