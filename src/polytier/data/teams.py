"""Which device is in which team, and which labels the devices of a team may hold.

A formation is a function `(num_devices, num_teams, num_classes, rng, *, own arguments)` that returns [n] the team of
each device and, if it decides on labels, [n, classes] bool, the labels that a device may hold (else None). The
partition gives a device no other labels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

Formed = tuple[np.ndarray, np.ndarray | None]


def blocks(num_devices: int, num_teams: int, what: str = "teams") -> np.ndarray:
    """[n] the block of each device: consecutive devices, in blocks whose sizes differ by at most one.

    Raises:
        ValueError: there are more blocks than devices, or none; `what` names them in the message.
    """
    if not 1 <= num_teams <= num_devices:
        raise ValueError(
            f"{num_teams} {what} of {num_devices} devices: each needs at least one device; "
            f"ask for 1 to {num_devices} {what}, or for more devices"
        )
    return np.arange(num_devices) * num_teams // num_devices


def random(num_devices: int, num_teams: int, num_classes: int | None, rng: np.random.Generator) -> Formed:
    """Random teams whose sizes differ by at most one."""
    return rng.permutation(blocks(num_devices, num_teams)), None


def sequential(num_devices: int, num_teams: int, num_classes: int | None, rng: np.random.Generator) -> Formed:
    """Consecutive devices form a team: the first ones the first team, and so on."""
    return blocks(num_devices, num_teams), None


def label_groups(num_teams: int, num_classes: int | None, extend: Callable[[int], int]) -> np.ndarray:
    """[teams, classes] bool: consecutive groups of labels; a group of `size` labels is extended by `extend(size)`.

    Raises:
        ValueError: there are more teams than classes.
    """
    if num_classes is None or num_teams > num_classes:
        raise ValueError(
            f"{num_teams} teams need at least one class each, there are {num_classes or 'no'} classes; "
            "ask for fewer teams or form them by random or sequential"
        )
    groups = np.zeros((num_teams, num_classes), dtype=bool)
    for team, labels in enumerate(np.array_split(np.arange(num_classes), num_teams)):
        reach = labels[0] + np.arange(len(labels) + extend(len(labels)))
        groups[team, reach % num_classes] = True
    return groups


def by_labels(num_devices: int, num_teams: int, num_classes: int | None, extend: Callable[[int], int]) -> Formed:
    """Consecutive devices form a team; each team has a group of labels (see `label_groups`)."""
    team = blocks(num_devices, num_teams)
    return team, label_groups(num_teams, num_classes, extend)[team]


def worst(num_devices: int, num_teams: int, num_classes: int | None, rng: np.random.Generator) -> Formed:
    """Teams have no label in common: two teams of ten classes hold {0-4} and {5-9} (PerMFL, Table 2, worst case)."""
    return by_labels(num_devices, num_teams, num_classes, lambda size: 0)


def average(num_devices: int, num_teams: int, num_classes: int | None, rng: np.random.Generator) -> Formed:
    """As `worst`, but each team also holds the next two labels: {0-6} and {5-9, 0, 1} (Table 2, average)."""
    return by_labels(num_devices, num_teams, num_classes, lambda size: 2)


def overlapping(
    num_devices: int,
    num_teams: int,
    num_classes: int | None,
    rng: np.random.Generator,
    *,
    overlap: float = 0.5,
) -> Formed:
    """As `worst`, but a team of k labels also holds the next round(`overlap` * k) labels."""
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap is a fraction of a team's labels, from 0 to 1; got {overlap}")
    return by_labels(num_devices, num_teams, num_classes, lambda size: round(overlap * size))


def learned(
    num_devices: int,
    num_teams: int,
    num_classes: int | None,
    rng: np.random.Generator,
    names: np.ndarray,
    asked: bool,
    *,
    source: str = "",
    by: str = "",
    threshold: float = 0.5,
) -> Formed:
    """The groups that a run has learned: learned:RUN_FOLDER, from the last matrix in its collaboration.npz.

    Args:
        num_devices: number of devices.
        num_teams: number of teams, used by `by=spectral` only; otherwise it follows from the matrix.
        num_classes: not used.
        rng: not used.
        names: [n] the names of the devices, by which they are found in the run.
        asked: whether the user asked for `num_teams` teams; then it is an error if there are more or fewer.
        source: the run folder, or its collaboration.npz.
        by: "connected": devices are in one team if they are connected by pairs whose weights are at least `threshold`
            times the largest one; "shared" (the default): only pairs count that also have most of the devices they
            listen to in common; "spectral": spectral clustering.
        threshold: see `by`.

    Raises:
        ValueError: there is no such run, it is about other devices, or it has another number of teams.
    """
    from polytier.tree.collaboration import FILE, load

    if not source:
        raise ValueError("learned teams need a run that has learned groups: learned:RUN_FOLDER")
    path = Path(source).expanduser()
    path = path / FILE if path.is_dir() else path
    snapshots, _ = load(path)
    last = snapshots[max(snapshots)]
    place = {str(name): k for k, name in enumerate(last.ids.tolist())}
    unknown = [name for name in names.tolist() if str(name) not in place]
    if unknown:
        raise ValueError(
            f"{path} is about {', '.join(list(place)[:3])}, ... ({len(place)} clients) and has no device {unknown[0]}; "
            "give a run over the same devices, with a method that compares devices and not teams"
        )
    here = last.take(np.array([place[str(name)] for name in names.tolist()]))
    team = here.groups(by, num_teams, threshold)
    if asked and (found := int(team.max()) + 1) != num_teams:
        raise ValueError(
            f"{num_teams} teams asked for, {path} has {found}; leave out teams, or choose their number with by=spectral"
        )
    return team, None


FORMATIONS: dict[str, Callable[..., Formed]] = {
    "random": random,
    "sequential": sequential,
    "worst": worst,
    "average": average,
    "overlapping": overlapping,
    "learned": learned,
}
