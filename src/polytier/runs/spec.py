"""The settings of a run, each declared once. This module does not import torch.

The declaration of a setting determines its flag on the command line, its key in a TOML file, the JSON schema for
editors (`polytier schema`), its row in docs/settings.md, how reports group runs, and what a resumed run may change.
"""

from __future__ import annotations

import logging
import os
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from polytier._errors import short, unknown
from polytier._text import finite, whole
from polytier.files.read import NoFile, check_file

log = logging.getLogger("polytier")
MOST, MOST_WORKERS = (1 << 31) - 1, 4096  # of rounds, devices, ...; of processes
PYTHON = "python"  # replaces a name if the part was given as a Python object
SCOPES = {  # the scope of a setting, and the title of its group of flags
    "data": "Data: what each device holds",
    "tree": "Tree: teams and participation",
    "model": "Model",
    "method": "Method",
    "training": "Training",
    "compute": "Computing: results are the same except for rounding",
}


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting.

    Args:
        name: The key in a TOML file; the flag is `--name`, with dashes.
        type: The type of its values.
        default: The default value.
        help: One line of help.
        scope: One of `SCOPES`.
        shown: The default in words, if the value alone is not clear.
        per_model: Whether each of several models (`[models.NAME]`) may have its own value.
    """

    name: str
    type: Any
    default: Any
    help: str
    scope: str
    shown: str = ""
    per_model: bool = False

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def kinds(self) -> set[Any]:
        """The types that a value may have, without None."""
        union = typing.get_origin(self.type) in (typing.Union, types.UnionType)
        parts = typing.get_args(self.type) if union else (self.type,)
        return {typing.get_origin(part) or part for part in parts} - {type(None)}

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, if they can be listed."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    @property
    def default_text(self) -> str:
        """The default as help texts show it; empty if there is none."""
        if self.shown:
            return self.shown
        return "" if self.default in (None, {}) else str(self.default)


def setting(default: Any, help: str, scope: str, *, shown: str = "", per_model: bool = False, **limits: Any) -> Any:
    """Declare a setting of `RunSpec`; `limits` are passed to `pydantic.Field` (ge, lt, ...)."""
    about = {"scope": scope, "shown": shown, "per_model": per_model}
    return Field(default, description=help, json_schema_extra=about, **limits)


class RunSpec(BaseModel):
    """All settings of a run, as `polytier run` and TOML files take them.

    A value of None means that the setting is not given. `polytier.assemble` then chooses a value and records it in the
    settings of the run. docs/settings.md lists all settings.

    Every setting is an argument.

    Raises:
        pydantic.ValidationError: A setting is unknown or a value is not allowed. It is a `ValueError`.

    Examples:
        >>> spec = RunSpec(algorithm="fedavg", rounds=10)
        >>> spec.replace(seed=1).seed
        1
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    algorithm: str = setting("permfl", "the method; see `polytier list algorithms`", "method", per_model=True)
    data: str = setting(
        "digits",
        "a data set by name, your own FILE.npz, text:FOLDER, or a folder (`data pack`)",
        "data",
        per_model=True,
    )
    data_dir: str | None = setting(
        None, "where the files of the data set are: DIR, DIR/NAME and DIR/raw are searched", "data", per_model=True
    )
    device_column: str | None = setting(
        None, "the array of your own FILE.npz that names devices", "data", shown="device", per_model=True
    )
    team_column: str | None = setting(
        None, "the array of your own FILE.npz that names teams", "data", shown="team, if there is one", per_model=True
    )
    model: str = setting(
        "mclr",
        "a model by name, or your own package.module:factory",
        "model",
        shown="mclr; for targets that are numbers, linear",
        per_model=True,
    )
    train: str = setting(
        "all",
        "which parameters train: all, head, layers=PATTERN, lora:rank=4,alpha=32,targets=PATTERN; others are not sent",
        "model",
        per_model=True,
    )
    local_layers: str | None = setting(
        None,
        "parameters that stay at the devices, such as *bn*; several patterns are joined by +",
        "model",
        per_model=True,
    )
    devices: int | None = setting(None, "number of devices", "data", shown="40", ge=1, le=MOST)
    teams: str | None = setting(None, "number of teams; 2x4 is two tiers of teams, 0 none", "tree", shown="4")
    partition: str | None = setting(
        None, "who holds which samples; see `polytier list partitions`", "data", shown="labels:2", per_model=True
    )
    per_class: str | None = setting(
        None, "TRAIN:TEST samples of each class that a device holds", "data", per_model=True
    )
    team_formation: str = setting("random", "which devices form a team; see `polytier list teams`", "tree")
    split: str = setting("3:0:1", "shares of training, validation and test samples per device", "data", per_model=True)
    standardize: bool = setting(
        False, "scale inputs to mean 0 and standard deviation 1", "data", shown="no", per_model=True
    )
    team_participation: float | str = setting(
        1.0, "teams that take part: a fraction, count:N, table:FILE, schedule:FILE or lines:ID,JOIN,LEAVE;..", "tree"
    )
    device_participation: float | str = setting(
        1.0, "devices that take part: a fraction, count:N, table:FILE, schedule:FILE or lines:ID,JOIN,LEAVE;..", "tree"
    )
    absent: Literal["skip", "stale"] = setting(
        "skip", "nodes that do not take part: skip them, or use their last (stale) answer", "tree"
    )
    rounds: int = setting(100, "rounds of the server", "training", ge=1, le=MOST)
    batch_size: int | str = setting(32, "samples per mini-batch, or grow:A/(B+t)", "training", per_model=True)
    shuffle: bool = setting(
        True, "make new mini-batches of shuffled samples in every epoch; otherwise they stay the same", "training"
    )
    seed: int = setting(0, "every random draw follows from it", "training", ge=0, lt=1 << 63)
    eval_every: int = setting(1, "rounds from one evaluation to the next", "training", ge=1, le=MOST)
    codec: str | None = setting(
        None,
        "how models are encoded for sending: float32, float16, sparse, int8, top:FRACTION, ...",
        "training",
        shown="the dtype",
    )
    upload: str | None = setting(
        None,
        "what devices do to the change of a model before they send it: clip:C, noise:S or clip:C,noise:S",
        "training",
    )
    metric: list[str] | None = setting(
        None,
        "what models are judged by, several allowed; the first one leads: accuracy, macro_f1, auc, mae, ...",
        "training",
        shown="accuracy for classes, else the loss",
    )
    l2: float = setting(
        0.0,
        "adds l2/2 |theta|^2 to the objective of every device",
        "training",
        per_model=True,
        ge=0,
        allow_inf_nan=False,
    )
    optimizer: str = setting(
        "sgd",
        "how devices step: sgd, momentum:0.9 or adamw; with :keep its state lasts from call to call",
        "training",
        per_model=True,
    )
    dtype: Literal["float32", "float64"] = setting("float32", "float32 or float64", "model")
    set: dict[str, Any] = setting({}, "fields of the method", "method", per_model=True)
    models: int | dict[str, dict[str, Any]] | None = setting(
        None,
        "several models on one pool of devices: how many alike, or a table [models.NAME] for each",
        "method",
        shown="2, for mfa-rr and mfa-rand",
    )
    engine: str = setting(
        "stacked", "what runs the nodes: stacked, ray, or ray:auto and ray:HOST:PORT for a cluster", "compute"
    )
    workers: int | None = setting(
        None,
        "worker processes; changes no bit of the result",
        "compute",
        shown="1, or 1 per core in a long run",
        ge=1,
        le=MOST_WORKERS,
    )
    tile: int | None = setting(None, "devices computed at once; changes no bit of the result", "compute", ge=1, le=MOST)
    on: str = setting("cpu", "cpu, cuda or mps", "compute")
    batching: str | None = setting(
        None,
        "how stacks of models are computed: stacked, single or eager",
        "compute",
        shown="found by a check at the start",
        per_model=True,
    )
    micro_batch: int | None = setting(
        None,
        "samples of a device whose gradients are computed at once, then added up; takes less memory with large models",
        "compute",
        shown="the whole mini-batch",
        per_model=True,
        ge=1,
        le=MOST,
    )
    cache_features: bool = setting(
        False,
        "compute the outputs of frozen layers once and keep them in place of samples (with --train head, ...)",
        "compute",
        shown="no",
        per_model=True,
    )
    out: str | None = setting(None, "the run folder", "compute", shown="runs/ALGORITHM-DATA-SEED-N")

    @field_validator("teams", mode="before")
    @classmethod
    def _teams(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("metric", mode="before")
    @classmethod
    def _metric(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("batch_size", mode="before")
    @classmethod
    def _batch_size(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value

    @field_validator("*", mode="after")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        texts = value if isinstance(value, list) else [value]
        if not texts or any(isinstance(text, str) and (not text.strip() or "\0" in text) for text in texts):
            raise ValueError("is an empty text; give a value, or leave the setting out")
        return value

    @field_validator("team_participation", "device_participation", mode="after")
    @classmethod
    def _participation(cls, value: float | str) -> float | str:
        try:
            return finite(value) if isinstance(value, str) else float(value)
        except ValueError:
            return value

    def replace(self, **changes: Any) -> RunSpec:
        """A copy with some settings changed.

        Args:
            **changes: The new values by name. They are not validated.

        Returns:
            The copy.
        """
        return self.model_copy(update=changes)

    def values(self) -> dict[str, Any]:
        """The settings for config.toml: those that have a value, without the path of the run folder.

        Settings about the data are left out if the data were given as Python objects.
        """
        unused = {*of_scope("data"), "teams", "team_formation"} - {"data"} if self.data == PYTHON else set()
        return self.model_dump(exclude={"out", *unused}, exclude_none=True)


def settings(kind: type[BaseModel] = RunSpec) -> dict[str, Setting]:
    """All declared settings by name."""
    found = {}
    for name, field in kind.model_fields.items():
        about: Any = field.json_schema_extra
        found[name] = Setting(name, field.annotation, field.default, field.description or "", **about)
    return found


def identity(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a resumed run must not change: all but the rounds, how it is computed, and where the data are.

    Args:
        values: The settings by name, as in config.toml.
    """
    free = {*of_scope("compute"), "rounds", "data_dir", "versions"}  # data are compared by content, not by place
    return {name: plain(value) for name, value in values.items() if name not in free}


def of_scope(*scopes: str) -> list[str]:
    """The names of the settings of these scopes."""
    return [each.name for each in settings().values() if each.scope in scopes]


def per_model() -> list[str]:
    """The names of the settings that each of several models may set for itself."""
    return [each.name for each in settings().values() if each.per_model]


def json_schema(kind: type[BaseModel] = RunSpec) -> dict[str, Any]:
    """The JSON schema of a TOML file, for editors."""
    schema = kind.model_json_schema()
    own = {name: about for name, about in schema["properties"].items() if about.get("per_model")}
    table = {"type": "object", "properties": own, "additionalProperties": False}
    for option in schema["properties"].get("models", {}).get("anyOf", ()):
        if option.get("type") == "object":
            option["additionalProperties"] = table
    for about in schema["properties"].values():
        for key in ("per_model", "shown", "title"):
            about.pop(key, None)
    schema["description"] = "The settings of a run of Polytier."
    schema["properties"]["versions"] = {"type": "object", "description": "written by a run; not a setting"}
    return schema


# -- reading ------------------------------------------------------------------------------------------


def check_spec(values: Mapping[str, Any]) -> RunSpec:
    """Validate the values and return them as a specification.

    Raises:
        ValueError: A value is not allowed. The message says what is allowed.
    """
    try:
        return RunSpec(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            raise unknown("setting", name, list(RunSpec.model_fields)) from None
        wanted = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        raise ValueError(f"{name} = {short(first['input'])}: it {wanted[0].lower()}{wanted[1:]}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a file, without the versions that a run folder records."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; to repeat a run give {path / 'config.toml'}")
    try:
        check_file(path)
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except NoFile:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as a TOML file: {short_line(error)}") from None
    values.pop("versions", None)
    if not values:
        raise ValueError(f"{path} holds no settings; write for example: rounds = 50")
    check_named(values, path, "repeat the run in Python")
    return values


def short_line(error: Exception) -> str:
    """The beginning of an error's first line."""
    return str(error).partition("\n")[0][:200]


def spec_in(folder: Path, values: Mapping[str, Any]) -> RunSpec:
    """The specification of a run folder; `values` are from its config.toml, which an error names."""
    with naming(folder / "config.toml"):
        return check_spec(values)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors about values name the file that has them."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_named(values: Mapping[str, Any], where: Path, advice: str) -> None:
    """Raise an error if a setting stands for a Python object, which a file cannot contain."""
    if PYTHON in (values.get("data"), values.get("model")):
        raise ValueError(
            f"{where} belongs to a run made in Python, with data or a model given as Python objects; {advice}"
        )


def read_spec(
    what: str | None, flags: Mapping[str, Any], fields: Sequence[str] = (), file: str | None = None
) -> RunSpec:
    """The specification from METHOD, FILE.toml or both, flags and `FIELD=VALUE` texts.

    Args:
        what: METHOD or FILE.toml.
        flags: Settings by name; they override the file.
        fields: `FIELD=VALUE` texts; they override the fields in the file.
        file: FILE.toml, if `what` is a METHOD. METHOD overrides the method of the file. The fields in the file belong
            to the method of the file, if it names one: they are not used for another.
    """
    method, file = method_and_file(what, file)
    values = {} if file is None else read_toml(Path(file))
    if method is not None:
        if values.get("algorithm", method) != method and values.pop("set", None):
            log.info("%s: its fields (set) are those of %s; %s does not use them", file, values["algorithm"], method)
        values["algorithm"] = method
    values |= flags
    if fields:
        values["set"] = merge_fields(values.get("set", {}), fields)
    return check_spec(values)


def method_and_file(what: str | None, file: str | None) -> tuple[str | None, str | None]:
    """METHOD and FILE.toml of a command that takes one of them, or both in this order."""
    if what is not None and is_file(what):
        if file is not None:
            raise ValueError(f"{what!r} and {file!r}: give METHOD, FILE.toml, or both in this order")
        return None, what
    if what is not None and what.lower().endswith(".npz"):
        raise ValueError(f"{what} holds data, it is no METHOD; try --data {what}")
    if file is not None and not is_file(file):
        raise ValueError(f"{file!r} is not a FILE.toml; give METHOD, FILE.toml, or both in this order")
    return what, file


def is_file(what: str) -> bool:
    """Whether `what` is FILE.toml (or, by mistake, a run folder) and not the name of a method."""
    return what.endswith(".toml") or os.sep in what or os.path.exists(os.path.join(what, "config.toml"))


def merge_fields(known: Any, texts: Sequence[str]) -> dict[str, Any]:
    """The fields of a file, with those given as `FIELD=VALUE` or `FIELD.TIER=VALUE` replaced."""
    merged, seen = dict(known) if isinstance(known, Mapping) else {}, {}
    for text in texts:
        field, equals, value = (part.strip() for part in text.partition("="))
        name, dot, tier = field.partition(".")
        if not equals or not name or not value or (dot and not tier) or "." in tier:
            raise ValueError(f"--set {text!r}: write FIELD=VALUE, for example --set device_lr=0.05")
        if seen.setdefault(name, dot) != dot:
            raise ValueError(f"--set {name} is given both for all tiers and by tier; choose one")
        if dot:
            before = merged.get(name)
            merged[name] = {**(before if isinstance(before, Mapping) else {}), tier: read_value(value)}
        else:
            merged[name] = read_value(value)
    return merged


def read_value(text: str) -> Any:
    """A number, true or false, a list of these (one value per node), or the text itself."""
    if "," in text:
        return [read_value(part.strip()) for part in text.split(",")]
    for kind in (whole, finite):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def read_teams(text: str | None) -> int | tuple[int, ...] | None:
    """4, (2, 4) for "2x4", 0 for "none"."""
    if text is None or text == "none":
        return None if text is None else 0
    try:
        sizes = tuple(whole(part) for part in text.split("x"))
    except ValueError:
        raise ValueError(f"teams {text!r} are not understood; give 4, or 2x4 for two tiers of teams") from None
    if min(sizes) < 0 or (min(sizes) == 0 and len(sizes) > 1) or max(sizes) > MOST:
        raise ValueError(f"teams {text!r}: the number of teams of each tier is 1 or more; 0 alone is no teams")
    return sizes[0] if len(sizes) == 1 else sizes


def read_numbers(name: str, text: str, kind: Callable[[str], Any], count: int, example: str) -> tuple:
    """Numbers separated by colons; `kind` reads one: `whole` or `finite`."""
    try:
        numbers = tuple(kind(part) for part in text.split(":"))
    except ValueError:
        numbers = ()
    if len(numbers) != count:
        raise ValueError(f"{name} {text!r} is not understood; write {count} numbers such as {example}")
    return numbers


# -- writing ------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """The same with lists instead of tuples, because TOML has no tuples."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def versions() -> dict[str, str]:
    """The versions of the packages and of Python that a run uses."""
    import platform
    from importlib.metadata import version

    from polytier import __version__

    others = {name: version(name) for name in ("torch", "numpy")}
    return {"polytier": __version__, **others, "python": platform.python_version()}


def to_toml(values: Mapping[str, Any]) -> str:
    """Text for config.toml: the settings that have a value, and the versions they were run with."""
    import tomli_w

    kept = {k: v for k, v in values.items() if v is not None and k != "out"}
    return tomli_w.dumps({**kept, "versions": versions()})
