"""The command line. torch is imported only by the commands that need it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from polytier import __version__
from polytier._errors import unknown
from polytier._terminal import BAD_INPUT, FAULT, INTERRUPTED, Interrupt, fail, log, say, set_up_logging, wide_console
from polytier._text import duration, size
from polytier.cli import report as pages
from polytier.cli import studies
from polytier.cli.options import flag, given
from polytier.report.tables import print_summary, print_unfinished, print_until
from polytier.runs.config import PYTHON, Config, check_config, prepare, resolve, versions
from polytier.runs.read import read_config, read_history, read_summary

if TYPE_CHECKING:
    from polytier.runs.loop import Training
    from polytier.runs.run import Run


class Group(TyperGroup):
    """What goes wrong becomes one line of advice and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            log.debug("where this came from:", exc_info=error)
            raise fail(str(error), BAD_INPUT) from None
        except KeyboardInterrupt:
            raise fail("interrupted", INTERRUPTED) from None
        except BrokenPipeError:
            raise
        except OSError as error:
            raise fail(str(error), FAULT) from None


app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
data_app = typer.Typer(no_args_is_help=True, help="Data sets.")
app.add_typer(data_app, name="data")


def show_version(asked: bool) -> None:
    if asked:
        print(f"polytier {__version__}")
        raise typer.Exit


