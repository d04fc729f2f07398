"""The fields of a method on the user's own data that nobody has set: a short search on training data.

A fifth of the training samples of each device is held out. Candidates are trained for a few rounds and compared by the
loss of the models that the method is judged by on the samples held out; validation and test samples are not used.
Steps start from 1 / L and pulls from a share of L, where L is the curvature at the initial model. One field after the
other is raised or lowered by a factor while that helps.

The result depends on the settings and the data alone: not on the engine, the number of workers or the tile.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from polytier._terminal import silence
from polytier.algorithms import CoBo, Ditto, PerMFL, PFedMe, SFedHP
from polytier.data.build import is_npz
from polytier.data.federation import Federation, split_by_shares
from polytier.data.pack import is_stored
from polytier.method.algorithm import Algorithm
from polytier.method.call import Diverged
from polytier.models.metrics import LOSS
from polytier.runs.defaults import settings as default_fields
from polytier.runs.make_data import make_topology
from polytier.runs.methods import make_method, method_class
from polytier.runs.read import judge_of
from polytier.runs.smoothness import quick_smoothness
from polytier.runs.spec import PYTHON, RunSpec, read_teams
from polytier.tree.topology import Topology

if TYPE_CHECKING:
    from polytier.runs.loop import Loop

log = logging.getLogger("polytier")
STEPS = ("device_lr", "personal_lr", "tune_lr", "inner_lr", "global_lr", "local_lr")  # of devices, on their models
# where pulls start, in units of L; pulls of other methods start at their defaults
PULLS: dict[type[Algorithm], dict[str, float]] = {
    PerMFL: {"device_pull": 0.03, "team_pull": 0.006},
    SFedHP: {"device_pull": 0.03, "team_pull": 0.006},
    Ditto: {"device_pull": 0.1},
    PFedMe: {"device_pull": 1.0},
}
FACTOR, MOVES = 3.0, 3  # a field is raised or lowered by this factor, at most so many times
MOST_RUNS, MOST_ROUNDS, MOST_GRADIENTS = 12, 50, 1000  # candidates; rounds, and gradients of a device, in each
MOST_WORK, MOST_BYTES = 1 << 28, 1 << 28  # parameters x devices x gradients of a candidate; samples: beyond, no search
UNEVEN = 100  # features whose standard deviations differ by this factor need scaling


def with_first_fields(spec: RunSpec, federation: Federation, **parts: Any) -> RunSpec:
    """The specification with fields chosen for the user's own data. Fields that are set stay as they are.

    Args:
        spec: The settings of one model.
        federation: Its data; only training samples are used.
        **parts: Other arguments of `assemble` that were given as objects: model, loss, topology, ...

    Returns:
        The specification itself if all fields that would be chosen are set. If the data are not the user's own, only
        steps that follow from pulls are set.
    """
    tiers = team_tiers(spec, federation, parts.get("topology"))
    if not is_own(spec):
        return with_exact_steps(spec, tiers)
    free = [name for name in free_fields(method_class(spec.algorithm)) if name not in spec.set]
    free = [name for name in free if tiers or name != "team_pull"]
    if not free:
        return spec
    try:
        search = Search.begin(spec, federation, free, parts)
    except ValueError:
        return spec  # the run itself meets the same error, and tells it
    chosen = search.complete(search.best())
    how = f"a short search in {search.runs} runs" if search.runs else f"their curvature alone: {search.no_search}"
    values = ", ".join(f"{name} = {value}" for name, value in chosen.items())
    log.info("%s: %s (chosen on training data by %s; --set FIELD=VALUE wins)", spec.algorithm, values, how)
    return spec.replace(set={**spec.set, **chosen})


def with_exact_steps(spec: RunSpec, tiers: Sequence[str]) -> RunSpec:
    """The specification with the steps of teams and of the server that follow from the pulls.

    Only where the table of defaults gives pulls, and for steps that neither the table nor the specification gives.
    """
    table = {name: value for name, (value, _) in default_fields(spec.algorithm, spec.data, spec.model).items()}
    if not any(name.endswith("_pull") for name in table):
        return spec
    fields = {**table, **spec.set}
    steps = exact_steps(make_method(spec.algorithm, fields), tiers)
    chosen = {name: value for name, value in steps.items() if name not in fields}
    if not chosen:
        return spec
    values = ", ".join(f"{name} = {value}" for name, value in chosen.items())
    log.info("%s: %s (from its pulls; --set FIELD=VALUE wins)", spec.algorithm, values)
    return spec.replace(set={**spec.set, **chosen})


def team_tiers(spec: RunSpec, federation: Federation, tree: Topology | None = None) -> Sequence[str]:
    """The names of the tiers of teams, the outermost first; `tree` is the tree, if it was given as an object."""
    tree = tree or make_topology(federation, read_teams(spec.teams))
    if tree is not None:
        return tree.tier_names[1 : tree.leaf]
    return () if federation.team is None else ("team",)


def is_own(spec: RunSpec) -> bool:
    """Whether the data are the user's own and the table of defaults has no row for them."""
    own = spec.data == PYTHON or is_npz(spec.data) or is_stored(spec.data)
    return own and not default_fields(spec.algorithm, spec.data, spec.model)


