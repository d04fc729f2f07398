"""A federation over TLS in one process: every node in a thread, over WebSocket or a broker, beside its simulation."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tomli_w
import torch

from brokers import Mosquitto
from network_processes import flat, write_device
from network_tree import data
from polytier import ALGORITHMS, Run
from polytier.engines.network.absences import FILE, read_absences
from polytier.engines.network.keys import enrol, make_authority
from polytier.runs.job import Job, settle
from polytier.runs.join import run_devices, run_team
from polytier.runs.loop import Loop
from polytier.runs.serve import run_server
from short_methods import SHORT, short

SECONDS = 60  # until a test gives up
TEAMS = {"t0": ["d0", "d2"], "t1": ["d1", "d3"]}
REGIONS = {"east": {"t0": ["d0", "d2"], "t1": ["d1"]}, "west": {"t2": ["d3", "d4"]}}
STEPS: dict[str, Any] = {"device_steps": 2}
ROUNDS: dict[str, Any] = {"device_steps": 2, "team_rounds": 2}
METHODS: dict[str, dict[str, Any]] = {  # those whose bits are compared over each network
    "permfl": {"algorithm": "permfl", "set": ROUNDS},
    "permfl with four tiers": {"algorithm": "permfl", "set": ROUNDS, "teams": REGIONS},
    "pfedmt": {"algorithm": "pfedmt", "set": ROUNDS},
    "sfedhp with sparse rows": {"algorithm": "sfedhp", "set": ROUNDS, "codec": "sparse"},
    "mfa-rr": {
        "algorithm": "mfa-rr",
        "models": {name: {"algorithm": "permfl", "set": ROUNDS} for name in "ab"},
        "teams": {f"t{k}": [f"d{d}" for d in range(k, 8, 2)] for k in (0, 1)},
    },
    "cobo": {"algorithm": "cobo", "set": {"sampling": "all"}},
    "fedavg": {"algorithm": "fedavg", "set": STEPS},
    "scaffold": {"algorithm": "scaffold", "set": STEPS},
    "ditto": {"algorithm": "ditto", "set": STEPS},
}
OTHERS = sorted(set(ALGORITHMS) - {"oracle"} - {about["algorithm"] for about in METHODS.values()})
NEEDED: dict[str, dict[str, Any]] = {
    "mfa-rand": METHODS["mfa-rr"],
    "validation": {"split": "3:1:1"},
    "fc": {"set": {"nearest": 2}},
}
PARTS: dict[str, dict[str, Any]] = {
    "all": {},
    "half": {"team_participation": 0.5, "device_participation": 0.5},
}


ASSEMBLING, assemble = threading.Lock(), Job.assemble


def assemble_alone(*given: Any, **more: Any) -> Any:
    """`Job.assemble`, in one thread at a time: the first values of a model come from torch's one generator."""
    with ASSEMBLING:
        return assemble(*given, **more)