@app.callback()
def polytier(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning with a model for every device, every team of devices and the whole population."""


# -- run ----------------------------------------------------------------------------------------------


Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no table: only the run folder's name.")]
Json = Annotated[bool, typer.Option("--json", help="Print summary.json and nothing else.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show what goes on inside.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")]


@app.command()
def run(
    ctx: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(metavar="ALGORITHM | FILE.toml", help="A method (default permfl) or a file."),
    ] = None,
    data: Annotated[str | None, flag("data")] = None,
    data_dir: Annotated[str | None, flag("data_dir")] = None,
    model: Annotated[str | None, flag("model")] = None,
    devices: Annotated[int | None, flag("devices", "40")] = None,
    teams: Annotated[str | None, flag("teams", "4")] = None,
    partition: Annotated[str | None, flag("partition", "labels:2")] = None,
    per_class: Annotated[str | None, flag("per_class")] = None,
    team_formation: Annotated[str | None, flag("team_formation")] = None,
    split: Annotated[str | None, flag("split")] = None,
    team_participation: Annotated[str | None, flag("team_participation")] = None,
    device_participation: Annotated[str | None, flag("device_participation")] = None,
    absent: Annotated[str | None, flag("absent")] = None,
    rounds: Annotated[int | None, flag("rounds")] = None,
    batch_size: Annotated[str | None, flag("batch_size")] = None,
    seed: Annotated[int | None, flag("seed")] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", rich_help_panel="Method",
                     help="a field of the method; FIELD.TIER=VALUE by tier; a,b,c one a node"),
    ] = None,
    models: Annotated[int | None, flag("models", "2, for mfa-rr and mfa-rand")] = None,
    eval_every: Annotated[int | None, flag("eval_every")] = None,
    out: Annotated[str | None, flag("out", "runs/ALGORITHM-DATA-SEED-N")] = None,
    engine: Annotated[str | None, flag("engine")] = None,
    workers: Annotated[int | None, flag("workers", "one, or one a core where the run is long")] = None,
    tile: Annotated[int | None, flag("tile")] = None,
    dtype: Annotated[str | None, flag("dtype")] = None,
    on: Annotated[str | None, flag("on")] = None,
    codec: Annotated[str | None, flag("codec", "the dtype")] = None,
    standardize: Annotated[bool | None, flag("standardize", "no")] = None,
    l2: Annotated[float | None, flag("l2")] = None,
    batching: Annotated[str | None, flag("batching")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:  # fmt: skip
    """Train. Alone, `polytier run` is PerMFL on digits; config.toml of any run folder repeats that run."""
    set_up_logging(quiet, verbose)
    config = resolve(what, given(ctx.params), fields or ())
    from polytier.runs.folder import check_free, next_free

    if config.out is not None:
        check_free(Path(config.out))
    training, config = prepare(config)
    from polytier.theory.check import warnings

    for text in warnings(training):
        log.warning("%s", text)
    folder = Path(config.out) if config.out is not None else next_free(Path("runs"), stem_of(config))
    with training:
        follow(training, config, folder, quiet, as_json)


def stem_of(config: Config) -> str:
    """ALGORITHM-DATA-SEED, fit to be a folder's name."""
    data = Path(config.data).stem if config.data.lower().endswith(".npz") else Path(config.data).name
    return re.sub(r"[^\w.-]+", "-", f"{config.algorithm}-{data}-{config.seed}")


@app.command()
def resume(
    folder: Folder,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Go on to this round.", show_default=False)] = None,
    engine: Annotated[str | None, flag("engine", "as before")] = None,
    workers: Annotated[int | None, flag("workers", "as before")] = None,
    tile: Annotated[int | None, flag("tile", "as before")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Go on with a run that was cut short, or take a finished one further; to the same bits."""
    set_up_logging(quiet, verbose)
    values = read_config(folder)
    made_with = values.pop("versions", {})
    if PYTHON in (values.get("data"), values.get("model")):
        raise ValueError(f"{folder} is of a run made in Python, with data or a model of its own; go on there")
    changes = {"rounds": rounds, "engine": engine, "workers": workers, "tile": tile}
    config = check_config(values | {name: value for name, value in changes.items() if value is not None})
    done = (read_summary(folder) or {}).get("rounds", 0)
    if done >= config.rounds:
        further = f"polytier resume {folder} --rounds {done + 100}"
        say(f"{folder} is finished: {done} rounds; to go further: {further}")
        print_result(folder, quiet, as_json)
        return
    changed = [f"{k} {v} (now {versions()[k]})" for k, v in made_with.items() if versions().get(k) != v]
    if changed:
        log.warning("started with %s: the bits may differ from those of an unbroken run", ", ".join(changed))
    training, config = prepare(config)
    with training:
        restore(training, folder, config.rounds)
        follow(training, config, folder, quiet, as_json, resumed=True)


def restore(training: Training, folder: Path, rounds: int) -> None:
    from polytier.method.mapped_memory import FOLDER as STORE
    from polytier.runs.load import latest

    found = latest(folder)
    if found is None:
        raise ValueError(f"{folder} holds no checkpoint; repeat the run: polytier run {folder / 'config.toml'}")
    number, tensors, facts = found
    if number > rounds:
        raise ValueError(f"{folder} has done {number} rounds; ask for at least as many")
    if facts.get("epochs"):
        training.keep_in(folder / STORE)
    training.restore(tensors, facts)
    log.info("going on after round %d of %d", number, rounds)


def follow(training: Training, config: Config, folder: Path, quiet: bool, as_json: bool, resumed: bool = False) -> None:
    """Train with everything a person may want to watch, and say how it ended."""
    from polytier.method.call import Diverged, NodesLost
    from polytier.runs.callbacks import Progress, RunFolder
    from polytier.runs.estimate import check_memory

    check_memory(training)
    if not quiet:
        announce(training, config)
    writer = RunFolder(folder, config.model_dump(exclude={"out"}), resumed)
    again = f"polytier resume {folder}"
    try:
        with Interrupt() as interrupt:
            training.run(config.rounds, [writer, *([] if quiet else [Progress()])], interrupt)
    except ValueError:
        if training.round == 0 and not resumed:  # bad input that only the method could find
            writer.discard()
        raise
    except Diverged as error:
        raise fail(f"{error}. {after_divergence(folder, writer.saved)}", FAULT) from None
    except NodesLost as error:
        raise fail(f"{error}: {again}", FAULT) from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        less = "there is not enough memory: go on with a smaller --tile or fewer --workers"
        raise fail(f"stopped in round {training.round + 1}, {less}: {again} --tile 4 --workers 1", FAULT) from None
    except KeyboardInterrupt:
        raise fail(f"stopped in round {training.round + 1}; go on with: {again}", INTERRUPTED) from None
    except OSError as error:
        log.debug("where this came from:", exc_info=error)
        raise fail(f"stopped by a fault: {error}; when that is mended: {again}", FAULT) from None
    if training.round < config.rounds:
        done = f"interrupted after round {training.round} of {config.rounds}"
        raise fail(f"{done}; go on with: {again}", INTERRUPTED)
    print_result(folder, quiet, as_json)


def after_divergence(folder: Path, saved: int) -> str:
    again = f"Try again with `polytier run {folder / 'config.toml'} --set FIELD=VALUE`"
    last = f"`polytier resume {folder} --rounds {saved}` gives the models of round {saved}, the last checkpoint"
    return again if saved < 1 else f"{again}; {last}"


def announce(training: Training, config: Config) -> None:
    """One line before the start."""
    from polytier.engines.protocol import engine_of
    from polytier.runs.estimate import memory_bytes, seconds_a_round

    topology, name = training.context.topology, type(training.algorithm).__name__
    teams = "".join(f" in {topology.size(t)} teams" for t in range(topology.leaf - 1, 0, -1))
    who = f"{name}: {topology.size(topology.leaf)} devices{teams}"
    memory = f"about {size(memory_bytes(training))} of data and models"
    sizes = Counter(f"{part.objective.dimension:,}" for part in training.context.parts)
    models = " and ".join(f"{count} x {each}" if count > 1 else each for each, count in sizes.items())
    what = f"{models} parameters, {memory}"
    seconds = seconds_a_round(training, engine_of(training.context).workers)
    left = config.rounds - training.round
    took = "" if seconds is None else f", {duration(seconds)} a round, {duration(seconds * left)} in all"
    say(f"{who}; {what}{took}")


def print_result(folder: Path, quiet: bool, as_json: bool) -> None:
    summary = read_summary(folder)
    if as_json:
        print(json.dumps(summary, indent=2))
    elif quiet:
        print(folder)
    elif summary is not None:
        print_summary(wide_console(), read_config(folder), summary, folder)


# -- several runs -------------------------------------------------------------------------------------

app.command()(studies.gain)
app.command(context_settings=studies.REST)(studies.compare)
app.command(context_settings=studies.REST)(studies.tune)
app.command()(studies.reproduce)
app.command(context_settings=studies.REST)(studies.check)
app.command()(studies.bench)


# -- afterwards ---------------------------------------------------------------------------------------

app.command()(pages.report)
app.command()(pages.watch)


@app.command()
def show(
    folders: pages.Folders,
    until: Annotated[
        float | None,
        typer.Option("--until", metavar="ACCURACY", help="Also the bytes until a test accuracy such as 0.9."),
    ] = None,
) -> None:
    """The result of a run from its files alone: accuracy, traffic, groups learned; of several, a table by data."""
    folder = folders[0]
    if len(folders) > 1 or (folder.is_dir() and not (folder / "config.toml").exists()):
        pages.print_tables(folders, until)
        return
    config, summary = read_config(folder), read_summary(folder)
    history = read_history(folder)
    if summary is None:
        print_unfinished(wide_console(), config, history, folder)
        return
    print_summary(wide_console(), config, summary, folder)
    if until is not None:
        print_until(wide_console(), history, until)
    if summary["rounds"] < config["rounds"]:
        say(f"on its way to round {config['rounds']}; go on with: polytier resume {folder}")


@app.command(name="list")
def list_(
    kind: Annotated[str, typer.Argument(metavar="algorithms|data|models|partitions|teams|papers")],
    name: Annotated[str | None, typer.Argument(help="Tell all about this one.")] = None,
) -> None:
    """What there is to choose from; with a name, its fields or arguments."""
    from polytier.cli.listing import print_list

    print_list(wide_console(), kind, name)


Device = Annotated[str | None, typer.Option("--device", metavar="ID", help="A device: its personal model.")]
Team = Annotated[str | None, typer.Option("--team", metavar="ID", help="A team: its model.")]
Everywhere = Annotated[bool, typer.Option("--global", help="The model of the whole population.")]


Of = Annotated[str | None, typer.Option("--of", metavar="NAME", help="Which of several models.")]


def load_model(
    folder: Path, device: str | None, team: str | None, everywhere: bool, of: str | None
) -> tuple[Run, Any, str]:
    """The run, the row of the model that is meant, and whose it is."""
    if (device is not None) + (team is not None) + everywhere != 1:
        raise ValueError("say whose model: one of --device ID, --team ID and --global")
    read_config(folder)  # says so quickly if this is no run folder
    from polytier.runs.run import Run

    run = Run.load(folder)
    if (of is None) != (not run.models) or (of is not None and of not in run.models):
        there = f"this run has {', '.join(run.models)}: say which --of them" if run.models else "this run has one model"
        raise ValueError(f"{there}; got {'no --of' if of is None else f'--of {of}'}")
    run = run if of is None else run.models[of]
    owner = f"device {device}" if device is not None else f"team {team}" if team is not None else "the whole population"
    return run, run.row(device=device, team=team), owner


@app.command()
def predict(
    folder: Folder,
    data: Annotated[
        Path, typer.Option("--data", metavar="FILE.npz", help="x: a row a sample, as in the training data.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.npz", help="Gets y, the class, and scores, the outputs.")],
    device: Device = None,
    team: Team = None,
    everywhere: Everywhere = False,
    of: Of = None,
) -> None:
    """Predict with the model of a device, of a team, or of the whole population."""
    run, row, owner = load_model(folder, device, team, everywhere, of)
    from polytier.runs import export as delivery

    number = delivery.predict(run, row, data, out)
    say(f"{number} predictions of the model of {owner} are in {out}")


@app.command()
def export(
    folder: Folder,
    out: Annotated[
        Path,
        typer.Option("-o", "--out", metavar="FILE", help="model.safetensors: parameters; model.pt2: a program."),
    ],
    device: Device = None,
    team: Team = None,
    everywhere: Everywhere = False,
    of: Of = None,
) -> None:
    """Write one model to a file of its own."""
    run, row, owner = load_model(folder, device, team, everywhere, of)
    from polytier.runs import export as delivery

    delivery.export(run, row, out, owner)
    say(f"the model of {owner} is in {out}")


@data_app.command()
def get(
    name: Annotated[str, typer.Argument(help="A data set; see `polytier list data`.")],
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Where to put it.", show_default=False)] = None,
) -> None:
    """Fetch a public data set, check its digest and put it where `polytier run` finds it."""
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


@data_app.command()
def pack(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder; `run --data FOLDER` uses it.")],
    data: Annotated[str | None, flag("data")] = None,
    data_dir: Annotated[str | None, flag("data_dir")] = None,
    devices: Annotated[int | None, flag("devices", "40")] = None,
    teams: Annotated[str | None, flag("teams", "4")] = None,
    partition: Annotated[str | None, flag("partition", "labels:2")] = None,
    per_class: Annotated[str | None, flag("per_class")] = None,
    team_formation: Annotated[str | None, flag("team_formation")] = None,
    split: Annotated[str | None, flag("split")] = None,
    standardize: Annotated[bool | None, flag("standardize", "no")] = None,
    seed: Annotated[int | None, flag("seed")] = None,
) -> None:
    """Write the devices' data to a folder that runs map instead of reading it: for large populations."""
    from polytier.runs.config import make_federation

    federation, _ = make_federation(resolve(None, given(ctx.params), ()))
    federation.save(folder)
    say(f"{len(federation):,} devices with {len(federation.x):,} samples are in {folder}")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
