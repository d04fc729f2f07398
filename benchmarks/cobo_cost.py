"""What a round of CoBo costs beside a round of LocalTraining with one step, in one run.

--clients clients, logistic regression on synthetic data, batch 32, constant sampling (each pair with probability 1/n),
the first rounds. The two take turns, so that a noisy machine slows both; compare ratios, not machines.

    python benchmarks/cobo_cost.py [--clients 1000] [--features 60 784] [--rounds 20] [--repeat 3] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics

import numpy as np

from polytier import Federation
from polytier.algorithms import LocalTraining
from polytier.algorithms.cobo import CoBo
from polytier.runs.loop import Loop, make_loop

CLASSES, SAMPLES, LR = 10, 64, 0.1


def make_data(clients: int, features: int) -> Federation:
    rng = np.random.default_rng(0)
    x = rng.random((clients * SAMPLES, features), dtype=np.float32)
    y = rng.integers(0, CLASSES, len(x))
    return Federation.from_arrays(x, y, np.repeat(np.arange(clients), SAMPLES), shares=(1, 0, 0))


def start(algorithm, data: Federation, warm: Loop | None = None) -> Loop:
    training = make_loop(algorithm, data, "mclr", batch_size=32, batching="stacked")
    if warm is not None:
        training.context.objective = warm.context.objective  # its graphs are traced
    return training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--features", type=int, nargs="+", default=[60, 784])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="where CoBo's time goes, instead")
    options = parser.parse_args()
    cobo = CoBo(device_lr=LR, device_pull=1 / (LR * options.clients))
    for features in options.features:
        data = make_data(options.clients, features)
        with start(cobo, data) as warm:
            for _ in range(3):
                warm.step()
            if options.profile:
                with cProfile.Profile() as profile, start(cobo, data, warm) as training:
                    for _ in range(options.rounds):
                        training.step()
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
                continue
            ratios, times = [], []
            for _ in range(options.repeat):
                with start(cobo, data, warm) as one, start(LocalTraining(LR, 1), data, warm) as other:
                    pairs = [(one.step(), other.step()) for _ in range(options.rounds)]
                seconds = np.array(pairs).sum(0)
                ratios.append(seconds[0] / seconds[1])
                times.append(1000 * seconds / options.rounds)
        a, b = np.median(times, axis=0)
        print(
            f"{options.clients} clients, {features} features: CoBo {a:.0f} ms a round, LocalTraining {b:.0f} ms, ratio "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
