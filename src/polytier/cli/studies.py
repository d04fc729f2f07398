"""The commands that make several runs, check settings against theory, or measure speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from polytier._terminal import loading_torch, say, set_up_logging, wide_console
from polytier.cli.options import Trust, a_path, check_code, real_number, takes_settings, trusted_spec, whole_number
from polytier.cli.run import File, Verbose, What
from polytier.report.tables import gain_table
from polytier.runs.spec import RunSpec

SHARED = tuple(name for name in RunSpec.model_fields if name not in ("algorithm", "out", "set"))
Seeds = Annotated[
    int, typer.Option("--seeds", parser=whole_number(1), metavar="<int>", help="Number of seeds, starting at --seed.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only the path of the folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


def output_folder(default: str) -> Any:
    """The option --out of a command that makes several runs."""
    text = "The output folder; an interrupted command continues there."
    return typer.Option("--out", parser=a_path, metavar="<path>", help=text, show_default=f"runs/{default}")


@takes_settings(("models", "set"))
def gain(
    *,
    what: Annotated[
        str, typer.Argument(metavar="FILE.toml | mfa-rr | mfa-rand", help="A method or a file, as for `polytier run`.")
    ],
    single_rounds: Annotated[
        int,
        typer.Option(
            "--single-rounds",
            metavar="T1",
            parser=whole_number(1),
            help="Rounds of each model alone, after which its target is measured.",
        ),
    ],
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds",
            parser=whole_number(1),
            metavar="<int>",
            help="Number of seeds, starting at the seed of the file.",
        ),
    ] = 3,
    split: Annotated[str, typer.Option("--split", help="Samples for the targets: train or test.")] = "test",
    most_rounds: Annotated[
        int | None,
        typer.Option(
            "--most-rounds",
            parser=whole_number(1),
            metavar="<int>",
            help="Stop training together after this many rounds.",
            show_default="10 M T1",
        ),
    ] = None,
    given: dict[str, Any],
    fields: list[str],
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure the gain of training several models together: M T1 / TM, with a 95 % interval over seeds."""
    set_up_logging(quiet=as_json, verbose=False)
    spec = trusted_spec(what, given, fields, trust)
    loading_torch(as_json)
    from polytier.runs.loop import Loop
    from polytier.studies.gain import measure_gain

    found = measure_gain(
        lambda seed: Loop.of(spec.replace(seed=seed)),
        single_rounds,
        range(spec.seed, spec.seed + seeds),
        split=split,
        most_rounds=most_rounds,
        progress=(lambda text: None) if as_json else say,
    )
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        wide_console().print(gain_table(found.as_dict()))


@takes_settings(SHARED)
def compare(
    *,
    methods: Annotated[str, typer.Argument(metavar="METHOD,METHOD,...", help="The methods to compare.")],
    what: Annotated[str | None, typer.Argument(metavar="FILE.toml", help="Settings shared by all methods.")] = None,
    given: dict[str, Any],
    seeds: Seeds = 3,
    out: Annotated[Path | None, output_folder("compare-DATA-N")] = None,
    until: Annotated[
        float,
        typer.Option(
            "--until",
            metavar="LEVEL",
            parser=real_number(0, 1),
            help="Count the bytes sent until the leading metric reaches this level.",
        ),
    ] = 0.9,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            parser=whole_number(1),
            metavar="<int>",
            help="Number of runs at the same time, one process per run.",
        ),
    ] = 1,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            parser=whole_number(1),
            metavar="<int>",
            help="Gradient steps per device and round, the same for all methods.",
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--tune",
            parser=whole_number(1),
            metavar="N",
            help="First search for the fields of each method with N trials, as `polytier tune` does.",
        ),
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[METHOD.]FIELD=VALUE",
            help="A field of one method, or without METHOD of all methods that have it.",
        ),
    ] = None,
    trust: Trust = False,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print compare.json and nothing else.")] = False,
    verbose: Verbose = False,
) -> None:
    """Run several methods on the same data, and compare them over seeds.

    On your own data, fields that are not set are chosen once per method, by a short search on training data.
    """
    set_up_logging(quiet or as_json, verbose)
    loading_torch(quiet or as_json)
    from polytier.studies.compare import compare_methods, protocol

    shared, names = protocol(what, given), methods.split(",")
    if what is not None:
        check_code(shared.model_dump(), Path(what), trust, [*names, given.get("model", ""), given.get("engine", "")])
    compare_methods(
        shared,
        names,
        fields=fields or (),
        steps=steps,
        trials=trials,
        seeds=seeds,
        out=out,
        until=until,
        jobs=jobs,
        quiet=quiet,
        as_json=as_json,
    )


