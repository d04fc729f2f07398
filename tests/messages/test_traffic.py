"""What is sent and what is counted: codecs to the bit, the ledger in every way, bytes until an accuracy."""

import itertools
import pickle
import struct
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from polytier import Federation, PerMFL, Topology
from polytier.engines.loopback import Loopback
from polytier.messages.codec import BITMAP, CODECS, DENSE, INDEX
from polytier.messages.ledger import FEW_NODES, Ledger
from polytier.runs import checkpoint
from polytier.runs.loop import Loop, make_loop
from polytier.runs.read import bytes_until

PLAIN = [name for name, codec in CODECS.items() if not codec.change]  # the others: test_change_codecs.py
MANY = settings(deadline=None, max_examples=150, derandomize=True, database=None)
SPARSE = ("sparse", "sparse16", "sparse64")
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
TINY = {torch.float16: 6e-8, torch.bfloat16: 1e-40, torch.float32: 1e-45, torch.float64: 5e-324}  # denormal


def same_bits(a, b) -> bool:
    kind = BITS.get(a.dtype.itemsize, a.dtype) if a.is_floating_point() else a.dtype
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(kind), b.view(kind))


def filled(size: int, count: int, dtype=torch.float32):
    """A row whose last `count` values are not zero."""
    row = torch.zeros(size, dtype=dtype)
    row[size - count :] = torch.arange(1, count + 1, dtype=dtype)
    return row


# -- codecs ----------------------------------------------------------------------------------------------


