"""What the tests of the papers' plans share: plans that hold together, and run folders written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polytier.papers.plan import Item, PlannedRun
from polytier.runs.methods import make_method
from polytier.runs.spec import check_spec


def runs_of(items: Sequence[Item]) -> dict[str, PlannedRun]:
    """All runs by name; equal names must be equal runs, and other names other settings."""
    found: dict[str, PlannedRun] = {}
    for run in (run for item in items for run in item.runs()):
        assert found.setdefault(run.name, run) == run
    assert len({repr(run.settings) for run in found.values()}) == len(found)
    return found


def check_runs(items: Sequence[Item]) -> None:
    """Settings that `polytier run` takes, and fields that the method has."""
    for run in runs_of(items).values():
        config = check_spec(run.settings)
        make_method(config.algorithm, config.set)
        assert not {"seed", "data_dir", "out", "workers"} & set(run.settings)
    for claim in (claim for item in items for claim in item.claims):
        rounds = [set(range(0, r.settings["rounds"] + 1, r.settings["eval_every"])) - {0} for r in claim.runs]
        assert set.intersection(*rounds), f"{claim.text}: no round in common"


def write_run(folder: Path, rounds: Mapping[int, Mapping[str, Sequence[float]]]) -> Path:
    """A run folder with a history: {round: {model: (test accuracy, pooled, validation accuracy)}}."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [
        {
            "round": number,
            "bytes": {},
            **{
                model: {
                    "test": {"accuracy": test, "accuracy_pooled": pooled, "loss": 1 - test},
                    "train": {"accuracy": test, "loss": 2 - test},
                    "validation": {"accuracy": validation},
                }
                for model, (test, pooled, validation) in models.items()
            },
        }
        for number, models in rounds.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return folder
