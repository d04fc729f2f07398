"""Links between nodes, over WebSocket and over a broker: who is let in, and what ends a link."""

from __future__ import annotations

import logging
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("websockets")
pytest.importorskip("paho.mqtt")

from websockets.exceptions import WebSocketException

from brokers import MISSING, MOSQUITTO, Mosquitto
from polytier.engines.network.contents import Limits, as_tensor, from_tensor
from polytier.engines.network.keys import (
    Revocations,
    enrol,
    issued,
    make_authority,
    make_request,
    peer,
    renew,
    revoke,
    sign_request,
    tls,
)
from polytier.engines.network.links import Closed, LinkHub, Uplink
from polytier.engines.network.message import Message, Refused, decode, encode
from polytier.engines.network.mqtt import Broker
from polytier.engines.network.transport import MQTT, open_hub, open_uplink
from polytier.engines.network.websocket import split_address
from polytier.runs.admission import Admission, hello, those_counted
from polytier.runs.job import make_job
from polytier.runs.node_versions import PROTOCOL
from raw_links import Raw, closed, raw_link

LARGEST = 1 << 16
ROSTER = {"devices": ["ann", "bob"], "gateways": {"lab": ["ann", "bob"]}, "shape": [3], "classes": 3}
# paho-mqtt leaves a socket open whose handshake has failed
UNCLOSED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
BROKER = pytest.mark.skipif(MOSQUITTO is None, reason=MISSING)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "federation"
    make_authority(folder)
    for name in ("server", "device/ann", "device/bob", "device/eve", "gateway/lab"):
        enrol(folder, name)
    return folder


@pytest.fixture(scope="module", params=["websocket", pytest.param("mqtt", marks=BROKER)])
def where(request, keys) -> Iterator[str]:
    """Where hubs listen: at a port of their own, or behind a broker."""
    if request.param == "websocket":
        yield "127.0.0.1:0"
        return
    with Mosquitto(keys) as broker:
        yield broker.via


@pytest.fixture
def hub(keys, where) -> Iterator[LinkHub]:
    hub = make_hub(where, keys / "server")
    yield hub
    hub.close()


def make_hub(where: str, keys: Path) -> LinkHub:
    job = make_job({"algorithm": "fedavg"}, ROSTER, "a test")
    return open_hub(where, keys, Admission(job, job.tree, 0, Limits(largest=LARGEST)))


def make_uplink(hub: LinkHub, keys: Path, largest: int = LARGEST) -> Uplink:
    via, _, name = hub.address.partition(" as ")
    return open_uplink(f"{via}/{name}" if name else via, keys, hello(["device/ann"]), largest)


def dial(hub: LinkHub, keys: Path) -> AbstractContextManager[Raw]:
    return raw_link(hub.address.replace(" as ", "/"), keys)