@MANY
@given(
    st.sampled_from(sorted(PLAIN)),
    st.sampled_from(sorted(TINY, key=str)),
    st.sampled_from([[], [0], [1], [7], [8], [9], [3, 5], [2, 0, 4], [300]]),
    st.sampled_from([0.0, 0.02, 0.3, 0.97, 1.0]),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_rows_arrive_to_the_bit_and_their_length_is_known(name, dtype, shape, density, n, seed):
    codec, rng = CODECS[name], np.random.default_rng(seed)
    values = rng.normal(size=(n, *shape)) * (rng.random((n, *shape)) < density)
    rows = torch.from_numpy(np.abs(values) if density < 0.5 else values).to(dtype)
    for special in (-0.0, TINY[dtype], -TINY[dtype]):
        rows[torch.from_numpy(rng.random((n, *shape)) < 0.05)] = special
    through, nbytes = codec.through(rows), codec.nbytes(rows)
    assert (nbytes.dtype, nbytes.shape) == (torch.int64, (n,))
    assert torch.equal(codec.nbytes(through), nbytes)  # engines count what has arrived
    assert same_bits(through, rows.to(codec.dtype).to(dtype))
    for k, row in enumerate(rows):
        message = codec.encode(row)
        assert len(message) == int(nbytes[k])
        assert same_bits(codec.decode(message, row), through[k])
    if codec.dtype.itemsize > dtype.itemsize or codec.dtype == dtype:
        assert through.data_ptr() == rows.data_ptr()


@pytest.mark.parametrize("name", CODECS)
def test_whole_numbers_go_as_they_are(name):
    codec = CODECS[name]
    for rows in (torch.tensor([[0, 0, 3], [0, -1, 0]]), torch.tensor([[True, False]]), torch.zeros(2, 0).long()):
        assert codec.through(rows) is rows
        for row, nbytes in zip(rows, codec.nbytes(rows).tolist(), strict=True):
            message = codec.encode(row)
            assert message == row.numpy().tobytes()
            assert nbytes == len(message)
            assert same_bits(codec.decode(message, row), row)


@pytest.mark.parametrize("name", CODECS)
def test_codecs_read_views_and_travel_to_workers(name):
    codec = pickle.loads(pickle.dumps(CODECS[name]))
    assert codec == CODECS[name]
    for rows in (torch.arange(12.0).reshape(3, 4).T, torch.tensor([0.0, 2.0, 0.0]).expand(4, 3)):
        assert codec.nbytes(rows).tolist() == [len(codec.encode(row)) for row in rows]
        assert same_bits(codec.decode(codec.encode(rows[1]), rows[1]), codec.through(rows)[1])
        assert codec.change or same_bits(codec.through(rows), rows.contiguous())


def test_the_price_of_the_paper_by_hand():
    """79,510 parameters, a fifth of them not zero: 64 bits each and 1 bit a position."""
    codec, row = CODECS["paper"], filled(79_510, 15_902)
    bits = 15_902 * 64 + 79_510
    assert len(codec.encode(row)) == int(codec.nbytes(row[None])) == -(-bits // 8) == 137_155
    assert same_bits(codec.decode(codec.encode(row), row), row)
    dense = torch.ones(79_510)
    assert len(codec.encode(dense)) == 79_510 * 8  # no mask
    # 64 parameters, 8 bytes of mask: with one zero the mask costs as much as it spares
    assert [len(codec.encode(filled(64, k))) for k in (64, 63, 62)] == [512, 512, 504]
    assert codec.encode(filled(64, 63)) == filled(64, 63).double().numpy().tobytes()
    assert codec.encode(torch.zeros(0)) == b""


def test_messages_by_hand():
    row = torch.zeros(16)
    row[0], row[9] = 1.5, -0.0
    assert CODECS["sparse"].encode(row) == struct.pack("<B2B2f", BITMAP + 4 * 2, 1, 2, 1.5, -0.0)
    assert CODECS["sparse16"].encode(row) == struct.pack("<B2B2e", BITMAP + 4 * 2, 1, 2, 1.5, -0.0)
    assert CODECS["paper"].encode(row) == struct.pack("<2B2d", 1, 2, 1.5, -0.0)
    row = torch.zeros(65_536)
    row[[3, 65_535]] = torch.tensor([1.5, 2.5])
    assert CODECS["sparse64"].encode(row) == struct.pack("<B2H2d", INDEX + 4 * 2, 3, 65_535, 1.5, 2.5)
    row = torch.cat([row, torch.ones(1)])  # one more entry: positions of 4 bytes
    assert CODECS["sparse"].encode(row) == struct.pack("<B3I3f", INDEX + 4 * 3, 3, 65_535, 65_536, 1.5, 2.5, 1)
    assert same_bits(CODECS["sparse"].decode(CODECS["sparse"].encode(row), row), row)
    assert CODECS["sparse"].encode(torch.ones(65)) == bytes([DENSE + 4 * 1]) + torch.ones(65).numpy().tobytes()
    assert CODECS["sparse"].encode(torch.zeros(0)) == bytes([DENSE])


@pytest.mark.parametrize(
    ("name", "size", "count", "form", "nbytes"),
    [  # dense 1 + 80 * 4, bitmap 1 + 10 + 4 k, index 1 + 6 k
        ("sparse", 80, 0, INDEX, 1),
        ("sparse", 80, 4, INDEX, 25),
        ("sparse", 80, 5, BITMAP, 31),  # as long as the index list
        ("sparse", 80, 77, BITMAP, 319),
        ("sparse", 80, 78, DENSE, 321),
        ("sparse", 32, 31, DENSE, 129),  # as long as the bitmap
        ("sparse16", 80, 4, INDEX, 17),
        ("sparse16", 80, 6, BITMAP, 23),
        ("sparse64", 80, 79, DENSE, 641),
        ("sparse64", 80, 78, BITMAP, 635),
        ("sparse", 80_000, 2_499, INDEX, 1 + 2_499 * 8),
        ("sparse", 80_000, 2_501, BITMAP, 1 + 10_000 + 2_501 * 4),
    ],
)
def test_the_shortest_form_is_sent(name, size, count, form, nbytes):
    codec, row = CODECS[name], filled(size, count)
    message = codec.encode(row)
    assert (message[0] % 4, len(message)) == (form, nbytes)
    assert codec.nbytes(torch.stack([row, torch.ones(size)])).tolist() == [nbytes, 1 + size * codec.dtype.itemsize]


@pytest.mark.parametrize("name", [*SPARSE, "paper"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_not_encoded(name, bad):
    with pytest.raises(ValueError, match=f"codec {name} .* NaN or infinity"):
        CODECS[name].encode(torch.tensor([0.0, bad]))


def test_values_too_large_for_a_codec_name_the_one_that_holds_them():
    large, huge = torch.tensor([[0, 65_519], [-65_520, 1]]).float(), torch.tensor([[1e39]], dtype=torch.float64)
    for name, rows, better in (
        ("float16", large, "float32"),
        ("float16", huge, "float64"),
        ("float32", huge, "float64"),
        ("sparse16", large, "sparse"),
        ("sparse16", huge, "sparse64"),
        ("sparse", huge, "sparse64"),
    ):
        for call in (lambda: CODECS[name].encode(rows[-1]), lambda: CODECS[name].through(rows)):  # noqa: B023
            with pytest.raises(ValueError, match=rf"codec {name} holds values up to .*use {better}$"):
                call()
        assert torch.equal(CODECS[better].through(rows), rows)
    assert CODECS["float16"].through(large[:1]).tolist() == [[0, 65_504]]
    lost = torch.tensor([[float("nan"), float("inf")]])  # the engine has a better word for it
    assert str(CODECS["float16"].through(lost)) == str(CODECS["sparse16"].through(lost)) == str(lost)


@pytest.mark.parametrize("name", [*SPARSE, "paper"])
@pytest.mark.parametrize("count", [0, 3, 30, 50])
def test_a_message_cut_short_or_too_long_is_refused(name, count):
    codec = CODECS[name]
    row = filled(50, count) * 1.1
    message = codec.encode(row)
    for wrong in (*(message[:k] for k in range(len(message))), *(message + bytes(k) for k in range(1, 40))):
        with pytest.raises(ValueError, match=f"got a message of {len(wrong)} bytes, expected a row of 50 values"):
            codec.decode(wrong, row)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"", "empty"),
        *((bytes([form]) + bytes(40), "layout 3") for form in (3, 7, 255)),
        (struct.pack("<BHf", INDEX + 4 * 1, 10, 1), "beyond the row"),
        (struct.pack("<B2H2f", INDEX + 4 * 2, 4, 4, 1, 1), "do not increase"),
        (struct.pack("<B2H2f", INDEX + 4 * 2, 4, 3, 1, 1), "do not increase"),
        (struct.pack("<B2H2f", INDEX + 4 * 3, 3, 4, 1, 1), "number of values"),
        (struct.pack("<B2B1f", BITMAP + 4 * 1, 0, 4, 1), "beyond the row"),
        (struct.pack("<B2B1f", BITMAP + 4 * 1, 1, 2, 1), "number of values"),
        (struct.pack("<B2B3f", BITMAP + 4 * 3, 1, 2, 1, 1, 1), "number of values"),
        (struct.pack("<B2B2f", BITMAP + 4 * 3, 1, 2, 1, 1), "number of values"),
        (struct.pack("<B9f", DENSE + 4 * 9, *range(9)), "number of values"),
        (struct.pack("<B10f", DENSE, *range(10)), "number of values"),
    ],
)
def test_damaged_messages_are_refused(message, why):
    with pytest.raises(ValueError, match=f"bytes, expected a row of 10 values in codec sparse: .*{why}"):
        CODECS["sparse"].decode(message, torch.zeros(10))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (struct.pack("<2B1d", 0, 4, 1), "beyond the row"),
        (struct.pack("<2B1d", 1, 2, 1), "number of values"),
        (struct.pack("<2B10d", 255, 3, *range(10)), "too long"),
    ],
)
def test_damaged_messages_without_a_first_byte_are_refused(message, why):
    with pytest.raises(ValueError, match=f"in codec paper: .*{why}"):
        CODECS["paper"].decode(message, torch.zeros(10))


