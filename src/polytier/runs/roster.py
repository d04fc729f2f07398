"""Changes of the roster during a run: roster.csv in the run folder, and the tree after each change.

A change is made between two rounds. Rows and bytes of the nodes that stay are carried over by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from polytier._terminal import event
from polytier.engines.network.versions import carried
from polytier.files.csv_records import read_records, write_records
from polytier.files.read import version
from polytier.files.write import write_text
from polytier.runs.job import Job, make_job, read_job
from polytier.runs.spec import read_toml, to_toml
from polytier.tree.topology import Topology

log = logging.getLogger("polytier")
FILE = "roster.csv"
JOINS, LEAVES = "joins", "leaves"


class Change(NamedTuple):
    """A line of roster.csv.

    Args:
        number: Counted from 1.
        round: The last round before the change.
        action: "joins" or "leaves".
        device: The name of the device.
    """

    number: int
    round: int
    action: str
    device: str


def read_changes(path: Path) -> list[Change]:
    """The lines of roster.csv; none if there is no such file.

    Raises:
        ValueError: The file cannot be read.
    """
    found = read_records(path, Change)
    if odd := next((change.action for change in found if change.action not in (JOINS, LEAVES)), None):
        raise ValueError(f"{path} cannot be read: an action is {odd!r}; restore it from a copy of the run folder")
    return found


def write_changes(path: Path, changes: Iterable[Change]) -> None:
    """Write roster.csv as a whole."""
    write_records(path, Change, changes)


class RosterFile:
    """The job file of a run that is going on: its roster may change, and is read again then.

    Args:
        path: The job.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._seen = path, version(path)

    def __call__(self, job: Job) -> Job:
        """The job with the present roster."""
        try:
            changed = version(self.path)
            if changed == self._seen:
                return job
            self._seen, now = changed, read_job(self.path)
        except (OSError, ValueError) as error:
            log.warning("the roster stays as it was: %s", error, extra=event("roster"))
            return job
        table = {**job.network, **{key: now.network[key] for key in ("teams", "devices", "gateways")}}
        return replace(job, network=table, roster=now.roster)


def change_roster(path: Path, device: str, team: str | None, there: bool) -> None:
    """Add a device to the roster of a job file, or remove it.

    Args:
        path: The job.
        device: Its name.
        team: The team that it joins; None: a roster without teams. Not used for a device that is removed.
        there: Whether it is in the roster afterwards.

    Raises:
        ValueError: The device or the team is not as it has to be. Nothing is written then.
    """
    values = read_toml(path)
    network = values.get("network", {})
    known = paths(read_job(path))
    if (device in known) == there:
        raise ValueError(f"{device} is {'already' if there else 'not'} in the roster of {path}")
    above = tuple(known.get(device, ()))
    if there and team is not None:
        above = next((each for each in known.values() if each and each[-1] == team), ())
    if (there and bool(team) != any(known.values())) or (team and not above):
        teams = sorted({each[-1] for each in known.values() if each})
        raise ValueError(f"give --team, one of {', '.join(teams)}" if teams else "the roster has no teams")
    place = network["teams"] if above else network
    *outer, last = above or ("devices",)
    for name in outer:
        place = place[name]
    place[last] = [*place[last], device] if there else [name for name in place[last] if name != device]
    make_job({k: v for k, v in values.items() if k not in ("network", "versions")}, network, str(path))
    write_text(path, to_toml(values))


def members(first: Iterable[str], changes: Sequence[Change]) -> set[str]:
    """The devices that take part after some changes."""
    found = set(first)
    for change in changes:
        (found.add if change.action == JOINS else found.discard)(change.device)
    return found


def next_changes(there: set[str], wanted: set[str], newcomers: Iterable[str], after: int, round_: int) -> list[Change]:
    """The changes that are due.

    Args:
        there: The devices that take part.
        wanted: Those of the present roster.
        newcomers: Those that have come since.
        after: The number of changes so far.
        round_: The last round.
    """
    due = [(LEAVES, name) for name in sorted(there - wanted)]
    due += [(JOINS, name) for name in sorted((set(newcomers) & wanted) - there)]
    return [Change(after + k, round_, *each) for k, each in enumerate(due, 1)]


def stages(first: Iterable[str], changes: Sequence[Change], rounds: int) -> Iterator[tuple[int, set[str]]]:
    """Until which round which devices take part; the last stage ends with the run."""
    there, done = set(first), 0
    for until, some in groupby(changes, lambda change: change.round):
        if until > done:
            yield until, set(there)
            done = until
        there = members(there, list(some))
    yield rounds, there


def with_roster(job: Job, now: Job) -> dict[str, Any]:
    """The table [network] of a run after a change: the roster has everybody who was ever in it.

    Raises:
        ValueError: A device has moved to another team.
    """
    before, after = paths(job), paths(now)
    for name, path in after.items():
        if before.get(name, path) != path:
            raise ValueError(f"{name} was in {'/'.join(before[name])} and cannot change its team; give it another name")
    whole: Any = {}
    for name, path in {**before, **after}.items():
        place = whole
        for team in path[:-1]:
            place = place.setdefault(team, {})
        place = place.setdefault(path[-1], []) if path else whole.setdefault("", [])
        place.append(name)
    roster = {"teams": {}, "devices": whole[""]} if "" in whole else {"teams": whole, "devices": []}
    return {**job.network, **roster, "gateways": now.network["gateways"]}


def paths(job: Job) -> dict[str, tuple[str, ...]]:
    """The teams above each device of the roster."""
    tree, found = job.roster, {}
    for device, name in enumerate(tree.names[-1].tolist()):
        path, node = [], device
        for tier in range(tree.leaf, 1, -1):
            node = int(tree.parents[tier][node])
            path.insert(0, str(tree.names[tier - 1][node]))
        found[str(name)] = tuple(path)
    return found


def moved(tensors: Mapping[str, Tensor], old: Topology, new: Topology) -> dict[str, Tensor]:
    """The tensors of a checkpoint of one model, for another tree: rows and bytes of nodes that are in both."""

    def of(value: Tensor, tier: int, axis: int = 0) -> Tensor:
        return carried(value, old.names[tier].tolist(), new.names[tier].tolist(), axis)

    links = {old.link(tier): tier for tier in range(1, old.num_tiers)}
    found = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(":")
        if kind == "memory":
            found[name] = of(value, int(rest.split("/")[0]))
        elif kind == "ever":
            found[name] = of(value, int(rest))
        elif kind in ("bytes", "rounds"):
            found[name] = of(value, links[rest.rpartition(":")[0]], axis=int(kind == "rounds"))
        else:
            found[name] = value
    return found
