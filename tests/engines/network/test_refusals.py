"""What is not a valid message of somebody on the roster is refused: one line in the log, and the sender is cut off."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from network_full.fuzz import fuzz
from network_tree import Tree, data
from polytier import Diverged, PerMFL
from polytier.engines.network.contents import Limits, allowed_programs, as_tensor
from polytier.engines.network.message import HEADER, Message, Refused, decode, encode
from polytier.runs.loop import make_loop
from short_methods import short

SETTINGS: dict[str, Any] = {"batch_size": 4, "seed": 3}
LARGEST = 1 << 20


@pytest.fixture(scope="module")
def tree():
    with make_loop(short("permfl"), data(), "mclr", **SETTINGS) as loop:
        tree = Tree(loop)
        asked = []
        device = tree.nodes["device/d0"]
        tree.hubs["team/t0"].dial("device/d0", lambda data: (asked.append(data), device.handle(data))[1])
        loop.run(1)
        tree.asked = decode(next(m for m in asked if decode(m, 1 << 30).kind == "call"), 1 << 30)  # type: ignore
        yield tree


# -- what is no message -------------------------------------------------------------------------------


def with_header(length: int, text: bytes, rest: bytes = b"") -> bytes:
    return length.to_bytes(8, "little") + text + rest


def with_tensor(shape: str, end: int, rest: bytes = b"") -> bytes:
    about = f'{{"dtype":"F32","shape":{shape},"data_offsets":[0,{end}]}}'
    text = f'{{"__metadata__":{{"polytier":"{{}}"}},"a":{about}}}'.encode()
    return with_header(len(text), text, rest)


BAD = {
    "nothing": b"",
    "a header of 10 GB": with_header(10 << 30, b"{}"),
    "a long header": with_header(HEADER + 8, b" " * (HEADER + 8)),
    "pickle": pickle.dumps({"kind": "call", "tensor": [1, 2, 3]}),
    "no JSON": with_header(4, b"\xff\xfe{}"),
    "nested JSON": with_header(60_000, b"[" * 60_000),
    "no facts": with_header(2, b"{}"),
    "a tensor beyond the end": with_tensor("[4]", 16, b"1234"),
    "a tensor of 2^62 numbers": with_tensor("[1099511627775,4194304]", 0),
    "too long": encode(Message("hello", {}, {"a": torch.zeros(LARGEST)})),
}


@pytest.mark.parametrize("name", BAD)
def test_bytes_that_are_no_message_are_refused(name):
    with pytest.raises(Refused):
        decode(BAD[name], LARGEST)


def test_messages_come_through_as_they_were():
    shared = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": shared, "b": shared, "c": torch.zeros(0, 4, dtype=torch.int64), "d": torch.tensor([True])}
    message = decode(encode(Message("answer", {"x": [1, "two"], "y": None}, tensors)), LARGEST)
    assert (message.kind, message.facts) == ("answer", {"x": [1, "two"], "y": None})
    assert all(torch.equal(message.tensors[name], value) for name, value in tensors.items())


# -- what a node refuses ------------------------------------------------------------------------------


def changed(message: Message, facts: dict[str, Any], tensors: dict[str, Any] | None = None) -> bytes:
    return encode(Message(message.kind, {**message.facts, **facts}, {**message.tensors, **(tensors or {})}))


ROWS = {"named": False, "fields": {"": ["float32", [12]]}, "count": 1}
WRONG = {
    "a method that is not on the list": {"method": "server"},
    "a private method": {"method": "__init__"},
    "another node": {"node": "device/d1"},
    "another tier": {"tier": 1},
    "another model": {"scope": "b"},
    "no number": {"number": None},
    "a negative round": {"round": -1},
    "a chain of texts": {"chain": ["a"]},
    "no chain": {"chain": []},
    "rows of another shape": {"rows": {**ROWS, "fields": {"": ["float32", [13]]}}},
    "rows of another type": {"rows": {**ROWS, "fields": {"": ["int64", [12]]}}},
    "rows of 2^39 numbers": {"rows": {**ROWS, "fields": {"more": ["float32", [1 << 39]]}, "named": True}},
    "rows of a type that is unknown": {"rows": {**ROWS, "fields": {"": ["object", [12]]}}},
    "more rows than there are": {"rows": {**ROWS, "count": 2}, "receivers": 2},
    "a million receivers": {"receivers": 1_000_000},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_device_refuses_calls_that_are_not_valid(tree, name):
    node = tree.nodes["device/d0"]
    before = node.versions[""].last
    with pytest.raises(Refused):
        node.handle(changed(tree.asked, WRONG[name]))
    assert node.versions[""].last == before


def test_a_device_refuses_rows_that_are_not_finite(tree):
    row = torch.full((12,), torch.nan).numpy().tobytes()
    tensor = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    with pytest.raises(Refused, match="NaN"):
        tree.nodes["device/d0"].handle(changed(tree.asked, {}, {"0:": tensor}))


def test_only_programs_of_rows_and_a_node_can_be_called():
    assert allowed_programs(short("permfl")) == {"solve", "team", "device"}
    assert "midpoint" in allowed_programs(short("cobo"))
    assert not allowed_programs(short("al2gd")) & {"server", "personal", "predict", "check", "init", "publish"}


# -- what a parent refuses ----------------------------------------------------------------------------


def nan_row(message: Message) -> bytes:
    return changed(message, {}, {"0:": torch.full((48,), 255, dtype=torch.uint8)})


ANSWERS = {
    "pickle": lambda m: pickle.dumps([1, 2]),
    "NaN": nan_row,
    "another shape": lambda m: changed(m, {"rows": {**ROWS, "fields": {"": ["float32", [13]]}}}),
    "other fields": lambda m: changed(m, {"rows": {"named": True, "fields": {}, "count": 1}}),
    "another name": lambda m: changed(m, {"node": "device/d2"}),
    "impossible traffic": lambda m: changed(m, {}, {"traffic": torch.tensor([[1, 0, 5, 5]])}),
    "negative steps": lambda m: changed(m, {"steps": -1}),
    "absences that are none": lambda m: changed(m, {}, {"absences": as_tensor([["x"]])}),
    "another question": lambda m: changed(m, {"number": m.facts["number"] + 1}),
    "a message of another kind": lambda m: encode(Message("stop", m.facts, m.tensors)),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_team_cuts_off_a_device_whose_answer_is_not_valid_and_goes_on(name, caplog):
    with make_loop(short("permfl"), data(), "mclr", **SETTINGS) as loop:
        tree = Tree(loop)
        hub, handle = tree.hubs["team/t0"], tree.nodes["device/d0"].handle

        def bad(data: bytes) -> bytes:
            message = decode(handle(data), 1 << 30)
            return ANSWERS[name](message) if message.kind == "answer" else encode(message)

        hub.dial("device/d0", bad)
        loop.run(2)
        assert "device/d0" in hub.closed
        assert "device/d0" not in hub.children
        assert {(line.name, line.why) for line in tree.server.absences} == {("d0", "refused"), ("d0", "not connected")}
    assert sum("device/d0" in record.message and "closed" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("name", ["permfl", "ditto", "fedrep"])
def test_the_server_receives_no_sample_and_no_personal_model(name):
    federation, received = data(), []
    with make_loop(short(name), federation, "mclr", **SETTINGS) as loop:
        tree = Tree(loop)
        hub = tree.hubs["server"]
        wait = hub.wait
        hub.wait = lambda seconds: received.append(wait(seconds)) or received[-1]  # type: ignore[func-returns-value]
        loop.run(3)
        own = [row for (_, kind, _), row in tree.models.items() if kind == "personal"]
        secret = [*own, *federation.x, *(-federation.x)]
        seen = b"".join(message[1] for message in received if message is not None and message[1] is not None)
    assert len(own) == 6
    assert len(seen) > 1000
    assert not [row for row in secret if row.numpy().tobytes() in seen]


def test_an_answer_that_comes_a_second_time_ends_the_link(caplog):
    with make_loop(short("permfl"), data(), "mclr", **SETTINGS) as loop:
        tree = Tree(loop)
        hub, handle = tree.hubs["team/t0"], tree.nodes["device/d0"].handle

        def twice(data: bytes) -> bytes:
            answer = handle(data)
            if decode(answer, 1 << 30).kind == "answer" and not hub.closed:
                hub._late.append(("device/d0", answer))
            return answer

        hub.dial("device/d0", twice)
        loop.run(2)
        assert "a second time" in hub.closed["device/d0"]
        assert {(line.name, line.why) for line in tree.server.absences} == {("d0", "not connected")}
    assert sum("a second time" in message for message in caplog.messages) == 1


def test_a_device_that_diverges_ends_the_run_with_its_name():
    with make_loop(PerMFL(device_lr=1e30, device_steps=9), data(), "mclr", **SETTINGS) as loop:
        Tree(loop)
        with pytest.raises(Diverged, match="round 1: the model of device d0"):
            loop.run(1)


# -- anything -----------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=400), st.integers(0, 1 << 20))
def test_any_bytes_are_refused_and_nothing_else_happens(data, length):
    for each in (data, length.to_bytes(8, "little") + data, len(data).to_bytes(8, "little") + data):
        with pytest.raises(Refused):
            decode(each, LARGEST)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    key=st.sampled_from([*("node", "scope", "tier", "number", "heard", "method", "chain"), "round", "call", "rows"]),
    value=JSON,
)
def test_any_value_of_a_fact_is_refused_or_answered(tree, key, value):
    node = tree.nodes["device/d0"]
    message = Message("call", {**tree.asked.facts, "heard": node.versions[""].last, key: value}, tree.asked.tensors)
    try:
        answer = node.answer(message)
    except Refused:
        return
    assert answer.kind in ("answer", "absent", "failed")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damage=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=6))
def test_any_damage_of_a_message_is_refused_or_answered(tree, damage):
    node = tree.nodes["device/d0"]
    message = Message("call", {**tree.asked.facts, "heard": node.versions[""].last}, tree.asked.tensors)
    whole = bytearray(encode(message))
    for place, byte in damage:  # the length differs from example to example, with the number of the last call
        whole[place % len(whole)] = byte
    try:
        answer = decode(node.handle(bytes(whole)), 1 << 30)
    except Refused:
        return
    assert answer.kind in ("answer", "absent", "failed")


def test_messages_changed_at_random_are_refused_or_answered_by_server_team_and_device():
    found = fuzz(800)  # all 10,000 in `make network`
    assert all(found[f"{who}: refused"] > 50 for who in ("device", "team", "server", "gate"))


def test_limits_come_through_json():
    limits = Limits({"/1/solve/up": {"": ("float32", (3,)), "n": None}}, 12, 34, frozenset({"/1"}))
    assert Limits.of(limits.as_values()) == limits
