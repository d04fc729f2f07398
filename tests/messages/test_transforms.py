"""Transforms of uploads: what they do to changes, how they draw, and how they are written."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytier.messages.transforms import Clip, Noise, Upload, make_upload, parse_upload
from polytier.method.call import Clock
from polytier.tree import random

KEYS = random.node_keys(random.key(3, "upload"), torch.arange(8))
NOW = Clock(4, 2)
MANY = settings(deadline=None, max_examples=60, derandomize=True, database=None)


def changes(n: int = 8, d: int = 50, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return scale * torch.randn(n, d, generator=torch.Generator().manual_seed(n * d)).to(dtype)


# -- clip ----------------------------------------------------------------------------------------------


@MANY
@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 40), st.sampled_from([torch.float32, torch.float64]))
def test_clip_bounds_the_norm_and_keeps_the_direction(norm, scale, d, dtype):
    change = changes(5, d, scale, dtype)
    change[2] = 0
    clipped = Clip(norm)(change, KEYS[:5], NOW)
    assert clipped.dtype == dtype
    before, after = (torch.linalg.vector_norm(rows.double(), dim=1) for rows in (change, clipped))
    assert (after <= norm * (1 + 1e-6)).all()
    assert torch.equal(clipped[before <= norm], change[before <= norm])  # short ones are left alone
    long = before > norm
    torch.testing.assert_close(after[long], torch.full_like(after[long], norm), rtol=1e-6, atol=0)
    cosine = (change.double() * clipped.double()).sum(1) / (before * after).clamp(min=1e-300)
    assert (cosine[before > 0] > 1 - 1e-6).all()
    assert torch.equal(Clip(norm)(change[3:4], KEYS[3:4], NOW)[0], clipped[3])  # a row alone is as in a stack


# -- noise ---------------------------------------------------------------------------------------------


def test_noise_is_gaussian_of_the_given_deviation():
    """40,000 draws: the mean, the deviation, the tails and a half of the values lie where they must."""
    noise = Noise(0.5, clip=3.0)(torch.zeros(4, 10_000, dtype=torch.float64), KEYS[:4], NOW) / 1.5
    assert abs(float(noise.mean())) < 5 / math.sqrt(40_000)
    assert abs(float(noise.std()) - 1) < 5 / math.sqrt(80_000)
    for bound in (0.6745, 1.0, 2.0, 3.0):
        inside, expected = float((noise.abs() < bound).double().mean()), math.erf(bound / math.sqrt(2))
        assert abs(inside - expected) < 5 * math.sqrt(expected * (1 - expected) / 40_000)
    assert noise.abs().max() < 6
    each = noise.mean(1).abs()  # at every device, and not only over all
    assert (each < 5 / math.sqrt(10_000)).all()
    correlation = torch.corrcoef(noise)
    assert (correlation - torch.eye(4)).abs().max() < 5 / math.sqrt(10_000)


def test_noise_is_added_to_the_change_in_its_dtype():
    change = changes(3, 7)
    noise = Noise(0.1)(torch.zeros(3, 7, dtype=torch.float64), KEYS[:3], NOW)
    assert torch.equal(Noise(0.1)(change, KEYS[:3], NOW), change + noise.float())
    assert torch.equal(Noise(0.0)(change, KEYS[:3], NOW), change)


def test_each_device_round_and_call_draws_its_own_noise():
    def draw(keys=KEYS, clock=NOW):
        return Noise(1.0)(torch.zeros(len(keys), 9, dtype=torch.float64), keys, clock)

    first = draw()
    assert len(first.unique()) == first.numel()
    assert torch.equal(draw(), first)  # the same question has the same answer
    assert torch.equal(draw(KEYS.flip(0)), first.flip(0))  # and goes by the device, not by its place
    assert torch.equal(draw(KEYS[5:6]), first[5:6])
    others = [draw(clock=Clock(5, 2)), draw(clock=Clock(4, 3)), draw(random.node_keys(9, torch.arange(8)))]
    for other in others:
        assert not (other == first).any()
    assert not (others[0] == others[1]).any()


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_normal_draws_of_any_number(count):
    draws = random.normal(KEYS, count)
    assert (tuple(draws.shape), draws.dtype) == ((8, count), torch.float64)
    assert torch.isfinite(draws).all()
    assert torch.equal(draws, torch.cat([random.normal(key, count) for key in KEYS.split(1)]))


# -- in words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("clip:1.0", (Clip(1.0),)),
        ("noise:0.5", (Noise(0.5, 1.0),)),
        ("clip:2,noise:0.5", (Clip(2.0), Noise(0.5, 2.0))),
        (" clip: 1e-3 , noise: 0 ", (Clip(0.001), Noise(0.0, 0.001))),
    ],
)
def test_text_is_read_and_written(text, expected):
    upload = parse_upload(text)
    assert upload == Upload(expected)
    assert parse_upload(str(upload)) == upload


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("", "no transform of uploads ''; available: clip, noise"),
        ("clop:1", "no transform of uploads 'clop'; did you mean 'clip'"),
        ("clip", "clip needs a number; for example clip:1.0,noise:0.5"),
        ("clip:much", "clip needs a number"),
        ("clip:nan", "clip needs a number"),
        ("clip:inf", "clip needs a number"),
        ("clip:0", "clip needs a number above 0; got 0"),
        ("noise:-1", "noise needs a number of at least 0; got -1"),
        ("clip:1,clip:2", "give clip once, then noise once"),
        ("noise:1,clip:2", "give clip once, then noise once"),
        ("clip:1,", "no transform of uploads ''"),
    ],
)
def test_what_cannot_be_read_gets_advice(text, advice):
    with pytest.raises(ValueError, match=advice):
        parse_upload(text)


def test_transforms_follow_each_other_and_may_be_any_function():
    change = changes(2, 3, 9.0)
    upload = parse_upload("clip:1.0,noise:0.5")
    assert torch.equal(upload(change, KEYS[:2], NOW), Noise(0.5)(Clip(1.0)(change, KEYS[:2], NOW), KEYS[:2], NOW))

    def halve(change, node_keys, clock):
        return change / 2

    assert make_upload(halve) is halve
    assert make_upload(None) is None
    assert make_upload("clip:1") == parse_upload("clip:1")
    with pytest.raises(ValueError, match=r"upload is text such as 'clip:1.0,noise:0.5' or a function .*; got 3"):
        make_upload(3)  # type: ignore[arg-type]
