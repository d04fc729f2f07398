"""Bounds of theorems beside runs that satisfy their conditions, and the rate of MFA-RR with growing mini-batches.

python benchmarks/theory_rates.py [--out docs/results/theory_rates.json] [--images docs/images]

bounds  | `polytier check --measure --picture` with settings that satisfy all conditions: PerMFL's Theorems 1 and 2,
              MFA's Theorem 1 and Corollary 1
samples | linear regression at 12 devices by MFA-RR with 2 models, a step that falls as 1/T, and full gradients,
          mini-batches that grow as Theorem 2 asks, or mini-batches of fixed size: the exponent p of a distance
          |w_T - w*| that falls as T^p, between rounds 200 and 4,000, over 2 models and 3 seeds
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from polytier import FedAvg, Federation
from polytier.algorithms import MFARR
from polytier.files.write import write_text
from polytier.report.intervals import interval
from polytier.runs.loop import make_loop
from polytier.studies.store_runs import origin
from polytier.theory.measure import Trail

QUADRATICS = "--models 2 --data quadratics:mu=1,smoothness=4 --model quadratic --devices 12 --rounds 300"
CHECKS = {
    "permfl-theorem-1": "permfl --data quadratics:mu=1,smoothness=1.2,dimension=4 --model quadratic --devices 6 "
    "--teams 2 --rounds 30 --set team_rounds=60 --set device_steps=60 --set device_pull=2.5 --set team_pull=5.25 "
    "--set device_lr=0.27 --set team_lr=0.064 --set server_lr=0.029",
    "permfl-theorem-2": "permfl --data digits --devices 12 --teams 3 --batch-size 2000 --rounds 30 "
    "--set team_rounds=30 --set device_pull=14 --set team_pull=30 "
    "--set device_lr=0.048 --set team_lr=0.0227 --set server_lr=0.0083",
    "mfa-corollary-1": f"mfa-rr {QUADRATICS} --set device_lr=1.5/(9+t//2) --set device_steps=3",
    "mfa-theorem-1": f"mfa-rand {QUADRATICS} --set device_lr=1.5/(30+t) --set device_steps=3",
}
DRAWN = ("permfl-theorem-2", "mfa-corollary-1")  # pictures of docs/theory.md
DEVICES, EACH, FEATURES, ROUNDS, FROM, SEEDS = 12, 512, 5, 4000, 200, 3
SAMPLES: dict[str, Any] = {
    "full gradients": EACH,
    "growing mini-batches": "grow:400/(401+t//2)",
    "mini-batches of 32": 32,
}
STEP = "4/(20+t//2)"


def check(name: str, words: str, images: Path) -> dict[str, Any]:
    """What `polytier check` measures with these settings, for each model."""
    command = ["check", *shlex.split(words), "--measure"]
    drawn = ["--picture", str(images / f"{name}.png")] if name in DRAWN else []
    asked = [*command, *drawn, "--json"]
    found = subprocess.run([sys.executable, "-m", "polytier", *asked], capture_output=True, text=True, check=True)
    reports = json.loads(found.stdout)
    models = [
        {
            "broken": [c["formula"] for c in report["conditions"] if c["holds"] is False],
            **{key: report["measured"][key] for key in ("what", "where", "keeps", "worst", "first", "last")},
            "bound": report["measured"]["bound"][-1],
        }
        for report in reports
    ]
    return {"command": shlex.join(["polytier", *command]), "rounds": reports[0]["measured"]["rounds"], "models": models}


def regression(seed: int) -> tuple[Federation, np.ndarray]:
    """Linear regression with a model of its own at each device, and the best common model (weights, bias)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(DEVICES, EACH, FEATURES)).astype(np.float32)
    own = rng.normal(size=FEATURES) + 0.3 * rng.normal(size=(DEVICES, FEATURES))
    y = np.einsum("nsf,nf->ns", x, own) + rng.normal(size=(DEVICES, EACH))
    device = np.repeat(np.arange(DEVICES), EACH)
    rows, values = x.reshape(-1, FEATURES), y.reshape(-1, 1).astype(np.float32)
    wide = np.hstack([rows.astype(float), np.ones((len(rows), 1))])
    best = np.linalg.lstsq(wide, values[:, 0].astype(float), rcond=None)[0]
    return Federation.from_arrays(rows, values, device=device, shares=(1, 0, 0)), best


def exponents(rule: Any, seed: int) -> list[float]:
    """The exponent p of |w_T - w*| ~ T^p for each model."""
    data, best = regression(seed)
    trail, models = Trail(), {name: FedAvg(STEP, 5) for name in ("a", "b")}
    both = dict.fromkeys(models, data)
    quiet: dict[str, Any] = {"dtype": "float64", "eval_every": ROUNDS, "seed": seed}
    with make_loop(MFARR(models), both, "linear", batch_size=rule, **quiet) as loop:
        loop.run(ROUNDS, [trail])
    t = np.arange(FROM, ROUNDS + 1)
    gaps = [np.linalg.norm(np.array(trail.x[name])[FROM:] - best, axis=1) for name in models]
    return [float(np.polyfit(np.log(t), np.log(gap), 1)[0]) for gap in gaps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/theory_rates.json"))
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    bounds = {name: check(name, words, given.images) for name, words in CHECKS.items()}
    samples = {
        name: {"rule": str(rule), **(interval(p for s in range(SEEDS) for p in exponents(rule, s)) or {})}
        for name, rule in SAMPLES.items()
    }
    found = {"command": "python benchmarks/theory_rates.py", **origin(), "bounds": bounds, "samples": samples}
    write_text(given.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps({"bounds": bounds, "samples": samples}, indent=1))


if __name__ == "__main__":
    main()
