"""Command-line options for the settings of a run, made from their declarations in `RunSpec`."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from polytier._text import finite, whole
from polytier.files.read import check_path
from polytier.runs.spec import MOST, SCOPES, RunSpec, Setting, method_and_file, read_spec, settings
from polytier.runs.trust import check_trusted, with_flag

Trust = Annotated[
    bool, typer.Option("--trust", help="Import code of the current folder that a file names (own models and methods).")
]
FIELDS = "set"  # the only setting that is given in several options: --set FIELD=VALUE


def whole_number(least: int, most: int = MOST) -> Any:
    """How an option reads a whole number from `least` to `most`."""
    return number_reader(whole, "a whole number", max(least, 4), least, most)


def real_number(least: float = -math.inf, most: float = math.inf) -> Any:
    """How an option reads a number from `least` to `most`."""
    return number_reader(finite, "a number", 0.9, least, most)


def number_reader(read: Callable[[str], float], what: str, example: float, least: float, most: float) -> Any:
    """A function from the text of an option, or a default that is a number already, to a number in a range."""

    def parser(text: Any) -> float:
        try:
            number = read(text) if isinstance(text, str) else text
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {what}; give one such as {example}") from None
        if not least <= number <= most:
            raise typer.BadParameter(f"{number} is not in the range {least:,} to {most:,}")
        return number

    return parser


def a_path(text: Any) -> Path:
    """How an option reads the path of a file or folder."""
    try:
        check_path(text, "the path")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return Path(text)


def read_whole(text: Any) -> int:
    """How an option reads a whole number whose range `RunSpec` declares."""
    return whole_number(-(1 << 64), 1 << 64)(text)


def option_type(setting: Setting) -> Any:
    """The type of the option. Settings with several types are passed as text, which `RunSpec` converts."""
    kinds = setting.kinds - {dict}
    if kinds == {bool}:
        return bool
    if list in kinds or setting.name == FIELDS:
        return list[str]
    return next(iter(kinds)) if kinds in ({int}, {float}) else str


def option(setting: Setting, default: str = "") -> Any:
    """The option of a setting; `default` replaces the setting's own default in the help text."""
    default = default or setting.default_text
    text = setting.help + (f" (default {default})" if default else "")
    names = f"{setting.flag}/--no-{setting.flag[2:]}" if setting.kinds == {bool} else setting.flag
    metavar = parser = None
    if setting.name == FIELDS:
        metavar, text = "FIELD=VALUE", "a field of the method; FIELD.TIER=VALUE by tier; a,b,c one value per node"
    elif option_type(setting) is int:
        metavar, parser = "<int>", read_whole
    elif option_type(setting) is float:
        metavar, parser = "<float>", real_number()
    panel = SCOPES[setting.scope]
    return typer.Option(names, help=text, metavar=metavar, parser=parser, show_default=False, rich_help_panel=panel)


def takes_settings(
    names: Collection[str] | None = None, defaults: Mapping[str, str] | None = None, spec: type[BaseModel] = RunSpec
) -> Callable[[Callable], Callable]:
    """Give a command an option for every setting, or for those of these names.

    The command is called with `given`, the settings that were given, and, if --set is one of them, with `fields`, its
    texts.

    Args:
        names: The settings; by default all but the method, which is an argument.
        defaults: Defaults to show in the help text instead of those of the settings.
        spec: The class that declares the settings.
    """
    known = {k: v for k, v in settings(spec).items() if (k != "algorithm" if names is None else k in names)}

    def wrap(command: Callable) -> Callable:
        own = inspect.signature(command, eval_str=True).parameters
        collected = {"given", "fields"} if FIELDS in known else {"given"}
        added = {
            name: inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[option_type(each) | None, option(each, (defaults or {}).get(name, ""))],
            )
            for name, each in known.items()
        }

        @functools.wraps(command)
        def called(*args: Any, **kwargs: Any) -> Any:
            given = {name: kwargs.pop(name) for name in known}
            if FIELDS in given:
                kwargs["fields"] = given.pop(FIELDS) or []
            return command(*args, given={k: v for k, v in given.items() if v is not None}, **kwargs)

        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for n, p in own.items() if n not in collected]
        called.__signature__ = inspect.Signature([*kept, *added.values()])  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in (*kept, *added.values())}
        return called

    return wrap


# -- code that a file names ---------------------------------------------------------------------------


def trusted_spec(
    what: str | None, given: Mapping[str, Any], fields: Sequence[str], trust: bool, file: str | None = None
) -> RunSpec:
    """`read_spec`; with --trust, or unless FILE.toml names code of the current folder."""
    spec = read_spec(what, given, fields, file)
    method, file = method_and_file(what, file)
    if file is not None:
        typed = [method or "", given.get("model", ""), given.get("engine", "")]
        check_code(spec.model_dump(), Path(file), trust, typed)
    return spec


def check_code(values: Mapping[str, Any], file: Path, trust: bool, typed: Sequence[str] = ()) -> None:
    """Raise an error if settings from a file name code of the current folder, unless --trust is given."""
    if not trust:
        check_trusted(values, file, with_flag(), typed)
