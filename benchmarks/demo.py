"""Why a model for every tier: the comparison of `make run`, with its searches and five seeds.

    python benchmarks/demo.py [--out FOLDER] [--json docs/results/demo.json]

The data are the bundled digits at four sites (`digits-sites`), which are divided the same way for every method. First
each method is tuned on validation samples: `polytier tune` with as many trials for each, by the rule of
bundled_defaults.py, on three seeds that are not among those of the comparison. The fields that are found are the
defaults for these data in runs/defaults.py; the script stops if they are not. Then `polytier compare` trains every
method with five seeds; only this uses test samples. In all methods a device computes 2,000 gradients and exchanges 100
models with its server or team. How many team rounds make a round of hierarchical FedAvg and PerMFL is part of their
search: of 5, 10 and 25 the best on validation samples.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from bundled_defaults import search
from polytier.files.write import write_text
from polytier.report.intervals import interval
from polytier.runs.defaults import settings

METHODS = ("local", "fedavg", "fedavg-ft", "hier-fedavg", "ditto", "permfl")
DATA = "digits-sites"
SETTINGS = ("--data", DATA, "--split", "3:1:1")
ROUNDS, STEPS, SEEDS, TRIALS, TUNING_SEEDS = 100, 20, 5, 16, 3
# how a method divides its gradients; a round with team rounds counts as so many rounds of the others
WITH_TEAMS = [{"device_steps": 20, "team_rounds": rounds} for rounds in (5, 10, 25)]
DIVISIONS = {
    "hier-fedavg": WITH_TEAMS,
    "permfl": WITH_TEAMS,
    "ditto": [{"device_steps": 10, "personal_steps": 10}],
}


def tune(method: str, out: Path) -> dict[str, Any]:
    """The search for the fields of a method. If there are several divisions, each takes one of its trials."""
    divisions: list[dict[str, int]] = DIVISIONS.get(method, [{}])
    found: dict[int, dict[str, Any]] = {}
    best = 1
    for trials in (1, TRIALS + 1 - len(divisions)) if len(divisions) > 1 else (TRIALS,):
        for fixed in divisions:
            words = [word for name, value in fixed.items() for word in ("--set", f"{name}={value}")]
            repeats = fixed.get("team_rounds", 1)
            folder = out / f"tune-{method}-{repeats}"
            each = search(method, (*SETTINGS, *words), folder, ROUNDS // repeats, trials, TUNING_SEEDS)
            found[repeats] = {**each, "fields": {**fixed, **each["fields"]}}
        best = max(found, key=lambda repeats: found[repeats]["validation"])
        divisions = [fixed for fixed in divisions if fixed.get("team_rounds", 1) == best]
    tried = {str(repeats): each["validation_at_start"] for repeats, each in found.items()}
    return {**found[best], "validation_by_team_rounds": tried}


def check_defaults(method: str, found: dict[str, Any]) -> None:
    """Stop if the fields that were found are not the defaults of the comparison: it would show others."""
    rows = {**settings(method, DATA, "mclr"), **settings(method, DATA, "mclr", STEPS)}
    other = {name: value for name, (value, _) in rows.items() if found.get(name) != value}
    if other or not rows:
        raise SystemExit(f"{method}: put {found} into SITES of runs/defaults.py, which has {other or 'nothing'}")


def compare(out: Path) -> tuple[str, dict[str, Any]]:
    """The command of the comparison, which is that of `make run`, and its compare.json."""
    shared = ("--steps", str(STEPS), "--rounds", str(ROUNDS), "--eval-every", "5", "--seeds", str(SEEDS))
    words = ["compare", ",".join(METHODS), *SETTINGS, *shared]
    run = [sys.executable, "-m", "polytier", *words, "--jobs", "2", "--out", str(out / "compare"), "--json"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    return f"polytier {shlex.join(words)}", json.loads(done.stdout)


def judged(found: dict[str, Any], row: dict[str, Any]) -> list[float]:
    """The test value of each seed, of the models that a method is judged by."""
    own = [record for record in found["records"] if record["method"] == row["method"]]
    return [record[row["judged_by"]][row["metric"]] for record in own]


def result(row: dict[str, Any], found: dict[str, Any], tuned: dict[str, Any]) -> dict[str, Any]:
    """The figures of a method: mean, half the 95 % interval and values by seed, of each kind of model."""
    kinds = [kind for kind in ("personal", "team", "global") if row[kind] is not None]
    own = [record for record in found["records"] if record["method"] == row["method"]]
    lost = [best - value for best, value in zip(judged(found, found["methods"][0]), judged(found, row), strict=True)]
    return {
        "judged_by": row["judged_by"],
        **{kind: {**row[kind], "by_seed": [record[kind][row["metric"]] for record in own]} for kind in kinds},
        "behind_the_best": interval(lost),
        "better_than_local": row["better_than_local"],
        "p_value_against_the_best": row["p_value"],
        "gradients": row["gradients"]["mean"],
        "tuning": tuned,
    }


def main() -> None:
    """Tune, compare, print the figures and write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/demo-study"))
    parser.add_argument("--json", type=Path, default=Path("docs/results/demo.json"))
    parser.add_argument("--tune-only", action="store_true", help="do not use test samples")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    tuned = {}
    for method in METHODS:
        tuned[method] = tune(method, given.out)
        print(
            f"{method}: {100 * tuned[method]['validation']:.2f} % on validation, {tuned[method]['fields']}", flush=True
        )
    if given.tune_only:
        return
    for method, found in tuned.items():
        check_defaults(method, found["fields"])
    command, found = compare(given.out)
    methods = {row["method"]: result(row, found, tuned[row["method"]]) for row in found["methods"]}
    for name, each in methods.items():
        figures = each[each["judged_by"]]
        print(f"{name:12}{each['judged_by']:10}{100 * figures['mean']:.2f} ± {100 * figures['half']:.2f}")
    write_text(given.json, json.dumps({"command": command, "methods": methods}, indent=2) + "\n")


if __name__ == "__main__":
    main()
