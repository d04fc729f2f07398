"""The configuration of a run: the flags of `polytier run`, or the keys of a TOML file."""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from polytier._errors import unknown

if TYPE_CHECKING:
    from polytier.data.federation import Federation
    from polytier.method.algorithm import Algorithm
    from polytier.runs.loop import Training
    from polytier.tree.topology import Topology

log = logging.getLogger("polytier")
PYTHON = "python"  # stands for data or a model that were given in Python and have no name


class Config(BaseModel):
    """Every setting of a run. None means not given; what that comes to is settled in `prepare`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    algorithm: str = Field("permfl", description="the method; see `polytier list algorithms`")
    data: str = Field("digits", description="a data set by name, your own FILE.npz, or a folder (`data pack`)")
    data_dir: str | None = Field(None, description="where its files are: DIR, DIR/NAME and DIR/raw are searched")
    model: str = Field("mclr", description="a model by name, or your own package.module:factory")
    devices: int | None = Field(None, ge=1, description="number of devices")
    teams: str | None = Field(None, description="number of teams; 2x4 is two tiers of teams, 0 none")
    partition: str | None = Field(None, description="who holds which samples; see `polytier list partitions`")
    per_class: str | None = Field(None, description="TRAIN:TEST samples of each class a device holds")
    team_formation: str = Field("random", description="which devices are a team; see `polytier list teams`")
    split: str = Field("3:0:1", description="shares of training, validation and test of each device")
    team_participation: float | str = Field(1.0, description="teams: a fraction, count:N, table:FILE or schedule:FILE")
    device_participation: float | str = Field(
        1.0, description="devices: a fraction, count:N, table:FILE or schedule:FILE"
    )
    absent: str = Field("skip", description="skip those who do not take part, or use their stale answer")
    rounds: int = Field(100, ge=1, description="rounds of the server")
    batch_size: int | str = Field(32, description="samples of a mini-batch; or grow:A/(B+t)")
    seed: int = Field(0, ge=0, lt=1 << 63, description="every draw follows from it")
    eval_every: int = Field(1, ge=1, description="rounds from one evaluation to the next")
    out: str | None = Field(None, description="the run folder")
    engine: str = Field(
        "stacked", description="what runs the nodes: stacked, ray, or ray:auto and ray:HOST:PORT for a cluster"
    )
    workers: int | None = Field(None, ge=1, description="worker processes; changes no bit of the result")
    tile: int | None = Field(None, ge=1, description="devices computed at once; changes no bit of the result")
    dtype: str = Field("float32", description="float32 or float64")
    on: str = Field("cpu", description="cpu, cuda or mps")
    codec: str | None = Field(
        None, description="how models travel: float32, float16, float64, sparse, sparse16, sparse64 or paper"
    )
    standardize: bool = Field(False, description="scale inputs to mean 0 and deviation 1")
    l2: float = Field(0.0, ge=0, description="adds l2/2 |theta|^2 to every device's objective")
    batching: str | None = Field(None, description="how stacks are run; found by a check at the start")
    set: dict[str, Any] = Field({}, description="fields of the method")
    models: int | dict[str, dict[str, Any]] | None = Field(
        None, description="several models on one pool of devices: how many alike, or a table [models.NAME] each"
    )

    @field_validator("teams", mode="before")
    @classmethod
    def _teams(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("batch_size", mode="before")
    @classmethod
    def _batch_size(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.isdigit() else value

    @field_validator("team_participation", "device_participation", mode="after")
    @classmethod
    def _participation(cls, value: float | str) -> float | str:
        try:
            return float(value)
        except ValueError:
            return value


# -- reading ------------------------------------------------------------------------------------------


def check_config(values: Mapping[str, Any]) -> Config:
    """The values as a configuration, or a ValueError that says what is wrong with the first bad one."""
    try:
        return Config(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            raise unknown("setting", name, list(Config.model_fields)) from None
        wanted = first["msg"].removeprefix("Input ")
        raise ValueError(f"{name} = {first['input']!r}: it {wanted[0].lower()}{wanted[1:]}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The settings of a file; the versions that a run folder records are left out."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; to repeat a run give {path / 'config.toml'}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a TOML file: {error}") from None
    values.pop("versions", None)
    if PYTHON in (values.get("data"), values.get("model")):
        raise ValueError(f"{path} is of a run made in Python, with data or a model of its own; repeat it there")
    return values


def resolve(what: str | None, flags: Mapping[str, Any], fields: Sequence[str] = ()) -> Config:
    """The configuration from ALGORITHM or FILE.toml, the flags (they win) and `FIELD=VALUE` texts."""
    values: dict[str, Any] = {}
    if what is not None and is_file(what):
        values = read_toml(Path(what))
    elif what is not None:
        values["algorithm"] = what
    values |= flags
    if fields:
        values["set"] = merge_fields(values.get("set", {}), fields)
    return check_config(values)


def is_file(what: str) -> bool:
    """Whether FILE.toml (or, by mistake, a run folder) is meant and not a method."""
    return what.endswith(".toml") or (Path(what) / "config.toml").exists() or os.sep in what


def merge_fields(known: Any, texts: Sequence[str]) -> dict[str, Any]:
    """`FIELD=VALUE` and `FIELD.TIER=VALUE` texts laid over the fields of a file."""
    merged, seen = dict(known) if isinstance(known, Mapping) else {}, {}
    for text in texts:
        field, equals, value = (part.strip() for part in text.partition("="))
        name, dot, tier = field.partition(".")
        if not equals or not name or not value or (dot and not tier):
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
    """A number, true or false, a list of these (one a node), or the text itself."""
    if "," in text:
        return [read_value(part.strip()) for part in text.split(",") if part.strip()]
    for kind in (int, float):
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
        sizes = tuple(int(part) for part in text.split("x"))
    except ValueError:
        raise ValueError(f"teams {text!r} are not understood; give 4, or 2x4 for two tiers of teams") from None
    if min(sizes) < 0:
        raise ValueError(f"teams {text!r}: there cannot be fewer than 0")
    return sizes[0] if len(sizes) == 1 else sizes


def read_numbers(name: str, text: str, kind: type, count: int, example: str) -> tuple:
    """Numbers written with colons between them."""
    try:
        numbers = tuple(kind(part) for part in text.split(":"))
    except ValueError:
        numbers = ()
    if len(numbers) != count:
        raise ValueError(f"{name} {text!r} is not understood; write {count} numbers such as {example}")
    return numbers


# -- from words to a run ------------------------------------------------------------------------------


def algorithm_kind(name: str) -> type[Algorithm]:
    """One of the house by name, or your own by package.module:Class."""
    from polytier.algorithms import ALGORITHMS

    kind = own_algorithm(name) if ":" in name else ALGORITHMS.get(name)
    if kind is None:
        raise unknown("algorithm", name, list(ALGORITHMS))
    return kind


def known_fields(kind: type[Algorithm]) -> list[str]:
    import dataclasses

    return [field.name for field in dataclasses.fields(kind) if field.name != "models"]


def make_algorithm(name: str, fields: Mapping[str, Any], models: Mapping[str, Algorithm] | None = None) -> Algorithm:
    """The method with these fields; `models` are those that it wraps."""
    kind = algorithm_kind(name)
    for field in fields:
        if field not in known_fields(kind):
            raise unknown(f"field of {name}", field, known_fields(kind))
    return kind(**fields) if models is None else kind(models=models, **fields)  # type: ignore[call-arg]


def settled_algorithm(config: Config) -> Algorithm:
    """The configuration's method; where it says nothing, as the table of defaults has it for these data and model."""
    import dataclasses

    from polytier.runs.defaults import settings

    kind = algorithm_kind(config.algorithm)
    own = {field.name: field.default for field in dataclasses.fields(kind)}
    table = settings(config.algorithm, config.data, config.model)
    found = {name: pair for name, pair in table.items() if name not in config.set and pair[0] != own[name]}
    for source in dict.fromkeys(source for _, source in found.values()):
        values = ", ".join(f"{name} = {value}" for name, (value, where) in found.items() if where == source)
        log.info("%s on %s with %s: %s (%s)", config.algorithm, config.data, config.model, values, source)
    return make_algorithm(config.algorithm, {name: value for name, (value, _) in found.items()} | config.set)


