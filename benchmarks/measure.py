"""All measurements behind docs/performance.md, one after the other: about half an hour on an idle machine.

    python benchmarks/measure.py [--against REV] [--peers PYTHON] [--skip million ...]

    bench    | polytier bench --repeat 5: the works beside hand-written loops and bare kernels
    against  | this tree and REV in turns on the works of benchmarks/same_bits.py, with one worker and with two
    peers    | FedJAX, pfl-research and Flower on the work `common`, with the Python in which they are installed
    million  | benchmarks/million.py
    bounds   | benchmarks/bounds.py: what is reachable on this machine
    start    | seconds from the command `polytier run --rounds 1` to its end, and evaluation beside a round of PerMFL

Everything is written to docs/results/bench.json, after each part. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "docs/results/bench.json"
HERE = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
REPEAT = 5


def output(*words: str, python: str = sys.executable) -> str:
    """What a script prints; it is also shown."""
    found = []
    with subprocess.Popen([python, *words], cwd=ROOT, env=HERE, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            found.append(line)
    return "".join(found)


def bench(options: argparse.Namespace) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bench.json")
        output("-m", "polytier", "bench", "--repeat", str(REPEAT), "--json", str(file))
        return json.loads(file.read_text())


def against(options: argparse.Namespace) -> Any:
    return {"rev": options.against, "works": speeds(options.against, 1), "two workers": speeds(options.against, 2)}


def speeds(rev: str, workers: int) -> dict[str, dict[str, float]]:
    """By work: device steps per second of a revision and of this tree, and the ratio."""
    words = ["--only", "speed/*", "--speed-repeat", str(REPEAT), "--speed-workers", str(workers)]
    text = output("benchmarks/same_bits.py", rev, *words)
    pattern = r"speed/(\w+): ([\d,]+) device steps a second, here ([\d,]+); ratio ([\d.]+) \(from ([\d.]+) to ([\d.]+)"
    names = ("rev", "here", "ratio", "min", "max")
    return {
        m[0]: dict(zip(names, (float(v.replace(",", "")) for v in m[1:]), strict=True))
        for m in re.findall(pattern, text)
    }


def peers(options: argparse.Namespace) -> Any:
    text = output("benchmarks/peers/run.py", python=options.peers)
    own = output("-m", "polytier", "bench", "common", "--repeat", str(REPEAT))  # beside them, in the same minutes
    return {"peers": text.splitlines(), "common": own.splitlines()}


def million(options: argparse.Namespace) -> Any:
    return output("benchmarks/million.py").splitlines()


def bounds(options: argparse.Namespace) -> Any:
    return output("benchmarks/bounds.py").splitlines()


EVALUATION = """
import time, torch, polytier
spec = polytier.RunSpec(algorithm="permfl", data="mnist", data_dir=DIR, devices=40, teams="4", workers=1)
with polytier.Loop(polytier.assemble(spec)) as loop:
    loop.step(), loop.evaluate()
    for _ in range(5):
        rounds = loop.step()
        started = time.perf_counter()
        loop.evaluate()
        print(rounds, time.perf_counter() - started)
"""


def start(options: argparse.Namespace) -> Any:
    seconds = []
    for k in range(REPEAT):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            output("-m", "polytier", "run", "--rounds", "1", "--quiet", "--out", f"{folder}/run{k}")
            seconds.append(time.perf_counter() - began)
    found: dict[str, Any] = {"seconds of polytier run --rounds 1": statistics.median(seconds)}
    if options.mnist:
        lines = output("-c", EVALUATION.replace("DIR", repr(options.mnist))).splitlines()
        rounds, evaluations = zip(*(map(float, line.split()) for line in lines), strict=True)
        found["seconds of a round of PerMFL on MNIST"] = statistics.median(rounds)
        found["seconds of an evaluation"] = statistics.median(evaluations)
    return found


PARTS = {"bench": bench, "against": against, "peers": peers, "million": million, "bounds": bounds, "start": start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REV", default="9a19e77", help="the revision to compare with")
    parser.add_argument("--peers", metavar="PYTHON", default=sys.executable, help="where the other packages are")
    parser.add_argument("--mnist", metavar="DIR", help="a folder with MNIST, for the evaluation")
    parser.add_argument("--skip", nargs="+", choices=PARTS, default=[], help="parts to leave as they are in the file")
    options = parser.parse_args()
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name, part in PARTS.items():
        if name not in options.skip:
            print(f"-- {name}", flush=True)
            found[name] = {"load before": os.getloadavg()[0], "result": part(options)}
            RESULT.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
