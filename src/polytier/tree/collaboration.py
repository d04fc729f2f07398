"""Weights between clients that a method learns: the matrix, the groups that follow from it, and its file.

A matrix is stored as one weight per row plus the pairs that differ from it, so that ten thousand clients with few
learned pairs fit in memory. This module does not need torch: reports and the formation of teams read the file of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polytier.files.read import check_file

FILE = "collaboration.npz"  # in a run folder
DENSE = 2000  # largest number of clients for which the matrix [n, n] is made by default


@dataclass(frozen=True, eq=False)
class Collaboration:
    """Weights between clients: client i learns from client j with weight w_ij.

    Pairs are directed; a symmetric method lists both directions. The diagonal has no meaning.

    Args:
        ids: [n] names of the clients: devices or teams.
        base: [n] w_ij of all pairs of row i that are not listed.
        pairs: [P, 2] int64, the listed pairs (i, j); they are sorted.
        weights: [P] w_ij of the listed pairs.

    Raises:
        ValueError: if shapes do not fit together, a weight is not finite, or a pair is wrong or listed twice.

    Examples:
        >>> import numpy as np
        >>> from polytier import Collaboration
        >>> w = Collaboration(np.array(["a", "b", "c"]), np.zeros(3), np.array([[0, 1], [1, 0]]), np.ones(2))
        >>> w.dense()
        array([[nan,  1.,  0.],
               [ 1., nan,  0.],
               [ 0.,  0., nan]])
        >>> w.groups().tolist()
        [0, 0, 1]
    """

    ids: np.ndarray
    base: np.ndarray
    pairs: np.ndarray
    weights: np.ndarray

    def __post_init__(self) -> None:
        ids, pairs = np.asarray(self.ids), np.asarray(self.pairs, dtype=np.int64).reshape(-1, 2)
        base, weights = as_floats(self.base), as_floats(self.weights)
        n = len(ids)
        if base.shape != (n,) or weights.shape != (len(pairs),):
            raise ValueError(
                f"a collaboration of {n} clients and {len(pairs)} pairs needs one base weight per client and one "
                f"weight per pair; got {base.shape} and {weights.shape}"
            )
        if not (np.isfinite(base).all() and np.isfinite(weights).all()):
            raise ValueError("the weights of a collaboration must be finite; got NaN or infinity; check the method")
        if len(pairs) and (pairs.min() < 0 or pairs.max() >= n or (pairs[:, 0] == pairs[:, 1]).any()):
            wrong = pairs[(pairs < 0).any(1) | (pairs >= n).any(1) | (pairs[:, 0] == pairs[:, 1])][0].tolist()
            raise ValueError(f"a pair names two different clients by numbers from 0 to {n - 1}; got {wrong}")
        order = np.argsort(pairs @ (n, 1), kind="stable")  # so that equal weights give equal arrays
        if (np.diff(pairs[order], axis=0) == 0).all(1).any():
            raise ValueError("a pair is listed twice; (i, j) and (j, i) are two pairs; list each at most once")
        for name, value in (("ids", ids), ("base", base), ("pairs", pairs[order]), ("weights", weights[order])):
            object.__setattr__(self, name, value)

    @classmethod
    def from_dense(cls, weights: np.ndarray) -> Collaboration | None:
        """From a matrix [n, n], whose diagonal is ignored; ids are numbers. None if n is 0."""
        dense, n = weights.copy(), len(weights)
        np.fill_diagonal(dense, 0)
        pairs = np.argwhere(dense)
        return cls(np.arange(n), np.zeros(n), pairs, dense[tuple(pairs.T)]) if n else None

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.ids)

    def dense(self) -> np.ndarray:
        """The weights as a matrix [n, n] with NaN on the diagonal."""
        matrix = np.repeat(self.base[:, None], len(self), axis=1)
        matrix[self.pairs[:, 0], self.pairs[:, 1]] = self.weights
        np.fill_diagonal(matrix, np.nan)
        return matrix

    def take(self, places: np.ndarray) -> Collaboration:
        """The weights between some of the clients, in the order of `places` [k]."""
        new = np.full(len(self), -1)
        new[places] = np.arange(len(places))
        pairs = new[self.pairs]
        both = (pairs >= 0).all(1)
        return Collaboration(self.ids[places], self.base[places], pairs[both], self.weights[both])

    def groups(self, by: str = "", number: int | None = None, threshold: float = 0.5) -> np.ndarray:
        """Divide the clients into groups.

        Two clients are neighbours if the mean of their weights (both directions) is positive and at least `threshold`
        times the largest weight.

        Args:
            by: ``"connected"``: groups are the connected components of the graph of neighbours; one wrong pair joins
                two groups. ``"shared"``: the same, but only neighbours count that have more than half of their
                neighbours in common, of all that either of them has, both of them included (Jarvis and Patrick 1973);
                takes memory O(n^2). ``"spectral"``: `number` groups by spectral clustering; takes memory O(n^2). By
                default shared, or connected for more than 2,000 clients.
            number: number of groups, for spectral.
            threshold: in (0, 1], for connected and shared.

        Returns:
            [n] the group of each client, numbered from 0 in the order of their first client.

        Raises:
            ValueError: if an argument is not allowed.
        """
        by = by or ("shared" if len(self) <= DENSE else "connected")
        if by in ("connected", "shared"):
            if not 0 < threshold <= 1:
                raise ValueError(f"threshold is a share of the largest weight, in (0, 1]; got {threshold}; try 0.5")
            level = 2 * threshold * self._largest()
            return self._connected(level) if by == "connected" else self._shared(level)
        if by != "spectral":
            raise ValueError(f"groups by {by!r} are unknown; allowed: connected, shared, spectral")
        if number is None or not 1 <= number <= len(self):
            raise ValueError(f"spectral groups need their number, from 1 to {len(self)} clients; got {number}")
        return self._spectral(number)

    def match(self, true: np.ndarray) -> dict[str, float]:
        """Compare `groups()` with the true groups.

        Args:
            true: [n] the true group of each client.

        Returns:
            adjusted_rand_index: 1 if the groups are the same, about 0 for random groups.
            contrast: mean weight within true groups minus mean weight between them; NaN if either has no pairs.
            groups: number of groups found.

        Raises:
            ValueError: if there is not one true group per client.
        """
        from sklearn.metrics import adjusted_rand_score

        if len(true) != len(self):
            raise ValueError(f"one true group per client is needed; got {len(true)} for {len(self)} clients")
        found = self.groups()
        label, size = np.unique(true, return_inverse=True, return_counts=True)[1:]
        i, j = self.pairs.T
        base, size = self.base.astype(float), size[label]
        change, same = self.weights - base[i], label[i] == label[j]
        sums = np.array([base @ (size - 1) + change[same].sum(), base @ (len(self) - size) + change[~same].sum()])
        pairs = np.array([(size - 1).sum(), (len(self) - size).sum()])
        within, between = np.divide(sums, pairs, out=np.full(2, np.nan), where=pairs > 0)
        return {
            "adjusted_rand_index": float(adjusted_rand_score(true, found)),
            "contrast": float(within - between),
            "groups": int(found.max()) + 1,
        }

    def _largest(self) -> float:
        """The largest weight of any pair, listed or not; at least 0."""
        unlisted = np.bincount(self.pairs[:, 0], minlength=len(self)) < len(self) - 1
        return float(np.concatenate([self.weights, self.base[unlisted]]).max(initial=0))

    def _connected(self, level: float) -> np.ndarray:
        """Components of the graph with an edge where w_ij + w_ji >= level, in time O(n log n + P)."""

        def joined(both: Any) -> Any:
            return (both >= level) & (both > 0)

        n, base, weights = len(self), self.base.astype(float), self.weights.astype(float)
        i, j = self.pairs.T
        codes, back = i * n + j, j * n + i
        place = np.searchsorted(codes, back).clip(max=max(len(codes) - 1, 0))
        back_weights = np.where(codes[place] == back, weights[place], base[j])
        listed: list[dict[int, bool]] = [{} for _ in range(n)]
        for a, b, edge in zip(i.tolist(), j.tolist(), joined(weights + back_weights).tolist(), strict=True):
            listed[a][b] = listed[b][a] = edge
        # unlisted pairs are not enumerated: clients not reached yet wait in a stack, the highest base on top
        waiting, weight = np.argsort(base, kind="stable").tolist(), base.tolist()
        group, number = [-1] * n, 0
        for first in range(n):
            if group[first] >= 0:
                continue
            group[first], queue = number, [first]
            while queue:
                a = queue.pop()
                near, apart = [b for b, edge in listed[a].items() if edge and group[b] < 0], []
                while waiting and joined(weight[a] + weight[waiting[-1]]):
                    b = waiting.pop()
                    if group[b] < 0:
                        (apart if b in listed[a] else near).append(b)
                waiting += reversed(apart)
                queue += near
                for b in near:
                    group[b] = number
            number += 1
        return np.array(group)

    def _shared(self, level: float) -> np.ndarray:
        """Components of the graph of neighbours that have more than half of their neighbours in common."""
        from scipy.sparse.csgraph import connected_components

        dense = np.nan_to_num(self.dense().astype(float))
        both = dense + dense.T
        near = ((both >= level) & (both > 0)).astype(np.float32)
        np.fill_diagonal(near, 1)
        common, size = near @ near, near.sum(1)
        either = size[:, None] + size - common
        return connected_components((near > 0) & (2 * common > either), directed=False)[1]

    def _spectral(self, number: int) -> np.ndarray:
        """`number` groups by spectral clustering."""
        from sklearn.cluster import SpectralClustering

        if number == len(self):  # scikit-learn requires fewer groups than clients
            return np.arange(number)
        matrix = self.dense().astype(float)
        matrix = (matrix + matrix.T) / 2
        np.fill_diagonal(matrix, 0)
        floor = (
            1e-3 * matrix.max() if matrix.max() > 0 else 1.0
        )  # without any positive weight the clustering would be undefined
        found = SpectralClustering(number, affinity="precomputed", random_state=0).fit_predict(matrix.clip(min=floor))
        _, first, group = np.unique(found, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first))[group]


def as_floats(values: Any) -> np.ndarray:
    """The values as an array of floats; float32 stays float32."""
    values = np.asarray(values)
    return values if values.dtype.kind == "f" else values.astype(float)


# -- over time ----------------------------------------------------------------------------------------


def when_kept(round_: int) -> bool:
    """Whether a run records the matrix of this round: 1 .. 8, 10, 12, 14, 16, 20, ... (m * 2^e with m < 8).

    It changes most in early rounds. The rounds do not depend on the length of the run.
    """
    zeros = max(0, round_.bit_length() - 3)
    return round_ > 0 and round_ >> zeros << zeros == round_


def save(path: Path | str, snapshots: Mapping[int, Collaboration], true: np.ndarray | None = None) -> None:
    """Write the matrices of some rounds to one .npz file; the same content gives the same bytes.

    array   | shape      | meaning
    rounds  | [R]        | the rounds, ascending
    ids     | [n]        | names of the clients, the same in all rounds
    true    | [n]        | the true group of each client; only if it is known
    base    | [R, n]     | `Collaboration.base` of each round
    offsets | [R + 1]    | the pairs of the k-th round are offsets[k] .. offsets[k + 1] - 1
    pairs   | [sum P, 2] | `Collaboration.pairs` of all rounds
    weights | [sum P]    | `Collaboration.weights` of all rounds

    Args:
        path: the file.
        snapshots: the matrices by round, at least one.
        true: [n] the true groups, if they are known.
    """
    rounds = sorted(snapshots)
    kept = [snapshots[r] for r in rounds]
    assert kept, "at least one matrix is needed"
    assert all(np.array_equal(k.ids, kept[0].ids) for k in kept), "the clients must be the same in all rounds"
    arrays = {
        "rounds": np.array(rounds),
        "ids": kept[0].ids,
        "base": np.stack([k.base for k in kept]),
        "offsets": np.cumsum([0, *(len(k.pairs) for k in kept)]),
        "pairs": np.concatenate([k.pairs for k in kept]).astype(np.int32),
        "weights": np.concatenate([k.weights for k in kept]),
        **({} if true is None else {"true": np.asarray(true)}),
    }
    with Path(path).open("wb") as file:  # given a path, numpy would append .npz to the name
        np.savez(file, **arrays)


def load(path: Path | str) -> tuple[dict[int, Collaboration], np.ndarray | None]:
    """Read a file of `save`: the matrices by round, and the true groups or None.

    Raises:
        ValueError: if the file cannot be read or is not such a file.
    """
    try:
        check_file(path)
        with Path(path).open("rb") as file:
            archive: Any = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("it holds one array without a name")
            names = ("rounds", "ids", "base", "offsets", "pairs", "weights")
            absent = [name for name in names if name not in archive]
            if absent:
                raise ValueError(f"it has {', '.join(archive) or 'no arrays'} but no {absent[0]}")
            rounds, ids, base, offsets, pairs, weights = (archive[name] for name in names)
            true = archive.get("true")
        shapes = len(rounds) > 0 and base.shape == (len(rounds), len(ids)) and offsets.shape == (len(rounds) + 1,)
        ordered = shapes and offsets[0] == 0 and (np.diff(offsets) >= 0).all()
        listed = ordered and offsets[-1] == len(pairs) == len(weights)
        if not (listed and (true is None or true.shape == ids.shape)):
            raise ValueError("its arrays do not fit together")
        found = {
            int(r): Collaboration(
                ids, base[k], pairs[offsets[k] : offsets[k + 1]], weights[offsets[k] : offsets[k + 1]]
            )
            for k, r in enumerate(rounds)
        }
    except Exception as error:  # a broken archive can raise nearly anything
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        advice = f"give the {FILE} of a run whose method learns weights between clients, e.g. cobo"
        raise ValueError(f"{path} cannot be read as collaboration: {reason}; {advice}") from error
    return found, true
