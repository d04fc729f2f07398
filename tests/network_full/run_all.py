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

from network_full.fuzz import fuzz
from network_full.spaces import Spaces
from network_processes import flat, write_device
from network_tree import data
from polytier.engines.network.absences import FILE, read_absences
from polytier.engines.network.contents import Limits, as_tensor
from polytier.engines.network.keys import enrol, make_authority
from polytier.engines.network.message import Message, decode
from polytier.engines.network.transport import open_hub, open_uplink
from polytier.runs.admission import Admission, hello
from polytier.runs.job import make_job, settle
from polytier.runs.load import load_run
from polytier.runs.replay import replay_run

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "network.json"
PAGE, BEGIN, END = RESULTS.parents[1] / "deploy.md", "<!-- figures -->", "<!-- end of figures -->"
PORT = 8750
ROLES = ("device/d3", "team/t1", "server")
LIMIT = 600.0  # seconds until a part gives up


class Federation:
    """A federation whose nodes live in `Spaces`: 2 teams x 2 devices, PerMFL."""

    def __init__(self, folder: Path, rounds: int, steps: int, **network: Any) -> None:
        self.folder, self.rounds = folder, rounds
        self.teams = {"t0": ["d0", "d2"], "t1": ["d1", "d3"]}
        self.parents = {f"device/{d}": f"team/{t}" for t, ds in self.teams.items() for d in ds}
        self.names = ["server", *(f"team/{t}" for t in self.teams), *self.parents]
        self.spaces = Spaces(folder, self.names)
        self.ports = {name: PORT + k for k, name in enumerate(self.names)}
        keys = folder / "authority"
        make_authority(keys)
        for name in self.names:
            shutil.move(enrol(keys, name), self.spaces.home(name) / "keys")
        table = {"shape": [3], "classes": 3, "teams": self.teams, "deadline": 2.0, **network}
        values: dict[str, Any] = {"algorithm": "permfl", "model": "mclr", "rounds": rounds, "batch_size": 4, "seed": 3}
        values |= {"set": {"device_steps": steps, "team_rounds": 2}, "network": table}
        job = self.spaces.home("server") / "job.toml"
        job.write_text(tomli_w.dumps(values))
        settle(job)
        federation, self.data = data(4, 2), folder / "pooled"
        self.samples = [row.numpy().tobytes() for row in federation.x]
        self.data.mkdir()
        for k, name in enumerate(federation.ids.tolist()):
            write_device(self.data / f"{name}.npz", federation, k)
            shutil.copy(self.data / f"{name}.npz", self.spaces.home(f"device/{name}") / "mine.npz")
        folder.chmod(0o755)
        self.spaces.own()

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
        if name == "server":
            words = ["serve", "job.toml", "--listen", self.at(name), "--out", "run"]
        elif name.startswith("team"):
            words = ["serve", "--team", name[5:], "--parent", self.at("server"), "--listen", self.at(name)]
        else:
            words = ["join", "--parent", self.at(self.parents[name]), "--data", "mine.npz", "--name", name[7:]]
        self.spaces.start(name, self.spaces.python, "-m", "polytier", *words, "--keys", "keys", "-v")

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
        time.sleep(5.0)
        away = [name for name in self.names if not self.ended(name) or not self.models(name)]
        if away:
            for name in filter(self.ended, self.names):
                self.start(name)
        self.until(lambda: all(map(self.ended, self.names)), f"the end of all nodes, after {away} were away")
        ended = {name: p.returncode for name, p in self.spaces.processes.items()}
        assert set(ended.values()) == {0}, ended

    def models(self, name: str) -> list[Path]:
        """What a node has kept at the end."""
        if name == "server":
            return list(self.out.glob("models/global.safetensors"))
        kind = "team" if name.startswith("team") else "personal"
        return list(self.spaces.home(name).glob(f"state/*/*/*/models/{kind}.safetensors"))

    def ended(self, name: str) -> bool:
        return self.spaces.processes[name].poll() is not None

    def same_as_replay(self) -> None:
        """Compare all models with those of the replay, to the bit."""
        replay_run(self.out, self.data, self.folder / "replayed")
        run = load_run(self.folder / "replayed", None, False)
        assert run.rounds == self.rounds
        kept = {name: path for name in self.names for path in self.models(name)}
        assert sorted(kept) == sorted(self.names), f"only {sorted(kept)} have a model"
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


