"""From a few words to a federation: source, team formation, partition, split."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from polytier._text import bind
from polytier.data.federation import Federation, one_a_device, split_by_shares, split_numbers
from polytier.data.npz import load_npz
from polytier.data.pack import is_stored
from polytier.data.partition import PARTITIONS, Assignment, column
from polytier.data.sources import MADE, SOURCES, Source
from polytier.data.teams import FORMATIONS, learned

FORM, SHARE = 0xB1, 0xB2  # what a stage's random numbers are for


def build_federation(
    data: str | Path | Source = "digits",
    data_dir: Path | str | None = None,
    devices: int | None = None,
    teams: int | tuple[int, ...] | None = None,
    partition: str | None = None,
    per_class: tuple[int, int] | None = None,
    team_formation: str = "random",
    split: tuple[float, float, float] = (3, 0, 1),
    standardize: bool = False,
    seed: int = 0,
) -> Federation:
    """The devices' data, a pure function of the arguments.

    None means not given: 40 devices, 4 teams and labels:2 where the data name no devices or teams themselves.
    Data that do (an .npz, LEAF, synthetic) keep their devices unless a partition is given; fewer `devices`
    than the data name are drawn from them. Data that name their test samples too keep these; `split` then says how
    much of training is held out for validation. `teams` (2, 4) is two tiers from the top: the first 4 of the 8
    innermost teams belong to the first top team; 0 is none. Learned teams replace those that the data name. Data,
    formation and partition are written `name:arg,key=value`.
    """
    if seed < 0 or (devices is not None and devices < 1):
        raise ValueError(f"seeds start at 0 and devices at 1; got seed {seed} and {devices} devices")
    number = 40 if devices is None else devices
    if is_stored(data):
        federation = Federation.open(data)  # type: ignore[arg-type]
        known = 0 if federation.team is None else len(np.unique(federation.team))
        settled = (devices, partition, per_class) == (None, None, None) and team_formation == "random"
        if not settled or (teams is not None and np.prod(teams) != known):
            raise ValueError(f"{data} holds its devices in {known} teams: leave that out, or pack the data anew")
        return federation.standardized() if standardize else federation
    if is_npz(data) and (devices, partition, per_class) != (None, None, None):
        raise ValueError(f"{data} names its own devices; leave out devices, partition and per_class")
    source = load(data, data_dir, devices, seed)
    rng = np.random.default_rng([seed, SHARE])
    if source.device is not None and per_class is None and partition in (None, "column"):
        number = len(np.unique(source.device)) if devices is None else devices
        assignment = column(source.y, number, rng, ids=source.device)
        names = np.unique(source.device[assignment.index])
        given = None if team_formation.startswith("learned") else given_teams(source, names)
        team, allowed = form(teams, team_formation, names, source, seed) if given is None else (given, None)
        if allowed is not None:
            raise ValueError(f"{team_formation} decides on labels; data with devices need random or sequential")
        if given is not None and teams is not None and np.prod(teams) != (known := len(np.unique(given))):
            raise ValueError(f"{teams} teams asked for, the data name {known}; leave out teams")
        part = None if source.split is None else source.split[assignment.index]
        cluster = None if source.cluster is None else source.cluster[assignment.index]
    else:
        names = np.arange(number)
        team, allowed = form(teams, team_formation, names, source, seed)
        assignment = share_out(source, number, partition, per_class, allowed, rng)
        part = assignment.split
        cluster = None if assignment.cluster is None else assignment.cluster[assignment.device]
    if part is not None:
        part = hold_out(split_numbers(part, len(part)), assignment.device, split, seed)
    federation = Federation.from_arrays(
        source.x[assignment.index],
        source.y[assignment.index] if assignment.y is None else assignment.y,
        device=names[assignment.device],
        team=None if team is None else team[assignment.device],
        split=part,
        shares=split,
        seed=seed,
        cluster=cluster,
        num_classes=source.num_classes,
    )
    federation = federation.from_black(source.low) if source.low else federation
    return federation.standardized() if standardize else federation


def hold_out(part: np.ndarray, owner: np.ndarray, shares: tuple[float, float, float], seed: int) -> np.ndarray:
    """Data that name their training and test samples: validation samples are taken from training, as `shares` say."""
    if shares[1] <= 0 or (part == 1).any():
        return part
    part, train = part.copy(), np.flatnonzero(part == 0)
    of = np.unique(owner[train], return_inverse=True)[1]
    part[train] = split_by_shares(of, (shares[0], shares[1], 0), seed)
    return part


def is_npz(data: str | Path | Source) -> bool:
    return not isinstance(data, Source) and str(data).lower().endswith(".npz")


def load(data: str | Path | Source, data_dir: Path | str | None, devices: int | None, seed: int) -> Source:
    if isinstance(data, Source):
        return data
    if is_npz(data):
        return load_npz(data)
    name, function, own = bind(str(data), SOURCES, "data set or .npz file")
    made = {"seed": seed} if devices is None else {"seed": seed, "num_devices": devices}
    return function(None if data_dir is None else Path(data_dir), **(made if name in MADE else {}), **own)


def given_teams(source: Source, names: np.ndarray) -> np.ndarray | None:
    """The team of each named device, if the data have a column of teams."""
    if source.device is None or source.team is None:
        return None
    known, owner = np.unique(source.device, return_inverse=True)
    return one_a_device(source.team, owner, known, "team")[np.isin(known, names)]


def form(
    teams: int | tuple[int, ...] | None, formation: str, names: np.ndarray, source: Source, seed: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The innermost team of each device, and the labels it may hold; 0 teams: none."""
    _, function, own = bind(formation, FORMATIONS, "team formation")
    if teams == 0:
        return None, None
    if isinstance(teams, tuple) and (not teams or min(teams) < 1):
        raise ValueError(f"teams of several tiers are written 2x4, each at least 1; got {teams}")
    number = min(4, len(names)) if teams is None else int(np.prod(teams))
    known = (names, teams is not None) if function is learned else ()
    return function(len(names), number, source.num_classes, np.random.default_rng([seed, FORM]), *known, **own)


def share_out(
    source: Source,
    num_devices: int,
    partition: str | None,
    per_class: tuple[int, int] | None,
    allowed: np.ndarray | None,
    rng: np.random.Generator,
) -> Assignment:
    """Run the partition; counts per class replace the sizes of `labels`."""
    default = "labels:2" if per_class is None else "per-class"
    name, function, own = bind(partition or default, PARTITIONS, "partition")
    if per_class is not None:
        if name not in ("labels", "per-class"):
            raise ValueError(f"counts per class go with the partition labels or per-class, not with {name}")
        function, own = PARTITIONS["per-class"], {**own, "train": per_class[0], "test": per_class[1]}
    return function(source.y, num_devices, rng, allowed=allowed, **own)