# -- the ledger ------------------------------------------------------------------------------------------

LINKS, WAYS = {"team": "server-team", "device": "team-device"}, ("down", "up")
NAMES = {"team": ["a", "b"], "device": ["0", "1", "2", "3"]}


def training(**more) -> Loop:
    """Four devices in two teams; the model has 63 numbers, and most features are zero at every device but the last."""
    rng = np.random.default_rng(0)
    x, y, device = rng.normal(size=(24, 20)), rng.integers(0, 3, 24), np.repeat(np.arange(4), 6)
    x[:18, 2:] = 0
    x[18:, 12:] = 0
    federation = Federation.from_arrays(x, y, device, num_classes=3)
    module = nn.Linear(20, 3)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    settings = {"codec": "sparse", "device_participation": 0.5, "batch_size": 3, "batching": "eager", **more}
    topology = Topology.build(federation.ids, ["a", "a", "b", "b"])
    return make_loop(PerMFL(0.1, 0.1, device_steps=2, team_rounds=2), federation, module, topology=topology, **settings)


@pytest.fixture(scope="module")
def run():
    with training() as made:
        return made.run(3)


class Counting(Loopback):
    """Every row by itself, as bytes: (round, tier, direction, node) -> the length of what was encoded."""

    def __init__(self, context, **settings) -> None:
        super().__init__(context, **settings)
        self.counts = Counter()

    def _send(self, call, direction, codec, rows):
        (row,), (node,) = rows, call.ids
        tier, names = self.context.topology.tier_names[call.tier], self.context.topology.names[call.tier]
        self.counts[call.clock.round + 1, tier, direction, str(names[node])] += len(codec.encode(row))
        return super()._send(call, direction, codec, rows)


