"""Small run folders, as `polytier run` leaves them, for the tests of reports; nothing is trained."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from polytier.runs.spec import to_toml
from polytier.tree.collaboration import FILE, Collaboration, save

DEVICES, ROUNDS = 6, 5
ALL = ("personal", "team", "global")
KINDS = {"permfl": ALL, "fedavg": ("global",), "local": ("personal",), "cobo": ("personal",)}


def figures_of(value: float) -> dict[str, float]:
    return {"loss": 2 - value, "accuracy": value, "accuracy_worst_decile": value / 2}


def make_run(folder: Path, method: str, seed: int = 0, done: int = ROUNDS, splits=("train", "test"), **settings: Any):
    """A run folder as `polytier run` leaves it; done < rounds: as it is on the way."""
    rng = np.random.default_rng([seed, len(method)])
    kinds, flat = KINDS[method], "team" not in KINDS[method]
    config = {
        "algorithm": method,
        "data": "digits",
        "model": "mclr",
        "devices": DEVICES,
        "teams": "2",
        "rounds": ROUNDS,
    }
    config |= {"partition": "labels:2", "split": "3:0:1", "seed": seed, "codec": "float32", "set": {"device_lr": 0.1}}
    config |= settings
    number = config["devices"]
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    links = ("server-device",) if flat else ("server-team", "team-device")
    sent = {link: dict.fromkeys(("down", "up"), 100 * (method != "local")) for link in links}
    history = []
    for r in range(1, done + 1):
        judged = {kind: {split: figures_of(0.1 * r + 0.02 * rng.random()) for split in splits} for kind in kinds}
        rest = {"bytes": sent, "seconds": 0.5, "participants": {"team": 2, "device": number}}
        history.append({"round": r, **judged, **rest})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in history))
    ids = [f"d{k}" for k in range(number)]
    tiers: list[dict[str, Any]] = [{"tier": "server", "ids": ["server"]}, {"tier": "device", "ids": ids}]
    if not flat:
        tiers.insert(1, {"tier": "team", "ids": [0, 1]})
    (folder / "topology.json").write_text(json.dumps({"tiers": tiers}))
    if done < config["rounds"]:
        return folder
    held = 10 + np.arange(number) + 7 * seed  # the same for all methods of a seed
    scores = {"local": np.full(number, 0.5), "permfl": np.linspace(0.4, 0.9, number)}.get(method, np.full(number, 0.6))
    with (folder / "devices.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        judged = [f"{kind}_accuracy" for kind in kinds] if "test" in splits else []
        writer.writerow(["id", "team", "samples", "train", "validation", "test", "label_0", "label_1", *judged])
        for k, name in enumerate(ids):
            writer.writerow([name, k % 2, held[k], held[k], 0, 3, held[k] - 2, 2, *[scores[k]] * len(judged)])
    last = history[-1]
    total = {link: {way: done * amount for way, amount in ways.items()} for link, ways in sent.items()}
    summary = {
        "algorithm": method,
        "seed": seed,
        "rounds": done,
        "device_steps": 60,
        "seconds": 2.5,
        "devices": number,
        "device_steps_per_second": 24,
        "teams": 0 if flat else 2,
        "parameters": 650,
        "never_took_part": 0,
        "best": None,
        "chosen": None,
        "traffic": total,
        **{kind: last.get(kind, {}).get("test") for kind in ALL},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    if method == "cobo":
        n, pairs = number, np.array([(0, 1), (1, 0), (2, 3)])
        frames = {r: Collaboration(np.arange(n), np.full(n, 0.1 * r), pairs, np.full(3, 0.9)) for r in (1, 2, 4)}
        save(folder / FILE, frames, np.arange(n) // 2)
    return folder


def make_all(root: Path, seeds=(0, 1)) -> Path:
    for seed in seeds:
        for method in KINDS:
            make_run(root / f"{method}-{seed}", method, seed)
    return root
