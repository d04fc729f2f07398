"""Sub-trees in actors of Ray: the same bits as in one process, also after an actor is lost."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import outside
from commands import SMALL, call
from polytier import AL2GD, ALGORITHMS, MFARR, CoBo, Diverged, FedAvg, Federation, LocalProblem, PerMFL, Topology
from polytier.engines.protocol import engine_of
from polytier.engines.ray import driver as engine
from polytier.engines.ray.driver import Ray
from polytier.engines.stacked import Stacked
from polytier.method.call import Call, NodesLost
from polytier.runs.callbacks import RunFolder
from polytier.runs.contract import differing, memory_of
from polytier.runs.loop import Callback, Loop, make_loop
from polytier.stack.rows import pack
from polytier.tree.topology import nested
from short_methods import short

PERMFL = PerMFL(0.1, 0.1, device_steps=2, team_rounds=2)
PART: Any = {"team_participation": 0.75, "device_participation": 0.6}


@pytest.fixture(scope="module")
def ray():
    """One instance for all, with room for three actors."""
    found, joined = engine.connect("", 3)
    assert joined
    yield found
    engine.disconnect(found)


@pytest.fixture(scope="module")
def actors(ray) -> list[Any]:
    """Idle actors: to start one takes seconds."""
    return []


@pytest.fixture
def again(monkeypatch, actors):
    """Engines take idle actors first, and leave theirs behind."""
    spawn = Ray._spawn

    def close(self: Ray) -> None:
        actors.extend(filter(self._lives, self.actors.values()))
        self.actors = {}

    monkeypatch.setattr(Ray, "_spawn", lambda self: actors.pop() if actors else spawn(self))
    monkeypatch.setattr(Ray, "close", close)


def federation_of(num: int = 12) -> Federation:
    """Devices of 8 or 11 samples, two of them for validation and two for test; three classes, three true groups."""
    sizes = np.array([8, 11, 8])[np.arange(num) % 3]
    rng = np.random.default_rng(1)
    device = np.repeat(np.arange(num), sizes)
    split = np.concatenate([np.repeat([0, 1, 2], [n - 4, 2, 2]) for n in sizes])
    x, y = rng.normal(size=(len(device), 2)), rng.integers(0, 3, len(device))
    team = np.array(["c", "a", "d", "b"])[device % 4]  # neighbours in the data are not in one team
    return Federation.from_arrays(x, y, device, team=team, split=split, cluster=device % 3, num_classes=3)


def left(training: Loop) -> dict[str, Any]:
    """All that a run comes to."""
    found: dict[str, Any] = pack("state", training.state) | memory_of(training)
    for part in training.context.parts:
        ledger = part.ledger
        found |= {f"{part.name}>{k}": v for k, v in ledger.state().items()}
        found |= {f"{part.name}>took part {tier}": mask.clone() for tier, mask in ledger.took_part.items()}
        found |= {f"{part.name}>rounds": ledger.rounds, f"{part.name}>steps": part.device_steps}
    for record in training.history:
        found |= {f"{k} in round {record['round']}": v for k, v in record.items() if k != "seconds"}
    return found


def compared(algorithm: Any, federation: Any = None, model: Any = "mclr", rounds: int = 3, **settings: Any) -> Loop:
    """Run by both engines; what they leave is the same."""
    settings = {"batch_size": 4, "batching": "eager", "dtype": "float64", **settings}
    federation = federation or federation_of()
    found = []
    for more in ({}, {"engine": "ray", "workers": 2}):
        with make_loop(algorithm, federation, model, **settings, **more) as training:
            run = training.run(rounds)
            models = {
                f"{name} {kind}": rows
                for name, part in (("", run), *run.models.items())
                for kind, rows in (("personal", part.personal), ("team", part.team), ("global", part.global_))
            }
            found.append(left(training) | models)
    assert engine_of(training.context).workers == 2
    assert not differing(*found)
    return training


# -- every method -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("again")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method(name):
    """With teams, and flat; some are absent."""
    algorithm = short(name)
    compared(algorithm, **PART)
    if algorithm.tiers != 2:
        flat = Topology.build(federation_of().ids)
        if name == "al2gd":
            algorithm = ALGORITHMS[name](p_team=0.0, steps=4)  # type: ignore[call-arg]
        compared(algorithm, topology=flat, **PART)


@pytest.mark.usefixtures("again")
def test_trees_and_settings():
    deep = federation_of(16)
    team = np.unique(deep.team, return_inverse=True)[1]  # type: ignore[arg-type]
    compared(PERMFL, deep, topology=Topology.build(deep.ids, *nested(team, (2, 2))), **PART)
    compared(PERMFL, absent="stale", codec="float16", dtype="float32", batching="stacked", **PART)
    compared(FedAvg(0.1, 2), federation_of(30), absent="stale", codec="sparse", tile=4, device_participation=0.5)
    compared(CoBo(0.1, clients="teams", sampling="all"), **PART)
    compared(PERMFL, upload="clip:0.05,noise:0.5", codec="int8", dtype="float32", **PART)
    compared(outside.Averaging(), federation_of(30), upload=outside.Halved(), codec=outside.Whole(), tile=4)
    dropping = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout(0.5))
    compared(short("validation"), model=dropping)  # masks of mini-batches, and of all samples of a split
    several = MFARR({"a": PERMFL, "b": FedAvg(0.1, 2), "c": CoBo(0.1)})  # one with teams, two flat ones
    compared(several, {"a": federation_of(), "b": federation_of(), "c": federation_of()}, rounds=4, **PART)


# -- what goes where, and what fails -------------------------------------------------------------------


class Flaky(Stacked):
    """Loses nodes in every call from the second round on."""

    remote, rounds = True, set()

    def deliver(self, call: Call) -> Iterator[Any]:
        self.rounds.add(call.clock.round)
        if call.clock.round:
            raise NodesLost("some nodes were lost")
        return super().deliver(call)


def test_nodes_that_are_lost_again_and_again():
    with make_loop(PERMFL, federation_of(), "mclr", batching="eager") as training:
        training.use(Flaky(training.context, codec=training.codec))
        with pytest.raises(NodesLost, match="nodes were lost, 3 times in a row; resume the run, with fewer --workers"):
            training.run(3)
    assert Flaky.rounds == {0, 1}


@pytest.mark.usefixtures("again")
def test_errors_arrive_as_what_they_are():
    class Refuses(FedAvg):  # in the function, so that it is sent to the actors by value
        def device(self, x: Tensor, local: LocalProblem) -> Tensor:
            raise ValueError("the device refuses")

    settings: Any = {"batching": "eager", "engine": "ray", "workers": 2, "l2": 1.0}
    steps = (*[0.1] * 10, 1e38, 0.1)
    with make_loop(FedAvg(steps, 3), federation_of(), "mclr", **settings) as training:
        with pytest.raises(Diverged, match="device 10 is no longer finite") as caught:
            training.run(2)
        assert type(caught.value) is Diverged
        assert (caught.value.round, caught.value.tier, caught.value.nodes) == (1, "device", ["10"])
    with (
        make_loop(Refuses(), federation_of(), "mclr", **settings) as training,
        pytest.raises(ValueError, match="the device refuses") as caught,
    ):
        training.run(1)
    assert type(caught.value) is ValueError


def test_data_stay_with_their_owner():
    federation, devices = federation_of(), torch.tensor([5, 1, 9])
    own = engine.only(federation, devices)
    assert len(own.x) == sum(
        len(federation.device(k, s)[0]) for k in (5, 1, 9) for s in ("train", "validation", "test")
    )
    assert torch.equal(own.samples, federation.samples)
    for k in devices.tolist():
        for split in ("train", "validation", "test"):
            assert all(map(torch.equal, own.device(k, split), federation.device(k, split)))


@pytest.mark.parametrize(("workers", "expected"), [(1, 1), (2, 2), (3, 3), (50, 4)])
def test_owners(workers, expected):
    topology = Topology.build(np.arange(100))  # blocks of four
    _, owner = engine.owners(topology, workers)
    assert owner.diff().min() >= 0
    assert len(owner.unique()) == min(workers, 25)
    assert all(len(block.unique()) == 1 for block in owner.split(4))  # sums of blocks are made in one place
    _, owner, of_device = engine.owners(Topology.build(np.arange(30), np.arange(30) % 4), workers)
    assert len(owner.unique()) == expected
    assert torch.equal(of_device, owner[Topology.build(np.arange(30), np.arange(30) % 4).parents[2]])


# -- the command line ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("again")
def test_a_run_goes_on_with_another_engine(tmp_path):
    quick = (*SMALL, "--batching", "eager", "--eval-every", 2, "--quiet")
    call("run", "permfl", *quick, "--rounds", 4, "--out", tmp_path / "whole")
    call("run", "permfl", *quick, "--rounds", 2, "--engine", "ray", "--workers", 2, "--out", tmp_path / "begun")
    assert 'engine = "ray"' in (tmp_path / "begun/config.toml").read_text()
    call("resume", tmp_path / "begun", "--rounds", 3, "--engine", "stacked", "--quiet")
    call("resume", tmp_path / "begun", "--rounds", 4, "--engine", "ray", "--quiet")
    assert scores(tmp_path / "whole") == scores(tmp_path / "begun")


def scores(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    return {k: summary[k] for k in ("personal", "team", "global", "traffic", "device_steps")}


def test_advice(ray, monkeypatch, tmp_path):
    """Before anything is written, and at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for address in ("127.0.0.1:1", "nowhere.invalid:6379", "host", "ray://127.0.0.1:10001"):
        shown = call("run", *SMALL, "--engine", f"ray:{address}", code=2).output
        assert f"no Ray cluster answers at '{address}'" in shown
        assert "HOST:PORT" in shown
    with make_loop(FedAvg(), federation_of(), "mclr") as training:
        training.context.objective.device = torch.device("cuda")
        with pytest.raises(ValueError, match="--engine stacked"):
            Ray(training.context, codec=training.codec)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert 'pip install "polytier[ray]"' in call("run", *SMALL, "--engine", "ray", code=2).output
    assert not list(tmp_path.iterdir())


