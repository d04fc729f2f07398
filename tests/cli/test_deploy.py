"""The units for systemd and the compose file: their linters, and the commands in them on the loopback interface."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets")
pytest.importorskip("yaml")

import yaml

from network_processes import Processes, write_device
from polytier.engines.network.keys import enrol
from polytier.runs.replay import read_status

FOLDER = Path(__file__).parents[2] / "deploy"
UNITS = sorted((FOLDER / "systemd").glob("*.service"))
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
PERMFL: dict[str, Any] = {"algorithm": "permfl", "rounds": 2, "set": {"device_steps": 2, "team_rounds": 2}}
EXECUTABLE = "/opt/polytier/bin/polytier"
HERE = "127.0.0.1:0"


def unit(name: str) -> dict[str, str]:
    """The settings of a unit; of one that is given several times the last."""
    lines = (FOLDER / "systemd" / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"[A-Z]\w+=", line))


def unit_words(name: str, instance: str, folder: Path, parent: str) -> list[str]:
    """The command of a unit, with the folders of a test in place of those of a system."""
    words = unit(name)["ExecStart"].replace("%i", instance).split()
    assert words.pop(0) == EXECUTABLE
    variables = {"${LISTEN}": HERE, "${HEALTH}": HERE, "${PARENT}": parent}
    places = {"/etc/polytier/job.toml": folder / "job.toml", "/etc/polytier": folder / "federation"}
    return [variables.get(word) or moved(word, {**places, "/var/lib/polytier": folder}) for word in words]


def moved(word: str, places: dict[str, Path]) -> str:
    """A path below one of `places`."""
    for place, here in places.items():
        if word == place or word.startswith(f"{place}/"):
            return f"{here}{word.removeprefix(place)}"
    return word


def service_words(service: str, folder: Path, ports: dict[str, int]) -> list[str]:
    """The command of a service of the compose file, with the folders and ports of a test."""
    about = COMPOSE["services"][service]
    places = {}
    for volume in about["volumes"]:
        source, target, *_ = volume.split(":")
        places[target] = folder / source if source.startswith("./") else folder / "volumes" / source
    words = [moved(word, places) for word in about["command"].split()]
    for k, word in enumerate(words):
        if words[k - 1] in ("--listen", "--health"):
            words[k] = HERE
        elif words[k - 1] == "--parent":
            host = word.partition(":")[0]
            assert set(about["networks"]) & set(COMPOSE["services"][host]["networks"]), f"{service} cannot reach {host}"
            words[k] = f"127.0.0.1:{ports[host]}"
    return words


def health(processes: Processes, name: str) -> dict[str, Any]:
    """What a node says of itself, at the address that its log of JSON lines names."""
    processes.until(lambda: '"event": "health"' in processes.log(name), name)
    lines = [json.loads(line) for line in processes.log(name).splitlines() if line.startswith("{")]
    assert all(list(line) == ["time", "level", "event", "node", "peer", "text"] for line in lines)
    (text,) = [line["text"] for line in lines if line["event"] == "health"]
    found: list[dict[str, Any]] = []

    def fine() -> bool:
        address = f"http://{text.removeprefix('health at ')}/healthz"
        with suppress(urllib.error.HTTPError), urllib.request.urlopen(address, timeout=30) as answer:
            found.append(json.load(answer))  # before that it is 503: no link to the parent yet
        return bool(found)

    processes.until(fine, name)
    return found[0]


def test_the_commands_of_the_units_train(tmp_path):
    teams = {"t0": ["d0", "d2"], "t1": ["d1"]}
    with Processes(tmp_path, teams, {"gateways": {"lab": ["d0", "d2"]}}, **PERMFL) as processes:
        enrol(processes.keys, "gateway/lab")
        (processes.keys / "gateway-lab.names").write_text("d0\nd2\n")

        def start(name: str, kind: str, instance: str = "", above: str = "") -> None:
            parent = f"127.0.0.1:{processes.ports[above]}" if above else ""
            processes.command(name, *unit_words(f"polytier-{kind}.service", instance, tmp_path, parent))
            if kind in ("server", "team@"):
                processes._port(name)

        start("server", "server")
        for team in teams:
            start(f"team/{team}", "team@", team, "server")
        start("gateway/lab", "gateway@", "lab", "team/t0")
        about = health(processes, "server")
        assert (about["status"], about["node"], about["round"]) == ("ok", "server", 0)
        assert health(processes, "gateway/lab")["node"] == "gateway/lab"
        start("device/d1", "device@", "d1", "team/t1")
        processes.wait()
        assert (read_status(tmp_path / "run")["state"], read_status(tmp_path / "run")["round"]) == ("done", 2)
        assert '"event": "round"' in processes.log("server")
        assert sorted(path.parent.parent.name for path in tmp_path.glob("*/*/*/models/personal.safetensors")) == [
            "device-d0",
            "device-d1",
            "device-d2",
        ]


def test_the_commands_of_the_compose_file_train(tmp_path):
    teams = {"north": ["ann", "bob"], "south": ["cleo", "dan"]}
    with Processes(tmp_path, teams, {}, **PERMFL) as processes:
        for k, name in enumerate(processes.parents):
            write_device(tmp_path / "data" / f"{name}.npz", processes.federation, k)
        services = COMPOSE["services"]
        assert set(services) == {"server", *(f"team-{t}" for t in teams), *(f"device-{d}" for d in processes.parents)}
        for service in services:  # in their order: parents first
            processes.command(service, *service_words(service, tmp_path, processes.ports))
            if not service.startswith("device-"):
                processes._port(service)
        processes.wait()
        assert read_status(tmp_path / "volumes" / "server" / "run")["state"] == "done"


def test_the_compose_file_is_consistent():
    networks, volumes = set(COMPOSE["networks"]), set(COMPOSE["volumes"])
    for name, about in COMPOSE["services"].items():
        assert set(about["networks"]) <= networks
        assert {v.partition(":")[0] for v in about["volumes"] if not v.startswith("./")} <= volumes
        assert all(v.endswith(":ro") for v in about["volumes"] if v.startswith("./")), name
        assert about["read_only"] is True
        assert about["cap_drop"] == ["ALL"]
        assert "--health 127.0.0.1:9750" in about["command"]
    if shutil.which("docker") and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        subprocess.run(["docker", "compose", "-f", FOLDER / "compose.yaml", "config", "-q"], check=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_the_units(tmp_path, path):
    text = path.read_text().replace(EXECUTABLE, sys.executable)
    (tmp_path / path.name).write_text(text)
    words = ["systemd-analyze", "verify", "--man=no", tmp_path / path.name]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert unit(path.name)["Restart"] == "always"
    assert unit(path.name)["ProtectSystem"] == "strict"
