"""Rows in files: the same bits as in memory, whatever is cut short, and advice where there is no room."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytier import Federation, PerMFL, Run, Topology, train
from polytier.method import mapped_memory
from polytier.method.mapped_memory import MappedMemory
from polytier.method.memory import Memory
from polytier.runs import callbacks, checkpoint
from polytier.runs.callbacks import RunFolder
from polytier.runs.loop import Callback, Loop, make_loop
from polytier.runs.read_files import STORE

TREE = Topology.build(np.arange(6), np.arange(6) // 3)
QUICK: dict[str, Any] = {"batching": "eager", "batch_size": 4, "device_participation": 0.5}
METHOD = PerMFL(0.1, device_steps=2, team_rounds=2)


def make() -> Federation:
    rng = np.random.default_rng(1)
    device = np.repeat(np.arange(6), 8)
    return Federation.from_arrays(rng.normal(size=(48, 3)), rng.integers(0, 3, 48), device, team=device // 3)


@pytest.fixture
def _in_files(monkeypatch):
    monkeypatch.setattr(callbacks, "IN_FILES", 0)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_store_goes_back_to_any_epoch(tmp_path_factory, data):
    """Against a memory of which copies were taken; writes by two processes' worth of stores on one folder."""
    folder, plain = tmp_path_factory.mktemp("store"), Memory(TREE)
    stores, copies = [MappedMemory(TREE, folder), MappedMemory(TREE, folder)], {}
    number = data.draw(st.integers(1, 12))
    for step in range(number):
        if data.draw(st.booleans()) or not step:
            copies[stores[0].advance()] = {k: v.clone() for k, v in plain.state().items()}
        ids = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=1, unique=True)))
        name, rows = data.draw(st.sampled_from(["model", "own"])), torch.full((len(ids), 2), float(step))
        for memory in (data.draw(st.sampled_from(stores)), plain):
            memory.write(2, name, ids, rows)
    epoch = data.draw(st.sampled_from(sorted(copies)))
    again = MappedMemory(TREE, folder)
    again.undo(epoch)
    for key, rows in again.state().items():
        before = copies[epoch].get(key, torch.zeros_like(rows))
        kept = again.state()[key.replace("/rows", "/kept")]
        assert torch.equal(rows[kept], before[kept])
        assert torch.equal(kept, copies[epoch].get(key.replace("/rows", "/kept"), torch.zeros_like(kept)))
    assert all(int(path.name.split("-")[1]) < epoch for path in folder.glob("log-*"))  # for earlier checkpoints


def test_half_a_record_is_of_rows_that_were_not_touched(tmp_path):
    memory = MappedMemory(TREE, tmp_path)
    memory.write(2, "model", torch.arange(6), torch.ones(6, 2))
    epoch = memory.advance()
    memory.write(2, "model", torch.tensor([0]), torch.full((1, 2), 5.0))
    journal = next(tmp_path.glob(f"log-{epoch}-*"))
    journal.write_bytes(journal.read_bytes() + mapped_memory.HEAD.pack(1000, 0) + b"half")
    again = MappedMemory(TREE, tmp_path)
    again.undo(epoch)
    assert torch.equal(again.read(2, "model", torch.arange(6), torch.zeros(6, 2)), torch.ones(6, 2))


class Cut(Callback):
    """Ends the process, so to speak, in the middle of a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_round(self, training: Loop, record: dict[str, Any]) -> None:
        if training.round == self.after:
            training.context.memory.write(2, "model", torch.arange(4), torch.full((4, 12), 7.0))  # of the next round
            raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("_in_files")
def test_a_run_that_was_cut_short_goes_on_to_the_same_bits(tmp_path, monkeypatch, workers):
    whole = train(METHOD, make(), "mclr", rounds=6, **QUICK)
    monkeypatch.setattr(callbacks, "PATIENCE", 1e9)  # a checkpoint after the first round, and no more
    with make_loop(METHOD, make(), "mclr", workers=workers, **QUICK) as first, pytest.raises(KeyboardInterrupt):
        first.run(6, [RunFolder(tmp_path / "run"), Cut(4)])
    number, tensors, facts = checkpoint.latest(tmp_path / "run/checkpoints") or (0, {}, {})
    assert number == 1
    assert not any(name.startswith("memory:") for name in tensors)
    with make_loop(METHOD, make(), "mclr", workers=workers, **QUICK) as second:
        with pytest.raises(ValueError, match="keep_in"):
            second.restore(tensors, facts)
        second.keep_in(tmp_path / "run" / STORE)
        second.restore(tensors, facts)
        again = second.run(6, [RunFolder(tmp_path / "run", resumed=True)])
    assert whole.personal is not None
    assert torch.equal(whole.personal, again.personal)  # type: ignore[arg-type]
    assert torch.equal(whole.team, again.team)  # type: ignore[arg-type]
    found = Run.load(tmp_path / "run").model(device=3)
    assert torch.equal(torch.cat([p.reshape(-1) for p in found.parameters()]), whole.personal[3])


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_mapped_memory import METHOD, QUICK, make
from polytier.runs import callbacks
from polytier.runs.loop import Loop, make_loop
callbacks.IN_FILES = 0
class Tell(callbacks.Callback):
    def on_round(self, training, record):
        print(training.round, flush=True)
with make_loop(METHOD, make(), "mclr", **QUICK) as training:
    training.run(100000, [callbacks.RunFolder({folder!r}), Tell()])
"""


@pytest.mark.usefixtures("_in_files")
def test_a_kill_at_any_moment_loses_nothing(tmp_path):
    folder = tmp_path / "run"
    code = KILLED.format(tests=str(Path(__file__).parent), folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 20:
                os.kill(process.pid, signal.SIGKILL)
                break
    number, tensors, facts = checkpoint.latest(folder / "checkpoints") or (0, {}, {})
    with make_loop(METHOD, make(), "mclr", **QUICK) as training:
        training.keep_in(folder / STORE)
        training.restore(tensors, facts)
        again = training.run(number + 5)
    whole = train(METHOD, make(), "mclr", rounds=number + 5, **QUICK)
    assert torch.equal(whole.personal, again.personal)  # type: ignore[arg-type]


def test_no_room_is_told_before_a_row_is_lost(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    memory = MappedMemory(TREE, tmp_path)
    with pytest.raises(OSError, match=r"No space left on device: .*rows needs 0\.0 GiB; make room"):
        memory.write(2, "model", torch.arange(6), torch.ones(6, 2))
    assert not list(tmp_path.rglob("*.rows"))
