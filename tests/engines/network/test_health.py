"""What a node says of itself: /healthz, /metrics, and lines of the log as JSON."""

from __future__ import annotations

import json
import logging
import re
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("websockets")

from polytier._terminal import JsonLines, event, log, say, set_up_logging
from polytier.engines.network.health import Vitals, answering

SAMPLE = re.compile(r'[a-z_]+\{node="[^"]*"(,[a-z]+="(\\.|[^"\\])*")*\} -?\d+(\.\d+)?(e-?\d+)?')


@pytest.fixture
def address(caplog):
    """Where the health of the node `VITALS` is answered."""
    caplog.set_level(logging.INFO, "polytier")
    with answering("127.0.0.1:0", VITALS):
        yield caplog.messages[-1].removeprefix("health at ")


LINKED = {"now": True}
VITALS = Vitals("team/t0", children=True, expected=3, linked=lambda: LINKED["now"], present=lambda: ["device/d0"])


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_node_without_a_link_to_its_parent_is_not_healthy(address, monkeypatch):
    code, text = get(address, "/healthz")
    assert (code, json.loads(text)["status"]) == (200, "ok")
    assert json.loads(text)["present"] == ["device/d0"]
    assert json.loads(text)["absent"] == 2
    monkeypatch.setitem(LINKED, "now", False)
    code, text = get(address, "/healthz")
    assert (code, json.loads(text)["status"]) == (503, "no link to the parent")
    assert get(address, "/")[0] == 404


def test_metrics_are_what_prometheus_reads(address):
    VITALS.round, VITALS.seconds, VITALS.saved = 7, 0.25, time.time() - 100
    VITALS.traffic['device/"odd"\\', "up"] += 12
    code, text = get(address, "/metrics")
    assert code == 200
    values = {line.split("{")[0]: line.rpartition(" ")[2] for line in text.splitlines() if not line.startswith("#")}
    assert {k: v for k, v in values.items() if "age" not in k} == {
        "polytier_linked": "1",
        "polytier_round": "7",
        "polytier_round_seconds": "0.25",
        "polytier_children_present": "1",
        "polytier_children_absent": "2",
        "polytier_absences": "0",
        "polytier_link_bytes_total": "12",
    }
    assert 100 <= float(values["polytier_checkpoint_age_seconds"]) < 10_000
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP|TYPE) [a-z_]+ .+", line)
        else:
            assert SAMPLE.fullmatch(line), line
    assert 'peer="device/\\"odd\\"\\\\",way="up"' in text


def test_a_port_that_is_taken_gets_advice(address):
    with pytest.raises(ValueError, match="give another HOST:PORT"), answering(address, VITALS):
        pass


def test_the_log_can_be_one_json_object_per_line(capsys):
    try:
        set_up_logging(False, False, JsonLines("device/ann"))
        log.info("%s is\nready", "north", extra=event("ready", "team/north"))
        say("the run is over", event="end")
        try:
            raise KeyError("x")
        except KeyError:
            log.exception("something failed")
    finally:
        set_up_logging(False, False)
    first, second, third = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert list(first) == ["time", "level", "event", "node", "peer", "text"]
    assert first["time"].endswith("+00:00")
    assert list(first.values())[1:] == ["info", "ready", "device/ann", "team/north", "north is\nready"]
    assert (second["event"], second["text"]) == ("end", "the run is over")
    assert (third["level"], third["event"], third["peer"]) == ("error", "message", None)
    assert "KeyError: 'x'" in third["text"]