# -- lost actors ---------------------------------------------------------------------------------------


class Kill(Callback):
    """Ends an actor after some rounds."""

    def __init__(self, ray: Any, after: tuple[int, ...], which: tuple[int, ...] = (0,)) -> None:
        self.ray, self.after, self.which, self.rounds = ray, after, which, []

    def on_round(self, training: Loop, record: dict[str, Any]) -> None:
        self.rounds.append(record["round"])
        if record["round"] in self.after:
            for k in self.which:
                driver = training.context.engine
                assert isinstance(driver, Ray)
                self.ray.kill(driver.actors[k])


@pytest.mark.usefixtures("again")
def test_lost_actors(ray, caplog, monkeypatch, tmp_path):
    """One after another and both at once: the same bits, and a line for each time."""
    monkeypatch.setattr("polytier.runs.loop.PATIENCE", 1e9)  # no snapshot but the first
    settings: Any = {"batch_size": 4, "batching": "eager", **PART}
    several = MFARR({"a": AL2GD(steps=4), "b": CoBo(0.1, clients="teams", sampling="all")})  # what they keep, they use
    found = []
    for more in ({}, {"engine": "ray", "workers": 2}):
        with make_loop(several, federation_of(), "mclr", **settings, **more) as training:
            folder = RunFolder(tmp_path / "run")  # its checkpoint of round 1 is the first to miss the actor
            kill = Kill(ray, (1,)), Kill(ray, (4,), (0, 1))
            training.run(5, (*kill, folder) if more else ())
            found.append(left(training))
    assert not differing(*found)
    written = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert kill[0].rounds == [json.loads(line)["round"] for line in written] == [1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="closed"):
        training.snapshot()
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(lines) == 2
    assert "team a to b" in lines[0]
    assert "after round 0" in lines[0]
    assert "team a to b, c to d" in lines[1]


