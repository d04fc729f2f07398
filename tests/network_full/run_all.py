"""What `make network` runs: nodes in network namespaces, faults, fuzz and figures. `--only PART` runs one part.

The figures of each part are written to docs/results/network.json as soon as it is done; the other parts keep theirs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

import polytier
from brokers import MOSQUITTO
from network_full.fuzz import fuzz
from network_full.spaces import Spaces
from network_processes import flat, write_device
from network_threads import METHODS, OTHERS, PARTS, check_bits, other
from network_tree import data
from polytier.engines.network.absences import FILE, read_absences
from polytier.engines.network.contents import Limits, as_tensor
from polytier.engines.network.keys import enrol, make_authority
from polytier.engines.network.message import Message, decode
from polytier.engines.network.mqtt import write_broker_files
from polytier.engines.network.transport import open_hub, open_uplink
from polytier.runs.admission import Admission, hello
from polytier.runs.job import make_job, settle
from polytier.runs.load import load_run
from polytier.runs.replay import replay_run

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "network.json"
PAGE, BEGIN, END = RESULTS.parents[1] / "deploy.md", "<!-- figures -->", "<!-- end of figures -->"
PORT = 8750
ROLES = ("device/d3", "team/t1", "server")
FLOWER = "| Flower 1.41, the first run with nested apps | 13-20 | 16-19 | - | 3,200 |"  # from the trial of engines
PATIENCE = 30.0  # seconds that nodes may take to end after the server
LIMIT = 600.0  # seconds until a part gives up


class Federation:
    """A federation whose nodes live in `Spaces`.

    Args:
        folder: For everything.
        rounds: Of the job.
        fields: Of PerMFL; one team round and one step if they are left out.
        tree: Numbers of teams and of devices per team.
        shape: Features and classes; (3, 3) are the small data of the tests.
        mqtt: Whether links go through a broker, which is one more node.
        gateways: Whether one process hosts all devices of a team.
        settings: More keys of the job.
        network: More keys of its table [network].
    """

    def __init__(
        self,
        folder: Path,
        rounds: int,
        fields: dict[str, int],
        tree: tuple[int, int] = (2, 2),
        shape: tuple[int, int] = (3, 3),
        mqtt: bool = False,
        gateways: bool = False,
        settings: dict[str, Any] | None = None,
        **network: Any,
    ) -> None:
        self.folder, self.rounds, self.mqtt = folder, rounds, mqtt
        federation = data(tree[0] * tree[1], tree[0]) if shape == (3, 3) else wide(tree, *shape)
        names = federation.ids.tolist()
        assert federation.team is not None
        teams = federation.team.tolist()
        self.teams = {team: [n for n, t in zip(names, teams, strict=True) if t == team] for team in sorted(set(teams))}
        self.parents = {f"device/{n}": f"team/{t}" for n, t in zip(names, teams, strict=True)}
        self.hosts = {name: name for name in self.parents}  # the process of each device
        if gateways:
            self.hosts = {name: team.replace("team/", "gateway/") for name, team in self.parents.items()}
        self.leaves = sorted(set(self.hosts.values()))
        self.names = ["server", *(f"team/{t}" for t in self.teams), *self.leaves]
        broker = ["broker/main"] if mqtt else []
        self.spaces = Spaces(folder, [*self.names, *broker])
        self.ports = {name: PORT + k for k, name in enumerate([*self.names, *broker])}
        self._keys()
        table = {"shape": shape[:1], "classes": shape[1], "teams": self.teams, "deadline": 2.0, **network}
        if gateways:
            table["gateways"] = self.teams
        values: dict[str, Any] = {"algorithm": "permfl", "model": "mclr", "rounds": rounds, "batch_size": 4, "seed": 3}
        values |= {"set": {"device_steps": 1, "team_rounds": 1, **fields}, "network": table, **(settings or {})}
        job = self.spaces.home("server") / "job.toml"
        job.write_text(tomli_w.dumps(values))
        settle(job)
        self.data, self.samples = folder / "pooled", [row.numpy().tobytes() for row in federation.x]
        self.data.mkdir()
        for k, name in enumerate(names):
            host = self.spaces.home(self.hosts[f"device/{name}"])
            (host / "data").mkdir(exist_ok=True)
            write_device(self.data / f"{name}.npz", federation, k)
            shutil.copy(self.data / f"{name}.npz", host / "data" / f"{name}.npz")
            with (host / "names").open("a") as file:
                file.write(f"{name}\n")
        folder.chmod(0o755)
        self.spaces.own()
        if mqtt:
            self.start("broker/main")
            time.sleep(1.0)

    def _keys(self) -> None:
        """Enrol all nodes."""
        keys = self.folder / "authority"
        make_authority(keys)
        for name in self.ports:
            home = self.spaces.home(name) / "keys"
            shutil.move(enrol(keys, name), home)
            if name.startswith("broker"):
                write_broker_files(home)
                conf = home / "mosquitto.conf"
                listen = f"listener {self.ports[name]} {self.spaces.host(name)}"
                conf.write_text(conf.read_text().replace("listener 8883", listen))

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *_: object) -> None:
        self.spaces.__exit__()

    @property
    def out(self) -> Path:
        return self.spaces.home("server") / "run"

    def at(self, name: str) -> str:
        return f"{self.spaces.host(name)}:{self.ports[name]}"

    def start(self, name: str) -> None:
        if name.startswith("broker"):
            self.spaces.start(name, MOSQUITTO or "mosquitto", "-c", "keys/mosquitto.conf")
            return
        listen = ["--via", f"mqtts://{self.at('broker/main')}"] if self.mqtt else ["--listen", self.at(name)]
        via = listen if self.mqtt else []
        if name == "server":
            words = ["serve", "job.toml", *listen, "--out", "run"]
        elif name.startswith("team"):
            words = ["serve", "--team", name[5:], "--parent", self._parent("server"), *listen]
        else:
            above = next(self.parents[device] for device, host in self.hosts.items() if host == name)
            words = ["join", "--parent", self._parent(above), *via]
            own = ["--data", f"data/{name[7:]}.npz", "--name", name[7:]]
            words += own if name in self.parents else ["--data", "data", "--names", "names"]
        self.spaces.start(name, self.spaces.python, "-m", "polytier", *words, "--keys", "keys", "-v")

    def _parent(self, name: str) -> str:
        return name if self.mqtt else self.at(name)

    def start_all(self) -> None:
        for name in self.names:
            self.start(name)

    def used(self) -> tuple[float, float]:
        """CPU seconds of all nodes so far, and the sum of what is resident of them, in MB."""
        cpu = memory = 0.0
        for name, process in self.spaces.processes.items():
            if name.startswith("broker") or process.poll() is not None:
                continue
            place = Path("/proc") / str(process.pid)
            user, system = (place / "stat").read_text().rpartition(")")[2].split()[11:13]
            cpu += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
            memory += of_status(place, "VmRSS") / 1e6
        return cpu, memory

    def timed(self, first: int) -> dict[str, Any]:
        """Run to the end; seconds and CPU seconds per round from round `first` on, and memory then."""
        self.start_all()
        self.until(lambda: self.done() >= first, f"round {first}")
        before, _ = self.used()
        last = self.rounds - 1
        self.until(lambda: self.done() >= last, f"round {last}")
        after, memory = self.used()
        self.wait()
        lines = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        times = [line["seconds"] for line in lines][first:]
        about = {"rounds": len(times), "cpu_seconds": round((after - before) / (last - first), 3)}
        about |= {"processes": len(self.names), "memory_mb": round(memory)}
        return {"round_seconds": round(float(np.median(times)), 3), **about}

    def until(self, happened: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT
        while not happened():
            log = (self.spaces.home("server") / "log").read_text()[-2000:]
            assert time.monotonic() < end, f"{what} did not happen\n{log}"
            time.sleep(0.05)

    def done(self) -> int:
        path = self.out / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def running(self) -> bool:
        return self.done() < self.rounds - 5

    def wait(self) -> None:
        """Wait until all nodes have ended; the server is started again for devices that were away at the end."""
        self.until(lambda: self.ended("server"), "the end of the server")
        end = time.monotonic() + PATIENCE
        while (away := self.away()) and time.monotonic() < end:
            time.sleep(0.2)
        if away:
            for name in filter(self.ended, self.names):
                self.start(name)
        self.until(lambda: all(map(self.ended, self.names)), f"the end of all nodes, after {away} were away")
        ended = {name: self.spaces.processes[name].returncode for name in self.names}
        assert set(ended.values()) == {0}, ended

    def away(self) -> list[str]:
        """The nodes that have not ended, or have no model."""
        return [name for name in self.names if not self.ended(name) or not self.models(name)]

    def models(self, name: str) -> list[Path]:
        """What a node has kept at the end."""
        if name == "server":
            return list(self.out.glob("models/global.safetensors"))
        kind = "team" if name.startswith("team") else "personal"
        return list(self.spaces.home(name).glob(f"state/*/*/*/models/{kind}.safetensors"))

    def kept(self) -> dict[str, Path]:
        """The models that all nodes have kept."""
        paths = [path for name in self.names if name != "server" for path in self.models(name)]
        found = {path.parts[-3].replace("-", "/", 1): path for path in paths}
        return found | dict.fromkeys(
            ["server"] * bool(self.models("server")), self.out / "models" / "global.safetensors"
        )

    def ended(self, name: str) -> bool:
        return self.spaces.processes[name].poll() is not None

    def same_as_replay(self) -> None:
        """Compare all models with those of the replay, to the bit."""
        replay_run(self.out, self.data, self.folder / "replayed")
        run = load_run(self.folder / "replayed", None, False)
        assert run.rounds == self.rounds
        kept, wanted = self.kept(), {"server", *(f"team/{team}" for team in self.teams), *self.parents}
        assert set(kept) == wanted, f"{sorted(wanted - set(kept))} have no model"
        assert run.team is not None
        assert run.personal is not None
        global_ = run.rows("global")
        assert global_ is not None
        rows = {"server": global_[0]}
        rows |= {f"team/{n}": row for n, row in zip(run.team_ids, run.team, strict=True)}
        rows |= {f"device/{n}": row for n, row in zip(run.device_ids, run.personal, strict=True)}
        for name, path in kept.items():
            own = run.context.objective.parameters(rows[name].unsqueeze(0))
            assert torch.equal(torch.cat([own[key].flatten() for key in sorted(own)]), flat(path)), name


def wide(tree: tuple[int, int], features: int, classes: int) -> Any:
    """Four samples per device with so many features that the model is large."""
    teams, each = tree
    rng, devices = np.random.default_rng(0), np.repeat(np.arange(teams * each), 4)
    x, y = rng.normal(size=(len(devices), features)).astype(np.float32), rng.integers(0, classes, len(devices))
    names = np.array([f"d{k}" for k in range(teams * each)])[devices]
    team = np.array([f"t{k % teams}" for k in range(teams * each)])[devices]
    return polytier.Federation.from_arrays(x, y, names, team, shares=(3, 0, 1), num_classes=classes)


def separate(folder: Path) -> dict[str, Any]:
    """Addresses, users and files of their own; what passes the switch is TLS."""
    with Federation(folder, 5, {"device_steps": 5, "team_rounds": 2}) as nodes:
        spaces, captured = nodes.spaces, folder / "traffic.pcap"
        tcpdump = spaces.capture(captured)
        time.sleep(1.0)
        nodes.start_all()
        nodes.wait()
        time.sleep(1.0)
        tcpdump.terminate()
        tcpdump.wait()
        seen = captured.read_bytes()
        plain = [*nodes.samples, b"__metadata__", b"device_steps", b"GET / HTTP"]
        assert len(seen) > 10_000, "nothing was captured"
        assert seen.count(b"\x17\x03\x03") > 20, "no TLS was seen"
        assert not [text for text in plain if text in seen]
        opened = spaces.run("server", "cat", str(spaces.home("device/d0") / "data" / "d0.npz")).returncode == 0
        assert opened != spaces.users, "the server can open the file of a device"
        nodes.same_as_replay()
        return {"namespaces": spaces.real, "users": spaces.users, "captured_bytes": len(seen)}


def faults(folder: Path, mqtt: bool = False, number: int = 100, rounds: int = 2000) -> dict[str, Any]:
    """kill -9 and SIGSTOP of each role in mid-round, a link that is down for 30 s, then faults at random."""
    draw = random.Random(0)
    with Federation(folder, rounds, {"device_steps": 40, "team_rounds": 2}, mqtt=mqtt) as nodes:
        spaces, started = nodes.spaces, time.monotonic()
        nodes.start_all()
        nodes.until(lambda: nodes.done() > 1, "the first rounds")

        def kill(name: str) -> None:
            spaces.kill(name)
            nodes.start(name)

        def hold(name: str) -> None:
            spaces.send(name, signal.SIGSTOP)
            time.sleep(3.0)  # longer than the deadline
            spaces.send(name, signal.SIGCONT)

        def cut(name: str, seconds: float = 3.0) -> None:
            spaces.link(name, False)
            time.sleep(seconds)
            spaces.link(name, True)

        kinds = [kill, hold, cut] if spaces.real else [kill, hold]
        roles = [*ROLES, "broker/main"] if mqtt else ROLES
        fixed = [(fault, name) for name in roles for fault in (kill, hold)]
        fixed += [(lambda name: cut(name, 30.0), "device/d3")] if spaces.real else []
        for fault, name in fixed:
            fault(name)
            before = nodes.done()
            nodes.until(lambda before=before: nodes.done() > before, f"a round after a fault of {name}")
        made = 0
        while made < number and nodes.running():
            draw.choice(kinds)(draw.choice(list(nodes.ports)))
            time.sleep(draw.random())
            made += 1
        assert made == number, f"the run was over after {made} faults"
        nodes.wait()
        absences = read_absences(nodes.out / FILE)
        nodes.same_as_replay()
        seconds = round(time.monotonic() - started)
        return {"fixed": len(fixed), "random": made, "absences": len(absences), "seconds": seconds}


def faults_mqtt(folder: Path) -> dict[str, Any]:
    """The same through a broker, which is killed and stopped too."""
    return faults(folder, mqtt=True)


def slow(folder: Path, mqtt: bool = False) -> dict[str, Any]:
    """A model of 8 MB over a link of 250 kB/s, 100 ms and 0.1 % loss each way: one team round, a deadline of 240 s."""
    wait: dict[str, Any] = {"deadline": 240.0, "team_deadline": 600.0}
    with Federation(folder, 2, {}, shape=(20_000, 100), mqtt=mqtt, settings={"eval_every": 2}, **wait) as nodes:
        if not nodes.spaces.slow("device/d3"):
            return {"namespaces": False}
        nodes.start_all()
        nodes.wait()
        assert read_absences(nodes.out / FILE) == []
        nodes.same_as_replay()
        lines = [json.loads(line) for line in (nodes.out / "metrics.jsonl").read_text().splitlines()]
        return {"round_seconds": [round(line["seconds"], 1) for line in lines], "deadline": wait["deadline"]}


def slow_mqtt(folder: Path) -> dict[str, Any]:
    """The same through a broker."""
    return slow(folder, mqtt=True)


def long(folder: Path) -> dict[str, Any]:
    """A run of 2,000 rounds whose server is killed near the end goes on."""
    with Federation(folder, 2000, {"team_rounds": 2}, settings={"eval_every": 10}) as nodes:
        nodes.start_all()
        nodes.until(lambda: nodes.done() > 1900, "round 1,900")
        nodes.spaces.kill("server")
        done = nodes.done()
        nodes.start("server")
        nodes.wait()
        nodes.same_as_replay()
        (newest,) = sorted((nodes.out / "checkpoints").glob("round-*/facts.json"))[-1:]
        return {"killed_after": done, "facts_bytes": newest.stat().st_size}


def rounds_of_2x2(folder: Path) -> dict[str, Any]:
    """A round of 2 teams x 2 devices with 10 team rounds; the first rounds are left out."""
    with Federation(folder, 30, {"device_steps": 10, "team_rounds": 10}, deadline=20.0) as nodes:
        return nodes.timed(6)


def fleet(folder: Path) -> dict[str, Any]:
    """The same with 10 teams x 20 devices; one process hosts the devices of a team."""
    fields = {"device_steps": 10, "team_rounds": 10}
    with Federation(folder, 12, fields, (10, 20), gateways=True, deadline=60.0) as nodes:
        found = nodes.timed(3)
        assert read_absences(nodes.out / FILE) == []
        return found


def models(folder: Path) -> dict[str, Any]:
    """Runs with models of 10 and of 100 MB: 1 team of 2 devices, one team round of one step."""
    found = {}
    for megabytes in (10, 100):
        place = folder / str(megabytes)
        place.mkdir()
        shape = (25_000 * megabytes // 10, 100)
        wait: dict[str, Any] = {"deadline": 120.0, "team_deadline": 300.0}
        with Federation(place, 6, {}, (1, 2), shape, settings={"eval_every": 6}, **wait) as nodes:
            found[f"{megabytes}MB"] = nodes.timed(2)
            assert read_absences(nodes.out / FILE) == []
    return found


def bits(folder: Path) -> dict[str, Any]:
    """The methods of `network_threads` with all and with half of the nodes, over WebSocket and through a broker."""
    compared = 0
    for mqtt in (False, True) if MOSQUITTO else (False,):
        settings = {name: [about | part for part in PARTS.values()] for name, about in METHODS.items()}
        settings |= {name: [other(name)] for name in OTHERS}
        for name, each in settings.items():
            for k, about in enumerate(each):
                place = folder / f"{mqtt}-{name.replace(' ', '-')}-{k}"
                place.mkdir()
                check_bits(place, mqtt, **about)
                compared += 1
    return {"compared": compared, "mqtt": bool(MOSQUITTO)}


def large(folder: Path) -> dict[str, Any]:
    """A message of 10 and of 100 MB down and up again over TLS on the loopback interface; the child is a process."""
    make_authority(folder / "federation")
    for name in ("server", "device/ann"):
        enrol(folder / "federation", name)
    result = {}
    for megabytes in (10, 100):
        command = [sys.executable, "-m", "network_full.run_all", "--pair", str(folder / "federation"), str(megabytes)]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT)
        result[f"{megabytes}MB"] = json.loads(found.stdout.splitlines()[-1])
    return result


def pair(keys: Path, megabytes: int) -> dict[str, Any]:
    """Time one exchange; the parent is this process, the child another one."""
    job = make_job({"algorithm": "fedavg"}, {"devices": ["ann"], "shape": [3], "classes": 3}, "a measurement")
    gate = Admission(job, job.tree, 0, Limits(largest=1 << 30))
    hub = open_hub("127.0.0.1:0", keys / "server", gate)
    child = subprocess.Popen(
        [sys.executable, "-m", "network_full.run_all", "--echo", str(keys), hub.address], stdout=subprocess.PIPE
    )
    while not gate.counts:
        time.sleep(0.01)
    gate.settle(job.tree, {"run": "r", "initial": {}})
    hub.send_worlds()
    while hub.link_of("device/ann") is None:
        time.sleep(0.01)
    rows = {"x": torch.rand(megabytes * 250_000)}
    base, cpu, start = peak(), time.process_time(), time.perf_counter()
    hub.ask("device/ann", Message("call", {"node": "device/ann", "number": 1}, rows))
    came = hub.wait(LIMIT)
    assert came is not None
    assert came[1] is not None
    assert torch.equal(decode(came[1], 1 << 30).tensors["x"], rows["x"])
    seconds, cpu, more = time.perf_counter() - start, time.process_time() - cpu, peak() - base
    hub.stop("done")
    assert child.stdout is not None
    below = json.loads(child.stdout.read().splitlines()[-1])
    child.wait()
    parent = {"seconds": round(seconds, 3), "parent_cpu_seconds": round(cpu, 3)}
    return {**parent, "parent_memory_of_message": round(more / megabytes / 1e6, 2), **below}


def echo(keys: Path, address: str) -> dict[str, Any]:
    """The child of `pair`: it sends back what it is asked."""
    uplink = open_uplink(address, keys / "device-ann", hello(["device/ann"]), 1 << 30)
    about: dict[str, Any] = {}
    while (came := uplink.next()) is not None:
        turn, message = came
        if message.kind != "call":
            base, cpu = peak(), time.process_time()
            counts = {"counts": as_tensor({"ann": [4, 0, 1]})} if message.kind == "welcome" else {}
            uplink.answer(turn, Message("ready", {}, counts))
            continue
        size = message.tensors["x"].nbytes
        uplink.answer(turn, Message("answer", {"node": "device/ann", "number": 1}, message.tensors))
        about = {"child_cpu_seconds": round(time.process_time() - cpu, 3)}
        about["child_memory_of_message"] = round((peak() - base) / size, 2)
    return about


def peak() -> int:
    """The largest memory that this process has had, in bytes."""
    return of_status(Path("/proc/self"), "VmHWM")


def of_status(place: Path, name: str) -> int:
    """A number of bytes in the status of a process."""
    lines = (place / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def changed_messages(folder: Path) -> dict[str, Any]:
    """10,000 messages that are changed at random."""
    logging.disable(logging.WARNING)
    try:
        return dict(sorted(fuzz(10_000).items()))
    finally:
        logging.disable(logging.NOTSET)


def table(known: dict[str, Any]) -> str:
    """The figures of docs/deploy.md."""
    lines = [
        "| message | seconds down and up | CPU seconds of parent, child | memory beside the rows of parent, child |"
    ]
    lines.append("|---|---|---|---|")
    for size, found in sorted(known.get("large", {}).items(), key=lambda item: len(item[0])):
        if isinstance(found, dict):
            cpu = f"{found['parent_cpu_seconds']}, {found['child_cpu_seconds']}"
            memory = f"{found['parent_memory_of_message']}, {found['child_memory_of_message']} messages"
            lines.append(f"| {size.replace('MB', ' MB')} | {found['seconds']} | {cpu} | {memory} |")
    return "\n".join([*lines, "", *table_of_runs(known)])


def table_of_runs(known: dict[str, Any]) -> list[str]:
    """The lines of the table of runs; what has not been measured is left out."""
    large = known.get("models", {})
    runs = {
        "2 teams of 2 devices, 10 team rounds": known.get("rounds"),
        "10 teams of 20 devices behind gateways, 10 team rounds": known.get("fleet"),
        "1 team of 2 devices, a model of 10 MB": large.get("10MB"),
        "1 team of 2 devices, a model of 100 MB": large.get("100MB"),
    }
    lines = ["| run | processes | seconds per round | CPU seconds per round | memory, MB |", "|---|---|---|---|---|"]
    for name, found in runs.items():
        if found is not None:
            columns = ("processes", "round_seconds", "cpu_seconds", "memory_mb")
            lines.append(f"| {name} | {' | '.join(str(found.get(column, '-')) for column in columns)} |")
    return [*lines, FLOWER]


def write_table(known: dict[str, Any]) -> None:
    """Replace the table in docs/deploy.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(known)}\n{END}{after}")


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "fuzz": changed_messages,
    "bits": bits,
    "large": large,
    "models": models,
    "separate": separate,
    "rounds": rounds_of_2x2,
    "fleet": fleet,
    "faults": faults,
    "faults_mqtt": faults_mqtt,
    "slow": slow,
    "slow_mqtt": slow_mqtt,
    "long": long,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=RUNS, help="run this part alone")
    parser.add_argument("--dry", action="store_true", help="print the figures only")
    parser.add_argument("--pair", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--echo", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.pair or given.echo:
        first, second = given.pair or given.echo
        print(json.dumps(pair(Path(first), int(second)) if given.pair else echo(Path(first), second)))
        return
    for name in [given.only] if given.only else RUNS:
        folder = Path(tempfile.mkdtemp(prefix="polytier-network-"))
        load, start = os.getloadavg()[0], time.monotonic()
        found = RUNS[name](folder)
        shutil.rmtree(folder, ignore_errors=True)
        found |= {"load_before": round(load, 2), "took_seconds": round(time.monotonic() - start)}
        print(name, json.dumps(found), flush=True)
        if given.dry:
            continue
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        known[name] = found
        RESULTS.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
        write_table(known)


if __name__ == "__main__":
    main()
