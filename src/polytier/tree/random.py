"""Counter-based random numbers: every draw is a function of its key, without any generator state.

The key is (seed, purpose, round, call), combined with the node and the position in the draw. So the order in which
nodes are computed, the tile, the process and a restart do not change a draw. All computations are integer arithmetic
modulo 2^64, with Python's integers, in torch or in NumPy, with the same result. NumPy takes a quarter of the time of
torch for few nodes, so what a round draws on the host is drawn in NumPy; tensors can be traced, or on an accelerator.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
MAX = (1 << 63) - 1
FACTORS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
SHIFTS = np.array([30, 27, 31], np.uint64)
Values = TypeVar("Values", Tensor, np.ndarray)  # int64 of any shape


def signed(value: int) -> int:
    """The int64 with the same 64 bits as an unsigned value."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def mix(z: Values) -> Values:
    """The finaliser of SplitMix64: every bit of the result depends on every bit of z, int64 of any shape."""
    if isinstance(z, np.ndarray):
        x = z.view(np.uint64)
        x = x ^ (x >> SHIFTS[0])
        x *= FACTORS[0]
        x ^= x >> SHIFTS[1]
        x *= FACTORS[1]
        x ^= x >> SHIFTS[2]
        return x.view(np.int64)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def mix_int(z: int) -> int:
    """`mix` of a Python integer."""
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def name_key(name: object) -> int:
    """The 64-bit key of a name: integers are their own key, other names are hashed."""
    if isinstance(name, int):
        return name & MASK
    return int.from_bytes(hashlib.blake2b(str(name).encode(), digest_size=8).digest(), "little")


def name_keys(names: np.ndarray) -> Tensor:
    """[n] `name_key` of each name, as int64."""
    if names.dtype.kind in "iu":
        return torch.from_numpy(names.astype(np.int64))
    return torch.tensor([signed(name_key(name)) for name in names.tolist()])


def key(seed: int, *parts: int | str) -> int:
    """The key of a draw: the seed combined with purpose, round, call, ..."""
    result = mix_int(seed + GOLDEN)
    for part in parts:
        result = mix_int(result ^ part_key(part))
    return result


@lru_cache(1024, typed=True)
def part_key(part: int | str) -> int:
    """The key of a part of a key; purposes, and most rounds and calls, come again and again."""
    return mix_int(name_key(part) + GOLDEN)


def node_keys(base: int, nodes: Values) -> Values:
    """[n] one key per node for a draw; `nodes` [n] are the keys of the nodes' names."""
    return drawn_keys(base, stems(nodes))


def stems(nodes: Values) -> Values:
    """[n] the part of `node_keys` that is the same for all draws."""
    return mix(nodes + signed(GOLDEN))


def drawn_keys(base: int, stems: Values) -> Values:
    """[n] `node_keys` of the nodes with these `stems` [n]."""
    return mix(stems ^ signed(base))


def bits(keys: Values, count: int) -> Values:
    """[n, count] int64 with 64 random bits each, for keys [n]."""
    if isinstance(keys, np.ndarray):
        return mix(keys[..., None] + np.arange(1, count + 1, dtype=np.int64) * signed(GOLDEN))
    slots = torch.arange(1, count + 1, device=keys.device) * signed(GOLDEN)
    return mix(keys.unsqueeze(-1) + slots)


def to_uniform(z: Values) -> Values:
    """float64 in [0, 1) from 53 of the 64 bits."""
    high = (z >> 11) & ((1 << 53) - 1)
    return high * 2.0**-53 if isinstance(high, np.ndarray) else high.to(torch.float64) * 2.0**-53


def uniform(keys: Values, count: int) -> Values:
    """[n, count] float64 in [0, 1), for keys [n]."""
    return to_uniform(bits(keys, count))


def normal(keys: Tensor, count: int) -> Tensor:
    """[n, count] draws from the standard normal distribution, float64, by the transform of Box and Muller."""
    pairs = -(-count // 2)
    u, v = uniform(keys, 2 * pairs).split([pairs, pairs], -1)
    radius, angle = (-2 * torch.log1p(-u)).sqrt(), 2 * math.pi * v
    return torch.cat([radius * angle.cos(), radius * angle.sin()], -1)[..., :count]


def shuffled(keys: Values, sizes: Values) -> Values:
    """[n, max(sizes)] a random order of 0 .. size - 1 in each row; the rest of a shorter row is undefined."""
    if isinstance(keys, Tensor):
        assert isinstance(sizes, Tensor)
        return torch.from_numpy(shuffled(keys.numpy(), sizes.numpy()))
    width = int(sizes.max())
    low = (1 << max(1, width - 1).bit_length()) - 1
    slots = np.arange(width, dtype=np.int64)
    # random high bits, the slot in the low bits: sorting these is faster than argsort
    draws = bits(keys, width)
    draws &= ~low
    draws |= slots
    if int(sizes.min()) < width:
        draws[slots >= sizes[:, None]] = MAX
    draws.sort(axis=1)
    draws &= low
    return draws
