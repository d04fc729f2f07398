"""Real processes with certificates, over the loopback interface: the bits of the simulation, also after kill -9."""

from __future__ import annotations

import csv
import os
import signal
from typing import Any

import pytest
import torch

pytest.importorskip("websockets")
pytest.importorskip("paho.mqtt")

from brokers import MISSING, MOSQUITTO
from network_processes import Processes, same_models
from polytier import Ditto, PerMFL
from polytier.engines.network.absences import read_absences
from polytier.runs.load import load_run
from polytier.runs.loop import make_loop
from polytier.runs.read import RunRecord
from polytier.runs.replay import read_status, replay_run
from polytier.runs.roster import FILE as CHANGES
from polytier.runs.roster import change_roster, read_changes

BROKER = pytest.mark.skipif(MOSQUITTO is None, reason=MISSING)
NETWORKS = pytest.mark.parametrize("mqtt", [False, pytest.param(True, marks=BROKER)], ids=["websocket", "mqtt"])
TEAMS = {"t0": ["d0", "d2"], "t1": ["d1", "d3"]}
PERMFL: dict[str, Any] = {"algorithm": "permfl", "set": {"device_steps": 2, "team_rounds": 2}}


@NETWORKS
def test_processes_have_the_bits_of_the_simulation_and_end_by_themselves(tmp_path, mqtt):
    with Processes(tmp_path, TEAMS, {}, mqtt, rounds=3, **PERMFL) as processes:
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


def test_standardisation_needs_no_data_in_one_place(tmp_path):
    with Processes(tmp_path, TEAMS, {}, rounds=2, standardize=True, **PERMFL) as processes:
        processes.start()
        processes.wait()
        pooled = processes.federation.standardized()
        found = load_run(processes.out, None, False).context.population
        for one, other in ((found.scale, pooled.scale), (found.shift, pooled.shift)):
            assert one is not None
            assert other is not None
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
        with make_loop(PerMFL(device_steps=2, team_rounds=2), pooled, "mclr", batch_size=4, seed=3) as loop:
            run = loop.run(2)
        assert run.global_ is not None
        parameters = run.context.objective.parameters(run.global_.reshape(1, -1))
        pieces = torch.cat([parameters[key].flatten() for key in sorted(parameters)])
        assert torch.allclose(processes.models("global")["server"], pieces, atol=1e-6)
        replay_run(processes.out, tmp_path / "data", tmp_path / "replayed")
        same_models(processes, load_run(tmp_path / "replayed", None, False))


@NETWORKS
def test_killed_processes_come_back_and_the_replay_has_the_same_bits(tmp_path, mqtt):
    settings = {**PERMFL, "set": {"device_steps": 20, "team_rounds": 5}}
    with Processes(tmp_path, TEAMS, {"quorum": 0.5, "deadline": 2.0}, mqtt, rounds=25, **settings) as processes:
        processes.start()
        processes.until(lambda: processes.rounds() > 0, "the first round")
        pid = processes.processes["device/d3"].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # it is late for one call, and absent until it is heard from
        processes.until(lambda: any(line.why == "late" for line in processes.absences()), "device/d3")
        os.kill(pid, signal.SIGCONT)
        for name, start in (("device/d0", lambda: processes.device("d0")), ("team/t1", lambda: processes.team("t1"))):
            done = processes.rounds()
            processes.until(lambda done=done: processes.rounds() > done + 1, name)
            processes.kill(name)
            start()
            seen = processes.rounds()
            processes.until(lambda seen=seen: processes.rounds() > seen + 1, name)
        if processes.broker is not None:
            processes.broker.kill()
            processes.broker.start()
        processes.kill("server")
        processes.server()
        processes.wait()
        absences = read_absences(processes.out / "absences.csv")
        assert {"d0", "t1", "d3"} <= {line.name for line in absences}
        assert {"deadline", "late"} <= {line.why for line in absences if line.name == "d3"}
        about = RunRecord(processes.out).network
        assert about is not None
        assert about["present"] == {"team/t0", "team/t1", *(f"device/d{k}" for k in range(4))}
        assert {line["name"] for line in about["absences"]} == {line.name for line in absences}
        replay_run(processes.out, tmp_path / "data", tmp_path / "replayed")
        run = load_run(tmp_path / "replayed", None, False)
        assert run.rounds == 25
        same_models(processes, run)


