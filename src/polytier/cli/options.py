"""The options of commands that are settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from polytier.runs.config import Config

PANELS = {
    "Data and teams": (
        "data", "data_dir", "devices", "teams", "partition", "per_class", "team_formation", "split",
        "standardize",
    ),
    "Method": (
        "model", "rounds", "batch_size", "seed", "team_participation", "device_participation", "absent",
        "codec", "l2", "models",
    ),
    "Computing": ("engine", "workers", "tile", "dtype", "on", "batching", "eval_every", "out"),
}  # fmt: skip


def flag(name: str, shown: str = "") -> Any:
    """The option of a setting: its help is the setting's own description."""
    field = Config.model_fields[name]
    default = shown or ("" if field.default is None else str(field.default))
    text = (field.description or "") + (f" (default {default})" if default else "")
    panel = next((title for title, names in PANELS.items() if name in names), None)
    option = f"--{name.replace('_', '-')}"
    declared = f"{option}/--no-{name}" if name == "standardize" else option
    return typer.Option(declared, help=text, show_default=False, rich_help_panel=panel)


def given(params: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run among a command's parameters, those that were given."""
    return {name: value for name, value in params.items() if value is not None and name in Config.model_fields}
