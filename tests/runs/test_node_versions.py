"""Nodes of different versions: who works together, and the messages of each version that has to be understood.

tests/fixtures/messages-VERSION holds all messages of a short run: NUMBER-KIND.message, in the order in which they were
sent. A new minor version gets a folder of its own, made by `python tests/runs/test_node_versions.py` with src and tests
in PYTHONPATH; folders of versions that are more than one minor version older may be removed.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("websockets")

from network_processes import write_device
from network_tree import data
from polytier import __version__
from polytier.engines.exchange import Exchange
from polytier.engines.network.contents import from_tensor
from polytier.engines.network.message import Message, Refused, decode, encode
from polytier.engines.network.parent import Parent
from polytier.engines.network.transport import InMemory
from polytier.models.trainable import digest
from polytier.runs import join
from polytier.runs.admission import Admission, hello
from polytier.runs.job import Job, job_of_parent, make_job
from polytier.runs.loop import Loop
from polytier.runs.node_versions import check_versions, numbers, own_versions, warn_of_bits
from polytier.runs.serve import PROGRAMS, limits_of

FIXTURES = Path(__file__).parents[1] / "fixtures"
FOLDERS = sorted(FIXTURES.glob("messages-*"))
LARGEST = 1 << 24
SETTINGS = {"algorithm": "scaffold", "batch_size": 4, "batching": "stacked", "rounds": 2, "set": {"device_steps": 2}}
NETWORK = {"shape": [3], "classes": 3, "devices": ["d0", "d1"]}


class NoUplink:
    """In place of a link: messages are handed over by the test."""

    def __init__(self, *_: Any) -> None:
        self.parent, self.linked, self.sent, self.received = "here", True, 0, 0


def device(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> join.Devices:
    """A device with its data, whose parent is the test."""
    monkeypatch.setattr(join, "open_uplink", NoUplink)
    monkeypatch.setattr(join, "certificate_name", lambda keys: f"device/{name}")
    federation = data(2, 1)
    write_device(folder / f"{name}.npz", federation, federation.ids.tolist().index(name))
    return join.Devices("here", folder, folder / name, {f"device/{name}": folder / f"{name}.npz"}, False)


def lead(job: Job, gate: Admission, hub: InMemory) -> torch.Tensor:
    """The server's rounds; returns the global model."""

    def engine(context: Any, **settings: Any) -> Parent:
        exchange = Exchange(settings["codec"], settings["upload"])
        return Parent(context, exchange, {"": 0}, hub, limits=gate.limits, programs=PROGRAMS, patience=job.patience)

    with Loop(job.assemble(gate.tree, job.population(gate.tree, gate.counts), engine)) as loop:  # type: ignore[arg-type]
        gate.settle(gate.tree, {"run": "r", "initial": {"": digest({"": loop.context.objective.initial})}})
        for name in gate.children:
            hub.greet(name)  # type: ignore[attr-defined]
        run = loop.run(2)
        assert run.global_ is not None
        return run.global_


def count_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = itertools.count(1)
    monkeypatch.setattr(secrets, "randbelow", lambda most: next(counter))


class Greeting(InMemory):
    """A hub that welcomes its children itself, and keeps all messages in their order."""

    def __init__(self, gate: Admission, answer: Any) -> None:
        super().__init__()
        self.gate, self.answer, self.log = gate, answer, []

    def pass_on(self, name: str, message: Message) -> Message:
        """What a child answers."""
        self.log.append(message)
        answer = self.answer(name, message)
        self.log.append(answer)
        return answer

    def welcome(self, name: str) -> None:
        first = self.answer(name, None)
        self.log.append(first)
        ready = self.pass_on(name, self.gate.admit(name, first))
        self.gate.ready([name], ready)

    def greet(self, name: str) -> None:
        world = self.gate.world([name])
        assert world is not None
        self.pass_on(name, world)
        self.dial(name, lambda data: encode(self.pass_on(name, decode(data, LARGEST))))


def play(answer: Any) -> tuple[torch.Tensor, list[Message]]:
    """A run whose devices answer with `answer`; returns the global model and all messages."""
    job = make_job(SETTINGS, NETWORK, "a test")
    gate = Admission(job, job.tree, 0, limits_of(job))
    hub = Greeting(gate, answer)
    for name in gate.children:
        hub.welcome(name)
    return lead(job, gate, hub), hub.log


