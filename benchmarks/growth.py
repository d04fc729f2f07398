"""How the cost of a round grows: with devices, parameters, local steps and tiers, and CoBo's with clients.

Batches of 32, one worker; each point is the fastest of --repeat rounds after two that trace and allocate. Writes
growth.json and, with matplotlib, growth.png to --out.

    python benchmarks/growth.py [--out DIR] [--repeat 3]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from polytier import FedAvg, Federation, PerMFL
from polytier.algorithms.cobo import CoBo
from polytier.runs.loop import make_loop
from polytier.tree.topology import Topology, nested

CLASSES, SAMPLES, LR = 10, 64, 0.01


def make_data(devices: int, features: int = 60) -> Federation:
    rng = np.random.default_rng(0)
    x = rng.random((devices * SAMPLES, features), dtype=np.float32)
    owner = np.repeat(np.arange(devices), SAMPLES)
    return Federation.from_arrays(x, rng.integers(0, CLASSES, len(x)), owner, shares=(1, 0, 0), num_classes=CLASSES)


def fastest(repeat: int, *given: Any, rounds: int = 1, **settings: Any) -> tuple[float, float]:
    """Seconds a round (the mean of `rounds`), and of each device step in it."""
    with make_loop(*given, batch_size=32, **settings) as training:
        training.step(), training.step()
        before, seconds = training.context.device_steps, []
        for _ in range(repeat):
            seconds.append(sum(training.step() for _ in range(rounds)) / rounds)
        steps = (training.context.device_steps - before) / repeat / rounds
    return min(seconds), min(seconds) / steps


def tree(devices: int, tiers: int) -> Topology | None:
    """Four nodes below each above the devices."""
    if tiers == 2:
        return None
    shape = [4] * (tiers - 2)
    return Topology.build(np.arange(devices), *nested(np.arange(devices) * 4 ** (tiers - 2) // devices, shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, Any] = {}

    def note(what: str, x: float, seconds: float) -> None:
        found.setdefault(what, []).append((x, seconds))
        print(f"{what}: {x:,} {1e6 * seconds:,.1f} us", flush=True)

    for devices in (10, 100, 1000, 10_000, 100_000):
        note("devices", devices, fastest(options.repeat, FedAvg(LR, 5), make_data(devices), "mclr")[1])
    for hidden in (10, 30, 100, 300, 1000):
        data = make_data(40, 784)
        parameters = 784 * hidden + hidden + 10 * hidden + 10
        note("parameters", parameters, fastest(options.repeat, FedAvg(LR, 5), data, f"dnn:{hidden}")[1])
    for steps in (1, 2, 5, 20, 100):
        note("local steps", steps, fastest(options.repeat, FedAvg(LR, steps), make_data(1000), "mclr")[1])
    for tiers in (2, 3, 4, 5):
        method = PerMFL(LR, device_steps=5, team_rounds=1)
        settings = {"topology": tree(1024, tiers)}
        note("tiers", tiers, fastest(options.repeat, method, make_data(1024), "mclr", **settings)[1])
    for clients in (100, 1000, 10_000):
        method = CoBo(device_lr=0.1, device_pull=10 / clients)
        note("clients of CoBo", clients, fastest(1, method, make_data(clients), "mclr", rounds=18)[0] / clients)
    (options.out / "growth.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    draw(found, options.out / "growth.png")


def draw(found: dict[str, list[tuple[float, float]]], path: Path) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        return
    figure, axes = plt.subplots(1, len(found), figsize=(3.1 * len(found), 3), layout="constrained")
    for axis, (what, points) in zip(axes, found.items(), strict=True):
        x, seconds = zip(*points, strict=True)
        axis.plot(x, [1e6 * s for s in seconds], "o-", color="#1f6f8b")
        axis.set_xlabel(what)
        axis.set_ylabel("µs a client and round" if "CoBo" in what else "µs a device step")
        if what != "tiers":
            axis.set_xscale("log")
        axis.set_xticks(x, [f"{v:,}" if v < 1e4 else f"{v / 1000:,.0f}k" for v in x], rotation=30)
        axis.minorticks_off()
        if what == "parameters":
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, 1.1e6 * max(seconds))
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
