"""Makes the data of the devices and the tree from settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polytier._text import finite, parse_text, whole
from polytier.data.build import build_federation, is_npz, load_source
from polytier.data.federation import Federation
from polytier.data.own_npz import read_arrays
from polytier.data.pack import is_stored
from polytier.data.sources import GENERATED, default_dir
from polytier.files.read import check_path
from polytier.models.pretrained import check_tokenizer
from polytier.runs.spec import RunSpec, read_numbers, read_teams, settings
from polytier.tree.topology import Topology, nested

log = logging.getLogger("polytier")


def absolute_formation(text: str) -> str:
    """The team formation with the path of its run folder made absolute."""
    name, args, given = parse_text(text)
    if name != "learned" or not (args or "source" in given):
        return text
    source = args.pop(0) if args else given.pop("source")
    others = [*args, *(f"{key}={value}" for key, value in given.items())]
    return f"{name}:{','.join([str(Path(source).expanduser().resolve()), *others])}"


def make_data(
    specs: Mapping[str, RunSpec], given: Mapping[str, Federation | None]
) -> tuple[dict[str, Federation], dict[str, RunSpec]]:
    """The data of each model; models with the same settings share them."""
    federations: dict[str, Federation] = {}
    complete: dict[str, RunSpec] = {}
    made: dict[str, tuple[Federation, RunSpec]] = {}
    own = [each.name for each in settings().values() if each.per_model and each.scope == "data"]
    decided = [*own, "devices", "teams", "team_formation"]
    for name, spec in specs.items():
        ready = given[name]
        if ready is not None:
            federations[name], complete[name] = ready, with_fitting_model(spec, ready)
            continue
        key = repr([getattr(spec, k) for k in own])
        if key not in made:
            made[key] = make_federation(spec)
        federations[name], found = made[key]
        own_spec = spec.replace(**{k: getattr(found, k) for k in decided})
        complete[name] = with_fitting_model(own_spec, federations[name])
    return federations, complete


def with_fitting_model(spec: RunSpec, federation: Federation) -> RunSpec:
    """The specification with a model for tokens or numbers where mclr, the default, does not fit the data.

    Raises:
        ValueError: the model is a pretrained one that came with another tokenizer than the data have.
    """
    if spec.model.startswith("hf:") and (tokenizer := parse_text(spec.data)[2].get("tokenizer")):
        check_tokenizer(spec.model.removeprefix("hf:"), tokenizer)
    if federation.is_tokens and spec.model == "mclr":
        log.info("the data are tokens: model gpt instead of mclr")
        return spec.replace(model="gpt")
    if federation.num_classes is not None or spec.model != "mclr":
        return spec
    model = "quadratic" if spec.data.partition(":")[0] in GENERATED else "linear"
    log.info("the targets are floats, not classes (integers): model %s instead of mclr", model)
    return spec.replace(model=model)


def needs_files(data: str) -> bool:
    """Whether these data are read from files of a public data set, which --data-dir names."""
    return not (is_npz(data) or is_stored(data) or data.split(":")[0].strip() in ("digits", *GENERATED))


def make_federation(spec: RunSpec) -> tuple[Federation, RunSpec]:
    """The data of the devices, and the specification with the settings that the data determine."""
    check_path(spec.data, "data")
    own_file, teams = is_npz(spec.data) or is_stored(spec.data), read_teams(spec.teams)
    if is_stored(spec.data) and spec.split != RunSpec.model_fields["split"].default:
        raise ValueError(f"{spec.data} already has a split: omit --split, or pack the data again with it")
    split: Any = read_numbers("split", spec.split, finite, 3, "3:0:1")
    per_class: Any = None
    if spec.per_class is not None:
        per_class = read_numbers("per_class", spec.per_class, whole, 2, "20:5")
    if spec.data_dir is not None and not needs_files(spec.data):
        raise ValueError(f"data_dir = {spec.data_dir!r}: {spec.data} needs no folder of files; leave out data_dir")
    directory = None if spec.data_dir is None else Path(spec.data_dir).expanduser().resolve()
    if directory is None and needs_files(spec.data):
        directory = default_dir().resolve()
    source: Any = Path(spec.data).expanduser().resolve()
    if not own_file:
        source = load_source(spec.data, directory, spec.devices, spec.seed)
    federation = build_federation(
        source,
        data_dir=directory,
        devices=spec.devices,
        teams=teams,
        partition=spec.partition,
        per_class=per_class,
        team_formation=spec.team_formation,
        split=split,
        standardize=spec.standardize,
        seed=spec.seed,
        device_column=spec.device_column,
        team_column=spec.team_column,
    )
    found: dict[str, Any] = {
        "data_dir": None if directory is None else str(directory),
        "team_formation": absolute_formation(spec.team_formation),
    }
    if own_file:
        found["data"] = str(source)
    else:
        found["data"] = source.setting or spec.data
        found["devices"] = len(federation)
        if source.device is None and per_class is None:
            found["partition"] = spec.partition or "labels:2"
    if teams is None:
        found["teams"] = "0" if federation.team is None else str(len(np.unique(federation.team)))
    return federation, spec.replace(**found)


def names_teams(spec: RunSpec) -> bool:
    """Whether the user says which teams there are: in the settings, or in data of their own."""
    if spec.teams is not None or spec.team_column is not None or is_stored(spec.data):
        return True
    return is_npz(spec.data) and "team" in read_arrays(Path(spec.data).expanduser(), (), ("team",))


def make_topology(federation: Federation, teams: int | tuple[int, ...] | None) -> Topology | None:
    """The tree for several tiers of teams; None if the federation's own teams are used."""
    if not isinstance(teams, tuple) or federation.team is None:
        return None
    return Topology.build(federation.ids, *nested(federation.team, teams))