def separate(folder: Path) -> dict[str, Any]:
    """Addresses, users and files of their own; what passes the switch is TLS."""
    with Federation(folder, 5, 5) as nodes:
        spaces, captured = nodes.spaces, folder / "traffic.pcap"
        tcpdump = spaces.capture(captured)
        time.sleep(1.0)
        for name in nodes.names:
            nodes.start(name)
        nodes.wait()
        time.sleep(1.0)
        tcpdump.terminate()
        tcpdump.wait()
        seen = captured.read_bytes()
        plain = [*nodes.samples, b"__metadata__", b"device_steps", b"GET / HTTP"]
        assert len(seen) > 10_000, "nothing was captured"
        assert seen.count(b"\x17\x03\x03") > 20, "no TLS was seen"
        assert not [text for text in plain if text in seen]
        opened = spaces.run("server", "cat", str(spaces.home("device/d0") / "mine.npz")).returncode == 0
        assert opened != spaces.users, "the server can open the file of a device"
        nodes.same_as_replay()
        return {"namespaces": spaces.real, "users": spaces.users, "captured_bytes": len(seen)}


def faults(folder: Path, number: int = 100, rounds: int = 1200) -> dict[str, Any]:
    """kill -9 and SIGSTOP of each role, a link that is down for 30 s, then faults at random."""
    draw = random.Random(0)
    with Federation(folder, rounds, 40) as nodes:
        spaces, started = nodes.spaces, time.monotonic()
        for name in nodes.names:
            nodes.start(name)
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
        for name in ROLES:
            for fault in (kill, hold):
                fault(name)
                before = nodes.done()
                nodes.until(lambda before=before: nodes.done() > before, f"a round after {fault.__name__} of {name}")
        if spaces.real:
            cut("device/d3", 30.0)
        made = 0
        while made < number and nodes.running():
            draw.choice(kinds)(draw.choice(nodes.names))
            time.sleep(draw.random())
            made += 1
        nodes.wait()
        absences = read_absences(nodes.out / FILE)
        nodes.same_as_replay()
        seconds = round(time.monotonic() - started)
        return {"fixed": 6 + spaces.real, "random": made, "absences": len(absences), "seconds": seconds}


def long(folder: Path) -> dict[str, Any]:
    """A run of 2,000 rounds whose server is killed near the end goes on."""
    with Federation(folder, 2000, 1) as nodes:
        for name in nodes.names:
            nodes.start(name)
        nodes.until(lambda: nodes.done() > 1900, "round 1,900")
        nodes.spaces.kill("server")
        done = nodes.done()
        nodes.start("server")
        nodes.wait()
        nodes.same_as_replay()
        (newest,) = sorted((nodes.out / "checkpoints").glob("round-*/facts.json"))[-1:]
        return {"killed_after": done, "facts_bytes": newest.stat().st_size}


def rounds_of_2x2(folder: Path) -> dict[str, Any]:
    """Seconds per round of 2 teams x 2 devices with 10 team rounds; the first rounds are left out."""
    with Federation(folder, 30, 10) as nodes:
        file = nodes.spaces.home("server") / "job.toml"
        file.write_text(file.read_text().replace("team_rounds = 2", "team_rounds = 10"))
        for name in nodes.names:
            nodes.start(name)
        nodes.wait()
        lines = [json.loads(line) for line in (nodes.out / "metrics.jsonl").read_text().splitlines()]
        times = [line["seconds"] for line in lines][6:]
        return {"round_seconds": round(float(np.median(times)), 3), "rounds": len(times)}


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
            uplink.answer(turn, Message("ready", {}, {"counts": as_tensor({"ann": [4, 0, 1]})}))
            continue
        size = message.tensors["x"].nbytes
        uplink.answer(turn, Message("answer", {"node": "device/ann", "number": 1}, message.tensors))
        about = {"child_cpu_seconds": round(time.process_time() - cpu, 3)}
        about["child_memory_of_message"] = round((peak() - base) / size, 2)
    return about


def peak() -> int:
    """The largest memory that this process has had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


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
    return "\n".join(lines)


def write_table(known: dict[str, Any]) -> None:
    """Replace the table in docs/deploy.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(known)}\n{END}{after}")


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "fuzz": changed_messages,
    "large": large,
    "separate": separate,
    "rounds": rounds_of_2x2,
    "faults": faults,
    "long": long,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="run this part alone")
    parser.add_argument("--pair", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--echo", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.pair or given.echo:
        first, second = given.pair or given.echo
        print(json.dumps(pair(Path(first), int(second)) if given.pair else echo(Path(first), second)))
        return
    for name in [given.only] if given.only else PARTS:
        folder = Path(tempfile.mkdtemp(prefix="polytier-network-"))
        load, start = os.getloadavg()[0], time.monotonic()
        found = PARTS[name](folder)
        shutil.rmtree(folder, ignore_errors=True)
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        known[name] = {**found, "load_before": round(load, 2), "took_seconds": round(time.monotonic() - start)}
        RESULTS.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
        write_table(known)
        print(name, json.dumps(known[name]), flush=True)


if __name__ == "__main__":
    main()
