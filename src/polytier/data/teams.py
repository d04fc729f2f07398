"""Which device is in which team, and which labels a team's devices may hold.

A formation returns the team of each device [n] and, if it decides on labels, which ones a device may hold
[n, classes]; the partition then keeps to them. Its own arguments are keyword-only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

Formed = tuple[np.ndarray, np.ndarray | None]


def blocks(num_devices: int, num_teams: int, what: str = "teams") -> np.ndarray:
    """[n] the number of the block of each device; block sizes differ by at most one."""
    if not 1 <= num_teams <= num_devices:
        raise ValueError(
            f"{num_teams} {what} of {num_devices} devices: each needs at least one device; "
            f"ask for 1 to {num_devices} {what}, or for more devices"
        )
    return np.arange(num_devices) * num_teams // num_devices


def random(num_devices: int, num_teams: int, num_classes: int | None, rng: np.random.Generator) -> Formed:
    """Devices at random, in teams whose sizes differ by at most one."""
    return rng.permutation(blocks(num_devices, num_teams)), None


def sequential(num_devices: int, num_teams: int, num_classes: int | None, rng: np.random.Generator) -> Formed:
    """The first devices are the first team, and so on."""
    return blocks(num_devices, num_teams), None


def label_groups(num_teams: int, num_classes: int | None, extend: Callable[[int], int]) -> np.ndarray:
    """[teams, classes]: consecutive groups of labels, each reaching `extend(size)` labels further."""
    if num_classes is None or num_teams > num_classes:
        raise ValueError(
            f"{num_teams} teams cannot share out {num_classes or 'no'} classes, at least one each; "
            "ask for fewer teams or form them by random or sequential"
        )
    groups = np.zeros((num_teams, num_classes), dtype=bool)
    for team, labels in enumerate(np.array_split(np.arange(num_classes), num_teams)):
        reach = labels[0] + np.arange(len(labels) + extend(len(labels)))
        groups[team, reach % num_classes] = True
    return groups


def by_labels(num_devices: int, num_teams: int, num_classes: int | None, extend: Callable[[int], int]) -> Formed:
    team = blocks(num_devices, num_teams)
    return team, label_groups(num_teams, num_classes, extend)[team]


def worst(num_devices: int, num_teams: int, num_classes: int | None, rng: np.random.Generator) -> Formed:
    """Teams share no label: two teams of ten classes hold {0-4} and {5-9} (PerMFL, Table 2, worst case)."""
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
    """As `worst`, but a team of k labels also holds the next `overlap` * k (rounded)."""
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap is a share of a team's labels, from 0 to 1; got {overlap}")
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
    """The groups that a run has found: learned:RUN_FOLDER, from the last matrix in its collaboration.npz.

    by=connected: devices are in one team if a chain of pairs joins them whose weights are at least `threshold` times
    the largest; by=shared (the default): and which have most of those they listen to in common; the number of teams
    follows. by=spectral: spectral clustering into the number of teams asked for. Devices are known by their names.
    """
    from polytier.tree.collaboration import FILE, load

    if not source:
        raise ValueError("learned teams need a run that has found groups: learned:RUN_FOLDER")
    path = Path(source).expanduser()
    path = path / FILE if path.is_dir() else path
    snapshots, _ = load(path)
    last = snapshots[max(snapshots)]
    place = {str(name): k for k, name in enumerate(last.ids.tolist())}
    unknown = [name for name in names.tolist() if str(name) not in place]
    if unknown:
        raise ValueError(
            f"{path} is about {', '.join(list(place)[:3])}, .. ({len(place)} clients) and has no device {unknown[0]}; "
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
