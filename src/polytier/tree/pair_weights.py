"""Weights w_ij between n clients, stored sparsely: one common value per row, and the pairs that differ from it.

Memory grows with the number of pairs that were changed, not with n^2. A state is a dict of three tensors:

field   | shape     | meaning
base    | [n]       | w_ij of all pairs of row i that are not listed
pairs   | [P] int64 | the listed pairs, (i, j) as i * n + j, in ascending order
weights | [P]       | w_ij of the listed pairs

Methods that compare all clients in every round store the full matrix instead, see `with_weights`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from polytier.tree.collaboration import Collaboration

Weights = dict[str, Tensor]
SHOWN = 2000  # largest number of clients for which a full matrix of weights is kept
DENSE = 8  # a full matrix is faster than a sparse one if at least 1 / DENSE of all pairs are listed
CACHED = 1 << 18  # numbers of the models that are multiplied with the weights at once, so that they stay in cache


def no_weights(like: Tensor) -> Weights:
    """The state before the number of clients is known, with weights of the dtype of `like`."""
    return {"base": like.new_zeros(0), "pairs": torch.zeros(0, dtype=torch.int64), "weights": like.new_zeros(0)}


def started(state: Weights, n: int, value: float) -> Weights:
    """The state with all weights of n clients equal to `value`, if it is still that of `no_weights`."""
    return state if len(state["base"]) else {**state, "base": state["base"].new_full((n,), value)}


def sample_pairs(draw: Callable[[int], Tensor], m: int, p: float) -> tuple[Tensor, Tensor]:
    """Draw each pair (a, b), a < b < m, with probability p. Returns a [P] and b [P].

    The time is proportional to the number of pairs drawn, not to m^2.

    Args:
        draw: ``draw(k)`` returns the first k numbers of one sequence of uniform random numbers in [0, 1).
        m: number of clients.
        p: probability of each pair, above 0.
    """
    slot = skip(draw, m * (m - 1) // 2, p).numpy()  # the pairs in the order (0, 1), (0, 2), (1, 2), (0, 3), ...
    b = ((1 + np.sqrt(1 + 8 * slot.astype(np.float64))) / 2).astype(np.int64)
    return torch.from_numpy(slot - b * (b - 1) // 2), torch.from_numpy(b)


def skip(draw: Callable[[int], Tensor], slots: int, p: float) -> Tensor:
    """Draw each of 0 .. slots - 1 with probability p, by geometrically distributed gaps between those drawn.

    `draw` is that of `sample_pairs`.
    """
    if p >= 1:
        return torch.arange(slots)
    k = int(1.2 * p * slots) + 16  # almost always enough draws
    while True:
        logarithms = (-draw(k)).log1p().numpy()  # torch's: the last bit of NumPy's can be another one
        place = (logarithms / math.log1p(-p) + 1).astype(np.int64).cumsum() - 1
        if place[-1] >= slots:
            return torch.from_numpy(place[place < slots])
        k *= 2


def step(state: Weights, i: Tensor, j: Tensor, change: Tensor, domain: str, own: bool = False) -> Weights:
    """Add `change` [P] to w_ij and to w_ji, then project onto the domain.

    Args:
        state: the weights before.
        i, j: [P] the pairs, each at most once.
        change: [P] what is added.
        domain: ``"box"``: each weight is in [0, 1]; ``"simplex"``: the weights of a row are at least 0 and sum to 1.
        own: whether a row has a weight w_ii; then i and j of a pair may be the same.
    """
    base, n = state["base"].numpy(), len(state["base"])  # in NumPy, which takes less time for few pairs
    a, b, listed = i.numpy(), j.numpy(), state["pairs"].numpy()
    drawn = np.concatenate([a * n + b, b * n + a])
    pairs = np.unique(np.concatenate([listed, drawn]))
    row = pairs // n
    w = base[row]
    w[np.searchsorted(pairs, listed)] = state["weights"].numpy()
    w[np.searchsorted(pairs, drawn)] += np.tile(change.numpy(), 2)
    if domain == "box":
        w = w.clip(0, 1)
    else:
        touched = np.zeros(n, dtype=bool)
        touched[drawn // n] = True
        on_simplex = project(torch.from_numpy(w), torch.from_numpy(row), torch.from_numpy(base), own)
        w, base = np.where(touched[row], on_simplex[0], w), np.where(touched, on_simplex[1], base)
    kept = w != base[row]
    return {k: torch.from_numpy(v) for k, v in (("base", base), ("pairs", pairs[kept]), ("weights", w[kept]))}


def project(w: Tensor, row: Tensor, base: Tensor, own: bool = False) -> tuple[Tensor, Tensor]:
    """Project every row onto the probability simplex, exactly (Michelot 1986): max(value - tau, 0).

    Args:
        w: [P] the listed weights.
        row: [P] the row of each.
        base: [n] the value of the weights of each row that are not listed; a row has n - 1 weights.
        own: whether a row has n weights.

    Returns:
        The new w [P] and base [n].
    """
    n = len(base)
    value, row = torch.cat([w, base]).double(), torch.cat([row, torch.arange(n)])
    count = torch.cat([torch.ones(len(w)), n - 1 + own - row[: len(w)].bincount(minlength=n)]).double()
    some = count > 0
    top = value.new_full((n,), -math.inf).scatter_reduce_(0, row[some], value[some], "amax")
    value = value - top[row]  # shifts tau by the same amount; the 1 below would be lost beside a large number
    while True:
        tau = (row.bincount(count * value, n) - 1) / row.bincount(count, n)
        above = count * (value > tau[row])
        if torch.equal(above, count):
            break
        count = above
    value = (value - tau[row]).clamp(min=0).to(w.dtype)
    return value[: len(w)], value[len(w) :]


def weighted_differences(state: Weights, x: Tensor, present: Tensor) -> Tensor:
    """[m, d] sum_k w_ik (x_i - x_k) over the clients k that are present, for each of them.

    Computed as if all weights were `base`, plus the listed pairs: O((m + P) d).

    Args:
        state: the weights of all n clients.
        x: [m, d] the models of the clients that are present.
        present: [m] their numbers.
    """
    n, m = len(state["base"]), len(present)
    i, k = np.divmod(state["pairs"].numpy(), n)
    place = np.full(n, -1)
    place[present.numpy()] = np.arange(m)
    both = (place[i] >= 0) & (place[k] >= 0)
    i, k, base = i[both], k[both], state["base"][present].unsqueeze(1)
    more = torch.from_numpy(state["weights"].numpy()[both] - state["base"].numpy()[i])
    at, to = torch.from_numpy(place[i]), torch.from_numpy(place[k])
    total = m * base + torch.zeros(m, dtype=more.dtype).index_add_(0, at, more).unsqueeze(1)
    times = by_pairs(at, to, more, m)
    base = base[:1] if bool((base == base[0]).all()) else base
    result, width = torch.empty_like(x), max(1, CACHED // m)
    for columns, part in zip(x.split(width, 1), result.split(width, 1), strict=True):
        y = columns - columns.mean(0)  # the differences are the same, with smaller rounding errors
        torch.mul(total, y, out=part)
        part -= base * y.sum(0)
        part -= times(y)
    return result


def by_pairs(i: Tensor, k: Tensor, values: Tensor, m: int) -> Callable[[Tensor], Tensor]:
    """A function of y [m, c]: its product with the matrix [m, m] that has `values` [P] at (i, k), else zeros.

    The matrix is stored in full if many pairs are listed.
    """
    if DENSE * len(values) > m * m:
        matrix = values.new_zeros(m, m).index_put_((i, k), values)
        return lambda y: matrix @ y
    from scipy.sparse import csr_array

    sparse = csr_array((values.numpy(), (i.numpy(), k.numpy())), shape=(m, m))
    return lambda y: torch.from_numpy(sparse @ y.numpy())


def as_collaboration(state: Weights) -> Collaboration | None:
    """The weights with clients by number, without w_ii, or None for `no_weights`."""
    base, pairs, weights = (state[k].numpy().copy() for k in ("base", "pairs", "weights"))  # a run keeps the result
    n = len(base)
    if not n:
        return None
    i, j = pairs // n, pairs % n
    return Collaboration(np.arange(n), base, np.stack([i, j], 1)[i != j], weights[i != j])


def with_weights(state: Weights, n: int, who: Tensor, whom: Tensor, w: Tensor) -> Weights:
    """A full matrix of weights with some rows replaced; unchanged above `SHOWN` clients.

    Args:
        state: the matrix [n, n] as ``"weights"``, or [0, 0] before the first round.
        n: number of clients.
        who: [m] the rows to replace.
        whom: [m, k] the columns that are not zero in the new rows.
        w: [m, k] the weights there.
    """
    if n > SHOWN:
        return state
    weights = state["weights"].clone() if len(state["weights"]) else w.new_zeros(n, n)
    weights[who] = 0
    weights[who.unsqueeze(1), whom] = w
    return {"weights": weights}