def free_fields(kind: type[Algorithm]) -> list[str]:
    """The fields of a method that may be chosen: steps of devices, then pulls, then the step of CoBo's weights."""
    known = [each.name for each in dataclasses.fields(kind) if each.metadata and isinstance(each.default, float)]
    more = [name for name in known if name.endswith("_pull")] + [name for name in known if name == "weight_lr"]
    return [name for name in STEPS if name in known] + more


def data_advice(federation: Federation) -> list[str]:
    """What a user may want to change about data of their own: sentences."""
    return [*class_advice(federation), *scale_advice(federation)]


def class_advice(federation: Federation) -> list[str]:
    """A sentence if no sample has some of the classes, as when they are numbered from 1."""
    if federation.num_classes is None or federation.is_tokens:
        return []
    absent = federation.num_classes - len(federation.y.unique())
    if not absent:
        return []
    classes = f"the classes are 0 to {federation.num_classes - 1}, and {absent} of them have no samples"
    return [f"{classes}; unless that is meant, number them from 0 on without gaps"]


def scale_advice(federation: Federation) -> list[str]:
    """A sentence if the features of a table differ so much in scale that no step suits all."""
    if not federation.x.is_floating_point() or federation.x.ndim != 2 or federation.scale is not None:
        return []
    spread = federation.x[:10_000].double().std(0)
    spread = spread[spread > 0]
    if len(spread) < 2 or float(spread.max() / spread.min()) < UNEVEN:
        return []
    ends = f"standard deviations from {float(spread.min()):.2g} to {float(spread.max()):.2g}"
    return [f"the features have different scales ({ends}), for which no step size is good; try --standardize"]


def hold_out(federation: Federation, seed: int) -> Federation:
    """The training samples alone, a fifth of each device's as validation samples; none where there are fewer than 5."""
    start, end = (bound.numpy() for bound in federation.span("train"))
    owner = np.repeat(np.arange(len(federation)), end - start)
    part = split_by_shares(owner, (4, 1, 0), seed)
    index = np.concatenate([np.arange(a, b) for a, b in zip(start, end, strict=True)])[np.lexsort((part, owner))]
    train = np.bincount(owner[part == 0], minlength=len(federation))
    ends = np.cumsum(end - start)
    bounds = np.stack([ends - (end - start), ends - (end - start) + train, ends, ends], axis=1)
    kept = torch.from_numpy(index)
    return dataclasses.replace(federation, x=federation.x[kept], y=federation.y[kept], bounds=torch.from_numpy(bounds))


# -- a search -----------------------------------------------------------------------------------------


