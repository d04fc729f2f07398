"""Attacks on a team of a run over TLS: one line in its log each, the sender is cut off, and the run goes on."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("websockets")


from websockets.exceptions import WebSocketException

from network_processes import Processes, same_models
from polytier import PerMFL
from polytier.engines.network.contents import as_tensor
from polytier.engines.network.keys import enrol, make_authority, revoke
from polytier.engines.network.message import Message, encode
from polytier.runs.admission import hello
from polytier.runs.loop import make_loop
from raw_links import Raw, closed, raw_link

TEAMS = {"t0": ["d0", "d2"], "t1": ["d1", "d3"]}
PERMFL: dict[str, Any] = {"algorithm": "permfl", "set": {"device_steps": 2, "team_rounds": 2}}
TEAM = "team/t1"
Answer = Callable[[Message], bytes]


def lines(processes: Processes) -> list[str]:
    found = processes.log(TEAM).splitlines()
    return [line for line in found if ("refused" in line or "closed" in line) and "waiting: " not in line]


def refused(processes: Processes, text: str, act: Callable[[], Any]) -> None:
    """Do something; the team writes one line about it, which contains `text`."""
    before = lines(processes)
    act()
    processes.until(lambda: len(lines(processes)) > len(before), TEAM)
    (line,) = lines(processes)[len(before) :]
    assert text in line, line


def say(processes: Processes, keys: Path, *messages: bytes) -> None:
    """Dial the team, send something after each of its answers, and wait until it closes the link."""
    with raw_link(f"127.0.0.1:{processes.ports[TEAM]}", keys) as link:
        for k, message in enumerate(messages):
            link.send(message)
            if k < len(messages) - 1:
                link.receive()
        assert closed(link)


def pose(processes: Processes, name: str, *answers: Answer) -> None:
    """Join as a device whose data are not here, and answer calls."""
    federation = processes.federation
    counts = federation.population.counts[federation.ids.tolist().index(name)].tolist()
    with raw_link(f"127.0.0.1:{processes.ports[TEAM]}", processes.keys / f"device-{name}") as link:
        link.send(encode(hello([f"device/{name}"])))
        link.receive()
        link.send(encode(Message("ready", {}, {"counts": as_tensor({name: counts})})))
        link.receive()
        link.send(encode(Message("ready")))
        for answer in answers:
            link.send(answer(called(link)))
        assert closed(link)


def called(link: Raw) -> Message:
    """The next call; evaluations have no answer here."""
    while (message := link.receive()).kind != "call":
        pass
    return message


def answered(shape: list[int], value: float = 0.0, **facts: Any) -> Answer:
    """An answer with one row."""

    def make(call: Message) -> bytes:
        row = torch.full(shape, value)
        about = {"rows": {"named": False, "fields": {"": ["float32", shape]}, "count": 1}, "steps": 2}
        below = {"traffic": torch.zeros(0, 4, dtype=torch.int64), "absences": as_tensor([])}
        whose = {key: call.facts[key] for key in ("node", "number")}
        return encode(Message("answer", {**about, **whose, **facts}, {"0:": row.view(torch.uint8).flatten(), **below}))

    return make


ANSWERS: dict[str, tuple[str, Answer]] = {
    "pickle": ("a header claims", lambda call: pickle.dumps({"rows": [1.0]})),
    "a header of 10 GB": ("a header claims", lambda call: (10 << 30).to_bytes(8, "little") + bytes(100)),
    "a wrong shape": ("is float32", answered([13])),
    "NaN": ("NaN", answered([12], torch.nan)),
    "another device": ("which it is not", answered([12], node="device/d1")),
    "a question of its own": ("not asked", answered([12], number=5)),
}


def test_attacks_are_one_line_each_and_the_run_has_the_bits_of_the_simulation(tmp_path):
    with Processes(tmp_path, TEAMS, {"quorum": 1.0}, rounds=3, **PERMFL) as processes:
        for name in ("device/eve", "device/mallory"):
            enrol(processes.keys, name)
        revoke(processes.keys, "device/mallory")
        processes.server()
        for team in TEAMS:
            processes.team(team)
        for name in ("d0", "d1", "d2"):
            processes.device(name)
        make_authority(tmp_path / "other")
        false = enrol(tmp_path / "other", "device/d3")
        shutil.copy(processes.keys / "ca.pem", false)
        one = encode(hello(["device/d3"]))

        def wrong_authority() -> None:
            with pytest.raises((OSError, WebSocketException)):
                say(processes, false, one)

        keys, unlisted = processes.keys, encode(hello(["device/eve"]))
        refused(processes, "a link was refused", wrong_authority)
        refused(processes, "not in the roster", lambda: say(processes, keys / "device-eve", unlisted))
        refused(processes, "may not speak for", lambda: say(processes, keys / "device-eve", one))
        refused(processes, "revoked", lambda: say(processes, keys / "device-mallory", one))
        refused(processes, "a header claims", lambda: say(processes, keys / "device-d3", pickle.dumps([1, 2])))
        refused(processes, "not possible", lambda: say(processes, keys / "device-d3", one, boasting()))
        for text, answer in ANSWERS.values():
            refused(processes, text, lambda answer=answer: pose(processes, "d3", answer))
        processes.device("d3")
        processes.wait()
        assert processes.absences() == []
        with make_loop(
            PerMFL(device_steps=2, team_rounds=2), processes.federation, "mclr", batch_size=4, seed=3
        ) as loop:
            same_models(processes, loop.run(3))


def boasting() -> bytes:
    return encode(Message("ready", {}, {"counts": as_tensor({"d3": [-5, 0, 1]})}))
