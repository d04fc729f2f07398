"""The commands that make several runs, and those that hold them against theory and measure their speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from polytier._terminal import say, set_up_logging, wide_console
from polytier.cli.options import flag, given
from polytier.report.tables import gain_table
from polytier.runs.config import prepare, resolve

REST = {"allow_extra_args": True, "ignore_unknown_options": True}  # of a command that also takes the flags of `run`
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="How many seeds, from --seed on.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no table: only the folder's name.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


def flags_of_run(ctx: typer.Context, args: list[str]) -> dict[str, Any]:
    """What `polytier run` makes of these."""
    assert ctx.parent is not None
    assert isinstance(ctx.parent.command, TyperGroup)
    return ctx.parent.command.commands["run"].make_context("run", args, parent=ctx.parent).params


def gain(
    what: Annotated[str, typer.Argument(metavar="FILE.toml | mfa-rr | mfa-rand", help="What `polytier run` takes.")],
    single_rounds: Annotated[
        int, typer.Option("--single-rounds", metavar="T1", help="Rounds of each model alone, which set its target.")
    ],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds, from the file's on.")] = 3,
    split: Annotated[str, typer.Option("--split", help="train or test: where the targets are measured.")] = "test",
    most_rounds: Annotated[
        int | None, typer.Option("--most-rounds", help="When to give up.", show_default="10 M T1")
    ] = None,
    models: Annotated[int | None, flag("models", "2")] = None,
    fields: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="A field.")] = None,
    as_json: Json = False,
) -> None:
    """What is gained by training several models together: M T1 / TM, with a 95 % interval over seeds."""
    set_up_logging(quiet=as_json, verbose=False)
    config = resolve(what, {} if models is None else {"models": models}, fields or ())
    from polytier.studies.gain import measure_gain

    numbers = range(config.seed, config.seed + seeds)
    found = measure_gain(
        lambda seed: prepare(config.model_copy(update={"seed": seed}))[0], single_rounds, numbers, split, most_rounds,
        progress=(lambda text: None) if as_json else say,
    )  # fmt: skip
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        wide_console().print(gain_table(found.as_dict()))


def compare(
    ctx: typer.Context,
    methods: Annotated[str, typer.Argument(metavar="METHOD,METHOD,... [FILE.toml]", help="What is compared.")],
    seeds: Seeds = 3,
    out: Annotated[
        Path | None, typer.Option("--out", help="Its folder; goes on there.", show_default="runs/compare-DATA-N")
    ] = None,
    until: Annotated[
        float, typer.Option("--until", metavar="ACCURACY", min=0, max=1, help="Count the bytes until it is reached.")
    ] = 0.9,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at a time, a process each.")] = 1,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Gradient steps of a device a round, the same for all methods.")
    ] = None,
    fields: Annotated[
        list[str] | None, typer.Option("--set", metavar="METHOD.FIELD=VALUE", help="A field of one of the methods.")
    ] = None,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print compare.json and nothing else.")] = False,
) -> None:
    """Run several methods on the same data, and compare them over seeds. All other flags are those of `run`."""
    if methods.startswith("-"):
        raise ValueError(f"the methods come first: polytier compare permfl,fedavg {methods} ...")
    asked = flags_of_run(ctx, ctx.args)
    set_up_logging(quiet or as_json, asked["verbose"])
    from polytier.studies.compare import compare_methods, protocol

    shared = protocol(asked["what"], given(asked))
    compare_methods(shared, methods.split(","), fields or (), steps, seeds, out, until, jobs, quiet, as_json)


def tune(
    ctx: typer.Context,
    what: Annotated[
        str | None, typer.Argument(metavar="ALGORITHM | FILE.toml", help="A method (default permfl) or a file.")
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over", metavar="FIELD[=SPEC]", show_default="all step sizes and pulls: ..._lr, ..._pull",
            help="A field to search over: LOW:HIGH, or A,B,C; alone, a tenth to ten times of what it is "
            "(a whole number: a quarter to four times), or all its choices.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="How many settings are tried.")] = 20,
    seeds: Seeds = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Its folder; goes on there.", show_default="runs/tune-ALGORITHM-DATA-N"),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Search for the fields of a method that are best on validation data. All other flags are those of `run`.

    Needs Optuna (the extra "tune") and validation samples (--split 3:1:1); test data are never looked at. The first
    trial is the present setting; trials that lag behind are cut short.
    """
    asked = flags_of_run(ctx, [*([] if what is None else [what]), *ctx.args])
    set_up_logging(quiet or as_json, asked["verbose"])
    config = resolve(asked["what"], given(asked), asked["fields"] or ())
    from polytier.studies.tune import tune_method

    tune_method(config, over or (), trials, seeds, out, quiet, as_json)


def reproduce(
    what: Annotated[
        str, typer.Argument(metavar="PAPER[/ITEM,...]", help="permfl, pfedmt, sfedhp, mfa or cobo; see `list papers`.")
    ],
    scale: Annotated[
        str, typer.Option("--scale", help="quick: the same shape in minutes; full: as in the paper.")
    ] = "quick",
    data_dir: Annotated[Path | None, flag("data_dir")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Its folder; goes on there.", show_default="runs/reproduce-PAPER-SCALE"),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs at a time, a process each.", show_default="one a core")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the runs and what they would take.")] = False,
    quiet: Quiet = False,
) -> None:
    """A paper's tables and figures beside ours, with a verdict a row, plots and a page."""
    set_up_logging(quiet, verbose=False)
    from polytier.studies.reproduce import reproduce_paper

    reproduce_paper(what, scale, data_dir, out, jobs, dry_run, quiet)


def check(
    ctx: typer.Context,
    what: Annotated[
        str | None, typer.Argument(metavar="ALGORITHM | FILE.toml", help="A method (default permfl) or a file.")
    ] = None,
    known: Annotated[
        list[str] | None,
        typer.Option("--given", metavar="LETTER=VALUE", help="A constant of the theorems that data cannot give."),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also run it, in float64, and compare.")] = False,
    as_json: Json = False,
) -> None:
    """Hold settings against the theorems of the method's paper, on these data. All other flags are those of `run`.

    Tells which steps and pulls are allowed, which conditions are broken, what is promised, and whether PerMFL or pFedMT
    will or may diverge.
    """
    asked = flags_of_run(ctx, [*([] if what is None else [what]), *ctx.args])
    set_up_logging(as_json or asked["quiet"], asked["verbose"])
    config = resolve(asked["what"], given(asked), asked["fields"] or ())
    from polytier.report.check_table import print_check
    from polytier.runs.folder import finite
    from polytier.theory.check import check_training, read_given
    from polytier.theory.measure import measure as run_it

    letters = read_given(known or ())
    with prepare(config.model_copy(update={"dtype": "float64"}) if measure else config)[0] as training:
        reports = check_training(training, config.rounds, letters)
        if measure:
            run_it(training, config.rounds, reports)
    found = [finite(report.as_dict()) for report in reports]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for each in found:
        print_check(wide_console(), each)


def bench(
    works: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORK", help="Of common, synthetic, dnn, wide, permfl, cnn.", show_default="all"),
    ] = None,
    file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here too.")] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="How often each is measured, in turns.")] = 5,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes of the engine.", show_default="one a core")
    ] = None,
) -> None:
    """Measure the engine beside a hand-written loop and the bare kernels: device steps a second."""
    set_up_logging(quiet=True, verbose=False)
    from polytier.studies.bench import bench_works

    bench_works(works or (), file, repeat, workers)