@dataclass
class Search:
    """What a candidate depends on.

    spec       | the settings of the run, computed by the stacked engine in this process
    federation | the data, with samples held out if there is a search
    free       | the fields to choose
    parts      | other arguments of `assemble`
    tiers      | the names of the tiers of teams, the outermost first
    start      | the first candidate
    no_search  | why there is no search; empty if there is one
    scores     | the loss of each candidate that was run
    """

    spec: RunSpec
    federation: Federation
    free: Sequence[str]
    parts: Mapping[str, Any]
    tiers: Sequence[str] = ()
    start: dict[str, float] = field(default_factory=dict)
    no_search: str = ""
    scores: dict[tuple[float, ...], float] = field(default_factory=dict)

    @classmethod
    def begin(cls, spec: RunSpec, federation: Federation, free: Sequence[str], parts: Mapping[str, Any]) -> Search:
        """The search for these settings.

        Raises:
            ValueError: The method cannot run with these settings on these data.
        """
        compute: dict[str, Any] = {"engine": "stacked", "workers": 1, "tile": None, "metric": None}
        search = cls(spec.replace(**compute), federation, free, {**parts, "objectives": {}})
        with silence(), search.loop({}) as loop:
            context, tree = loop.context, loop.context.topology
            search.tiers = tree.tier_names[1 : tree.leaf]
            search.start = search.first(quick_smoothness(context))
            each = gradients(loop.algorithm, len(search.tiers))
            work = context.objective.dimension * len(federation) * each
        # not the rounds of the run, which may be extended
        rounds = min(MOST_ROUNDS, max(1, MOST_GRADIENTS // each), MOST_WORK // work)
        search.spec = search.spec.replace(rounds=max(1, rounds))
        if not rounds or federation.x.nbytes > MOST_BYTES:
            search.no_search = "a search would take long"
        elif int(federation.samples.max()) < 5:
            search.no_search = "no device has 5 training samples"
        else:
            search.federation = hold_out(federation, spec.seed)
        return search

    @property
    def runs(self) -> int:
        """Number of candidates that were run."""
        return len(self.scores)

    def first(self, smoothness: float | None) -> dict[str, float]:
        """The first candidate, from the curvature; the defaults of the method where that is not known."""
        kind = method_class(self.spec.algorithm)
        known: dict[str, Any] = {each.name: each.default for each in dataclasses.fields(kind)}
        pulls = next((own for base, own in PULLS.items() if issubclass(kind, base)), {})
        if smoothness:
            known |= dict.fromkeys(STEPS, 1 / smoothness) | {name: c * smoothness for name, c in pulls.items()}
        if smoothness and issubclass(kind, CoBo):  # a client has n - 1 pulls; a pair is compared in 1 of n rounds
            n = len(self.federation)
            known |= {"device_pull": 0.25 * smoothness / n, "weight_lr": 0.2 * n / smoothness}
        return {name: rounded(known[name]) for name in self.free}

    def complete(self, point: Mapping[str, float]) -> dict[str, Any]:
        """The fields of a candidate, with those that follow from them."""
        tied = exact_steps(make_method(self.spec.algorithm, {**self.spec.set, **point}), self.tiers)
        return {**point, **{name: value for name, value in tied.items() if name not in self.spec.set}}

    def loop(self, fields: Mapping[str, Any]) -> Loop:
        """The run of a candidate."""
        from polytier.runs.assemble import assemble  # these two import this module
        from polytier.runs.loop import Loop

        method = make_method(self.spec.algorithm, {**self.spec.set, **fields})
        return Loop(assemble(self.spec, algorithm=method, federation=self.federation, **self.parts))

    def score(self, point: Mapping[str, float]) -> float:
        """The mean loss over devices on the samples held out; infinite if the run diverged or there are enough runs."""
        key = tuple(point.values())
        if key not in self.scores and self.runs < MOST_RUNS:
            self.scores[key] = self.loss(self.complete(point))
        return self.scores.get(key, inf)

    def loss(self, fields: Mapping[str, Any]) -> float:
        """Train with these fields and measure the loss."""
        try:
            with silence(), self.loop(fields) as loop:
                for _ in range(self.spec.rounds):
                    loop.step()
                loop.evaluate()
                figures = loop.evaluations[""].figures()
            value = figures[judge_of(figures)]["validation"][LOSS.name]
        except (Diverged, ValueError):
            return inf
        return value if value is not None and isfinite(value) else inf

    def best(self) -> dict[str, float]:
        """The best candidate: all steps together, then each pull from the top, then each step but that of `device_lr`.

        CoBo's pull and the step of its weights stay as they start: what they are worth shows after more rounds.
        """
        point = self.start
        if self.no_search:
            return point
        steps = [name for name in self.free if name in STEPS]
        # in the other order the team models stay poor where teams contradict each other (own_data.py: relabelled)
        pulls = [(name,) for name in reversed(self.free) if name not in STEPS]
        if issubclass(method_class(self.spec.algorithm), CoBo):
            pulls = []
        for names in (tuple(steps), *pulls, *((name,) for name in steps[1:])):
            point = climb(self.score, point, names) if names else point
        return point


def climb(score: Callable[[Mapping[str, float]], float], point: dict[str, float], names: Sequence[str]) -> dict:
    """The point with some of its values raised, or else lowered, by a factor while the score falls."""
    for factor in (FACTOR, 1 / FACTOR) if isfinite(score(point)) else (1 / FACTOR,):
        before = point
        for _ in range(MOVES):
            moved = {**point, **{name: rounded(factor * point[name]) for name in names}}
            if isfinite(score(point)) and not score(moved) < score(point):
                break
            point = moved
        if point is not before:
            break
    return point


def exact_steps(method: Algorithm, tiers: Sequence[str]) -> dict[str, Any]:
    """Steps of teams and of the server with which every inner node moves to the minimiser of its own pulls.

    Args:
        method: Its pulls count; methods other than PerMFL, sFedHP and those derived from them have no such steps.
        tiers: The names of the tiers of teams, the outermost first.

    Returns:
        Fields of the method; none if a pull is not one number above 0.
    """
    if not isinstance(method, PerMFL | SFedHP):
        return {}
    lam, gamma = method.device_pull, method.team_pull
    if not (isinstance(lam, float) and isinstance(gamma, float) and lam > 0 and gamma > 0):
        return {}
    if isinstance(method, SFedHP):  # its server averages, and its teams move to the mean phi alone
        return {"team_lr": rounded(1 / gamma)} if tiers else {}
    below = dict.fromkeys(tiers, gamma) | dict.fromkeys(tiers[-1:], lam)
    own = {tier: rounded(1 / (below[tier] + gamma)) for tier in tiers}
    team = {"team_lr": own if len(own) > 1 else own[tiers[0]]} if own else {}
    return {**team, "server_lr": rounded(1 / (gamma if tiers else lam))}


def gradients(method: Any, tiers: int) -> int:
    """About how many gradients a device computes in a round."""
    rounds = getattr(method, "team_rounds", 1)
    rounds = max(rounds.values()) if isinstance(rounds, Mapping) else rounds
    steps = sum(getattr(method, name, 1) for name in method.budget)
    return steps * rounds**tiers * getattr(method, "local_rounds", 1)


def rounded(value: float) -> float:
    """The value with two significant digits, as people write it."""
    return float(f"{value:.2g}")
