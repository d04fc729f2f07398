"""A job: what all nodes of a federation agree on before anybody starts. A TOML file, settled by `federation init`.

The keys of a run, and a table:

    [network]
    shape = [8]              # of one sample
    dtype = "float32"        # of the samples: float32, uint8 for images, int64 for tokens
    classes = 3              # 0: the targets are numbers
    targets = []             # the shape of one target; [] for one label or number
    deadline = 60.0          # seconds for an answer of a device
    team_deadline = 600.0    # seconds for an answer of a team
    quorum = 0.5             # share of the nodes asked that have to answer, at least one
    wait = 0.0               # seconds to wait for the whole roster at the start; 0: until everybody is there
    relay = false            # methods without teams: devices dial their teams, which pass everything on

    [network.teams]          # the roster: teams with their devices, or with further teams; or devices = [...]
    north = ["ann", "bob"]
    south = ["cleo"]

    [network.gateways]       # certificates that may speak for several devices
    lab = ["ann", "cleo"]

    [network.code]           # written by `federation init`: the SHA-256 of each module of your own that the job names
    my_models = "..."
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polytier._errors import unknown
from polytier._text import finite
from polytier.algorithms.multimodel import MultiModel
from polytier.data.federation import Federation
from polytier.data.own_npz import read_arrays
from polytier.data.population import Population
from polytier.engines.exchange import Exchange
from polytier.engines.network.parent import Patience
from polytier.engines.network.rehearsal import made_up, pruned, rehearse
from polytier.engines.network.world import without_samples
from polytier.engines.protocol import EngineFactory
from polytier.files.read import digest_of, reading
from polytier.files.write import write_text
from polytier.method.algorithm import Algorithm
from polytier.models.own_code import load
from polytier.runs.assemble import Assembly, assemble
from polytier.runs.methods import make_method, method_of
from polytier.runs.model_specs import RULES, model_specs, own_fields
from polytier.runs.spec import PYTHON, RunSpec, check_spec, read_numbers, read_toml, to_toml
from polytier.runs.trust import is_built_in, named_code
from polytier.tree.topology import Topology

KEYS = {
    "shape": [8],
    "dtype": "float32",
    "classes": 2,
    "targets": [],
    "deadline": 60.0,
    "team_deadline": 600.0,
    "quorum": 0.5,
    "wait": 0.0,
    "relay": False,
    "teams": {},
    "devices": [],
    "gateways": {},
    "code": {},
}
MOST_TRIED, WIDTH_TRIED = 256, 8  # a job with more devices is tried with so many children of each node
DTYPES = {"float32": torch.float32, "uint8": torch.uint8, "int64": torch.int64}
TEMPLATE = """algorithm = "permfl"
model = "mclr"
rounds = 20
batch_size = 32
seed = 0

[set]
device_steps = 10
team_rounds = 2

[network]
shape = [8]
dtype = "float32"
classes = 2
deadline = 60.0
team_deadline = 600.0
quorum = 0.5