@pytest.mark.parametrize("codec", ["sparse", "sparse16", "paper", "float32", "int8", "top:0.2"])
def test_the_ledger_counts_the_length_of_what_is_encoded(codec):
    with training(codec=codec) as stacked:
        stacked.run(2)
    with training(codec=codec) as alone:
        engine = Counting(alone.context, codec=alone.codec)
        alone.use(engine)
        alone.run(2)
    ledger = stacked.ledger
    sent = [(r, t, w, n) for r in (1, 2) for t in LINKS for w in WAYS for n in NAMES[t]]
    found = {key: ledger.read(round=key[0], tier=key[1], direction=key[2], node=key[3]) for key in sent}
    assert {key: amount for key, amount in found.items() if amount} == engine.counts
    assert torch.equal(stacked.state, alone.state)  # type: ignore[arg-type]
    assert list(ledger.entries()) == list(alone.ledger.entries())
    dense = 63 * stacked.codec.dtype.itemsize
    messages = len(WAYS) * 2 * (2 + 2 * 2)  # in 2 rounds: 2 teams, each with 1 device in 2 team rounds
    if stacked.codec.change:
        assert ledger.read(direction="down") == messages * dense / 2
        assert ledger.read(direction="up") < messages * dense / 2 / (3 if codec == "int8" else 4)
        return
    assert codec == "float32" or 0 < ledger.read() < messages * dense / 2  # zeros were spared
    assert codec != "float32" or ledger.read() == messages * dense


def test_the_ledger_is_read_in_every_way(run):
    ledger, entries = run.ledger, list(run.ledger.entries())
    assert ledger.read() == sum(amount for *_, amount in entries) > 0
    for tier, way, number in itertools.product((None, *LINKS), (None, *WAYS), (None, 1, 2, 3)):
        link = LINKS[tier] if tier else None
        expected = sum(a for r, k, w, a in entries if (number or r, link or k, way or w) == (r, k, w))
        assert ledger.read(link=link, direction=way, round=number) == expected
        assert ledger.read(tier=tier, direction=way, round=number) == expected
        assert ledger.read(link=link, tier=tier, direction=way, round=number) == expected
        if tier is not None:
            by_node = [ledger.read(tier=tier, direction=way, round=number, node=n) for n in NAMES[tier]]
            assert sum(by_node) == expected
            assert tier == "team" or len(set(by_node)) > 1  # the server sends all teams the same
    for way in WAYS:
        totals = ledger.nodes["team-device"][way].tolist()
        assert [ledger.read(link="team-device", direction=way, node=n) for n in (0, 1, 2, 3)] == totals


def test_the_ledger_cumulated(run):
    ledger = run.ledger
    for link, way, node in ((None, None, None), ("server-team", "up", None), ("team-device", None, 3)):
        by_round = [ledger.read(link=link, direction=way, node=node, round=k) for k in (1, 2, 3)]
        expected = [by_round[0], sum(by_round[:2]), sum(by_round)]
        assert ledger.cumulated(link=link, direction=way, node=node) == expected
        assert expected[-1] == ledger.read(link=link, direction=way, node=node)
    assert Ledger(ledger.topology).cumulated() == []
    assert Ledger(ledger.topology).read() == 0


@pytest.mark.parametrize(
    ("what", "advice"),
    [
        ({"link": "server-device"}, "no link 'server-device'; available: server-team, team-device"),
        ({"tier": "server"}, "no tier 'server'; available: team, device"),
        ({"direction": "left"}, "no direction 'left'; available: down, up"),
        ({"round": 0}, "no round 0; 3 are done, counted from 1"),
        ({"round": 4}, "no round 4; 3 are done"),
        ({"node": "a"}, "node a may be in any tier; give link .server-team, team-device. or tier"),
        ({"tier": "team", "node": "c"}, "no node 'c'; available: a, b"),
        ({"link": "server-team", "tier": "device"}, "tier device is not below link server-team"),
    ],
)
def test_what_the_ledger_does_not_have(run, what, advice):
    with pytest.raises(ValueError, match=advice):
        run.ledger.read(**what)


def test_large_tiers_keep_nodes_and_rounds_apart():
    ledger = Ledger(Topology.build(np.arange(FEW_NODES + 1), np.arange(FEW_NODES + 1) % 2))
    ledger.start_round()
    ledger.add(2, "up", torch.tensor([0, 1]), torch.tensor([5, 7]))
    assert ledger.read(tier="device", node=2) == 7  # 0, 2, .. are in the first team
    assert ledger.read(tier="device", round=1) == 12
    for ask in (
        lambda: ledger.read(tier="device", node=2, round=1),
        lambda: ledger.cumulated(link=LINKS["device"], node=2),
    ):
        with pytest.raises(ValueError, match="at most 4,096 nodes; team-device has 4,097: give node or round"):
            ask()
    with pytest.raises(ValueError, match="available: 0, 2, 4, 6, 8, 10, 12, 14 and 4089 more"):
        ledger.read(tier="device", node="x")
    assert ledger.read(tier="team", node=0, round=1) == 0
    assert not any(key.startswith("rounds:team-device") for key in ledger.state())


