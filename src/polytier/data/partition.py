"""Which sample goes to which device.

A partition is a function `(y, num_devices, rng, allowed=None, *, own arguments) -> Assignment`:

argument    | meaning
y           | [N] labels of all samples, or [N, ...] other targets
num_devices | number of devices
rng         | the only source of random numbers
allowed     | [devices, classes] bool, the labels that a device may hold, if the team formation decides on them; or None

PARTITIONS has those that are known by name; `build_federation(partition=...)` also takes a function. Most partitions
first compute counts [devices, classes] and then hand out shuffled samples, so that no sample is given twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from polytier.data.teams import blocks

Array = np.ndarray
Mask = np.ndarray | None
Rng = np.random.Generator


@dataclass(frozen=True)
class Assignment:
    """What a partition decides: sample `index[k]` of the source goes to device `device[k]`.

    Args:
        index: [K] rows of the source; a row that is not listed is not used.
        device: [K] a number from 0 to n - 1.
        split: [K] 0 for training, 1 for validation, 2 for test; None: each device's samples are split later.
        y: [K] labels that replace those of the source; None: they stay.
        cluster: [n] the true group of each device, or None.

    Examples:
        >>> import numpy as np
        >>> halves = Assignment(index=np.arange(6), device=np.array([0, 0, 0, 1, 1, 1]))
    """

    index: Array
    device: Array
    split: Array | None = None
    y: Array | None = None
    cluster: Array | None = None


def apportion(total: int, weights: Array) -> Array:
    """Integers in proportion to the weights whose sum is `total`: the differences of a rounded cumulative sum.

    Examples:
        >>> apportion(10, np.array([1, 1, 2])).tolist()
        [2, 3, 5]
    """
    running = np.cumsum(weights, dtype=np.float64)
    return np.diff(np.rint(running / running[-1] * total), prepend=0).astype(np.int64)


def check_assignment(given: Assignment, num_samples: int, num_devices: int) -> Assignment:
    """The assignment that a user's own partition returned.

    Raises:
        ValueError: it is none, it names samples or devices that do not exist, or a device gets no samples.
    """
    check(
        isinstance(given, Assignment),
        f"a partition returns an Assignment (polytier.Assignment(index, device)); got {type(given).__name__}",
    )
    index, device = np.asarray(given.index), np.asarray(given.device)
    check(
        index.ndim == 1 and index.shape == device.shape and index.dtype.kind in "iu" and device.dtype.kind in "iu",
        "index and device of an Assignment are integers, one of each per sample; got "
        f"{index.dtype} {index.shape} and {device.dtype} {device.shape}",
    )
    for name, values, size in (("index", index, num_samples), ("device", device, num_devices)):
        inside = not len(values) or (int(values.min()) >= 0 and int(values.max()) < size)
        check(inside, f"{name} of an Assignment goes from 0 to {size - 1}")
    for name, rows in (("split", len(index)), ("y", len(index)), ("cluster", num_devices)):
        values = getattr(given, name)
        check(values is None or len(values) == rows, f"{name} of an Assignment needs {rows} values")
    empty = np.setdiff1d(np.arange(num_devices), device)
    check(not len(empty), f"the partition gives no samples to device {empty[0] if len(empty) else ''}")
    return replace(given, index=index, device=device)


def check(holds: bool, advice: str) -> None:
    """Raise a ValueError with this advice unless the condition holds."""
    if not holds:
        raise ValueError(advice)


def one_label(y: Array) -> Array:
    """The labels; a ValueError if there is not one label per sample."""
    advice = "Use iid or power-law, or a single attribute"
    known = y.ndim == 1 and y.dtype.kind in "iu"
    check(known, f"this partition needs one class label per sample; y is {y.dtype} {y.shape}. {advice}")
    return y


def check_enough(num_samples: int, num_devices: int, minimum: int = 1) -> None:
    """Raise a ValueError if there are fewer than `minimum` samples per device."""
    check(
        num_devices >= 1 and minimum >= 1,
        f"ask for at least 1 device and a minimum of at least 1 sample; got {num_devices} and {minimum}",
    )
    check(
        num_samples >= num_devices * minimum,
        f"{num_samples} samples are too few for {num_devices} devices with at least {minimum} each; "
        f"ask for at most {num_samples // max(1, minimum)} devices or a lower minimum",
    )


def deal(y: Array, counts: Array, rng: Rng) -> Assignment:
    """Give `counts[u, c]` samples of label c to device u, at random."""
    index, device = [], []
    for label in np.flatnonzero(counts.any(0)):
        pool = rng.permutation(np.flatnonzero(y == label))
        index.append(pool[: counts[:, label].sum()])
        device.append(np.repeat(np.arange(len(counts)), counts[:, label]))
    return Assignment(np.concatenate(index), np.concatenate(device))


def lift(counts: Array, minimum: int, allowed: Mask) -> Array:
    """[n, classes] counts after samples were moved from the largest devices to those that have less than the minimum.

    Every move brings the small device to the minimum, or uses up a label of the large one, or brings the large one
    down to the minimum; so this ends. (To draw a partition again until it fits may never end.)
    """
    counts, size = counts.copy(), counts.sum(1)
    for poor in np.flatnonzero(size < minimum):
        may = np.ones(counts.shape[1], dtype=bool) if allowed is None else allowed[poor]
        while size[poor] < minimum:
            rich = int((size * counts[:, may].any(1)).argmax())
            spare = counts[rich] * may
            label = int(spare.argmax())
            move = min(minimum - size[poor], size[rich] - minimum, spare[label])
            check(
                move > 0,
                f"device {poor} cannot get {minimum} samples of the labels its team may hold; "
                "ask for fewer devices or teams, or a lower minimum",
            )
            for device, change in ((rich, -move), (poor, move)):
                counts[device, label] += change
                size[device] += change
    return counts


def held_labels(y: Array, num_devices: int, per_device: int, allowed: Mask) -> Array:
    """[n, classes] bool: device u holds `per_device` labels u, u + 1, ... (mod C) of those it may hold.

    If the formation limits the labels, u counts the devices with the same allowed labels, so that the labels of a team
    are used evenly. Labels without samples are skipped.
    """
    present = np.bincount(y, minlength=0 if allowed is None else allowed.shape[1]) > 0
    may = np.tile(present, (num_devices, 1)) if allowed is None else allowed & present
    holds, seen = np.zeros_like(may), {}
    for device, row in enumerate(may):
        own = np.flatnonzero(row)
        check(
            1 <= per_device <= len(own),
            f"{per_device} labels per device, but device {device} may hold {len(own)} labels; "
            f"ask for 1 to {len(own)}" + ("" if allowed is None else ", or for fewer teams"),
        )
        rank = seen[row.tobytes()] = seen.get(row.tobytes(), -1) + 1
        holds[device, own[(rank + np.arange(per_device)) % len(own)]] = True
    return holds


def fitted(size: Array, holds: Array, pools: Array) -> Array:
    """[n] sizes, scaled so that for every label the sizes of its holders sum to about its number of samples.

    Otherwise a device that shares a label with a large one would get few samples of it, and many of its other labels.
    """
    for _ in range(100):
        asked = np.where(holds, size[:, None], 0).sum(0)
        ratio = np.log(np.maximum(pools, 1)) - np.log(np.maximum(asked, 1e-300))
        size = size * np.exp(np.where(holds, ratio, 0).sum(1) / holds.sum(1))
    return size


def labels(y: Array, num_devices: int, rng: Rng, allowed: Mask = None, *, per_device: int = 2) -> Assignment:
    """A few labels per device, and devices of very different size (after PerMFL's and pFedMe's experiments).

    Every device that holds a label gets 10 samples of it, then 300 to 599 more (fewer if there are not enough, together
    at most half of what is left of the label). What is left then is divided in proportion to the sizes of the devices,
    which are drawn from lognormal(0, 2).

    Difference to the papers' code: there an amount is drawn for each label, and devices get it as long as there are
    samples of the label, so that many devices have 10 samples of one of their labels. Here a large device has many
    samples of all its labels.
    """
    y = one_label(y)
    check_enough(len(y), num_devices)
    holds = held_labels(y, num_devices, per_device, allowed)
    counts = np.zeros(holds.shape, dtype=np.int64)
    size = fitted(rng.lognormal(0, 2, num_devices), holds, np.bincount(y, minlength=holds.shape[1]))
    for label in np.flatnonzero(holds.any(0)):
        holders, pool = np.flatnonzero(holds[:, label]), int((y == label).sum())
        check(
            pool >= len(holders),
            f"label {label} has {pool} samples for {len(holders)} devices; ask for fewer devices or labels",
        )
        base = min(10, pool // len(holders))
        rest = pool - base * len(holders)
        extra = rng.integers(300, 600, len(holders))
        level = min(int(extra.sum()), rest // 2)
        counts[holders, label] = base + apportion(level, extra) + apportion(rest - level, size[holders])
    return deal(y, counts, rng)


def labels_first_come(y: Array, num_devices: int, rng: Rng, allowed: Mask = None, *, per_device: int = 2) -> Assignment:
    """A few labels per device as the code of PerMFL's and pFedMe's experiments gives them out.

    Device u holds the labels u, u + 1, ... and gets 10 samples of each. Then, device by device and label by label, an
    amount is drawn: a share of the label in proportion to lognormal(0, 2), and 300 to 600 more. The device gets it if
    so many samples are left of the label, and otherwise none, so that many devices keep 10 samples of a label.
    """
    y = one_label(y)
    holds = held_labels(y, num_devices, per_device, allowed)
    weight = np.where(holds, rng.lognormal(0, 2, holds.shape), 0)
    pools, base = np.bincount(y, minlength=holds.shape[1]), 10
    left = pools - base * holds.sum(0)
    check(left.min() >= 0, f"a label has fewer than {base} samples for each of its devices; ask for fewer devices")
    wanted = (left * weight / np.maximum(weight.sum(0), 1e-300)).astype(np.int64) + rng.integers(300, 601, holds.shape)
    counts = base * holds
    for device, label in np.argwhere(holds):
        if wanted[device, label] < left[label]:
            counts[device, label] += wanted[device, label]
            left[label] -= wanted[device, label]
    return deal(y, counts, rng)


def per_class(
    y: Array,
    num_devices: int,
    rng: Rng,
    allowed: Mask = None,
    *,
    train: int = 200,
    test: int = 800,
    per_device: int = 5,
    shared: bool = False,
) -> Assignment:
    """Fixed numbers of training and test samples of each class (sFedHP's settings 1 and 2).

    The counts are for the whole population, and are divided evenly among the devices that hold the class. With
    `shared` they are per device: then devices may have images in common, but no training image of one device is a test
    image of another.
    """
    y = one_label(y)
    check_enough(len(y), num_devices)
    check(train >= 1 and test >= 0, f"counts per class are TRAIN:TEST, at least 1:0; got {train}:{test}")
    holds = held_labels(y, num_devices, per_device, allowed)
    index, device, split = [], [], []
    for label in np.flatnonzero(holds.any(0)):
        holders = np.flatnonzero(holds[:, label])
        pool = rng.permutation(np.flatnonzero(y == label))
        check(
            len(pool) >= train + test,
            f"label {label} has {len(pool)} samples, not {train} + {test}; ask for smaller counts per class",
        )
        check(
            shared or train >= len(holders),
            f"{train} training samples per class are too few for {len(holders)} devices; ask for more of them",
        )
        cut = len(pool) * train // (train + test) if shared else train
        for part, rows, count in ((0, pool[:cut], train), (2, pool[cut:], test)):
            own = [rng.permutation(rows)[:count] for _ in holders] if shared else None
            given = own or np.array_split(rows[:count], len(holders))
            index += given
            device.append(np.repeat(holders, [len(rows) for rows in given]))
            split.append(np.full(len(device[-1]), part))
    return Assignment(np.concatenate(index), np.concatenate(device), np.concatenate(split))


def dirichlet(
    y: Array, num_devices: int, rng: Rng, allowed: Mask = None, *, alpha: float = 0.5, minimum: int = 10
) -> Assignment:
    """Every class is divided among the devices in proportions drawn from Dirichlet(alpha), once for each class.

    Devices with fewer than `minimum` samples then get some of the largest ones.
    """
    y = one_label(y)
    check_enough(len(y), num_devices, minimum)
    check(1e-6 <= alpha <= 1e6, f"Dirichlet's alpha must lie between 1e-6 and 1e6; got {alpha}")

    def draw(holders: Array) -> Array:
        return rng.dirichlet(np.full(len(holders), alpha))

    return by_weights(y, num_devices, rng, allowed, minimum, draw)


def by_weights(
    y: Array, num_devices: int, rng: Rng, allowed: Mask, minimum: int, draw: Callable[[Array], Array]
) -> Assignment:
    """Divide every class in proportion to `draw(devices that may hold it)`; then see to the minimum by `lift`."""
    pools = np.bincount(y, minlength=0 if allowed is None else allowed.shape[1])
    counts = np.zeros((num_devices, len(pools)), dtype=np.int64)
    for label, pool in enumerate(pools):
        may = np.ones(num_devices, dtype=bool) if allowed is None else allowed[:, label]
        holders = rng.permutation(np.flatnonzero(may))
        if len(holders):
            counts[holders, label] = apportion(pool, draw(holders))
    return deal(y, lift(counts, minimum, allowed), rng)


def iid(y: Array, num_devices: int, rng: Rng, allowed: Mask = None) -> Assignment:
    """Random samples; the sizes of the devices differ by at most one."""
    check_enough(len(y), num_devices)
    if allowed is not None:
        return by_weights(one_label(y), num_devices, rng, allowed, 1, lambda who: np.ones(len(who)))
    return Assignment(rng.permutation(len(y)), blocks(len(y), num_devices))


def power_law(
    y: Array, num_devices: int, rng: Rng, allowed: Mask = None, *, exponent: float = 2.0, minimum: int = 10
) -> Assignment:
    """Random samples; the sizes of the devices above the minimum have the density s^-exponent."""
    check_enough(len(y), num_devices, minimum)
    check(1.1 <= exponent < np.inf, f"the exponent of a power law must be 1.1 or more; got {exponent}")
    weights = rng.uniform(1e-9, 1, num_devices) ** (-1 / (exponent - 1))
    if allowed is not None:
        return by_weights(one_label(y), num_devices, rng, allowed, minimum, lambda who: weights[who])
    sizes = minimum + apportion(len(y) - num_devices * minimum, weights)
    return Assignment(rng.permutation(len(y)), np.repeat(np.arange(num_devices), sizes))


def column(y: Array, num_devices: int, rng: Rng, allowed: Mask = None, ids: Array | None = None) -> Assignment:
    """The devices that the data name: `ids` [N] for each sample. If fewer devices are asked for, so many are drawn.

    Devices are numbered in the sorted order of the names that are kept.
    """
    if ids is None:
        raise ValueError("these data name no devices; use another partition: labels:2, iid, dirichlet, ...")
    check(allowed is None, "the data say which labels a device has; form teams by random or sequential")
    names, owner = np.unique(ids, return_inverse=True)
    check(
        1 <= num_devices <= len(names),
        f"{num_devices} devices asked for, the data name {len(names)}; ask for 1 to {len(names)}",
    )
    kept = np.sort(rng.permutation(len(names))[:num_devices])
    index = np.flatnonzero(np.isin(owner, kept))
    return Assignment(index, np.searchsorted(kept, owner[index]))


def clustered(pools: list[Array], cluster: Array, rng: Rng, allowed: Mask) -> Assignment:
    """The samples `pools[c]` are divided evenly and at random among the devices of cluster c."""
    check(allowed is None, "clusters decide on their devices' labels; form teams by random or sequential")
    index, device = [], []
    for number, pool in enumerate(pools):
        members = np.flatnonzero(cluster == number)
        check_enough(len(pool), len(members))
        index.append(rng.permutation(pool))
        device.append(members[blocks(len(pool), len(members))])
    return Assignment(np.concatenate(index), np.concatenate(device), cluster=cluster)


def clusters_permuted(
    y: Array, num_devices: int, rng: Rng, allowed: Mask = None, *, num_clusters: int = 4, whole: bool = True
) -> Assignment:
    """Clusters of devices in which the classes have different labels (CoBo's first experiment).

    No two clusters give a class the same label; the first one keeps the true labels. Each cluster has the whole data
    set, divided at random among its devices; with `whole=false` the data set is divided among the clusters too.
    """
    y = one_label(y)
    num_classes = int(y.max(initial=0)) + 1
    check(
        1 <= num_clusters <= num_classes,
        f"{num_clusters} clusters need as many classes, there are {num_classes}; ask for 1 to {num_classes}",
    )
    cluster = blocks(num_devices, num_clusters, "clusters")
    parts = np.array_split(rng.permutation(len(y)), 1 if whole else num_clusters)
    given = clustered([parts[c % len(parts)] for c in range(num_clusters)], cluster, rng, allowed)
    order = rng.permutation(num_classes)  # the classes in a circle; each cluster has its own shift
    shift = np.append(0, rng.permutation(np.arange(1, num_classes)))[cluster[given.device]]
    renamed = order[(np.argsort(order)[y[given.index]] + shift) % num_classes]
    return replace(given, y=renamed)


def clusters_disjoint(
    y: Array,
    num_devices: int,
    rng: Rng,
    allowed: Mask = None,
    *,
    num_clusters: int = 4,
    sizes: tuple[int, ...] = (),
    classes_per_cluster: int = 0,
) -> Assignment:
    """Clusters of devices that have no class in common (CoBo's second experiment: sizes=6+6+7+7+8+8+9+9+10+10).

    `sizes` are the numbers of devices per cluster (not given: about equal); `classes_per_cluster` 0 uses all classes.
    """
    y = one_label(y)
    check(
        not sizes or (sum(sizes) == num_devices and min(sizes) > 0),
        f"the sizes {'+'.join(map(str, sizes))} must be above 0 and add up to {num_devices} devices",
    )
    num_clusters = len(sizes) or num_clusters
    classes = rng.permutation(np.unique(y))
    each = classes_per_cluster or len(classes) // max(1, num_clusters)
    check(
        each >= 1 and 1 <= num_clusters * each <= len(classes),
        f"{num_clusters} clusters of {classes_per_cluster or 'some'} classes each cannot be made of "
        f"{len(classes)} classes; ask for fewer, but at least 1",
    )
    cluster = blocks(num_devices, num_clusters, "clusters")
    if sizes:
        cluster = np.repeat(np.arange(len(sizes)), sizes)
    groups = np.array_split(classes[: num_clusters * classes_per_cluster or None], num_clusters)
    return clustered([np.flatnonzero(np.isin(y, group)) for group in groups], cluster, rng, allowed)


PARTITIONS: dict[str, Callable[..., Assignment]] = {
    "labels": labels,
    "labels-first-come": labels_first_come,
    "per-class": per_class,
    "dirichlet": dirichlet,
    "iid": iid,
    "power-law": power_law,
    "column": column,
    "clusters-permuted": clusters_permuted,
    "clusters-disjoint": clusters_disjoint,
}
