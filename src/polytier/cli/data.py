"""The commands about data sets: `data get`, `data pack` and `data verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from polytier._errors import unknown
from polytier._terminal import loading_torch, say
from polytier._text import counted
from polytier.cli.options import a_path, takes_settings
from polytier.runs.spec import of_scope, read_spec

PACKED = (*of_scope("data"), "teams", "team_formation", "seed")


def get(
    name: Annotated[str, typer.Argument(help="A data set; see `polytier list data`.")],
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir", parser=a_path, metavar="<path>", help="The folder to write it to.", show_default=False
        ),
    ] = None,
) -> None:
    """Download a public data set, check its digest and store it where `polytier run` finds it."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from polytier.data.download import get as fetch
    from polytier.data.sources import SOURCES

    if name not in SOURCES:
        raise unknown("data set", name, list(SOURCES))
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)
        folder = fetch(name, data_dir, lambda done, total: bar.update(task, completed=done, total=total, visible=True))
    say(f"{name} is in {folder}")


@takes_settings(PACKED)
def pack(
    *,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", parser=a_path, help="A new folder; `run --data FOLDER` uses it.")
    ],
    given: dict[str, Any],
) -> None:
    """Write the devices' data to a folder that runs memory-map instead of reading: for large populations."""
    loading_torch(quiet=False)
    from polytier.data.pack import check_new
    from polytier.runs.make_data import make_federation

    check_new(folder)
    federation, _ = make_federation(read_spec(None, given))
    federation.save(folder)
    say(f"{counted(len(federation), 'device')} with {counted(len(federation.x), 'sample')} in {folder}")


def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `data pack` wrote.")],
) -> None:
    """Compare all files of a packed folder with their digests. Runs check only some blocks of them."""
    from polytier.data.pack import verify as verify_pack

    say(f"{folder} is whole: the digests of {counted(verify_pack(folder), 'block')} match")
