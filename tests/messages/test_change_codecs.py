"""Codecs of changes: what arrives, how long messages are, what is refused, and what the parent makes of it."""

from __future__ import annotations

import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytier import Codec, FedAvg, Federation, HierFedAvg
from polytier.engines.exchange import Exchange
from polytier.messages.codec import CODECS, INDEX, make_codec
from polytier.runs.loop import make_loop
from polytier.stack.rows import as_dict

MANY = settings(deadline=None, max_examples=150, derandomize=True, database=None)
NAMES = ("int8", "top:0.1", "top:0.5", "top:1", "top:1e-9")
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SHAPES = ([], [0], [1], [7], [8], [9], [3, 5], [2, 0, 4], [300])
SCALES = (0.0, 1e-45, 1e-30, 1.0, 1e30)


def same_bits(a, b) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(BITS[a.itemsize]), b.view(BITS[b.itemsize]))


def drawn(dtype, shape, scale, seed, n=3):
    """Rows with ties, zeros of both signs and values that are too small for the scale of the row."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(n, *shape)) * scale
    values[rng.random(values.shape) < 0.2] = scale  # ties
    values[rng.random(values.shape) < 0.1] = 0.0
    values[rng.random(values.shape) < 0.1] = -0.0
    return torch.from_numpy(values).to(dtype).nan_to_num(0, 0, 0)  # what a narrow dtype cannot hold


# -- every codec ---------------------------------------------------------------------------------------


@MANY
@given(
    st.sampled_from(NAMES),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    st.sampled_from(SHAPES),
    st.sampled_from(SCALES),
    st.integers(0, 99),
)
def test_what_arrives_is_what_was_promised_and_as_long(name, dtype, shape, scale, seed):
    codec, rows = make_codec(name), drawn(dtype, shape, scale, seed)
    through, nbytes = codec.through(rows), codec.nbytes(rows)
    assert (through.dtype, through.shape) == (rows.dtype, rows.shape)
    assert (nbytes.dtype, nbytes.shape) == (torch.int64, (len(rows),))
    for k, row in enumerate(rows):
        message = codec.encode(row)
        assert len(message) == int(nbytes[k])
        assert same_bits(codec.decode(message, row), through[k])
        assert same_bits(codec.through(row[None])[0], through[k])  # a row alone is as in a stack
    assert torch.equal(codec.through(rows[:0]), rows[:0])
    assert codec.nbytes(rows[:0]).tolist() == []


@MANY
@given(st.sampled_from(NAMES), st.integers(0, 40), st.data())
def test_damaged_messages_are_refused_or_read_as_finite_rows(name, size, data):
    """Never a crash, never NaN: bytes are changed, cut off, added, or drawn at random."""
    codec, like = make_codec(name), torch.zeros(size)
    message = bytearray(codec.encode(drawn(torch.float32, [size], 1.0, data.draw(st.integers(0, 9)), 1)[0]))
    kind = data.draw(st.sampled_from(["change", "cut", "add", "random"]))
    if kind == "change" and message:
        message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        message = message[: data.draw(st.integers(0, max(0, len(message) - 1)))]
    elif kind == "add":
        message += data.draw(st.binary(min_size=1, max_size=9))
    else:
        message = bytearray(data.draw(st.binary(max_size=60)))
    try:
        row = codec.decode(bytes(message), like)
    except ValueError:
        return
    assert (row.shape, row.dtype) == (like.shape, like.dtype)
    assert torch.isfinite(row).all()
    assert kind != "cut"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_not_encoded_and_not_hidden(name, bad):
    row = torch.tensor([1.0, bad, 2.0, 3.0])
    with pytest.raises(ValueError, match="NaN or infinity"):
        make_codec(name).encode(row)
    assert not torch.isfinite(make_codec(name).through(row[None])).all()


@pytest.mark.parametrize("name", NAMES)
def test_whole_numbers_large_values_and_pickles(name):
    codec = make_codec(name)
    assert pickle.loads(pickle.dumps(codec)) == codec
    whole = torch.tensor([[1, 300, -2]])
    assert codec.through(whole) is whole
    assert torch.equal(codec.decode(codec.encode(whole[0]), whole[0]), whole[0])
    with pytest.raises(ValueError, match=rf"codec {codec.name} holds values up to .*: use float64"):
        codec.through(torch.tensor([[1e39, 1.0]], dtype=torch.float64))
    assert codec.plain is CODECS["float32"]


def test_names_that_are_not_codecs_get_advice():
    assert make_codec("sparse") is CODECS["sparse"]
    assert make_codec(make_codec("top:0.25")).name == "top:0.25"
    for bad in ("top", "top:", "top:0", "top:1.5", "top:-1", "top:nan", "top:many"):
        with pytest.raises(ValueError, match="needs the fraction of values to send, above 0 and at most 1"):
            make_codec(bad)
    with pytest.raises(ValueError, match="no codec 'int9'; did you mean 'int8'"):
        make_codec("int9")
    with pytest.raises(ValueError, match=r"subclass of polytier.Codec; got 8"):
        make_codec(8)  # type: ignore[arg-type]


# -- each by hand --------------------------------------------------------------------------------------


def test_int8_by_hand():
    codec = CODECS["int8"]
    row = torch.tensor([0.0, 127.0, -127.0, 0.5, 1.5, -0.4, 63.2])
    message = struct.pack("<f7b", 1.0, 0, 127, -127, 0, 2, 0, 63)  # halves to the even number
    assert codec.encode(row) == message
    assert codec.decode(message, row).tolist() == [0, 127, -127, 0, 2, 0, 63]
    assert codec.encode(torch.zeros(3)) == bytes(7)
    assert codec.encode(torch.zeros(0)) == bytes(4)
    rows = torch.randn(50, 200, generator=torch.Generator().manual_seed(0))
    error = (codec.through(rows) - rows).abs().amax(1)
    assert (error <= rows.abs().amax(1) / 127 / 2 * 1.0001).all()
    for bad, why in (
        (struct.pack("<f7b", float("nan"), *range(7)), "its scale is nan"),
        (struct.pack("<f7b", -1.0, *range(7)), "its scale is -1"),
        (struct.pack("<f7b", 1e38, *range(7)), "its scale is "),
        (struct.pack("<f7b", 1.0, -128, *range(6)), "it has a value below -127"),
        (message[:-1], "its length is not 4 \\+ 7"),
    ):
        with pytest.raises(ValueError, match=f"a row of 7 values in codec int8: {why}"):
            codec.decode(bad, row)


def test_top_keeps_the_largest_and_of_equal_ones_the_first():
    codec = make_codec("top:0.5")
    rows = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0], [0.1, 5.0, -7.0, 0.2, 6.0, 0.0]])
    assert codec.through(rows).tolist() == [[1, -1, 1, 0, 0, 0], [0, 5, -7, 0, 6, 0]]
    assert make_codec("top:0.001").through(rows).count_nonzero(1).tolist() == [1, 1]  # one at least
    assert make_codec("top:1").through(rows) is rows
    row = torch.zeros(1000)
    row[[3, 999]] = torch.tensor([2.0, -1.0])
    assert make_codec("top:0.1").encode(row) == struct.pack("<B2H2f", INDEX + 4 * 2, 3, 999, 2.0, -1.0)
    dense = torch.arange(1.0, 1001)
    assert make_codec("top:0.1").nbytes(dense[None]).tolist() == [1 + 125 + 100 * 4]  # a bitmap is shorter
    with pytest.raises(ValueError, match="more than 100 of its values are not zero"):
        make_codec("top:0.1").decode(CODECS["sparse"].encode(dense), dense)


class Crude(Codec):
    """Only what a codec must define."""

    name = "crude"

    def encode(self, row):
        return row.sign().to(torch.int8).numpy().tobytes()

    def decode(self, message, like):
        return torch.frombuffer(bytearray(message), dtype=torch.int8).to(like)


def test_a_codec_needs_encode_and_decode_alone():
    rows = torch.tensor([[3.0, -2.0, 0.0], [1.0, 1.0, 1.0]])
    assert Crude().through(rows).tolist() == [[1, -1, 0], [1, 1, 1]]
    assert Crude().nbytes(rows).tolist() == [3, 3]
    assert Crude().plain.name == "crude"
    with pytest.raises(NotImplementedError, match="Codec needs a method encode"):
        Codec().encode(rows[0])
    with pytest.raises(ValueError, match="codec Codec needs an attribute name"):
        make_codec(Codec())


# -- in a run ------------------------------------------------------------------------------------------


def federation() -> Federation:
    rng = np.random.default_rng(0)
    device = np.repeat(np.arange(6), 8)
    x, y = rng.normal(size=(48, 5)), rng.integers(0, 3, 48)
    return Federation.from_arrays(x, y, device, team=device % 2, num_classes=3)


@pytest.mark.parametrize("name", ["int8", "top:0.2"])
@pytest.mark.parametrize("algorithm", [FedAvg(0.1, 2), HierFedAvg(0.1, 2, team_rounds=2)])
def test_every_upload_of_a_model_is_a_change_and_every_download_is_plain(monkeypatch, name, algorithm):
    """What arrives is what was sent plus the decoded change, at all tiers; bytes are those of the messages."""
    seen = []
    up = Exchange.up

    def watched(self, context, call, start, end, answer):
        arrived, nbytes = up(self, context, call, start, end, answer)
        seen.append((call.tier, as_dict(call.rows)[""][call.sender[start:end]], answer, arrived, nbytes))
        return arrived, nbytes

    monkeypatch.setattr(Exchange, "up", watched)
    with make_loop(algorithm, federation(), "mclr", codec=name, batch_size=4, batching="eager") as training:
        run = training.run(2)
    codec, d = training.codec, training.context.objective.dimension
    for _, sent, answer, arrived, nbytes in seen:
        assert torch.equal(arrived, sent + codec.through(answer - sent))
        assert not torch.equal(arrived, answer)
        assert torch.equal(nbytes, codec.nbytes(answer - sent))
    leaf = training.context.topology.leaf
    assert {tier for tier, *_ in seen} == set(range(1, leaf + 1))
    messages = sum(len(sent) for _, sent, *_ in seen)
    assert run.ledger.read(direction="down") == messages * d * 4
    assert run.ledger.read(direction="up") == sum(int(nbytes.sum()) for *_, nbytes in seen) < messages * d * 4 / 2
    assert training.spec.codec == name