# -- what it opens ------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
@pytest.mark.usefixtures("again")
def test_on_one_machine_ray_listens_to_this_machine_alone(ray):
    with make_loop(PERMFL, federation_of(), "mclr", engine="ray", workers=2) as training:
        training.run(1)
        found = listening(descendants(os.getpid()))
    processes = {process for process, _ in found}
    assert len(processes) >= 4  # the driver, two actors, and those of Ray itself
    assert all(address.is_loopback for _, address in found), found


def test_actors_do_not_search_the_current_folder_first(tmp_path):
    (tmp_path / "torch.py").write_text("open('imported', 'w')")  # in place of a package that every actor imports
    (tmp_path / "mine.toml").write_text('algorithm = "fedavg"\nengine = "ray"\ndevices = 4\nteams = "0"\nrounds = 1\n')
    command = [sys.executable, "-m", "polytier", "run", "mine.toml", "--workers", "1", "--quiet", "--out", "run"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert not (tmp_path / "imported").exists()


def descendants(process: int) -> set[int]:
    """A process, the ones that it started, those that they started, ..."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    new = {process}
    while new:
        found |= new
        new = {child for child, parent in parents.items() if parent in new}
    return found


def listening(processes: set[int]) -> list[tuple[int, Any]]:
    """(process, address) of all TCP sockets on which processes listen."""
    owner, found = {}, []
    for process in processes:
        with suppress(OSError):
            for file in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):
                    owner[os.readlink(file)] = process
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in owner:
                words = bytes.fromhex(fields[1].partition(":")[0])  # 32 bits each, in the order of this machine
                raw = b"".join(words[k : k + 4][::-1] for k in range(0, len(words), 4))
                address: Any = ipaddress.ip_address(raw)
                found.append((owner[f"socket:[{fields[9]}]"], getattr(address, "ipv4_mapped", None) or address))
    return found
