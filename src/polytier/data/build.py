"""From a few words to a federation: source, team formation, partition, split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from polytier._text import bind
from polytier.data.federation import Federation, check_samples, one_per_device, split_by_shares, split_numbers
from polytier.data.own_npz import load_npz
from polytier.data.pack import is_stored
from polytier.data.partition import PARTITIONS, Assignment, check_assignment, column
from polytier.data.sources import GENERATED, SOURCES, Source
from polytier.data.teams import FORMATIONS, learned

FORM, SHARE = 0xB1, 0xB2  # random numbers of the formation and of the partition have different keys
Partition = Callable[..., Assignment]  # (y, num_devices, rng, allowed=None) -> Assignment

READ = 1 << 30  # bytes of a packed data set that are read whole to look for NaN; larger ones take too long


def build_federation(
    data: str | Path | Source = "digits",
    data_dir: Path | str | None = None,
    devices: int | None = None,
    teams: int | tuple[int, ...] | None = None,
    partition: str | Partition | None = None,
    per_class: tuple[int, int] | None = None,
    team_formation: str = "random",
    split: tuple[float, float, float] = (3, 0, 1),
    standardize: bool = False,
    seed: int = 0,
    device_column: str | None = None,
    team_column: str | None = None,
) -> Federation:
    """Give the samples of a data set to devices in teams. The result depends on nothing but the arguments.

    Data, partition and team formation are written `name:value,key=value`; `polytier list` shows what there is.

    Args:
        data: the name of a data set, an .npz file, a folder written by `Federation.save`, or a `Source`.
        data_dir: the folder with the files of public data sets; by default $POLYTIER_DATA or ~/.cache/polytier.
        devices: the number of devices, by default 40. If the data name their devices (an .npz file, LEAF, generated
            data), by default all of them; with a smaller number so many are drawn.
        teams: the number of teams, by default 4, or the data's own; 0: no teams. (2, 4) is two tiers: 2 teams at the
            top with 4 teams each.
        partition: which samples a device gets, by name, such as "labels:2" (the default), "iid" or "dirichlet:0.3"; or
            a function `(y, num_devices, rng, allowed=None) -> Assignment` (see `polytier.data.partition`). By default
            data that name their devices keep them.
        per_class: the number of training and test samples of each class, for the partitions labels and per-class.
        team_formation: which devices form a team, by name, such as "random" or "worst".
        split: how much of a device's samples (of text: of its documents) is for training, validation and test. If the
            data name their test samples, how much of the training samples is held out for validation.
        standardize: scale the inputs to mean 0 and standard deviation 1.
        seed: of all random numbers.
        device_column: the array of an .npz file that names devices; by default "device".
        team_column: the array of an .npz file that names teams; by default "team", if there is one.

    Returns:
        The devices' data.

    Raises:
        ValueError: a name is unknown, files are missing, or what is asked for does not fit the data.

    Examples:
        >>> federation = build_federation("digits", devices=10, teams=2, partition="dirichlet:0.5")
        >>> len(federation), len(set(federation.team))
        (10, 2)

        A partition of one's own: device k of n gets samples k, k + n, k + 2n, ...

        >>> import numpy as np
        >>> from polytier.data.partition import Assignment
        >>> def in_turn(y, num_devices, rng, allowed=None):
        ...     return Assignment(index=np.arange(len(y)), device=np.arange(len(y)) % num_devices)
        >>> len(build_federation("digits", devices=7, teams=0, partition=in_turn))
        7
    """
    if seed < 0 or (devices is not None and devices < 1):
        raise ValueError(f"seeds start at 0 and devices at 1; got seed {seed} and {devices} devices")
    for name, value in {"device_column": device_column, "team_column": team_column}.items():
        if value is not None and not is_npz(data):
            raise ValueError(
                f"{name} = {value!r} names an array of an .npz file, which these data are not; leave it out"
            )
    if is_stored(data):
        asked = (devices, partition, per_class) != (None, None, None) or team_formation != "random"
        federation = open_packed(str(data), teams, asked)
        return federation.standardized() if standardize else federation
    if is_npz(data) and (devices, partition, per_class) != (None, None, None):
        raise ValueError(f"{data} names its own devices; leave out devices, partition and per_class")
    if is_npz(data):
        source = load_npz(str(data), device_column, team_column)
    else:
        source = load_source(data, data_dir, devices, seed)
    source = source.of_split(split, seed)
    if source.is_tokens and (partition not in (None, "column") or per_class is not None):
        raise ValueError("text names its own devices, and tokens are no labels; leave out partition and per_class")
    rng = np.random.default_rng([seed, SHARE])
    if source.device is not None and per_class is None and partition in (None, "column"):
        names, team, assignment = keep_devices(source, devices, teams, team_formation, rng, seed)
        part = None if source.split is None else source.split[assignment.index]
        cluster = None if source.cluster is None else source.cluster[assignment.index]
    else:
        if devices is not None and devices > len(source.y) and not callable(partition):
            raise ValueError(f"{len(source.y)} samples are too few for {devices} devices; ask for fewer devices")
        names = np.arange(40 if devices is None else devices)
        team, allowed = form_teams(teams, team_formation, names, source, seed)
        assignment = assign(source, len(names), partition, per_class, allowed, rng)
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


# -- where samples come from --------------------------------------------------------------------------


def is_npz(data: str | Path | Source) -> bool:
    """Whether this is the name of an .npz file."""
    return not isinstance(data, Source) and str(data).lower().endswith(".npz")


def load_source(data: str | Path | Source, data_dir: Path | str | None, devices: int | None, seed: int) -> Source:
    """Read a data set by name; generated data are made for this number of devices and this seed."""
    if isinstance(data, Source):
        return data
    if str(data) not in SOURCES and Path(str(data)).is_file():
        raise ValueError(
            f"{data} is no .npz file; own data are written by np.savez with x, y and device (docs/guide.md)"
        )
    name, function, own = bind(str(data), SOURCES, "data set or .npz file")
    made = {"seed": seed} if devices is None else {"seed": seed, "num_devices": devices}
    try:
        return function(None if data_dir is None else Path(data_dir), **(made if name in GENERATED else {}), **own)
    except MemoryError:
        raise ValueError(f"{data} does not fit into memory; ask for fewer devices, samples or features") from None


def open_packed(folder: str, teams: int | tuple[int, ...] | None, asked: bool) -> Federation:
    """A federation from its folder; `asked`: whether devices, a partition or a team formation are asked for too."""
    federation = Federation.open(folder)
    if federation.x.nbytes <= READ:
        ends = federation.bounds[:, 3].contiguous()
        check_samples(
            federation.x, federation.y, lambda row: federation.ids[int(torch.searchsorted(ends, row, right=True))]
        )
    known = 0 if federation.team is None else len(np.unique(federation.team))
    if asked or (teams is not None and np.prod(teams) != known):
        raise ValueError(
            f"{folder} holds its devices in {known} teams, which cannot be changed; leave out devices, teams, "
            "partition, per_class and team_formation, or pack the data anew"
        )
    return federation


# -- which samples go to which device -----------------------------------------------------------------


def keep_devices(
    source: Source,
    devices: int | None,
    teams: int | tuple[int, ...] | None,
    formation: str,
    rng: np.random.Generator,
    seed: int,
) -> tuple[np.ndarray, np.ndarray | None, Assignment]:
    """The devices that the data name, the team of each, and their samples.

    Raises:
        ValueError: the data name other teams than asked for, or the formation decides on labels.
    """
    assert source.device is not None
    number = len(np.unique(source.device)) if devices is None else devices
    assignment = column(source.y, number, rng, ids=source.device)
    names = np.unique(source.device[assignment.index])
    given = None if formation.startswith("learned") else given_teams(source, names)
    team, allowed = form_teams(teams, formation, names, source, seed) if given is None else (given, None)
    if allowed is not None:
        raise ValueError(f"{formation} decides on labels; data with devices need random or sequential")
    if given is not None and teams is not None and np.prod(teams) != (known := len(np.unique(given))):
        raise ValueError(f"{teams} teams asked for, the data name {known}; leave out teams")
    return names, team, assignment


def given_teams(source: Source, names: np.ndarray) -> np.ndarray | None:
    """[n] the team of each named device, or None if the data have no column of teams."""
    if source.device is None or source.team is None:
        return None
    known, owner = np.unique(source.device, return_inverse=True)
    return one_per_device(source.team, owner, known, "team")[np.isin(known, names)]


def form_teams(
    teams: int | tuple[int, ...] | None, formation: str, names: np.ndarray, source: Source, seed: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """[n] the innermost team of each device, and [n, classes] bool, the labels it may hold; None and None: no teams."""
    _, function, own = bind(formation, FORMATIONS, "team formation")
    if teams == 0:
        return None, None
    if isinstance(teams, tuple) and (not teams or min(teams) < 1):
        raise ValueError(f"teams of several tiers are written 2x4, each at least 1; got {teams}")
    number = min(4, len(names)) if teams is None else int(np.prod(teams))
    known = (names, teams is not None) if function is learned else ()
    return function(len(names), number, source.num_classes, np.random.default_rng([seed, FORM]), *known, **own)


def assign(
    source: Source,
    num_devices: int,
    partition: str | Partition | None,
    per_class: tuple[int, int] | None,
    allowed: np.ndarray | None,
    rng: np.random.Generator,
) -> Assignment:
    """Run the partition; with `per_class`, the partition per-class with these counts.

    Raises:
        ValueError: the partition is unknown, does not go with `per_class`, or cannot be made of these samples; a
            function of the user gives what is no assignment.
    """
    if partition is not None and not isinstance(partition, str):
        if per_class is not None:
            raise ValueError("counts per class go with the partition labels or per-class, not with a function")
        return check_assignment(partition(source.y, num_devices, rng, allowed=allowed), len(source.y), num_devices)
    default = "labels:2" if per_class is None else "per-class"
    name, function, own = bind(partition or default, PARTITIONS, "partition")
    if per_class is not None:
        if name not in ("labels", "per-class"):
            raise ValueError(f"counts per class go with the partition labels or per-class, not with {name}")
        function, own = PARTITIONS["per-class"], {**own, "train": per_class[0], "test": per_class[1]}
    return function(source.y, num_devices, rng, allowed=allowed, **own)


def hold_out(part: np.ndarray, owner: np.ndarray, shares: tuple[float, float, float], seed: int) -> np.ndarray:
    """[K] the split of each sample, with validation samples taken from the training samples as `shares` say.

    For data that name their training and test samples; if they name validation samples too, nothing is changed.
    """
    if shares[1] <= 0 or (part == 1).any():
        return part
    part, train = part.copy(), np.flatnonzero(part == 0)
    of = np.unique(owner[train], return_inverse=True)[1]
    part[train] = split_by_shares(of, (shares[0], shares[1], 0), seed)
    return part
