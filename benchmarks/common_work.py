"""The common work, in one run: the engine beside a hand-written loop and the bare kernels.

40 devices, 640 samples of 784 features each, logistic regression, batch 32, 20 local steps, FedAvg,
all take part. Figures are device gradient steps a second; compare ratios, not machines.

    python benchmarks/common_work.py [--repeat 5] [--rounds 20] [--workers 2]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from torch import nn

from polytier import FedAvg, Federation
from polytier.training import Training

DEVICES, SAMPLES, FEATURES, CLASSES, BATCH, STEPS, LR = 40, 640, 784, 10, 32, 20, 0.01


def make_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.random((DEVICES, SAMPLES, FEATURES), dtype=np.float32)
    return x, rng.integers(0, CLASSES, (DEVICES, SAMPLES))


def loop(x: torch.Tensor, y: torch.Tensor, rounds: int) -> None:
    """What people write: one module, load_state_dict per device, torch.optim.SGD, a randperm per epoch, gathers."""
    model = nn.Linear(FEATURES, CLASSES)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    criterion = nn.CrossEntropyLoss()
    for _ in range(rounds):
        total = {k: torch.zeros_like(v) for k, v in state.items()}
        for c in range(DEVICES):
            model.load_state_dict(state)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            order = torch.randperm(SAMPLES)
            for s in range(STEPS):
                i = order[s * BATCH : (s + 1) * BATCH]
                optimizer.zero_grad()
                criterion(model(x[c, i]), y[c, i]).backward()
                optimizer.step()
            for k, v in model.state_dict().items():
                total[k] += v / DEVICES
        state = total


def kernels(x: torch.Tensor, y: torch.Tensor, rounds: int) -> None:
    """The products and the update alone, for a stack of all devices, on data that is already in batches."""
    w, b = torch.zeros(DEVICES, CLASSES, FEATURES), torch.zeros(DEVICES, 1, CLASSES)
    onehot = torch.nn.functional.one_hot(y, CLASSES).float()
    for _ in range(rounds):
        for s in range(STEPS):
            rows = slice(s * BATCH, (s + 1) * BATCH)
            xs = x[:, rows]
            error = torch.softmax(torch.baddbmm(b, xs, w.transpose(1, 2)), 2).sub_(onehot[:, rows]).mul_(LR / BATCH)
            w -= torch.bmm(error.transpose(1, 2), xs)
            b -= error.sum(1, keepdim=True)


def timed(work, rounds: int) -> float:
    started = time.perf_counter()
    work(rounds)
    return DEVICES * STEPS * rounds / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    data_x, data_y = make_data()
    x, y = torch.from_numpy(data_x), torch.from_numpy(data_y)
    owner = np.repeat(np.arange(DEVICES), SAMPLES)
    flat_x, flat_y = data_x.reshape(-1, FEATURES), data_y.reshape(-1)
    federation = Federation.from_arrays(flat_x, flat_y, owner, shares=(1, 0, 0))
    threads = torch.get_num_threads()
    algorithm = FedAvg(device_lr=LR, device_steps=STEPS)
    engines = {w: Training(algorithm, federation, "mclr", workers=w, eval_every=10**9) for w in {1, options.workers}}

    def engine(workers: int):
        training = engines[workers]

        def work(rounds: int) -> None:
            torch.set_num_threads(1)
            for _ in range(rounds):
                training.step()

        return work

    def with_threads(work):
        def run(rounds: int) -> None:
            torch.set_num_threads(threads)
            work(x, y, rounds)

        return run

    works = {"hand-written loop": with_threads(loop), "bare kernels": with_threads(kernels)}
    works |= {f"polytier, {w} worker{'s' * (w > 1)}": engine(w) for w in sorted(engines)}
    speeds = {name: [] for name in works}
    for work in works.values():
        work(2)  # traces, workers, caches
    for _ in range(options.repeat):  # interleaved, so that a noisy machine shows as spread
        for name, work in works.items():
            speeds[name].append(timed(work, options.rounds))
    base = statistics.median(speeds["hand-written loop"])
    bound = statistics.median(speeds["bare kernels"])
    print(f"{'device steps a second':28}{'median':>9}{'min':>9}{'max':>9}{'/ loop':>9}{'/ kernels':>11}")
    for name, values in speeds.items():
        m = statistics.median(values)
        print(f"{name:28}{m:9,.0f}{min(values):9,.0f}{max(values):9,.0f}{m / base:9.2f}{m / bound:11.2f}")
    for training in engines.values():
        training.__exit__()


if __name__ == "__main__":
    main()
