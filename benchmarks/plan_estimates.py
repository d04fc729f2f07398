"""Estimates of `polytier reproduce --dry-run` beside short runs: processor seconds of a round and of an evaluation.

    python benchmarks/plan_estimates.py --data-dir DIR [--out docs/results/plan_estimates.json]

One run per model of the plans at the full scale, and of the quick scale, whose rounds are short, with the real data.
The most memory that a dry run of each paper needs is measured too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from polytier import papers
from polytier.files.write import write_text
from polytier.runs.loop import Loop
from polytier.studies import plan_cost
from polytier.studies.reproduce import make_tasks
from polytier.studies.store_runs import origin

RUNS = {  # one for each model: paper, scale, name of the run
    "mclr, MNIST, PerMFL": ("permfl", "full", "permfl-mnist-mclr"),
    "mclr, MNIST, FedAvg": ("permfl", "full", "fedavg-mnist-mclr"),
    "mclr:62, MNIST": ("permfl", "full", "permfl-mnist-mclr-code"),
    "mclr, synthetic, Per-FedAvg": ("pfedmt", "full", "per-fedavg-synthetic-mclr"),
    "60-20-10, synthetic": ("permfl", "full", "permfl-synthetic-network"),
    "784-100-10, HierFAVG": ("sfedhp", "full", "hier-fedavg-mnist-dnn"),
    "784-500-200-10, FedAvg": ("sfedhp", "full", "fedavg-mnist-setting-1"),
    "quadratic, MFA-RR": ("mfa", "full", "mfa-rr-tridiagonal-m2-e5-constant"),
    "mclr, synthetic, MFA-RR": ("mfa", "full", "mfa-rr-synthetic-a-m2"),
    "64-32-10, CoBo": ("cobo", "quick", "cobo-8"),
    "784-32-10, PerMFL": ("permfl", "quick", "permfl-mnist-network"),
    "CNN of MNIST, FedAvg": ("permfl", "full", "fedavg-mnist-network"),
    "CNN of FMNIST, FedAvg": ("permfl", "full", "fedavg-fmnist-network"),
    "ResNet-9, Local": ("cobo", "full", "local-8"),
}
LEAST, MOST = 1.0, 200.0  # processor seconds of rounds that are measured, and of a single one


def measured(spec: Any) -> tuple[float, float]:
    """Processor seconds of a round and of an evaluation of a run with its real data."""
    with Loop.of(spec) as loop:
        loop.step()
        started, rounds = time.process_time(), 0
        while time.process_time() - started < LEAST:
            loop.step()
            rounds += 1
        each = (time.process_time() - started) / rounds
        return each, plan_cost.seconds_of(loop.evaluate)


def compared(name: str, data_dir: Path) -> dict[str, Any]:
    """The estimate and the measurement of a run."""
    paper, scale, run = RUNS[name]
    planned = {r.name: r for item in papers.items_of(paper, scale) for r in item.runs()}[run]
    samples = plan_cost.Samples()
    task = make_tasks([planned], data_dir, Path("none"), samples, 1)[0]
    if task.reason:
        return {"run": run, "reason": task.reason}
    found = plan_cost.cost(task, {}, samples)
    rounds, judged = task.spec.rounds, plan_cost.evaluations(task.spec)
    estimate = ((found.training or 0) / rounds, (found.evaluation or 0) / judged)
    if estimate[0] > MOST:
        return {"run": run, "reason": f"a round takes {estimate[0]:.0f} s"}
    real = measured(task.spec)
    hours = [(rounds * pair[0] + judged * pair[1]) / 3600 for pair in (estimate, real)]
    return {
        "run": f"{paper}, {scale}: {run}",
        "round": {"estimate": estimate[0], "measured": real[0]},
        "evaluation": {"estimate": estimate[1], "measured": real[1]},
        "hours": {"estimate": hours[0], "measured": hours[1]},
        "ratio": hours[0] / hours[1],
    }


def dry_run(paper: str, data_dir: Path) -> dict[str, Any]:
    """What the dry run of a paper at the full scale says in its last line, and the MiB that it needs at most."""
    command = [sys.executable, "-m", "polytier", "reproduce", paper, "--scale", "full", "--dry-run"]
    code = (
        "import resource, subprocess, sys; "
        "found = subprocess.run(sys.argv[1:], capture_output=True, text=True, check=True); "
        "print(found.stdout.splitlines()[-1]); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, *command, "--data-dir", str(data_dir)], capture_output=True, text=True, check=True
    )
    says, kib = found.stdout.splitlines()
    return {"says": says, "MiB": int(kib) // 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--only", help="a run of RUNS; its result is printed")
    parser.add_argument("--out", type=Path, default=Path("docs/results/plan_estimates.json"))
    given = parser.parse_args()
    if given.only:
        print(json.dumps(compared(given.only, given.data_dir)))
        return
    found: dict[str, Any] = {"command": "python benchmarks/plan_estimates.py --data-dir DIR", **origin()}
    found |= {"dry runs": {}, "runs": {}}
    for name in RUNS:  # each in a process of its own, so that none finds the graphs of another
        command = [sys.executable, __file__, "--only", name, "--data-dir", str(given.data_dir)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found["runs"][name] = json.loads(shown.splitlines()[-1])
        write_text(given.out, json.dumps(found, indent=1) + "\n")
    for paper in papers.PAPERS:
        found["dry runs"][paper] = dry_run(paper, given.data_dir)
        write_text(given.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