def until(happened: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def received(socket: Raw) -> Message:
    return socket.receive()


@contextmanager
def joined(hub: LinkHub, keys: Path, *names: str) -> Iterator[Any]:
    """A link whose other end is ready to be called."""
    gate = hub.gate
    assert isinstance(gate, Admission)
    with dial(hub, keys) as socket:
        socket.send(encode(hello(list(names))))
        assert received(socket).kind == "welcome"
        counts = {name.partition("/")[2]: [4, 0, 1] for name in names}
        socket.send(encode(Message("ready", {}, {"counts": as_tensor(counts)})))
        until(lambda: set(counts) <= set(gate.counts))
        gate.begin(gate.counts)
        gate.settle(those_counted(gate.tree, gate.counts), {"run": "r", "initial": {}})
        hub.send_worlds()
        assert received(socket).kind == "world"
        socket.send(encode(Message("ready")))
        until(lambda: hub.link_of(names[0]))
        yield socket


def test_a_child_that_dials_while_the_run_begins_counts_its_samples_first(hub, keys, caplog):
    gate = hub.gate
    assert isinstance(gate, Admission)
    with dial(hub, keys / "device-ann") as socket:
        socket.send(encode(hello(["device/ann"])))
        received(socket)
        gate.begin({"ann": [4, 0, 1]})
        gate.settle(those_counted(gate.tree, gate.counts), {"run": "r", "initial": {}})
        hub.send_worlds()
        socket.send(encode(Message("ready", {}, {"counts": as_tensor({"ann": [4, 0, 1]})})))
        assert received(socket).kind == "world"
        assert hub.present() == []
        socket.send(encode(Message("ready")))
        until(lambda: hub.present() == ["device/ann"])
    assert not warnings(caplog)


def greeted(hub: LinkHub, keys: Path) -> Message:
    with dial(hub, keys) as socket:
        socket.send(encode(hello(["device/ann"])))
        return received(socket)


def warnings(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_child_is_welcomed_told_its_world_and_asked(hub, keys):
    with joined(hub, keys / "device-ann", "device/ann") as socket:
        assert hub.present() == ["device/ann"]
        link = hub.ask("device/ann", Message("call", {"number": 7}))
        assert received(socket).facts == {"number": 7}
        socket.send(encode(Message("answer", {"number": 7})))
        came = hub.wait(30)
        assert came is not None
        assert (came[0], decode(came[1] or b"", LARGEST).facts) == (link, {"number": 7})
    until(lambda: hub.link_of("device/ann") is None)
    assert hub.wait(30) == (link, None)
    assert hub.ask("device/bob", Message("call")) is None


def test_a_device_is_told_nothing_of_the_others(hub, keys):
    with dial(hub, keys / "device-ann") as socket:
        socket.send(encode(hello(["device/ann"])))
        job = from_tensor(received(socket), "job")
        assert job["trees"] == {"device/ann": {"names": [["server"], ["ann"]], "parents": [[0], [0]], "order": [0]}}
        assert not {"devices", "teams", "gateways"} & set(job["network"])
        assert "bob" not in str(job)


def test_a_gateway_speaks_for_the_devices_that_the_job_lists(hub, keys):
    with joined(hub, keys / "gateway-lab", "device/ann", "device/bob"):
        assert hub.present() == ["device/ann", "device/bob"]
        assert hub.link_of("device/ann") == hub.link_of("device/bob")


@pytest.mark.parametrize(
    ("who", "message", "text"),
    [
        ("device-eve", hello(["device/eve"]), "not in the roster"),
        ("device-ann", hello(["device/bob"]), "may not speak for"),
        ("gateway-lab", hello(["server"]), "may not speak for"),
        ("device-ann", hello([]), "does not say who it is"),
        (
            "device-ann",
            Message("hello", {"protocol": PROTOCOL + 1, "names": ["device/ann"]}),
            "install the same version",
        ),
        ("device-ann", Message("answer", {}), "begins with a message answer"),
    ],
)
def test_who_may_not_come_is_told_why_and_cut_off(hub, keys, caplog, who, message, text):
    with dial(hub, keys / who) as socket:
        socket.send(encode(message))
        refused = received(socket)
        assert refused.kind == "refused"
        assert text in refused.facts["text"]
        assert closed(socket)
    assert len(warnings(caplog)) == 1
    assert text in warnings(caplog)[0]


def test_a_team_passes_on_only_what_its_own_devices_say(tmp_path):
    roster = {"teams": {"north": ["ann"], "south": ["bob"]}, "shape": [3], "classes": 3}
    names = ["device/ann"]

    def admitted(certificate: str, *via: str, relay: bool = True) -> Message:
        job = make_job({"algorithm": "fedavg"}, {**roster, "relay": relay}, "a test")
        about = hello(names)
        about.facts["via"] = list(via)
        return Admission(job, job.tree, 0, Limits(largest=LARGEST)).admit(certificate, about)

    assert admitted("team/north", "device/ann").kind == "welcome"
    assert admitted("device/ann").kind == "welcome"
    for certificate, *via in (
        ("team/south", "device/ann"),
        ("team/north", "device/bob"),
        ("device/bob", "device/ann"),
        ("team/north", "device/ann", "team/south"),
        ("team/north",),
    ):
        with pytest.raises(Refused, match="may not"):
            admitted(certificate, *via)
    with pytest.raises(Refused, match="may not pass on"):
        admitted("team/north", "device/ann", relay=False)
    names = ["team/north"]
    assert from_tensor(admitted("team/north"), "job")["relay"] is True
    with pytest.raises(Refused, match="relay = true"):
        admitted("team/north", relay=False)


BAD = {
    "pickle": b"\x80\x04]\x94.",
    "text": "text",
    "a header of 10 GB": (10 << 30).to_bytes(8, "little") + b"{}",
    "a long message": bytes(2 * LARGEST),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_something_else_than_a_message_ends_the_link_with_one_line(hub, keys, caplog, data):
    with dial(hub, keys / "device-ann") as socket:
        socket.send(encode(hello(["device/ann"])))
        received(socket)
        socket.send(data)
        assert closed(socket)
    until(lambda: warnings(caplog))
    assert len(warnings(caplog)) == 1
    with joined(hub, keys / "device-bob", "device/bob"):  # others can come
        assert hub.present() == ["device/bob"]


def test_a_first_message_that_is_too_long_is_one_line(hub, keys, caplog):
    with dial(hub, keys / "device-ann") as socket:
        socket.send(bytes(2 * LARGEST))
        assert closed(socket)
    until(lambda: warnings(caplog))
    assert len(warnings(caplog)) == 1
    assert "device/ann" in warnings(caplog)[0]


def test_samples_that_are_impossible_or_have_changed_are_refused(hub, keys, caplog):
    for counts in ({"ann": [0, 0, 1]}, {"ann": [-1, 0, 1]}, {"bob": [1, 0, 1]}, {"ann": "many"}, [1]):
        with dial(hub, keys / "device-ann") as socket:
            socket.send(encode(hello(["device/ann"])))
            received(socket)
            socket.send(encode(Message("ready", {}, {"counts": as_tensor(counts)})))
            assert received(socket).kind == "refused"
    with joined(hub, keys / "device-ann", "device/ann"):
        pass
    with dial(hub, keys / "device-ann") as socket:
        socket.send(encode(hello(["device/ann"])))
        received(socket)
        socket.send(encode(Message("ready", {}, {"counts": as_tensor({"ann": [5, 0, 1]})})))
        assert "other numbers of samples" in received(socket).facts["text"]


@UNCLOSED
def test_a_certificate_of_another_authority_is_refused(hub, keys, tmp_path, caplog):
    make_authority(tmp_path / "other")
    other = enrol(tmp_path / "other", "device/ann")
    shutil.copy(keys / "ca.pem", other / "ca.pem")  # it trusts the server, which does not trust it
    with pytest.raises((WebSocketException, OSError, Closed)):
        greeted(hub, other)
    if not hub.address.startswith(MQTT):  # the broker has refused it
        until(lambda: warnings(caplog))
        assert len(warnings(caplog)) == 1
        assert "refused" in warnings(caplog)[0]


@UNCLOSED
def test_a_server_of_another_authority_is_refused_by_the_device(hub, keys, tmp_path):
    make_authority(tmp_path / "other")
    uplink = make_uplink(hub, enrol(tmp_path / "other", "device/ann"))
    with pytest.raises(ValueError, match="no certificate of this federation"):
        uplink.next()


def test_a_device_cannot_pose_as_a_parent(where, keys, caplog):
    false = make_hub(where, keys / "device-eve")
    uplink = make_uplink(false, keys / "device-ann")
    until(lambda: any("neither a server nor a team" in text for text in warnings(caplog)))
    uplink.close()
    false.close()


def test_a_revoked_certificate_is_cut_off_at_once_and_not_let_in_again(where, keys, tmp_path, caplog):
    folder = tmp_path / "federation"
    shutil.copytree(keys, folder)
    hub = make_hub(where, folder / "server")
    with joined(hub, folder / "device-ann", "device/ann") as socket:
        revoke(folder, "device/ann")
        assert hub.ask("device/ann", Message("call")) is None
        assert closed(socket)
    with dial(hub, folder / "device-ann") as socket:
        assert "revoked" in received(socket).facts["text"]
    hub.close()
    assert ["revoked" in text for text in warnings(caplog)] == [True, True]


def test_a_message_that_comes_a_second_time_ends_the_link(hub, keys, caplog):
    uplink = make_uplink(hub, keys / "device-ann")
    until(lambda: hub._links)
    (link,) = hub._links.values()
    for _ in range(2):
        link.send(Message("call", {"node": "device/ann", "number": 5}))
    until(lambda: hub._links and list(hub._links.values()) != [link])  # it has dialled again
    assert ["a second time" in text for text in warnings(caplog)] == [True]
    uplink.close()


def test_both_sides_of_a_link_can_send_large_messages_at_the_same_time(keys, where):
    job = make_job({"algorithm": "fedavg"}, ROSTER, "a test")
    hub = open_hub(where, keys / "server", Admission(job, job.tree, 0, Limits(largest=1 << 26)))
    large = {"x": torch.zeros(6 << 20)}
    with joined(hub, keys / "device-ann", "device/ann"):
        pass
    assert (hub.wait(30) or ("", b""))[1] is None
    uplink = make_uplink(hub, keys / "device-ann", 1 << 26)
    for kind, counts in (("welcome", {"counts": as_tensor({"ann": [4, 0, 1]})}), ("world", {})):
        came = uplink.next()
        assert came is not None
        assert came[1].kind == kind
        uplink.answer(came[0], Message("ready", {}, counts))
    until(lambda: hub.link_of("device/ann"))
    hub.ask("device/ann", Message("call", {"node": "device/ann", "number": 1}, large))
    uplink.answer(1, Message("answer", {}, large))
    came, answer = uplink.next(), hub.wait(30)
    assert came is not None
    assert answer is not None
    assert torch.equal(came[1].tensors["x"], large["x"])
    assert torch.equal(decode(answer[1] or b"", 1 << 26).tensors["x"], large["x"])
    uplink.close()
    hub.close()


def test_a_key_can_stay_on_its_machine(hub, keys, tmp_path):
    place = tmp_path / "ann"
    request = make_request(place, "device/ann")
    name, certificate = sign_request(keys, request)
    assert name == "device/ann"
    certificate.rename(place / "cert.pem")
    shutil.copy(keys / "ca.pem", place)
    with joined(hub, place, "device/ann"):
        assert hub.present() == ["device/ann"]
    assert (place / "key.pem").stat().st_mode & 0o077 == 0


def serial(hub: LinkHub) -> int:
    until(lambda: hub._links)
    return next(iter(hub._links.values())).serial


def test_certificates_are_renewed_while_nodes_run(where, keys, tmp_path):
    folder = tmp_path / "federation"
    shutil.copytree(keys, folder)
    hub = make_hub(where, folder / "server")
    uplink = make_uplink(hub, folder / "device-ann")
    old, own = serial(hub), tls(folder / "device-bob", listens=False)
    for name in ("device/ann", "server"):
        renew(folder, name)
    uplink.cut("a cable")
    until(lambda: hub._links and serial(hub) != old)
    if not where.startswith(MQTT):
        host, port = split_address(hub.address)
        with socket.create_connection((host, port), 30) as plain, own.wrap_socket(plain) as link:
            assert peer(link)[1] in set(issued(folder, "server")) - set(issued(keys, "server"))
    revoke(folder, "device/ann")  # the old certificate as well
    assert old in Revocations(folder / "server")
    assert set(issued(folder, "device/ann")) >= {old, *issued(keys, "device/ann")}
    uplink.close()
    hub.close()


def test_a_parent_whose_certificate_is_revoked_is_left(where, keys, tmp_path, caplog):
    folder = tmp_path / "federation"
    shutil.copytree(keys, folder)
    revoke(folder, "server")
    hub = make_hub(where, folder / "server")
    uplink = make_uplink(hub, folder / "device-ann")
    until(lambda: any("the parent at" in text and "revoked" in text for text in warnings(caplog)))
    assert hub.present() == []
    uplink.close()
    hub.close()


def test_a_node_whose_key_is_elsewhere_can_be_revoked(keys, tmp_path):
    folder = tmp_path / "federation"
    shutil.copytree(keys, folder)
    name, _ = sign_request(folder, make_request(tmp_path / "fay", "device/fay"))
    listed = Revocations(folder / "server")
    for each in ("device/bob", name):  # the list is read again, also if both changes have the same time
        serials = revoke(folder, each)
        assert serials
        assert all(serial in listed for serial in serials)


@pytest.mark.parametrize("text", ["8750", "host:", "host:99999", ":1", "host:x"])
def test_addresses_that_are_none_get_advice(text):
    with pytest.raises(ValueError, match="give HOST:PORT"):
        split_address(text)


@BROKER
def test_the_broker_lets_a_node_write_under_its_own_name_and_read_what_is_for_it(keys, caplog):
    read = []

    def eve() -> Broker:
        will = "polytier/from/device/eve/all", b""
        return Broker(mosquitto.via, keys / "device-eve", will, lambda topic, data: read.append(topic), lambda: None)

    with Mosquitto(keys) as mosquitto:
        hub, reader = make_hub(mosquitto.via, keys / "server"), eve()
        reader.subscribe("polytier/#", "polytier/from/+/+/up/server/+", "polytier/from/server/down/device/ann/+")
        for topic in ("polytier/from/device/ann/up/server/1", "polytier/from/server/all"):
            forger = eve()
            forger.publish(topic, b"\x16 no connection")
            until(forger.lost.is_set)  # the broker has cut it off
            forger.close()
        with joined(hub, keys / "device-ann", "device/ann"):
            reader.sent(reader.publish("polytier/from/device/eve/up/server/1", b"\x16 no connection"))
            until(lambda: warnings(caplog))  # what was sent before it has arrived, if it was let through
            assert hub.present() == ["device/ann"]
        assert len(warnings(caplog)) == 1
        assert not [topic for topic in read if "ann" in topic]
        reader.close()
        hub.close()