class Threads:
    """The nodes of a job.

    Args:
        folder: For everything.
        broker: Through which links go; None: WebSocket.
        settings: Keys of the job; `teams` is its roster.
    """

    def __init__(self, folder: Path, broker: Mosquitto | None, **settings: Any) -> None:
        self.folder, self.broker = folder, broker
        self.teams: dict[str, Any] = settings.pop("teams", TEAMS)
        self.devices = sorted(name for _, names in leaves(self.teams) for name in names)
        shares = tuple(int(n) for n in settings.get("split", "3:0:1").split(":"))
        self.federation = data(len(self.devices), 1, shares)
        network = {"shape": [3], "classes": 3, "teams": self.teams, **settings.pop("network", {})}
        values = {"model": "mclr", "rounds": 2, "batch_size": 4, "seed": 3, **settings, "network": network}
        file = folder / "job.toml"
        file.write_text(tomli_w.dumps(values))
        self.job: Job = settle(file)
        self.keys = folder / "federation"
        if not self.keys.exists():
            make_authority(self.keys)
        for k, name in enumerate(self.devices):
            write_device(folder / f"{name}.npz", self.federation, k)
        self._started = 0
        self._ended: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def run(self) -> None:
        """Train; returns when all nodes have ended by themselves."""
        here = {"listen": "127.0.0.1:0" if self.broker is None else self.broker.via}
        about: Any = {"folder": self.folder / "run", "stop": lambda: False}
        server = self._start(run_server, "server", self.job, **here, **about)
        if self.job.tree.num_tiers == 2:
            self._start_devices(self.devices, server)
        else:
            self._grow(self.teams, server, 1, here)
        for _ in range(self._started):
            name, outcome = self._ended.get(timeout=SECONDS)
            if isinstance(outcome, Exception):
                raise outcome
            assert outcome == (None if name == "server" else "done"), name

    def _grow(self, teams: dict[str, Any], parent: str, tier: int, here: dict[str, str]) -> None:
        kind = "team" if self.job.tree.num_tiers == 3 else f"team{tier}"
        for name, below in teams.items():
            place = self._start(run_team, f"{kind}/{name}", name, parent, **here)
            if isinstance(below, dict):
                self._grow(below, place, tier + 1, here)
            else:
                self._start_devices(below, place)

    def _start_devices(self, names: list[str], parent: str) -> None:
        """Start devices in threads; those of a gateway in one."""
        behind = [name for name in names if name in self.job.network["gateways"].get("lab", ())]
        if behind:
            self._start(run_devices, "gateway/lab", parent, data=self._files(behind))
        for name in names:
            if name not in behind:
                self._start(run_devices, f"device/{name}", parent, data=self._files([name]))

    def _files(self, names: list[str]) -> dict[str, Path]:
        return {name: self.folder / f"{name}.npz" for name in names}

    def _start(self, program: Any, name: str, *given: Any, **more: Any) -> str:
        """Start a node; returns where it listens."""
        place, told = enrol(self.keys, name), queue.SimpleQueue()
        if program is not run_devices:
            more["started"] = told.put
        if program is not run_server:
            more["state"] = self.folder / "state" / place.name

        def work() -> None:
            try:
                self._ended.put((name, program(*given, keys=place, **more)))
            except Exception as error:
                self._ended.put((name, error))

        threading.Thread(target=work, daemon=True).start()
        self._started += 1
        return told.get(timeout=SECONDS).replace(" as ", "/") if "started" in more else ""

    def simulated(self) -> Run:
        """The simulation of the same job."""
        with Loop(self.job.assemble(self.job.tree, self.federation)) as loop:
            return loop.run(self.job.spec.rounds)

    def same_bits(self, run: Run) -> None:
        """Compare all models that nodes kept with those of a simulation, to the bit."""
        compared = 0
        for part in run.parts:
            parameters, scope = part.context.objective.parameters, part.context.name
            tree = part.context.topology
            for kind, rows, tier in (("team", part.team, tree.leaf - 1), ("personal", part.personal, tree.leaf)):
                names = part.team_ids if kind == "team" and part.team is not None else part.device_ids
                for row, name in zip([] if rows is None else rows, names, strict=False):
                    pattern = f"*/*/{tree.tier_names[tier]}-{name}/models/{scope and f'{scope}/'}{kind}.safetensors"
                    (path,) = (self.folder / "state").glob(pattern)
                    same_file(path, parameters(row.unsqueeze(0)))
                    compared += 1
            if (row := part.global_) is not None:
                folder = self.folder / "run" / "models"
                same_file(folder / scope / "global.safetensors", parameters(row.reshape(1, -1)))
                compared += 1
        assert compared
        assert read_absences(self.folder / "run" / FILE) == []


def other(name: str) -> dict[str, Any]:
    """The settings of another method, with few steps."""
    fields = {} if name in NEEDED else {"set": {k: v for k, v in vars(short(name)).items() if k in SHORT}}
    return {**fields, **NEEDED.get(name, {}), "algorithm": name}


def leaves(teams: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """The teams of devices, and their devices."""
    for name, below in teams.items():
        yield from leaves(below) if isinstance(below, dict) else [(name, below)]


def same_file(path: Path, parameters: dict[str, torch.Tensor]) -> None:
    """Compare a model in a file with the parameters of one."""
    assert torch.equal(flat(path), torch.cat([parameters[key].flatten() for key in sorted(parameters)])), path


def check_bits(folder: Path, mqtt: bool, **settings: Any) -> None:
    """Run a job over a network, and its simulation."""
    make_authority(folder / "federation")
    with Mosquitto(folder / "federation") if mqtt else nullcontext() as broker:
        threads = Threads(folder, broker, **settings)
        with patch.object(Job, "assemble", assemble_alone):
            threads.run()
    threads.same_bits(threads.simulated())
