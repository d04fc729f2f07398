"""PerMFL with a million devices on one machine: time a device step and peak memory, beside fewer devices.

Each device has 10 samples of 60 features and a logistic regression of its own; 1,000 teams, K = 1, L = 5, batch 10. The
data are packed into a folder and mapped. A round with 1 % of the devices is measured and one with all of them, each the
best of --repeat after a first one that also makes the devices' rows. Every size runs in a process of its own.

    python benchmarks/million.py [--devices 10000 1000000] [--folder DIR] [--workers 1]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

SAMPLES, FEATURES, TEAMS, STEPS = 10, 60, 1000, 5


def pack(devices: int, folder: Path) -> None:
    import numpy as np
    import torch

    from polytier import Federation

    generator = torch.Generator().manual_seed(0)
    x = torch.empty(devices * SAMPLES, FEATURES).normal_(generator=generator)
    y = torch.randint(0, 10, (len(x),), generator=generator)
    start = torch.arange(devices) * SAMPLES
    bounds = torch.stack([start, *[start + SAMPLES] * 3], 1)
    Federation(x, y, bounds, np.arange(devices), team=np.arange(devices) % TEAMS, num_classes=10).save(folder)


def measure(folder: Path, workers: int, repeat: int) -> None:
    from polytier import Federation, PerMFL
    from polytier.runs.loop import make_loop

    federation, method = Federation.open(folder), PerMFL(0.01, device_steps=STEPS, team_rounds=1)
    for share in (0.01, 1.0):
        with make_loop(
            method, federation, "mclr", device_participation=share, batch_size=SAMPLES, workers=workers
        ) as training:
            training.step()
            seconds, steps = [], training.context.device_steps
            for _ in range(repeat):
                seconds.append(training.step())
            steps = (training.context.device_steps - steps) // repeat
        peak = (
            sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 2**20
        )
        line = (
            f"{len(federation):>11,}{share:>8.0%}{min(seconds):>12.2f}{1e6 * min(seconds) / steps:>14.1f}{peak:>12.1f}"
        )
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--folder", type=Path, help="where packed data are kept for the next time")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.one, options.workers, options.repeat)
        return
    print(f"{'devices':>11}{'there':>8}{'s a round':>12}{'us a step':>14}{'peak GiB':>12}", flush=True)
    with tempfile.TemporaryDirectory() as made:
        for devices in options.devices:
            folder = (options.folder or Path(made)) / str(devices)
            if not folder.exists():
                pack(devices, folder)
            again = [sys.executable, __file__, "--one", str(folder), "--workers", str(options.workers)]
            subprocess.run([*again, "--repeat", str(options.repeat)], check=True)


if __name__ == "__main__":
    main()
