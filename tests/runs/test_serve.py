"""Real processes with certificates, over the loopback interface: the bits of the simulation, also after kill -9."""

from __future__ import annotations

import csv
from typing import Any

import pytest
import torch

pytest.importorskip("websockets")

from network_processes import Processes
from polytier import PerMFL, Run
from polytier.engines.network.absences import read_absences
from polytier.runs.load import load_run
from polytier.runs.loop import make_loop
from polytier.runs.replay import read_status, replay_run

TEAMS = {"t0": ["d0", "d2"], "t1": ["d1", "d3"]}
PERMFL: dict[str, Any] = {"algorithm": "permfl", "set": {"device_steps": 2, "team_rounds": 2}}


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


def test_processes_have_the_bits_of_the_simulation_and_end_by_themselves(tmp_path):
    with Processes(tmp_path, TEAMS, {}, rounds=3, **PERMFL) as processes:
        processes.start()
        processes.wait()
        with make_loop(
            PerMFL(device_steps=2, team_rounds=2), processes.federation, "mclr", batch_size=4, seed=3
        ) as loop:
            run = loop.run(3)
        same_models(processes, run)
        found = load_run(processes.out, None, False)
        assert [r["personal"] for r in found.history] == [r["personal"] for r in run.history]
        assert [r["bytes"] for r in found.history] == [r["bytes"] for r in run.history]
        assert not (processes.out / "models" / "personal.safetensors").exists()
        assert read_absences(processes.out / "absences.csv") == []
        status = read_status(processes.out)
        assert (status["state"], status["round"], status["present"]) == ("done", 3, ["team/t0", "team/t1"])
        with (processes.out / "devices.csv").open() as file:
            assert [line["id"] for line in csv.DictReader(file)] == ["d0", "d1", "d2", "d3"]


def test_killed_processes_come_back_and_the_replay_has_the_same_bits(tmp_path):
    settings = {**PERMFL, "set": {"device_steps": 20, "team_rounds": 5}}
    with Processes(tmp_path, TEAMS, {"quorum": 0.5}, rounds=40, **settings) as processes:
        processes.start()
        for name, start in (("device/d0", lambda: processes.device("d0")), ("team/t1", lambda: processes.team("t1"))):
            done = processes.rounds()
            processes.until(lambda done=done: processes.rounds() > done + 1, name)
            processes.kill(name)
            start()
            seen = processes.rounds()
            processes.until(lambda seen=seen: processes.rounds() > seen + 1, name)
        processes.kill("server")
        processes.server()
        processes.wait()
        absences = read_absences(processes.out / "absences.csv")
        assert {("device", "d0"), ("team", "t1")} <= {(line.tier, line.name) for line in absences}
        replay_run(processes.out, tmp_path / "data", tmp_path / "replayed")
        run = load_run(tmp_path / "replayed", None, False)
        assert run.rounds == 40
        same_models(processes, run)


def test_devices_of_a_flat_method_join_the_server_and_a_stranger_is_refused(tmp_path):
    with Processes(tmp_path, TEAMS, {}, algorithm="fedavg", rounds=2, set={"device_steps": 2}) as processes:
        processes.server()
        for name in ("d0", "d1", "d2"):
            processes.device(name)
        processes.device("d3", keys=processes.keys / "device-d0")  # the certificate of another device
        stranger = processes.processes.pop("device/d3")
        stranger.join(60)
        assert stranger.exitcode == 2
        assert "may not speak for 'device/d3'" in processes.log("device/d3")
        processes.device("d3")
        processes.wait()
        assert "'device/d0' may not speak for 'device/d3'" in processes.log("server")
        assert load_run(processes.out, None, False).rounds == 2
