"""The world of one node: its ancestors, itself and all nodes below it.

Random draws depend on names and not on numbers, and blocks of sums on the position among the children of a parent. So a
node computes the same numbers in its own small world as in the tree of the whole run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytier.data.federation import Federation
from polytier.data.population import Population
from polytier.engines.network.versions import NodeMemory
from polytier.messages.ledger import Ledger
from polytier.method.context import Context
from polytier.tree.topology import Topology


def address(topology: Topology, tier: int, node: int) -> str:
    """How messages name a node: the name of its tier and its own, such as "team/north"."""
    return f"{topology.tier_names[tier]}/{topology.names[tier][node]}"


def places(topology: Topology, tier: int) -> dict[str, int]:
    """The number of every node of a tier by its address."""
    return {address(topology, tier, node): node for node in range(topology.size(tier))}


def span(topology: Topology, tier: int, node: int) -> list[tuple[int, int]]:
    """By tier: the first node, and the one after the last, of a node's world. Nodes of a world are consecutive."""
    found = [(node, node + 1)]
    for t in range(tier, 0, -1):
        above = int(topology.parents[t][found[0][0]])
        found.insert(0, (above, above + 1))
    for t in range(tier, topology.leaf):
        low, high = found[-1]
        found.append((int(topology.offsets[t][low]), int(topology.offsets[t][high])))
    return found


def subtree(topology: Topology, tier: int, node: int) -> Topology:
    """The tree of a node's world; its devices are numbered in their order in the tree."""
    spans = span(topology, tier, node)
    names = tuple(n[low:high] for n, (low, high) in zip(topology.names, spans, strict=True))
    parents = [torch.zeros(1, dtype=torch.int64)]
    for t in range(1, topology.num_tiers):
        (above, _), (low, high) = spans[t - 1], spans[t]
        parents.append(topology.parents[t][low:high] - above)
    return Topology(names, tuple(parents), torch.arange(len(names[-1])))


def devices_of(topology: Topology, tier: int, node: int) -> Tensor:
    """[k] the devices of a node's world, as numbers in the federation."""
    low, high = span(topology, tier, node)[-1]
    return topology.order[low:high]


def population_of(population: Population, devices: Tensor) -> Population:
    """The population of some devices, given by number."""
    which = devices.numpy()
    columns = {
        name: None if (values := getattr(population, name)) is None else values[which]
        for name in ("team", "cluster", "label_counts")
    }
    return replace(population, ids=population.ids[which], counts=population.counts[devices], **columns)


def without_samples(population: Population) -> Federation:
    """A federation with the sizes of all devices and without samples, for nodes that must not have any."""
    ends = population.counts.reshape(-1).cumsum(0).reshape(-1, 3)
    target = torch.float32 if population.num_classes is None else torch.int64
    return Federation(
        x=torch.zeros((0, *population.shape), dtype=population.dtype),
        y=torch.zeros((0, *population.target_shape), dtype=target),
        bounds=torch.cat([ends[:, :1] - population.counts[:, :1], ends], 1),
        ids=population.ids,
        team=population.team,
        cluster=population.cluster,
        num_classes=population.num_classes,
        scale=population.scale,
        shift=population.shift,
    )


def only_devices(federation: Federation, devices: Tensor) -> Federation:
    """The samples of some devices, given by number."""
    bounds, which = federation.bounds[devices], devices.numpy()
    pieces = [torch.arange(int(start), int(end)) for start, end in bounds[:, [0, 3]]]
    sizes = bounds[:, 3] - bounds[:, 0]
    rows = torch.cat(pieces)
    return replace(
        federation,
        x=federation.x[rows],
        y=federation.y[rows],
        bounds=bounds - bounds[:, :1] + (sizes.cumsum(0) - sizes).unsqueeze(1),
        ids=federation.ids[which],
        team=None if federation.team is None else federation.team[which],
        cluster=None if federation.cluster is None else federation.cluster[which],
    )


def world_of(context: Context, tier: int, node: int) -> Context:
    """The context of one node, made from one that contains it. Only a device gets samples: its own.

    Args:
        context: Of one model.
        tier: Tier of the node in the tree of this model.
        node: Its number in that tier.
    """
    topology, devices = context.topology, devices_of(context.topology, tier, node)
    tree = subtree(topology, tier, node)
    population = population_of(context.population, devices)
    if tier == topology.leaf:
        federation = only_devices(context.batches.federation, devices)
    else:
        federation = without_samples(population)
    return replace(
        context,
        topology=tree,
        population=population,
        batches=context.batches.over(federation),
        memory=NodeMemory(tree),
        ledger=Ledger(tree),
        device_steps=0,
        engine=None,  # type: ignore[arg-type]
        scopes={},
    )


# -- as text ------------------------------------------------------------------------------------------


def tree_text(topology: Topology) -> dict[str, Any]:
    """A tree as values that JSON can hold."""
    return {
        "names": [names.tolist() for names in topology.names],
        "parents": [parents.tolist() for parents in topology.parents],
        "order": topology.order.tolist(),
    }


def read_tree(about: Any) -> Topology:
    """The tree that `tree_text` described.

    Raises:
        ValueError: It is no tree.
    """
    try:
        names = tuple(as_names(each) for each in about["names"])
        parents = tuple(torch.tensor(each, dtype=torch.int64) for each in about["parents"])
        order = torch.tensor(about["order"], dtype=torch.int64)
        fits = len(names) == len(parents) >= 2 and len(names[0]) == 1 and len(order) == len(names[-1])
        for above, own, parent in zip((names[0], *names), names, parents, strict=False):
            inside = bool(((parent >= 0) & (parent < len(above))).all()) and bool((parent.diff() >= 0).all())
            fits = fits and len(own) == len(parent) >= 1 and inside
        fits = fits and sorted(order.tolist()) == list(range(len(order)))
    except (TypeError, KeyError, IndexError, RuntimeError, OverflowError) as error:
        raise ValueError(f"this is no tree: {error}") from None
    if not fits:
        raise ValueError("this is no tree: names and parents do not belong together")
    return Topology(names, parents, order)


def as_names(names: Any) -> np.ndarray:
    """Names as an array of integers or of texts, as a topology has them."""
    kinds = {type(name) for name in names}
    if not kinds <= {int} and not kinds <= {str}:
        raise ValueError(f"names are integers or texts, all of one kind; got {json.dumps(names)[:80]}")
    return np.array(names)
