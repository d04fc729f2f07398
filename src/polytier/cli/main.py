"""The command `polytier` and its subcommands."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from polytier import __version__
from polytier._errors import outcome
from polytier._terminal import log, say, wide_console
from polytier.cli import data, network, predict_export, report, run, studies
from polytier.runs.spec import json_schema


class Group(TyperGroup):
    """Prints errors as one line with advice, and sets the exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # nobody reads the output any more; typer ends quietly
            raise
        except (Exception, KeyboardInterrupt) as error:
            code, text = outcome(error)
            if code is None:
                raise
            log.debug("where this came from:", exc_info=error)
            say(f"polytier: {text}", logging.ERROR, "end")
            raise typer.Exit(code) from None


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # subcommands inherit it
)


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


app.command()(run.run)
app.command()(run.resume)
app.command()(studies.gain)
app.command()(studies.compare)
app.command()(studies.tune)
app.command()(studies.reproduce)
app.command()(studies.check)
app.command()(studies.bench)
app.command()(report.show)
app.command()(report.report)
app.command()(report.watch)
app.command()(predict_export.predict)
app.command()(predict_export.export)
app.command()(network.serve)
app.command()(network.join)
app.command()(network.replay)
app.add_typer(network.federation, name="federation")
data_app = typer.Typer(no_args_is_help=True, help="Data sets.")
data_app.command()(data.get)
data_app.command()(data.pack)
data_app.command()(data.verify)
app.add_typer(data_app, name="data")


@app.command(name="list")
def list_(
    kind: Annotated[str, typer.Argument(metavar="algorithms|data|models|partitions|teams|papers|settings")],
    name: Annotated[str | None, typer.Argument(help="Show details of this name.")] = None,
) -> None:
    """List what is available; with a name, its fields or arguments."""
    from polytier.cli.listing import print_list

    print_list(wide_console(), kind, name)


@app.command()
def schema() -> None:
    """Print the JSON schema of the TOML files that `polytier run` takes, for validation and completion in editors."""
    print(json.dumps(json_schema(), indent=2))