[network.teams]
north = ["ann", "bob"]
south = ["cleo", "dan"]
"""


@dataclass(frozen=True)
class Job:
    """What all nodes of a federation agree on.

    Args:
        spec: The settings of the run.
        network: The table [network], complete.
        roster: The tree of everybody who may take part.
        scaling: Mean and spread of the inputs, as lists; None if inputs are used as they are, or not yet known.
    """

    spec: RunSpec
    network: dict[str, Any]
    roster: Topology
    scaling: list[Any] | None = None

    @property
    def tree(self) -> Topology:
        """The tree of the run: the roster, without teams for methods that ignore them."""
        parts = list((self.method().parts() or {"": self.method()}).values())
        flat = self.roster.num_tiers > 2 and all(part.tiers == 2 for part in parts)
        return in_federation_order(self.roster.flat() if flat else self.roster)

    @property
    def relayed(self) -> bool:
        """Whether the teams of the roster pass on the messages of a method that has no teams."""
        return self.network["relay"] and self.roster.num_tiers > 2 and self.tree.num_tiers == 2

    @property
    def standardized(self) -> bool:
        """Whether inputs are scaled to mean 0 and standard deviation 1 over the training samples of all devices."""
        return self.spec.standardize

    @property
    def features(self) -> tuple[int, int]:
        """The number of channels or features that are scaled, and the number of values of each in one sample."""
        first, *rest = self.network["shape"]
        return first, prod(rest)

    @property
    def patience(self) -> Patience:
        """How long parents wait."""
        net = self.network
        return Patience(float(net["deadline"]), float(net["team_deadline"]), float(net["quorum"]))

    def population(self, tree: Topology, counts: Mapping[str, Any]) -> Population:
        """The population of the devices of a tree, in its order; `counts` are their samples by split, by name."""
        place, devices, teams = tree.order.numpy(), np.empty_like(tree.names[-1]), None
        devices[place] = tree.names[-1]
        if tree.num_tiers > 2:
            teams = np.empty(len(devices), dtype=tree.names[-2].dtype)
            teams[place] = tree.names[-2][tree.parents[-1].numpy()]
        classes, image = self.network["classes"], self.network["dtype"] == "uint8"
        population = Population(
            ids=devices,
            counts=torch.tensor([list(counts[str(name)]) for name in devices], dtype=torch.int64),
            shape=tuple(self.network["shape"]),
            dtype=DTYPES[self.network["dtype"]],
            target_shape=tuple(self.network["targets"]),
            num_classes=classes or None,
            team=teams,
            scale=torch.tensor(1 / 255) if image else None,
        )
        scaled = self.rescaled(without_samples(population))
        return replace(population, scale=scaled.scale, shift=scaled.shift)

    def rescaled(self, federation: Federation) -> Federation:
        """Data as a model sees them with the scaling of this job."""
        if self.scaling is None:
            return federation
        mean, spread = (torch.tensor(values, dtype=torch.float64) for values in self.scaling)
        return federation.rescaled(mean, spread)

    def federation(self, name: str, path: Path) -> Federation:
        """The samples of one device, from an .npz file with x, y and optionally split.

        Raises:
            ValueError: The file cannot be read, or its samples are not those of the job.
        """
        advice = "write it by np.savez with x, y and optionally split (train, validation, test)"
        with reading(path, "an .npz file", advice):
            arrays = read_arrays(path, ("x", "y"), ("x", "y", "split"))
        shares: Any = read_numbers("split", self.spec.split, finite, 3, "3:0:1")
        found = Federation.from_arrays(
            arrays["x"],
            arrays["y"],
            np.full(len(arrays["x"]), name),
            split=arrays.get("split"),
            shares=shares,
            seed=self.spec.seed,
            num_classes=self.network["classes"] or None,
        )
        form = tuple(found.x.shape[1:]), found.x.dtype, tuple(found.y.shape[1:]), found.y.is_floating_point()
        net = self.network
        wanted = tuple(net["shape"]), DTYPES[net["dtype"]], tuple(net["targets"]), not net["classes"]
        if form != wanted:
            raise ValueError(
                f"{path}: samples have shape {form[0]} and type {form[1]}, targets shape {form[2]}; the job has "
                f"{wanted[0]}, {wanted[1]} and {wanted[2]}{'' if net['classes'] else ' (numbers)'}"
            )
        if net["classes"] and int(found.y.max()) >= net["classes"]:
            raise ValueError(f"{path}: label {int(found.y.max())} in data for {net['classes']} classes, 0 to classes-1")
        return found

    def values(self) -> dict[str, Any]:
        """The job as values that JSON can hold, for the nodes below; without the roster."""
        kept = {key: value for key, value in self.network.items() if key not in ("teams", "devices")}
        settings = {k: v for k, v in self.spec.values().items() if v is not None} | self.about_data
        plain, defaults = RunSpec().model_dump(), []  # a node of another version may not know all of them
        for table, known in ((settings, plain), (kept, KEYS)):
            defaults += [key for key, value in table.items() if value == known.get(key)]
        return {"spec": settings, "network": kept, "defaults": defaults}

    @property
    def about_data(self) -> dict[str, Any]:
        """The settings about the data that nodes need; `RunSpec.values` leaves them out."""
        return {"split": self.spec.split, "standardize": self.spec.standardize}

    def method(self) -> Algorithm:
        """The method of the job."""
        specs = model_specs(self.spec)
        methods = {name: method_of(each) for name, each in specs.items()}
        return methods[""] if "" in methods else make_method(self.spec.algorithm, own_fields(self.spec), methods)

    def assemble(
        self,
        tree: Topology,
        federation: Federation | Population,
        engine: EngineFactory | None = None,
        whole: bool = True,
    ) -> Assembly:
        """The parts of a run at one node.

        Args:
            tree: The tree of its world.
            federation: Its data; a population for nodes without data.
            engine: Makes the engine.
            whole: Whether the tree is that of the run.
        """
        if isinstance(federation, Population):
            federation = without_samples(federation)
        parts: Any = {"federation": federation, "topology": tree if tree.num_tiers > 2 else None}
        return assemble(self.spec, algorithm=self.method(), **parts, engine=engine, whole=whole)


def in_federation_order(tree: Topology) -> Topology:
    """The tree with devices numbered in the sorted order of their names, as a federation has them."""
    order = np.argsort(np.argsort(tree.names[-1]))
    return Topology(tree.names, tree.parents, torch.from_numpy(order))


# -- reading ------------------------------------------------------------------------------------------


def job_of_parent(values: Any, tree: Topology) -> Job:
    """The job that a parent described; `tree` is the part of the roster that this node may see.

    Raises:
        ValueError: It is no job.
    """
    if not isinstance(values, dict) or not all(isinstance(values.get(key), dict) for key in ("spec", "network")):
        raise ValueError("the parent describes no job")
    plain = values.get("defaults", [])
    network, spec = (
        {key: value for key, value in values[table].items() if key in known or key not in plain}
        for table, known in (("network", KEYS), ("spec", RunSpec.model_fields))
    )
    for key in network:
        if key not in KEYS:
            raise unknown("key of [network] in this version of polytier", key, list(KEYS))
    network = {**KEYS, **network}
    check_network(network, "the job of the parent")
    job = Job(check_spec({**spec, "data": PYTHON}), network, tree)
    check_method(job, "the job of the parent")
    return job


def read_job(path: Path) -> Job:
    """The job in a file.

    Raises:
        ValueError: The file is no job, or the method cannot be run over a network.
    """
    values = read_toml(path)
    network = values.pop("network", None)
    if not isinstance(network, dict):
        raise ValueError(f"{path} has no table [network]; `polytier federation init NEW.toml` writes an example")
    values.pop("versions", None)
    return make_job(values, network, str(path))


def make_job(values: Mapping[str, Any], network: Mapping[str, Any], where: str) -> Job:
    """The job of these settings; `where` names their source in messages."""
    for key in network:
        if key not in KEYS:
            raise unknown(f"key of [network] in {where}", key, list(KEYS))
    complete = {**KEYS, "teams": {}, "devices": [], "gateways": {}, **network}
    check_network(complete, where)
    spec = check_spec({**values, "data": PYTHON})
    tree = roster_tree(complete, where)
    job = Job(spec, complete, tree)
    check_method(job, where)
    return job


def check_network(network: Mapping[str, Any], where: str) -> None:
    """Raise an error for values of [network] that are not allowed."""

    def sizes(value: Any) -> bool:
        return isinstance(value, list) and len(value) <= 4 and all(type(n) is int and n >= 1 for n in value)

    def number(least: float, most: float) -> Any:
        return lambda value: type(value) in (int, float) and least <= value <= most

    rules: dict[str, tuple[Any, str]] = {
        "shape": (lambda v: sizes(v) and bool(v), "a list such as [3, 32, 32]"),
        "targets": (sizes, "a list; [] for one label or number"),
        "dtype": (lambda v: v in DTYPES, f"one of {', '.join(DTYPES)}"),
        "classes": (lambda v: type(v) is int and 0 <= v < 1 << 20, "a whole number; 0 for targets that are numbers"),
        "deadline": (number(0.001, 1e6), "seconds, above 0"),
        "team_deadline": (number(0.001, 1e7), "seconds, above 0"),
        "quorum": (number(0, 1), "a share from 0 to 1"),
        "wait": (number(0, 1e7), "seconds; 0: until everybody is there"),
        "relay": (lambda v: type(v) is bool, "true or false"),
        "code": (lambda v: isinstance(v, dict), "a table; `polytier federation init` writes it"),
    }
    for key, (fits, allowed) in rules.items():
        if not fits(network[key]):
            raise ValueError(f"{where}: {key} of [network] is {network[key]!r}; it is {allowed}")


def roster_tree(network: Mapping[str, Any], where: str) -> Topology:
    """The tree of the roster."""
    if bool(network["teams"]) == bool(network["devices"]):
        raise ValueError(f"{where}: [network] needs a roster: devices = [...], or a table [network.teams], not both")
    paths = list(walk(network["teams"] or network["devices"], (), where))
    if len({len(path) for path in paths}) != 1:
        raise ValueError(f"{where}: all devices of the roster need the same number of teams above them")
    for tier in range(len(paths[0])):
        places = {path[tier]: path[:tier] for path in paths}
        twice = [path[tier] for path in paths if places[path[tier]] != path[:tier]]
        last = tier == len(paths[0]) - 1
        if last and len(paths) != len(places):
            twice += [name for name in places if sum(path[-1] == name for path in paths) > 1]
        if twice:
            raise ValueError(f"{where}: {twice[0]!r} is in the roster twice; give every node a name of its own")
    paths.sort(key=lambda path: path[-1])
    tiers, below = [], [path[-1] for path in paths]
    for level in range(len(paths[0]) - 1, 0, -1):
        known = {path[level]: path[level - 1] for path in paths}
        tiers.append([known[name] for name in below])
        below = sorted(set(tiers[-1]))
    return Topology.build([path[-1] for path in paths], *tiers)


def walk(roster: Any, above: tuple[str, ...], where: str) -> Iterator[tuple[str, ...]]:
    """The path of every device: the teams above it, and its name."""
    if isinstance(roster, dict) and roster:
        for name, below in roster.items():
            yield from walk(below, (*above, checked_name(name, where)), where)
    elif isinstance(roster, list) and roster:
        for name in roster:
            yield (*above, checked_name(name, where))
    else:
        raise ValueError(f"{where}: team {'/'.join(above)!r} of the roster has no devices; give it a list of names")


def checked_name(name: Any, where: str) -> str:
    """A name of a node: it is part of file names and of certificates."""
    fits = isinstance(name, str) and 1 <= len(name) <= 50 and name.replace("-", "").replace("_", "").isalnum()
    if not fits or not name.isascii():
        raise ValueError(f"{where}: {name!r} is no name of a node; use 1 to 50 letters, digits, - and _")
    return name


def check_method(job: Job, where: str) -> None:
    """Raise an error if the method cannot be run over a network.

    Raises:
        ValueError: It needs files, values per node or trees that only a simulation has.
    """
    spec, method = job.spec, job.method()
    for rule in RULES:
        if isinstance(getattr(spec, rule), str) and getattr(spec, rule).startswith(("table:", "schedule:")):
            raise ValueError(f"{where}: {rule} is a file, which the nodes do not have; give a fraction or count:N")
    if any(each.standardize != spec.standardize for each in model_specs(spec).values()):
        raise ValueError(f"{where}: all models see the same inputs over a network; give standardize once, for all")
    if spec.standardize and job.network["dtype"] == "int64":
        raise ValueError(f"{where}: tokens cannot be standardised; leave standardize out")
    parts = list((method.parts() or {"": method}).values())
    if isinstance(method, MultiModel) and len({part.tiers == 2 for part in parts}) > 1 and job.roster.num_tiers > 2:
        raise ValueError(f"{where}: models on trees of different depth cannot be trained over a network; use devices")
    for part in parts:
        per_node = [name for name, value in vars(part).items() if holds_list(value)]
        if per_node:
            raise ValueError(f"{where}: {per_node[0]} has one value per node; over a network give one for all")


def holds_list(value: Any) -> bool:
    """Whether a field has one value per node."""
    values = value.values() if isinstance(value, Mapping) else [value]
    return any(isinstance(each, list | tuple) for each in values)


def check_code_names(job: Job, trust: bool) -> None:
    """Raise an error if a job from elsewhere names code to import, or files to read, unless it is trusted."""
    for key, name in named_code(job.spec.values()):
        if not trust and not (key == "model" and is_built_in(name)):
            raise ValueError(
                f"the job has {key} = {name!r}, which imports code or reads files on this machine; if you trust it and "
                "whoever runs the server, repeat the command with --trust"
            )


def code_digests(spec: RunSpec) -> dict[str, str]:
    """SHA-256 of the source of each module of the user that a job names, by the module's name."""
    found = {}
    for key, name in named_code(spec.values()):
        module = name.partition(":")[0]
        if not (key == "model" and is_built_in(name)):
            load(name)
            file = sys.modules[module].__file__
            found[module] = "" if file is None else digest_of(Path(file))
    return found