def fields_of(algorithm: Algorithm) -> dict[str, Any]:
    """Its hyper-parameters, as TOML has them."""
    values = {name: getattr(algorithm, name) for name in known_fields(type(algorithm))}
    return plain({name: value for name, value in values.items() if value is not None})


def own_algorithm(name: str) -> type[Algorithm]:
    import importlib

    from polytier.method.algorithm import Algorithm
    from polytier.models.zoo import importable

    module, _, attribute = name.partition(":")
    try:
        importable(module)  # the current folder counts too
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"algorithm {name} does not load ({error}); give package.module:Class") from None
    if not isinstance(kind, type) or not issubclass(kind, Algorithm):
        raise ValueError(f"algorithm {name} is no polytier.Algorithm; derive your class from it")
    return kind


def make_federation(config: Config) -> tuple[Federation, Config]:
    """The devices' data, and the configuration with all that they settle written out."""
    import numpy as np

    from polytier.data.build import build_federation, is_npz, load_source
    from polytier.data.pack import is_stored
    from polytier.data.sources import GENERATED, default_dir

    own_file, teams = is_npz(config.data) or is_stored(config.data), read_teams(config.teams)
    if is_stored(config.data) and config.split != Config.model_fields["split"].default:
        raise ValueError(f"{config.data} holds its split: leave --split out, or pack the data anew with it")
    split: Any = read_numbers("split", config.split, float, 3, "3:0:1")
    per_class: Any = None
    if config.per_class is not None:
        per_class = read_numbers("per_class", config.per_class, int, 2, "20:5")
    directory = None if config.data_dir is None else Path(config.data_dir).expanduser().resolve()
    if directory is None and not own_file and config.data.split(":")[0] not in ("digits", *GENERATED):
        directory = default_dir().resolve()
    source: Any = Path(config.data).expanduser().resolve()
    if not own_file:
        source = load_source(config.data, directory, config.devices, config.seed)
    federation = build_federation(
        source, directory, config.devices, teams, config.partition, per_class, config.team_formation, split,
        config.standardize, config.seed,
    )  # fmt: skip
    found: dict[str, Any] = {
        "data_dir": None if directory is None else str(directory),
        "team_formation": absolute_formation(config.team_formation),
    }
    if own_file:
        found["data"] = str(source)
    else:
        found["devices"] = len(federation)
        if source.device is None and per_class is None:
            found["partition"] = config.partition or "labels:2"
    if teams is None:
        found["teams"] = "0" if federation.team is None else str(len(np.unique(federation.team)))
    return federation, config.model_copy(update=found)


