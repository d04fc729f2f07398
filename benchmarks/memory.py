"""Peak memory of a FedAvg round as devices grow: `solve` holds sums, so what lies beyond the data stays flat.

python benchmarks/memory.py [--devices 1000 10000 50000]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

SAMPLES, FEATURES = 10, 60


def measure(devices: int) -> None:
    import numpy as np

    from polytier import FedAvg, Federation
    from polytier.runs.loop import make_loop

    rng = np.random.default_rng(0)
    x = rng.random((devices * SAMPLES, FEATURES), dtype=np.float32)
    federation = Federation.from_arrays(
        x, rng.integers(0, 10, len(x)), np.repeat(np.arange(devices), SAMPLES), shares=(1, 0, 0)
    )
    del x
    training = make_loop(FedAvg(device_steps=5), federation, "mclr", batch_size=10)
    training.step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    training.step()
    data = sum(t.numel() * t.element_size() for t in (federation.x, federation.y)) / 2**20
    models = devices * training.context.objective.dimension * 4 / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{devices:>9,}{data:>10.1f}{models:>20.1f}{peak:>11.1f}{(peak - before / 2**10):>18.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1_000, 10_000, 50_000])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.one)
        return
    print(f"{'devices':>9}{'data MiB':>10}{'all answers MiB':>20}{'peak MiB':>11}{'second round MiB':>18}", flush=True)
    for devices in options.devices:  # each in a process of its own: a peak never goes down
        subprocess.run([sys.executable, __file__, "--one", str(devices)], check=True)


if __name__ == "__main__":
    main()
