"""How good the first fields are on data that are in no table: defaults beside fields after a search with 30 trials.

    python benchmarks/own_data.py [--out FOLDER] [--json docs/results/own_data.json]

Writes four data sets as .npz files, runs `polytier compare` on each, without any --set and with --tune 30, and prints
a line per data set and method. A default is good enough if the tuned fields are better by no more than 5 points of
accuracy, or than the 95 % interval of the difference over seeds if that is wider; for a loss, by no more than a factor
of 1.1 or that interval.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

from polytier.files.write import write_text
from polytier.report.intervals import interval

METHODS = "local,fedavg,fedavg-ft,ditto,permfl"
SETTINGS = ("--rounds", "50", "--split", "3:1:1", "--seeds", "3", "--standardize")
TRIALS, POINTS, FACTOR = 30, 0.05, 1.1


def by_quantile(column: np.ndarray, devices: int) -> np.ndarray:
    """[N] the device of each sample: equal parts of the data, sorted by a column."""
    return np.argsort(np.argsort(column, kind="stable"), kind="stable") * devices // len(column)


def cancer() -> dict[str, np.ndarray]:
    """Breast cancer of scikit-learn: 12 devices by mean texture, 3 teams; raw features from 0.001 to 4,254."""
    data: Any = load_breast_cancer()
    device = by_quantile(data.data[:, 1], 12)
    return {"x": data.data, "y": data.target, "device": device, "team": device // 4}


def diabetes() -> dict[str, np.ndarray]:
    """Diabetes of scikit-learn, a regression: 10 devices by body mass index, 2 teams; scaled targets."""
    data: Any = load_diabetes(scaled=False)
    device = by_quantile(data.data[:, 2], 10)
    y = (data.target - data.target.mean()) / data.target.std()
    return {"x": data.data, "y": y, "device": device, "team": device // 5}


def sensors() -> dict[str, np.ndarray]:
    """Made here: 60 devices in 5 teams, 4 classes; a linear rule per device, near the rule of its team."""
    rng = np.random.default_rng(0)
    teams = rng.normal(size=(4, 10)) + 0.7 * rng.normal(size=(5, 4, 10))
    parts: dict[str, list[np.ndarray]] = {"x": [], "y": [], "device": [], "team": []}
    for device in range(60):
        n, team = int(rng.integers(30, 120)), device % 5
        x = rng.normal(size=(n, 10)) + 0.5 * rng.normal(size=10)
        scores = x @ (teams[team] + 0.4 * rng.normal(size=(4, 10))).T + 0.5 * rng.gumbel(size=(n, 4))
        columns = {"x": x, "y": scores.argmax(1), "device": np.full(n, device), "team": np.full(n, team)}
        for name, own in parts.items():
            own.append(columns[name])
    return {name: np.concatenate(own) for name, own in parts.items()}


def relabelled() -> dict[str, np.ndarray]:
    """Digits of scikit-learn: 20 devices in 4 teams; each team has its own order of the labels."""
    rng = np.random.default_rng(5)
    data: Any = load_digits()
    device = rng.integers(0, 20, len(data.target))
    orders = np.stack([rng.permutation(10) for _ in range(4)])
    return {"x": data.data / 16, "y": orders[device % 4, data.target], "device": device, "team": device % 4}


DATA = {"cancer": cancer, "diabetes": diabetes, "sensors": sensors, "relabelled": relabelled}


def compare(data: Path, out: Path, *more: str) -> dict[str, Any]:
    """The result of `polytier compare`; a comparison that is there is used again."""
    words = ["compare", METHODS, "--data", str(data), *SETTINGS, "--jobs", "2", "--out", str(out), "--json", *more]
    done = subprocess.run([sys.executable, "-m", "polytier", *words], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def scores(found: dict[str, Any], row: dict[str, Any]) -> list[float]:
    """The test value of each seed, of the models that a method is judged by."""
    own = [record for record in found["records"] if record["method"] == row["method"]]
    return [record[row["judged_by"]][row["metric"]] for record in own]


def measure(name: str, folder: Path) -> list[dict[str, Any]]:
    """One result per method."""
    file = folder / f"{name}.npz"
    arrays: dict[str, Any] = DATA[name]()
    np.savez(file, **arrays)
    plain, tuned = compare(file, folder / name), compare(file, folder / f"{name}-tuned", "--tune", str(TRIALS))
    results = []
    for row in sorted(plain["methods"], key=lambda row: METHODS.split(",").index(row["method"])):
        before, after = scores(plain, row), scores(tuned, row)
        sign = 1 if row["better"] == "higher" else -1
        lost = interval([sign * (b - a) for a, b in zip(before, after, strict=True)])
        assert lost is not None
        allowed = POINTS if row["unit"] == "%" else (FACTOR - 1) * float(np.mean(after))
        spread = max(lost["high"] - lost["mean"], 0.0)
        results.append(
            {
                "data": name,
                "method": row["method"],
                "metric": row["metric"],
                "default": before,
                "tuned": after,
                "lost": lost,
                "good": lost["mean"] <= max(allowed, spread),
                "default_fields": plain["settings"]["set"][row["method"]],
                "tuned_fields": tuned["settings"]["set"][row["method"]],
            }
        )
    return results


def main() -> None:
    """Measure all data sets, print the table and write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/own-data"))
    parser.add_argument("--json", type=Path, default=Path("docs/results/own_data.json"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results = [result for name in DATA for result in measure(name, given.out)]
    print(f"{'data':11}{'method':11}{'metric':10}{'default':>9}{'tuned':>9}{'lost':>9}{'±':>8}  good enough")
    for r in results:
        default, tuned, lost = np.mean(r["default"]), np.mean(r["tuned"]), r["lost"]
        spread = lost["high"] - lost["mean"]
        said = f"{default:9.4f}{tuned:9.4f}{lost['mean']:9.4f}{spread:8.4f}"
        print(f"{r['data']:11}{r['method']:11}{r['metric']:10}{said}  {'yes' if r['good'] else 'NO'}")
    command = f"polytier compare {METHODS} --data FILE.npz {' '.join(SETTINGS)} [--tune {TRIALS}]"
    write_text(given.json, json.dumps({"command": command, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