def live(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Answers of devices of this version."""
    devices = {f"device/{name}": device(folder, name, monkeypatch) for name in ("d0", "d1")}

    def answer(name: str, message: Message | None) -> Message | None:
        return hello([name]) if message is None else devices[name]._answer(message)

    return answer


def stored(folder: Path) -> list[Message]:
    return [decode(path.read_bytes(), LARGEST) for path in sorted(folder.glob("*.message"))]


def alike(one: Message, other: Message) -> None:
    """Compare two messages: kind, facts, and tensors up to what processors differ in."""
    assert (one.kind, set(one.facts)) == (other.kind, set(other.facts))
    fixed = {k: v for k, v in one.facts.items() if k not in own_versions()}
    assert fixed == {k: v for k, v in other.facts.items() if k not in own_versions()}
    assert set(one.tensors) == set(other.tensors)
    for name, value in one.tensors.items():
        if name in ("job", "world"):
            assert set(from_tensor(one, name)) == set(from_tensor(other, name))
            continue
        assert (value.dtype, value.shape) == (other.tensors[name].dtype, other.tensors[name].shape), name


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_devices_of_an_earlier_version_are_understood(folder, monkeypatch):
    """A server of this version, and the answers of devices of another one."""
    count_numbers(monkeypatch)
    messages = iter(stored(folder))

    def answer(name: str, message: Message | None) -> Message:
        question = None if message is None else next(messages)
        if message is not None and question is not None and folder.name == f"messages-{minor(__version__)}":
            alike(question, message)  # what this version sends has not changed
        return next(messages)

    model, _ = play(answer)
    assert torch.isfinite(model).all()
    assert not list(messages)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_server_of_an_earlier_version_is_understood(folder, tmp_path, monkeypatch):
    """Devices of this version, and the questions of a server of another one."""
    answer = live(tmp_path, monkeypatch)
    messages = stored(folder)
    assert [m.facts["names"] for m in messages if m.kind == "hello"] == [["device/d0"], ["device/d1"]]
    for question, expected in itertools.pairwise(messages):
        if question.kind not in ("welcome", "world", "call", "measure"):
            continue
        if question.kind == "welcome":
            whose = next(iter(from_tensor(question, "job")["trees"]))
        elif question.kind == "world":
            whose = next(iter(from_tensor(question, "world")["nodes"]))
        else:
            whose = question.facts["node"]
        alike(expected, decode(encode(answer(whose, question)), LARGEST))


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def test_this_version_has_its_messages_in_a_folder():
    assert f"messages-{minor(__version__)}" in [folder.name for folder in FOLDERS]


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        ({"protocol": 2}, "install the same version"),
        ({"polytier": "1.2.0"}, "at most one minor version apart"),
        ({"polytier": "0.4.0"}, "at most one minor version apart"),
        ({"polytier": "0"}, "at most one minor version apart"),
        ({"polytier": None}, "at most one minor version apart"),
        ({"polytier": "0.3.1"}, ""),
        ({"polytier": "0.1.0"}, ""),
        ({}, ""),
    ],
)
def test_versions_one_minor_apart_work_and_others_get_advice(monkeypatch, theirs, text):
    monkeypatch.setattr("polytier.__version__", "0.2.0")
    about = {**own_versions(), **theirs}
    if text:
        with pytest.raises(Refused, match=text):
            check_versions(about)
    else:
        check_versions(about)


def test_numbers_of_versions():
    assert [numbers(v) for v in ("1.12.3", "0.2.0rc1", "x.1", "3")] == [(1, 12), (0, 2), None, None]


def test_another_torch_or_processor_is_a_warning(caplog):
    warn_of_bits("device/ann", own_versions())
    assert not caplog.records
    warn_of_bits("device/ann", {**own_versions(), "torch": "1.0", "processor": "abacus"})
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2
    assert "device/ann has torch 1.0" in caplog.messages[0]
    assert "last bits" in caplog.messages[1]


def test_a_setting_that_this_version_does_not_know_is_left_out_if_it_has_its_default():
    job = make_job(SETTINGS, NETWORK, "a test")
    values = job.values()
    values["spec"]["newer"], values["network"]["newest"] = 1, 2
    with pytest.raises(ValueError, match="newest"):
        job_of_parent(values, job.tree)
    values["defaults"] += ["newest"]
    with pytest.raises(ValueError, match="newer"):
        job_of_parent(values, job.tree)
    values["defaults"] += ["newer"]
    assert job_of_parent(values, job.tree).spec == job.spec


def write_messages(folder: Path, scratch: Path) -> None:
    """Write the messages of this version."""
    with pytest.MonkeyPatch.context() as patch:
        count_numbers(patch)
        _, messages = play(live(scratch, patch))
    folder.mkdir(exist_ok=True)
    for k, message in enumerate(messages):
        (folder / f"{k:03d}-{message.kind}.message").write_bytes(encode(message))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        write_messages(FIXTURES / f"messages-{minor(__version__)}", Path(scratch))