def absolute_formation(text: str) -> str:
    """Learned teams whose run is named so that it is found from anywhere."""
    from polytier._text import spec

    name, args, given = spec(text)
    if name != "learned" or not (args or "source" in given):
        return text
    source = args.pop(0) if args else given.pop("source")
    others = [*args, *(f"{key}={value}" for key, value in given.items())]
    return f"{name}:{','.join([str(Path(source).expanduser().resolve()), *others])}"


def make_topology(federation: Federation, teams: int | tuple[int, ...] | None) -> Topology | None:
    """The tree of several tiers of teams; None: the federation's own teams."""
    from polytier.tree.topology import Topology, nested

    if not isinstance(teams, tuple) or federation.team is None:
        return None
    return Topology.build(federation.ids, *nested(federation.team, teams))


def absolute_file(value: float | str) -> float | str:
    """A participation rule whose file is named so that it is found from anywhere."""
    kind, colon, path = value.partition(":") if isinstance(value, str) else ("", "", "")
    return f"{kind}:{Path(path).expanduser().resolve()}" if colon and kind in ("table", "schedule") else value


def prepare(config: Config) -> tuple[Training, Config]:
    """A run that is ready to start, and its configuration, complete enough to repeat it to the bit."""
    if several(config):
        from polytier.runs.multi import prepare_several

        return prepare_several(config)
    algorithm = settled_algorithm(config)
    federation, config = make_federation(config)
    own = {name: getattr(config, name) for name in ("l2", "batch_size", "batching")}
    training, config = start(algorithm, federation, config.model, federation, config, own)
    found = {"set": fields_of(algorithm), "batching": training.context.objective.batching}
    return training, config.model_copy(update=found)


def several(config: Config) -> bool:
    """Whether several models are trained: the method wraps others."""
    from polytier.algorithms.multimodel import MultiModel

    wraps = issubclass(algorithm_kind(config.algorithm), MultiModel)
    if config.models is not None and not wraps:
        raise ValueError(f"{config.algorithm} trains one model; several are trained by mfa-rr or mfa-rand")
    return wraps


def start(
    algorithm: Algorithm, data: Any, model: Any, federation: Federation, config: Config, own: dict[str, Any]
) -> tuple[Training, Config]:
    """The training, and the configuration with what it settles; `federation` says who is in which team."""
    from polytier.runs.loop import Training

    rules = ("team_participation", "device_participation")
    here = {name: absolute_file(getattr(config, name)) for name in rules}
    same = ("seed", "absent", "eval_every", "workers", "tile", "dtype", "on", "codec", "engine")
    training = Training(
        algorithm, data, model, topology=make_topology(federation, read_teams(config.teams)), **own, **here,
        **{name: getattr(config, name) for name in same},
    )  # fmt: skip
    try:
        for context in training.context.parts:
            check_tiers(context.algorithm, context.topology.tier_names)
    except ValueError:
        training.close()
        raise
    return training, config.model_copy(update={**here, "codec": training.codec.name})


def check_tiers(algorithm: Algorithm, tiers: Sequence[str]) -> None:
    import dataclasses

    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        for tier in value if isinstance(value, Mapping) else ():
            if tier not in tiers:
                raise unknown(f"tier for {field.name}", tier, tiers)


def plain(value: Any) -> Any:
    """Lists instead of tuples, as TOML has them."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def versions() -> dict[str, str]:
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