@takes_settings((*SHARED, "set"))
def tune(
    *,
    what: What = None,
    file: File = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="FIELD[=SPEC]",
            show_default="all step sizes and pulls, but no steps that follow from pulls",
            help="A field to search over: LOW:HIGH, or A,B,C; alone, a tenth to ten times of what it is "
            "(a whole number: a quarter to four times), or all its choices.",
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option("--trials", parser=whole_number(1), metavar="<int>", help="Number of settings to try.")
    ] = 20,
    seeds: Seeds = 1,
    out: Annotated[Path | None, output_folder("tune-ALGORITHM-DATA-N")] = None,
    given: dict[str, Any],
    fields: list[str],
    trust: Trust = False,
    quiet: Quiet = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Search for the fields of a method that are best on validation data.

    Needs Optuna (the extra "tune") and validation samples (--split 3:1:1); test data are never used. The first trial is
    the current setting. Trials that are clearly worse than others are stopped early.
    """
    set_up_logging(quiet or as_json, verbose)
    spec = trusted_spec(what, given, fields, trust, file)
    loading_torch(quiet or as_json)
    from polytier.studies.tune import tune_method

    tune_method(spec, over or (), trials=trials, seeds=seeds, out=out, quiet=quiet, as_json=as_json)


@takes_settings(("data_dir",))
def reproduce(
    *,
    what: Annotated[
        str, typer.Argument(metavar="PAPER[/ITEM,...]", help="permfl, pfedmt, sfedhp, mfa or cobo; see `list papers`.")
    ],
    scale: Annotated[
        str, typer.Option("--scale", help="quick: the same shape in minutes; full: as in the paper.")
    ] = "quick",
    given: dict[str, Any],
    out: Annotated[Path | None, output_folder("reproduce-PAPER-SCALE")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            parser=whole_number(1),
            metavar="<int>",
            help="Number of runs at the same time, one process per run.",
            show_default="one per core",
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            metavar="PATTERN[,PATTERN]",
            help="Only runs with such names, METHOD-DATA-MODEL; * stands for any text: '*-mnist-mclr'.",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds",
            parser=whole_number(1),
            metavar="<int>",
            help="Number of seeds of every run.",
            show_default="as in the plan: quick mostly 1, full as in the paper",
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            help="Folder for one JSON file per finished run, with its origin and values.",
            show_default="OUT/results",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="The pretrained model of cobo/language --scale full: a folder of Transformers or a .gguf file.",
            show_default="gpt2 in the current folder",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the runs and their estimated time.")] = False,
    quiet: Quiet = False,
) -> None:
    """Reproduce a paper's tables and figures: our values beside the paper's, a verdict per row, plots, a page."""
    set_up_logging(quiet, verbose=False)
    loading_torch(quiet)
    from polytier.studies.reproduce import Plan, reproduce_paper

    plan = Plan(what, scale, only, seeds, model)
    where = {"data_dir": given.get("data_dir"), "out": out, "results": results}
    reproduce_paper(plan, **where, jobs=jobs, dry_run=dry_run, quiet=quiet)


@takes_settings((*SHARED, "set"))
def check(
    *,
    what: What = None,
    file: File = None,
    known: Annotated[
        list[str] | None,
        typer.Option(
            "--given", metavar="LETTER=VALUE", help="A constant of the theorems that cannot be computed from the data."
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run the method in float64 and compare the result.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture", metavar="FILE", parser=a_path, help="With --measure: draw the measured and predicted values."
        ),
    ] = None,
    given: dict[str, Any],
    fields: list[str],
    trust: Trust = False,
    quiet: Quiet = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check settings against the theorems of the method's paper, for these data.

    Prints the allowed steps and pulls, the conditions that do not hold, the predictions of the theorems, and whether
    PerMFL or pFedMT will or may diverge.
    """
    set_up_logging(as_json or quiet, verbose)
    spec = trusted_spec(what, given, fields, trust, file)
    loading_torch(quiet or as_json)
    from polytier.files.write import json_ready
    from polytier.report.check_table import print_check
    from polytier.report.figures import save
    from polytier.runs.loop import Loop
    from polytier.theory.check import check_training, read_given
    from polytier.theory.measure import measure as run_it
    from polytier.theory.measure import picture as drawing

    letters = read_given(known or ())
    if picture is not None and not measure:
        raise ValueError("--picture draws measured values; add --measure")
    with Loop.of(spec.replace(dtype="float64") if measure else spec) as loop:
        reports = check_training(loop, spec.rounds, letters)
        if measure:
            run_it(loop, spec.rounds, reports)
    if picture is not None:
        save(drawing(reports), picture)
    found = [json_ready(report.as_dict()) for report in reports]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for each in found:
        print_check(wide_console(), each)


def bench(
    works: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORK",
            help="Some of common, synthetic, dnn, wide, permfl, cnn, lora, round, teams, cobo, cobo80, mfa.",
            show_default="all",
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", parser=a_path, help="Also write the results to this file.")
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat", parser=whole_number(1), metavar="<int>", help="Number of measurements of each contender."
        ),
    ] = 5,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            parser=whole_number(1),
            metavar="<int>",
            help="Number of worker processes of the engine.",
            show_default="one per core",
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", parser=real_number(0, 3600), metavar="<float>", help="About how long one measurement takes."
        ),
    ] = 1.0,
) -> None:
    """Measure device steps per second of the engine, of a hand-written loop and of the bare kernels."""
    set_up_logging(quiet=True, verbose=False)
    loading_torch(quiet=False)
    from polytier.studies.bench import bench_works

    bench_works(works or (), file, repeat, workers, seconds)
