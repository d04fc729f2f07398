"""How large the page of a large study is, and how long it takes to make and to open.

Run folders of 10 methods x 3 seeds x 500 rounds x 3,500 devices are made up in a temporary folder (no training);
Chromium must be on the machine to open the page.

    python benchmarks/report_size.py [--methods 10] [--seeds 3] [--rounds 500] [--devices 3500] [--keep FILE.html]
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from polytier.report.page import render
from polytier.report.page_contents import page_of
from polytier.runs.spec import to_toml
from polytier.tree.collaboration import FILE, Collaboration, save

ALL = ("personal", "team", "global")
METHODS = {  # the models that each has
    "permfl": ALL,
    "pfedmt": ALL,
    "sfedhp": ALL,
    "al2gd": ALL,
    "hier-fedavg": ALL[1:],
    "pfedme": ("personal", "global"),
    "ditto": ("personal", "global"),
    "cobo": ("personal",),
    "fedavg": ("global",),
    "local": ("personal",),
}
TEAMS, LABELS = 50, 10
BROWSER = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def figures(accuracy: float) -> dict[str, float]:
    return {
        "loss": 2.3 - 2 * accuracy,
        "accuracy": accuracy,
        "accuracy_std": 0.1,
        "accuracy_worst_decile": 0.7 * accuracy,
        "accuracy_pooled": accuracy,
    }


def make_run(folder: Path, method: str, place: int, seed: int, rounds: int, devices: int) -> None:
    """All files of a run folder that a page is made from."""
    rng = np.random.default_rng([place, seed])
    kinds, flat = METHODS[method], "team" not in METHODS[method]
    folder.mkdir(parents=True)
    config = {
        "algorithm": method,
        "data": "mnist",
        "model": "mclr",
        "devices": devices,
        "teams": str(TEAMS),
        "seed": seed,
        "partition": "labels:2",
        "split": "3:0:1",
        "rounds": rounds,
        "codec": "float32",
        "set": {"device_lr": 0.01},
    }
    (folder / "config.toml").write_text(to_toml(config))
    best = 0.97 - 0.03 * place + 0.01 * rng.standard_normal()
    ids, team = list(range(devices)), np.arange(devices) % TEAMS
    links = {"server-device": devices} if flat else {"server-team": TEAMS, "team-device": 10 * devices}
    nbytes = {link: dict.fromkeys(("down", "up"), 31400 * nodes * (method != "local")) for link, nodes in links.items()}
    lines = []
    for number in range(1, rounds + 1):
        record: dict[str, Any] = {"round": number}
        for k, kind in enumerate(kinds):
            reached = (best - 0.05 * k) * (1 - 0.9 * np.exp(-number / 60)) + 0.004 * rng.standard_normal()
            record[kind] = {"train": figures(reached + 0.01), "test": figures(reached)}
        lines.append(json.dumps({**record, "bytes": nbytes, "seconds": 0.5, "participants": {"device": devices}}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    tiers: list[dict[str, Any]] = [{"tier": "server", "ids": ["server"]}]
    if not flat:
        tiers.append({"tier": "team", "ids": list(range(TEAMS)), "parents": ["server"] * TEAMS})
    tiers.append({"tier": "device", "ids": ids, "parents": ["server"] * devices if flat else team.tolist()})
    (folder / "topology.json").write_text(json.dumps({"tiers": tiers}))
    who = np.random.default_rng(seed)  # the same data for all methods
    counts = np.zeros((devices, LABELS), dtype=int)
    for _ in range(2):
        counts[np.arange(devices), who.integers(LABELS, size=devices)] += who.integers(10, 40, devices)
    with (folder / "devices.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        labels = [f"label_{k}" for k in range(LABELS)]
        writer.writerow(
            ["id", "team", "samples", "train", "validation", "test", *labels, *(f"{k}_accuracy" for k in kinds)]
        )
        scores = np.clip(best + 0.1 * rng.standard_normal((devices, len(kinds))), 0, 1).tolist()
        for row, total in enumerate(counts.sum(1).tolist()):
            writer.writerow([row, team[row], total, total, 0, total // 4, *counts[row], *scores[row]])
    total = {link: {way: rounds * amount for way, amount in ways.items()} for link, ways in nbytes.items()}
    last = json.loads(lines[-1])
    summary = {
        "algorithm": method,
        "seed": seed,
        "rounds": rounds,
        "device_steps": rounds * devices,
        "seconds": 0.5 * rounds,
        "device_steps_per_second": 2.0 * devices,
        "traffic": total,
        "devices": devices,
        "teams": 0 if flat else TEAMS,
        **{kind: last[kind]["test"] if kind in kinds else None for kind in ("personal", "team", "global")},
        "best": None,
        "chosen": None,
        "parameters": 7850,
        "never_took_part": 0,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    if method == "cobo":
        pairs = rng.integers(devices, size=(4 * devices, 2))
        pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
        base = np.full(devices, 0.1)
        frames = {
            r: Collaboration(np.arange(devices), base, pairs, rng.random(len(pairs))) for r in (1, 2, 4, 8, 64, 500)
        }
        save(folder / FILE, frames, team)


def open_page(path: Path) -> float:
    """Seconds from the request until all charts are drawn."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(BROWSER))
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(path.resolve().as_uri(), wait_until="domcontentloaded")
        page.wait_for_selector("html[data-ready]")
        # the scripts run before DOMContentLoaded, and a frame later all of it is on the screen
        milliseconds = page.evaluate(
            "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
        )
        charts = page.locator("svg[role=img]").count()
        print(f"charts: {charts}")
        browser.close()
    return milliseconds / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("methods", 10), ("seeds", 3), ("rounds", 500), ("devices", 3500)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for place, method in enumerate(list(METHODS)[-options.methods :]):
            for seed in range(options.seeds):
                make_run(root / "runs" / f"{method}-{seed}", method, place, seed, options.rounds, options.devices)
        started = time.perf_counter()
        title, subtitle, blocks = page_of([root / "runs"])
        text = render(title, blocks, subtitle)
        built = time.perf_counter() - started
        page = options.keep or root / "report.html"
        page.write_text(text, encoding="utf-8")
        print(f"page: {len(text.encode()) / 1e6:.2f} MB")
        print(f"made in {built:.1f} s")
        print(f"opened and drawn in {open_page(page):.2f} s")


if __name__ == "__main__":
    main()