def check_code(job: Job) -> None:
    """Raise an error if a module that the job names is another one here than where the job was settled."""
    here = code_digests(job.spec) if job.network["code"] else {}
    for module, wanted in job.network["code"].items():
        if here.get(module) != wanted:
            raise ValueError(f"{module} has other code here than when the job was settled; install the same version")


# -- settling -----------------------------------------------------------------------------------------


def settle(path: Path) -> Job:
    """Check a job on made-up data, decide what is open, and write it back.

    Returns:
        The complete job.
    """
    job = read_job(path)
    tree = job.tree if job.tree.size(job.tree.leaf) <= MOST_TRIED else pruned(job.tree, WIDTH_TRIED)
    some = job.population(tree, {str(name): (4, 2, 2) for name in tree.names[-1]})
    assembly = job.assemble(tree, made_up(some, tree))
    try:
        rehearse(assembly.context, Exchange(assembly.codec, assembly.upload))
        settled = Job(assembly.spec, {**job.network, "code": code_digests(assembly.spec)}, job.roster)
    finally:
        assembly.close()
    computed = ("data", "workers", "tile", "engine", "on")
    values = {k: v for k, v in settled.spec.values().items() if k not in computed} | job.about_data
    write_text(path, to_toml({**values, "network": {k: v for k, v in settled.network.items() if v not in ({}, [])}}))
    return read_job(path)