def test_the_ledger_goes_through_a_checkpoint(run, tmp_path):
    with training() as half:
        half.run(2)
        checkpoint.save(tmp_path, 2, *half.snapshot())
    _, tensors, facts = checkpoint.latest(tmp_path)  # type: ignore[misc]
    with training() as resumed:
        resumed.restore(tensors, facts)
        resumed.run(3)
    ledger = resumed.ledger
    assert list(ledger.entries()) == list(run.ledger.entries())
    for tier, number in itertools.product(LINKS, (None, 1, 2, 3)):
        for node in NAMES[tier]:
            what = {"tier": tier, "round": number, "node": node}
            assert ledger.read(**what) == run.ledger.read(**what)


def test_checkpoints_of_older_versions_have_no_bytes_by_node_and_round(run, tmp_path):
    with training() as half:
        half.run(2)
        tensors, facts = half.snapshot()
    old = {key: value for key, value in tensors.items() if "rounds:" not in key}
    assert len(old) == len(tensors) - 4
    with training() as resumed:
        resumed.restore(old, facts)
        resumed.run(3)
        checkpoint.save(tmp_path, 3, *resumed.snapshot())
    ledger = Ledger(run.ledger.topology)
    _, tensors, facts = checkpoint.latest(tmp_path)  # type: ignore[misc]
    ledger.load(tensors, facts["traffic"])
    assert list(ledger.entries()) == list(run.ledger.entries())
    for node in NAMES["team"]:
        assert ledger.read(tier="team", node=node) == run.ledger.read(tier="team", node=node)
        assert ledger.read(tier="team", node=node, round=3) == run.ledger.read(tier="team", node=node, round=3)
        with pytest.raises(ValueError, match="no bytes by node for round 2"):
            ledger.read(tier="team", node=node, round=2)
        with pytest.raises(ValueError, match="no bytes by node for round 1"):
            ledger.cumulated(link="server-team", node=node)


# -- bytes until an accuracy -----------------------------------------------------------------------------


def record(number, bytes_, **accuracy):
    models = {model: {"train": {"accuracy": 1.0}, "test": {"accuracy": a}} for model, a in accuracy.items()}
    down_up = {"server-team": {"down": bytes_, "up": 1}, "team-device": {"down": 1000, "up": 100}}
    return {"round": number, **models, "bytes": down_up, "seconds": 0.1, "participants": {"team": 2, "device": 4}}


HISTORY = [
    record(1, 10),
    record(2, 20, personal=0.6, **{"global": 0.3}),
    record(3, 30),
    record(4, 40, personal=0.9, **{"global": None}),  # NaN, in a file
    record(5, 50, personal=0.8, **{"global": 0.7}),
]


def test_bytes_until_an_accuracy():
    assert bytes_until(HISTORY, 0.6) == (2, 10 + 20 + 2 + 2 * 1100)
    assert bytes_until(HISTORY, 0.61) == (4, 100 + 4 + 4 * 1100)
    assert bytes_until(HISTORY, 0.61, link="server-team") == (4, 104)
    assert bytes_until(HISTORY, 0.5, model="global", link="team-device") == (5, 5500)
    assert bytes_until(HISTORY, 0.95) is None
    assert bytes_until(HISTORY[:1], 0) is bytes_until([], 0.5) is None
    with pytest.raises(ValueError, match="no model 'team'; available: global, personal"):
        bytes_until(HISTORY, 0.5, model="team")
    with pytest.raises(ValueError, match="no link 'team-server'; available: server-team, team-device"):
        bytes_until(HISTORY, 0.5, link="team-server")
    with pytest.raises(ValueError, match="a fraction such as 0.9; got 90"):
        bytes_until(HISTORY, 90)


def test_bytes_until_of_a_run(run):
    best = max(range(3), key=lambda k: run.history[k]["personal"]["test"]["accuracy"])  # the first of the best
    accuracy = run.history[best]["personal"]["test"]["accuracy"]
    assert bytes_until(run.history, accuracy) == (best + 1, run.ledger.cumulated()[best])
