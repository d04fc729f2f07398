"""A setting is declared once, and everything else follows from the declaration."""

import json
import runpy
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from commands import call
from polytier.cli.listing import settings_rows
from polytier.cli.options import takes_settings
from polytier.cli.run import MayChange
from polytier.runs.spec import SCOPES, RunSpec, check_spec, json_schema, per_model, setting, settings

DOCS = Path(__file__).parents[2] / "docs"


class More(RunSpec):
    colour: str = setting("red", "the colour of the wire", "compute", per_model=True)


def test_a_new_flag_is_one_declaration():
    seen = {}

    def command(*, given: dict, fields: list) -> None:
        seen.update(given)

    app = typer.Typer()
    app.command()(takes_settings(spec=More)(command))
    shown = CliRunner().invoke(app, ["--help"], terminal_width=200).stdout
    assert "--colour" in shown
    assert "the colour of the wire (default red)" in " ".join(shown.replace("│", " ").split())
    assert CliRunner().invoke(app, ["--colour", "blue"]).exit_code == 0
    assert seen == {"colour": "blue"}
    schema = json_schema(More)
    assert schema["properties"]["colour"] == {
        "default": "red",
        "description": "the colour of the wire",
        "scope": "compute",
        "type": "string",
    }
    table = next(o for o in schema["properties"]["models"]["anyOf"] if o.get("type") == "object")
    assert "colour" in table["additionalProperties"]["properties"]
    assert ("colour", "--colour", "red", "compute", "the colour of the wire") in settings_rows(["colour"], More)
    page = runpy.run_path(str(DOCS / "make_settings.py"))["page"]
    assert "| `colour`* | `--colour` | red | the colour of the wire |" in page(More)


def test_the_page_of_settings_is_up_to_date():
    page = runpy.run_path(str(DOCS / "make_settings.py"))["page"]
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == page(), "run `make docs`"


def test_every_setting_is_a_flag_of_run_and_in_the_schema():
    shown = call("run", "--help").stdout
    schema = json.loads(call("schema").stdout)["properties"]
    for name, each in settings().items():
        assert name == "algorithm" or each.flag in shown
        assert schema[name]["scope"] in SCOPES
    assert {"rounds", "workers", "engine", "tile"} <= set(MayChange)
    assert not {"seed", "data", "dtype", "codec"} & set(MayChange)


def test_settings_of_one_of_several_models():
    assert {"data", "model", "l2", "batch_size", "set"} <= set(per_model())
    assert not {"seed", "rounds", "devices", "teams", "workers"} & set(per_model())


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"round": 3}, "no setting 'round'; did you mean 'rounds'"),
        ({"rounds": 0}, "rounds = 0: it should be greater than or equal to 1"),
        ({"absent": "gone"}, "absent = 'gone': it should be 'skip' or 'stale'"),
        ({"dtype": "float8"}, "dtype = 'float8': it should be 'float32' or 'float64'"),
        ({"seed": "one"}, "seed = 'one': it should be a valid integer"),
    ],
)
def test_bad_values_get_advice(values, advice):
    with pytest.raises(ValueError, match=advice):
        check_spec(values)
