"""Reading a run folder; needs no torch."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a run, with its versions."""
    path = folder / "config.toml"
    if not folder.is_dir():
        raise ValueError(f"there is no run folder {folder}; `polytier run` makes one, by default below runs/")
    if not path.is_file():
        raise ValueError(f"{folder} is no run folder: it has no config.toml")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary, or None if the run has not come to its end."""
    path = folder / "summary.json"
    return read_json(path) if path.exists() else None


def read_history(folder: Path) -> list[dict[str, Any]]:
    """A dict a round. A last line that a kill cut short is left out."""
    path, history = folder / "metrics.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            history.append(json.loads(line))
        except ValueError:
            break
    return history
