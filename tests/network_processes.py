"""A federation of real processes on the loopback interface, over WebSocket or a broker, with keys of their own."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from safetensors.torch import load_file

from brokers import Mosquitto
from network_tree import data
from polytier import Federation, Run
from polytier.engines.network.absences import FILE, Absence, read_absences
from polytier.engines.network.keys import enrol, make_authority
from polytier.runs.job import Job, settle

SECONDS = 90.0  # until a test gives up
CONTEXT = multiprocessing.get_context("forkserver")  # its processes start without importing torch again
CONTEXT.set_forkserver_preload(["polytier.cli.main", "polytier.runs.join", "torch.fx.experimental.symbolic_shapes"])


def command(folder: str, log: str, words: tuple[str, ...]) -> None:
    """The program of a process: a command of polytier, with its output in a file."""
    from polytier.cli.main import app

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.chdir(folder)
    app(list(words), prog_name="polytier")


class Processes:
    """The processes of a job; use it in a `with` statement, which ends all that are left.

    Args:
        folder: For everything.
        teams: The roster.
        network: Keys of the table [network] of the job.
        mqtt: Whether links go through a broker.
        settings: Keys of the job.
    """

    def __init__(
        self, folder: Path, teams: dict[str, list[str]], network: dict[str, Any], mqtt: bool = False, **settings: Any
    ) -> None:
        self.folder, self.processes = folder, {}
        self.federation = data(sum(map(len, teams.values())), len(teams))
        roster = {"teams": teams}
        table = {"shape": [3], "classes": 3, "deadline": 20.0, **roster, **network}
        values = {"model": "mclr", "batch_size": 4, "seed": 3, **settings, "network": table}
        self.file = folder / "job.toml"
        self.file.write_text(tomli_w.dumps(values))
        self.job: Job = settle(self.file)
        self.keys, self.ports = folder / "federation", {}
        make_authority(self.keys)
        tree = self.job.tree
        self.flat = tree.num_tiers == 2 and not network.get("relay")
        nodes = ["server", *(f"device/{name}" for team in teams.values() for name in team)]
        nodes += [] if self.flat else [f"team/{name}" for name in teams]
        for node in nodes:
            enrol(self.keys, node)
        self.teams = teams
        self.parents = {device: team for team, devices in teams.items() for device in devices}
        self.broker = Mosquitto(self.keys) if mqtt else None
        (folder / "data").mkdir()
        for k, name in enumerate(self.federation.ids.tolist()):
            write_device(folder / "data" / f"{name}.npz", self.federation, k)

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        if self.broker is not None:
            self.broker.kill()

    def command(self, name: str, *words: str) -> None:
        """Start a process; its output goes to a file."""
        log = str(self.folder / f"{name.replace('/', '-')}.log")
        process = CONTEXT.Process(target=command, args=(str(self.folder), log, words), daemon=True)
        process.start()
        self.processes[name] = process

    def log(self, name: str) -> str:
        path = self.folder / f"{name.replace('/', '-')}.log"
        return path.read_text() if path.exists() else ""

    def server(self) -> None:
        self.command("server", "serve", "job.toml", *self._listen("server"), "--out", "run", "-v")
        self._port("server")

    def team(self, name: str) -> None:
        keys, own = str(self.keys / f"team-{name}"), f"team/{name}"
        words = ("--team", name, *self._parent("server"), *self._listen(own), "--keys", keys, "-v")
        self.command(own, "serve", *words)
        self._port(own)

    def device(self, name: str, **other: Any) -> None:
        above = "server" if self.flat else f"team/{self.parents[name]}"
        keys = str(other.get("keys", self.keys / f"device-{name}"))
        via = () if self.broker is None else ("--via", self.broker.via)
        words = (*self._parent(above), *via, "--data", f"data/{name}.npz", "--name", name, "--keys", keys, "-v")
        self.command(f"device/{name}", "join", *words)

    def _listen(self, name: str) -> tuple[str, ...]:
        if self.broker is not None:
            return "--via", self.broker.via
        return "--listen", f"127.0.0.1:{self.ports.get(name, 0)}"

    def _parent(self, name: str) -> tuple[str, ...]:
        return "--parent", f"127.0.0.1:{self.ports[name]}" if self.broker is None else name

    def start(self) -> None:
        self.server()
        for name in () if self.flat else self.teams:
            self.team(name)
        for name in self.parents:
            self.device(name)

    def _port(self, name: str) -> None:
        self.until(lambda: "listening at" in self.log(name).rpartition("\n")[0], name)
        if self.broker is not None:
            return
        address = [line for line in self.log(name).splitlines() if line.startswith("listening at")][-1]
        self.ports[name] = int(address.rpartition(":")[2])

    def until(self, happened: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + SECONDS
        while not happened():
            logs = "\n".join(f"== {name}\n{self.log(name)[-1500:]}" for name in ("server", what))
            assert time.monotonic() < end, f"{what} did not happen\n{logs}"
            time.sleep(0.02)

    def absences(self) -> list[Absence]:
        return read_absences(self.out / FILE)

    def rounds(self) -> int:
        path = self.out / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.join()

    def wait(self) -> None:
        """Wait until all processes have ended by themselves."""
        end = time.monotonic() + SECONDS
        for name, process in self.processes.items():
            process.join(max(1.0, end - time.monotonic()))
            assert process.exitcode == 0, f"{name}\n{self.log(name)[-3000:]}\n{self.log('server')[-3000:]}"
        self.processes = {}

    def models(self, kind: str) -> dict[str, torch.Tensor]:
        """The models that nodes kept, by name of the node; that of the server from its run folder."""
        if kind == "global":
            return {"server": flat(self.out / "models" / "global.safetensors")}
        tier = "device" if kind == "personal" else "team"
        found = self.folder.glob(f"state/*/*/{tier}-*/models/{kind}.safetensors")
        return {path.parts[-3].partition("-")[2]: flat(path) for path in found}


def same_models(processes: Processes, run: Run) -> None:
    """Compare what the nodes kept with the models of a simulation, to the bit."""
    parameters = run.context.objective.parameters
    for kind, rows, names in (
        ("global", run.rows("global"), ["server"]),
        ("team", run.team, [] if run.team is None else run.team_ids),
        ("personal", run.personal, run.device_ids),
    ):
        kept = processes.models(kind)
        for row, name in zip([] if rows is None else rows, names, strict=True):
            own = parameters(row.unsqueeze(0))
            assert torch.equal(torch.cat([own[key].flatten() for key in sorted(own)]), kept[str(name)]), (kind, name)


def flat(path: Path) -> torch.Tensor:
    tensors = load_file(path)
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def write_device(path: Path, federation: Federation, k: int) -> None:
    """The data of one device as a file, with its split."""
    start, end = int(federation.bounds[k, 0]), int(federation.bounds[k, 3])
    counts = federation.population.counts[k].numpy()
    split = np.repeat(["train", "validation", "test"], counts)
    np.savez(path, x=federation.x[start:end].numpy(), y=federation.y[start:end].numpy(), split=split)
