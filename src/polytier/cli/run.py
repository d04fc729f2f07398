"""The commands that train: `run` and `resume`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polytier._terminal import Interrupt, loading_torch, log, say, set_up_logging, wide_console
from polytier._text import counted, duration, size
from polytier.cli.options import Trust, a_path, check_code, takes_settings, trusted_spec
from polytier.files.read import check_path
from polytier.report.tables import print_summary
from polytier.runs.read_files import finished_rounds, read_config, read_summary
from polytier.runs.spec import check_spec, of_scope

if TYPE_CHECKING:
    from polytier.files.lock import FolderLock
    from polytier.runs.loop import Loop

Quiet = Annotated[bool, typer.Option("--quiet", help="Print only the path of the run folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print summary.json and nothing else.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print log messages.")]
What = Annotated[
    str | None, typer.Argument(metavar="METHOD", help="A method (default permfl), or FILE.toml.", show_default=False)
]
File = Annotated[str | None, typer.Argument(metavar="FILE.toml", help="Settings; METHOD and flags override them.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", parser=a_path, help="A run folder.")]
MayChange = ("rounds", *(name for name in of_scope("compute") if name != "out"))


@takes_settings()
def run(
    *,
    what: What = None,
    file: File = None,
    given: dict[str, Any],
    fields: list[str],
    trust: Trust = False,
    quiet: Quiet = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train a method. Without arguments: PerMFL on digits. The config.toml of a run folder repeats that run."""
    set_up_logging(quiet, verbose)
    spec = trusted_spec(what, given, fields, trust, file)
    loading_torch(quiet or as_json)
    from polytier.runs.folder import check_free
    from polytier.runs.loop import Loop
    from polytier.theory.stability import warnings

    if spec.out is not None:
        check_path(spec.out, "out")
        check_free(Path(spec.out))
    with Loop.of(spec) as loop:
        for text in warnings(loop):
            log.warning("%s", text)
        follow(loop, None if spec.out is None else Path(spec.out), quiet, as_json)


@takes_settings(MayChange, defaults=dict.fromkeys(MayChange, "as before"))
def resume(
    *,
    folder: Folder,
    given: dict[str, Any],
    trust: Trust = False,
    quiet: Quiet = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Continue an interrupted run, or extend a finished one; results are those of a run without interruption."""
    set_up_logging(quiet, verbose)
    check_spec(given)
    config = read_config(folder)
    done = finished_rounds(folder, given.get("rounds") or config.get("rounds", 0))
    if done is not None:
        more = f"polytier resume {folder} --rounds {done + 100}"
        say(f"{folder} is finished: {counted(done, 'round')}; to continue: {more}")
        from polytier.report.heatmap import draw_beside

        draw_beside(folder, again=False)
        print_result(folder, quiet, as_json)
        return
    check_code({**config, **given}, folder / "config.toml", trust, [given.get("engine", "")])
    loading_torch(quiet or as_json)
    from polytier.runs.folder import reopen
    from polytier.runs.resume import resumed_loop, spec_of_folder

    with reopen(folder) as lock, resumed_loop(spec_of_folder(folder, **given), folder) as loop:
        follow(loop, folder, quiet, as_json, lock)


def follow(loop: Loop, folder: Path | None, quiet: bool, as_json: bool, resumed: FolderLock | None = None) -> None:
    """Train with a progress bar unless `quiet`, and print the result."""
    from polytier.report.heatmap import draw_beside
    from polytier.runs.callbacks import Progress
    from polytier.runs.launch import run_in_folder

    class Announced(Progress):
        """A progress bar below a line about the run."""

        def on_start(self, loop: Loop) -> None:
            announce(loop)
            super().on_start(loop)

    with Interrupt() as interrupt:
        folder = run_in_folder(loop, folder, [] if quiet else [Announced()], interrupt, resumed)
    draw_beside(folder)
    print_result(folder, quiet, as_json)


def announce(loop: Loop) -> None:
    """Print one line about the run before it starts."""
    from polytier.runs.estimate import check_memory, memory_bytes, seconds_a_round

    check_memory(loop)  # a few steps are timed below
    topology, name = loop.context.topology, type(loop.algorithm).__name__
    teams = "".join(f" in {counted(topology.size(t), 'team')}" for t in range(topology.leaf - 1, 0, -1))
    who = f"{name}: {counted(topology.size(topology.leaf), 'device')}{teams}"
    memory = f"about {size(memory_bytes(loop))} of memory"
    sizes = Counter(f"{part.objective.dimension:,}" for part in loop.context.parts)
    models = " and ".join(f"{count} x {each}" if count > 1 else each for each, count in sizes.items())
    workers: int = loop.context.engine.workers  # type: ignore[attr-defined]
    seconds, left = seconds_a_round(loop, workers), loop.spec.rounds - loop.round
    took = "" if seconds is None else f", {duration(seconds)} per round, {duration(seconds * left)} in all"
    say(f"{who}; {models} parameters, {memory}{took}")


def print_result(folder: Path, quiet: bool, as_json: bool) -> None:
    """Print the table of a finished run, its summary as JSON, or the path of its folder."""
    summary = read_summary(folder)
    if as_json:
        print(json.dumps(summary, indent=2))
    elif quiet:
        print(folder)
    elif summary is not None:
        print_summary(wide_console(), read_config(folder), summary, folder)
