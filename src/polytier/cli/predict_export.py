"""The commands that use a trained model: `predict` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polytier._terminal import loading_torch, say
from polytier._text import counted
from polytier.cli.options import Trust, a_path, check_code
from polytier.cli.run import Folder
from polytier.runs.read_files import read_config

if TYPE_CHECKING:
    from polytier.runs.run import Run

Device = Annotated[str | None, typer.Option("--device", metavar="ID", help="Use the personal model of this device.")]
Team = Annotated[str | None, typer.Option("--team", metavar="ID", help="Use the model of this team.")]
Everywhere = Annotated[bool, typer.Option("--global", help="Use the model of the whole population.")]


Of = Annotated[str | None, typer.Option("--of", metavar="NAME", help="The name of one of several models.")]


def load_model(
    folder: Path, device: str | None, team: str | None, everywhere: bool, of: str | None, trust: bool
) -> tuple[Run, Any, str]:
    """The run, the row of the selected model, and the name of its owner."""
    if (device is not None) + (team is not None) + everywhere != 1:
        raise ValueError("select a model with one of --device ID, --team ID and --global")
    # an error here comes before torch is imported; the engine is not used
    check_code({**read_config(folder), "engine": None}, folder / "config.toml", trust)
    loading_torch(quiet=False)
    from polytier.runs.run import Run

    run = Run.load(folder, trust=True)
    if (of is None) != (not run.models) or (of is not None and of not in run.models):
        there = (
            f"this run has {', '.join(run.models)}: select one with --of" if run.models else "this run has one model"
        )
        raise ValueError(f"{there}; got {'no --of' if of is None else f'--of {of}'}")
    run = run if of is None else run.models[of]
    owner = f"device {device}" if device is not None else f"team {team}" if team is not None else "the whole population"
    return run, run.whole_row(device=device, team=team), owner


def predict(
    folder: Folder,
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            metavar="FILE.npz",
            parser=a_path,
            help="File with x: one row per sample, as in the training data.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="FILE.npz", parser=a_path, help="Output file with y, the class, and scores, the outputs."
        ),
    ],
    device: Device = None,
    team: Team = None,
    everywhere: Everywhere = False,
    of: Of = None,
    trust: Trust = False,
) -> None:
    """Predict with the model of a device, of a team, or of the whole population."""
    run, row, owner = load_model(folder, device, team, everywhere, of, trust)
    from polytier.runs import export as files

    number = files.predict(run, row, data, out)
    say(f"{counted(number, 'prediction')} of the model of {owner} in {out}")


def export(
    folder: Folder,
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            parser=a_path,
            help="model.safetensors: parameters; model.pt2: a program for torch; model.onnx: for ONNX runtimes.",
        ),
    ],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="whole: all parameters; parts: those that were trained; peft: an adapter folder, for LoRA.",
        ),
    ] = "whole",
    device: Device = None,
    team: Team = None,
    everywhere: Everywhere = False,
    of: Of = None,
    trust: Trust = False,
) -> None:
    """Write one model to a file."""
    run, row, owner = load_model(folder, device, team, everywhere, of, trust)
    from polytier.runs import export as files

    what = files.export(run, row, out, owner, form)
    say(f"the model of {owner} is in {out}" + ("" if what == "the model" else f": {what}"))
