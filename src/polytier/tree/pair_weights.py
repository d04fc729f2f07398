"""Weights between clients, stored as what differs from a common value, so that nothing grows with n^2.

field   | shape        | meaning
base    | [n]          | w_ij of every pair that is not listed, by row i
pairs   | [P] int64    | the listed pairs as i * n + j, sorted
weights | [P]          | w_ij of the listed pairs
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Weights = dict[str, Tensor]
SHOWN = 2000  # clients up to which methods that compare all of them keep every weight
DENSE = 8  # a full matrix is faster where at least one of so many pairs is listed
CACHED = 1 << 18  # numbers of models that are multiplied with the weights at once


def skip(draw: Callable[[int], Tensor], slots: int, p: float) -> Tensor:
    """Those of 0 .. slots - 1 that are drawn, each with probability p, by geometric gaps between them.

    `draw(k)` gives the first k of a row of uniform numbers.
    """
    if p >= 1:
        return torch.arange(slots)
    k = int(1.2 * p * slots) + 16
    while True:
        place = ((-draw(k)).log1p() / math.log1p(-p) + 1).long().cumsum(0) - 1
        if place[-1] >= slots:
            return place[place < slots]
        k *= 2


def step(state: Weights, i: Tensor, j: Tensor, change: Tensor, domain: str) -> Weights:
    """Add to w_ij and w_ji, and project."""
    base, n = state["base"], len(state["base"])
    drawn = torch.cat([i * n + j, j * n + i])
    pairs = torch.cat([state["pairs"], drawn]).unique()
    row = pairs // n
    w = base[row]
    w[torch.searchsorted(pairs, state["pairs"])] = state["weights"]
    w[torch.searchsorted(pairs, drawn)] += change.repeat(2)
    if domain == "box":
        w = w.clamp(0, 1)
    else:
        touched = torch.zeros(n, dtype=torch.bool).index_fill_(0, drawn // n, True)
        on_simplex = project(w, row, base)
        w, base = torch.where(touched[row], on_simplex[0], w), torch.where(touched, on_simplex[1], base)
    kept = w != base[row]
    return {"base": base, "pairs": pairs[kept], "weights": w[kept]}


def project(w: Tensor, row: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Every row onto the probability simplex, exactly (Michelot 1986), as max(value - tau, 0).

    A row has the weights w [P] listed for it and, for all others of the n - 1, base [n].
    """
    n = len(base)
    value, row = torch.cat([w, base]).double(), torch.cat([row, torch.arange(n)])
    count = torch.cat([torch.ones(len(w)), n - 1 - row[: len(w)].bincount(minlength=n)]).double()
    some = count > 0
    top = value.new_full((n,), -math.inf).scatter_reduce_(0, row[some], value[some], "amax")
    value = value - top[row]  # shifts tau alone; beside a large number the 1 below would be lost
    while True:
        tau = (row.bincount(count * value, n) - 1) / row.bincount(count, n)
        above = count * (value > tau[row])
        if torch.equal(above, count):
            break
        count = above
    value = (value - tau[row]).clamp(min=0).to(w.dtype)
    return value[: len(w)], value[len(w) :]


def pull(state: Weights, x: Tensor, present: Tensor) -> Tensor:
    """sum_k w_ik (x_i - x_k) over those present: as if all weights were the base, then the pairs that differ."""
    pairs, n, m = state["pairs"], len(state["base"]), len(present)
    i, k = pairs // n, pairs % n
    place = torch.full((n,), -1)
    place[present] = torch.arange(m)
    both = (place[i] >= 0) & (place[k] >= 0)
    i, k, base = i[both], k[both], state["base"][present].unsqueeze(1)
    more = state["weights"][both] - state["base"][i]
    total = m * base + torch.zeros(m, dtype=more.dtype).index_add_(0, place[i], more).unsqueeze(1)
    times = by_pairs(place[i], place[k], more, m)
    pulls, width = torch.empty_like(x), max(1, CACHED // m)
    for columns, result in zip(x.split(width, 1), pulls.split(width, 1), strict=True):
        y = columns - columns.mean(0)  # the same pull, with less to cancel
        result.copy_(total * y - base * y.sum(0) - times(y))
    return pulls


def by_pairs(i: Tensor, k: Tensor, values: Tensor, m: int) -> Callable[[Tensor], Tensor]:
    """Multiplies y [m, c] with the matrix [m, m] that has these values at (i, k): full where many are listed."""
    if DENSE * len(values) > m * m:
        matrix = values.new_zeros(m, m).index_put_((i, k), values)
        return lambda y: matrix @ y
    from scipy.sparse import csr_array

    sparse = csr_array((values.numpy(), (i.numpy(), k.numpy())), shape=(m, m))
    return lambda y: torch.from_numpy(sparse @ y.numpy())


def with_weights(state: Weights, n: int, who: Tensor, whom: Tensor, w: Tensor) -> Weights:
    """All weights, where `who` [m] now listen to `whom` [m, k] with w [m, k] and to nobody else."""
    if n > SHOWN:
        return state
    weights = state["weights"].clone() if len(state["weights"]) else w.new_zeros(n, n)
    weights[who] = 0
    weights[who.unsqueeze(1), whom] = w
    return {"weights": weights}