def test_devices_join_and_leave_during_a_run_and_the_replay_has_the_same_bits(tmp_path):
    settings: Any = {**PERMFL, "rounds": 250, "eval_every": 100, "set": {"device_steps": 2, "team_rounds": 1}}
    with Processes(tmp_path, TEAMS, {}, **settings) as processes:
        change_roster(processes.file, "d3", None, there=False)
        processes.server()
        for name in TEAMS:
            processes.team(name)
        for name in ("d0", "d1", "d2"):
            processes.device(name)
        processes.until(lambda: processes.rounds() > 1, "the first round")
        change_roster(processes.file, "d3", "t1", there=True)
        processes.until(lambda: processes.log("server").count("team/t1 is ready") > 1, "team/t1")
        processes.device("d3")
        changes = processes.out / CHANGES
        processes.until(lambda: "joins" in (changes.read_text() if changes.exists() else ""), "device/d3")
        change_roster(processes.file, "d0", None, there=False)
        processes.until(lambda: "leaves" in changes.read_text(), "device/d0")
        gone = processes.processes.pop("device/d0")
        gone.join(60)
        assert gone.exitcode == 2
        assert "not in the roster" in processes.log("device/d0")
        processes.wait()
        found = read_changes(changes)
        assert [(change.number, change.action, change.device) for change in found] == [
            (1, "joins", "d3"),
            (2, "leaves", "d0"),
        ]
        replay_run(processes.out, tmp_path / "data", tmp_path / "replayed")
        run = load_run(tmp_path / "replayed", None, False)
        assert run.device_ids.tolist() == ["d1", "d2", "d3"]
        same_models(processes, run)


def test_teams_that_pass_messages_on_change_no_bit(tmp_path):
    settings: Any = {"algorithm": "ditto", "rounds": 3, "set": {"device_steps": 2}}
    with Processes(tmp_path, TEAMS, {"relay": True}, **settings) as processes:
        processes.start()
        processes.wait()
        assert "device/d0 is passed on" in processes.log("team/t0")
        assert processes.absences() == []
        with make_loop(Ditto(device_steps=2), processes.federation, "mclr", batch_size=4, seed=3) as loop:
            same_models(processes, loop.run(3))


def test_devices_of_a_flat_method_join_the_server_and_a_stranger_is_refused(tmp_path):
    with Processes(tmp_path, TEAMS, {}, algorithm="ditto", rounds=2, set={"device_steps": 2}) as processes:
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
        before = processes.models("personal")
        assert sorted(before) == ["d0", "d1", "d2", "d3"]
        next(tmp_path.glob("state/*/*/device-d3/models/personal.safetensors")).unlink()
        processes.server()  # for those who were away at the end
        for name in ("d0", "d1", "d2", "d3"):
            processes.device(name)
        processes.wait()
        after = processes.models("personal")
        assert all(torch.equal(after[name], row) for name, row in before.items())


def test_a_team_that_comes_late_joins_with_its_devices(tmp_path):
    settings: Any = {
        **PERMFL,
        "rounds": 250,
        "eval_every": 100,
        "set": {"device_steps": 2, "team_rounds": 1},
        "standardize": True,
    }
    with Processes(tmp_path, TEAMS, {"wait": 0.5, "quorum": 0.4}, **settings) as processes:
        processes.server()
        processes.team("t0")
        for name in TEAMS["t0"]:
            processes.device(name)
        processes.until(lambda: processes.rounds() > 0, "the first round")
        processes.team("t1")
        for name in TEAMS["t1"]:
            processes.device(name)
        processes.wait()
        found = read_changes(processes.out / CHANGES)
        assert sorted((change.action, change.device) for change in found) == [("joins", "d1"), ("joins", "d3")]
        replay_run(processes.out, tmp_path / "data", tmp_path / "replayed")
        run = load_run(tmp_path / "replayed", None, False)
        assert run.device_ids.tolist() == ["d0", "d1", "d2", "d3"]
        same_models(processes, run)
