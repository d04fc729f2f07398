"""Searches for the default fields of all methods on the bundled data: the rows of runs/defaults.py for digits.

    python benchmarks/bundled_defaults.py [METHOD ...] [--out FOLDER] [--json docs/results/bundled_defaults.json]

Every method has the same search: `polytier tune` on the validation samples of two seeds that no table uses, as many
trials for each, over all its step sizes and pulls from a tenth to ten times of a start. The start is the first
candidate on the user's own data: steps of devices 1 / L and pulls a share of L, where L is the curvature of the loss
at the initial model. The steps of teams and of the server of PerMFL, pFedMT and sFedHP follow from the pulls. A search
that is there is used again; results of methods that are not named are kept.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polytier import ALGORITHMS
from polytier._terminal import silence
from polytier.files.write import write_text
from polytier.runs.first_fields import Search, free_fields
from polytier.runs.make_data import make_federation
from polytier.runs.methods import method_class
from polytier.runs.spec import read_spec

SEED, SEEDS, TRIALS = 100, 2, 16
ROUNDS, STEPS = 30, 20  # methods with one or two gradients per round have rounds in proportion
SETTINGS = ("--data", "digits", "--split", "3:1:1")
GROUPS = ("--partition", "clusters-permuted:4")
COBO = (*GROUPS, "--set", "weight_lr=1")  # products of gradients are far below 1
OTHER = {"oracle": GROUPS, "cobo": COBO, "fc": GROUPS}  # methods for devices in groups
SKIPPED = ("mfa-rand", "mfa-rr", "pfedmt")  # they use the methods of their models; pFedMT has the fields of PerMFL


def starts(method: str, settings: Sequence[str]) -> list[str]:
    """--set for every field that the search starts from."""
    given = {flag.removeprefix("--"): value for flag, value in zip(settings[::2], settings[1::2], strict=True)}
    given.pop("set", None)  # numbers of steps, which are not searched for
    with silence():
        spec = read_spec(None, {**given, "algorithm": method, "seed": SEED})
        federation, complete = make_federation(spec)
        search = Search.begin(complete, federation, free_fields(method_class(method)), {})
        fields = search.complete(search.start)
    return [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]


def search(
    method: str, settings: Sequence[str], out: Path, rounds: int, trials: int = TRIALS, seeds: int = SEEDS
) -> dict[str, Any]:
    """The command of a search and its result: the best fields and their score on validation samples."""
    more = ("--rounds", str(rounds), "--seed", str(SEED), "--seeds", str(seeds), "--trials", str(trials))
    words = ["tune", method, *settings, *more, *starts(method, settings)]
    run = [sys.executable, "-m", "polytier", *words, "--out", str(out), "--json"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    first = found["trials"][0]
    return {
        "command": f"polytier {shlex.join(words)}",
        "fields": {name: rounded(value) for name, value in found["best"]["fields"].items()},
        "validation": found["best"]["score"],
        "validation_at_start": first["score"],
        "trials": len(found["trials"]),
    }


def rounded(value: float) -> float:
    """The value with two significant digits."""
    return float(f"{value:.2g}")


def main() -> None:
    """Search for the fields of the methods named, or of all, print them and write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("methods", nargs="*", default=[name for name in ALGORITHMS if name not in SKIPPED])
    parser.add_argument("--out", type=Path, default=Path("runs/bundled-defaults"))
    parser.add_argument("--json", type=Path, default=Path("docs/results/bundled_defaults.json"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results = json.loads(given.json.read_text()) if given.json.exists() else {}
    for method in given.methods:
        rounds = ROUNDS * max(1, round(STEPS * ALGORITHMS[method].budget.get("rounds", 0)))
        results[method] = search(method, (*SETTINGS, *OTHER.get(method, ())), given.out / method, rounds)
        print(f"{method}: {100 * results[method]['validation']:.2f} % {results[method]['fields']}", flush=True)
        write_text(given.json, json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
