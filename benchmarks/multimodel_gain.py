"""Several models on one pool of devices: how MFA-Rand and MFA-RR converge, and what is gained by training together.

The strongly convex problem of Bhuyan, Moharir, Joshi 2022 (Section 6): N = 24, p = 4, mu = 2e-4, 97 dimensions, full
gradients, float64. All M models are the same problem.

(a) log10(F - F*) over 1,000 rounds, mean and deviation over seeds: E = 5, M = 2 and 12, steps of 0.1 and 30/(100+t).
    It is the first of the M models, seen alone as in the paper (Remark 3): FedAvg with the groups that the wrapper
    gives that model, all seeds at once as teams.
(b) the gain M T_1 / T_M against M for some E, a step of 0.1: T_M is the first round in which all M models, trained
    together, have the loss that FedAvg on all devices has after T_1 rounds. Only the first device has b != 0, so early
    on (T_1 of some tens) the gain tells how often that one is reached, and nothing of E.

    python benchmarks/multimodel_gain.py [--seeds 20] [--gain-seeds 10] [--jobs 2] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from polytier import FedAvg, Federation
from polytier.algorithms.multimodel import MFARR, MFARand
from polytier.data.synthetic import tridiagonal
from polytier.method.call import Clock
from polytier.method.children import Children
from polytier.method.local_problem import LocalProblem
from polytier.runs.loop import Loop, make_loop
from polytier.studies.gain import Gain, measure_gain

METHODS = {"MFA-Rand": MFARand, "MFA-RR": MFARR}
STEPS = {"0.1": 0.1, "30/(100+t)": "30/(100+t)"}
FEW, MANY, LOCAL_STEPS = 2, 12, 5
ROUNDS, SHOWN = 1000, (12, 101, 252, 501, 996, 999)  # 12, 252 and 996 end a frame of both M, the others of none
SETTINGS: dict[str, Any] = {"dtype": "float64", "batching": "stacked"}


@dataclass(frozen=True)
class Pools(FedAvg):
    """FedAvg in every team by itself, as many runs at once as there are teams; the gradient A w - b in one product."""

    tiers: ClassVar[int | None] = None

    def server(self, x: Tensor, teams: Children) -> Tensor:
        teams.solve(x)
        return x

    def team(self, x: Tensor, devices: Children) -> Tensor:
        w = devices.solve(devices.memory("model", x)).mean()
        devices.keep(model=w)
        return w

    def device(self, x: Tensor, local: LocalProblem) -> Tensor:
        (all_data,) = local.full().groups
        a, b, lr = all_data.x[:, 0], all_data.y[:, 0], local.value(self.device_lr)
        for _ in range(self.device_steps):
            x = x - lr * (torch.bmm(a, x.unsqueeze(2)).squeeze(2) - b)
        return x


def wrapper(method: str, num_models: int, lr: Any, local_steps: int) -> MFARand | MFARR:
    one = FedAvg(device_lr=lr, device_steps=local_steps)
    return METHODS[method](models={f"model{k}": one for k in range(1, num_models + 1)})


def first_groups(together: MFARand | MFARR, seed: int) -> np.ndarray:
    """[rounds, devices] who trains the first model."""
    rows = []
    with make_loop(together, tridiagonal(), "quadratic", seed=seed, **SETTINGS) as pool:
        for t in range(ROUNDS):
            group, match = together.groups(Children(pool.context, 0, torch.zeros(1, dtype=torch.int64), Clock(t)))
            rows.append((group == match[0]).numpy())
    return np.array(rows)


def gap(w: Tensor) -> np.ndarray:
    """[k] log10(F(w) - F*) of models [k, d]."""
    one = tridiagonal()
    hessian = one.x.mean(0).numpy()
    away = w.numpy() - np.linalg.solve(hessian, one.y.mean(0).numpy())
    return np.log10(0.5 * ((away @ hessian) * away).sum(1))


def gaps(method: str, num_models: int, seeds: int) -> dict[str, np.ndarray]:
    """[seeds, rounds] log10(F - F*) of the first model after every round, by step."""
    one = tridiagonal()
    everybody, teams = np.arange(seeds * len(one)), torch.arange(seeds)
    bounds = torch.from_numpy(everybody[:, None] + [0, 1, 1, 1])
    x, y = one.x.repeat(seeds, 1, 1), one.y.repeat(seeds, 1)
    copies = Federation(x, y, bounds, everybody, team=everybody // len(one))
    groups = [first_groups(wrapper(method, num_models, 0.1, LOCAL_STEPS), seed) for seed in range(seeds)]
    result = {}
    for name, lr in STEPS.items():
        together, w = wrapper(method, num_models, lr, LOCAL_STEPS), []
        pools, table = Pools(device_lr=lr, device_steps=LOCAL_STEPS), np.concatenate(groups, axis=1)
        with make_loop(pools, copies, "quadratic", device_participation=table, **SETTINGS) as training:
            training.context.hold = together.frame
            for _ in range(ROUNDS):
                training.step()
                w.append(training.context.memory.read(1, "model", teams, torch.empty(seeds, x.shape[1])))
        with training_of(together, 0) as training:  # it is what the wrapper does, by the first rounds of a seed
            first = training.run(num_models + 1).models["model1"]
            assert torch.allclose(first.row(), w[num_models][0], rtol=0, atol=1e-12)
        result[name] = gap(torch.cat(w)).reshape(ROUNDS, seeds).T
    return result


def training_of(together: MFARand | MFARR, seed: int) -> Loop:
    """All models, as they are."""
    return make_loop(together, tridiagonal(), "quadratic", seed=seed, **SETTINGS)


def gain(method: str, num_models: int, local_steps: int, single_rounds: int, seeds: int) -> Gain:
    together, most = wrapper(method, num_models, 0.1, local_steps), num_models * single_rounds  # a gain of 1
    return measure_gain(lambda seed: training_of(together, seed), single_rounds, range(seeds), "train", most)


def spread(pool: ProcessPoolExecutor, work: Callable, tasks: Iterable[tuple]) -> dict[tuple, Any]:
    """The results by a task's first three arguments."""
    futures = {task[:3]: pool.submit(work, *task) for task in tasks}
    return {task: future.result() for task, future in futures.items()}


def show_gaps(found: dict[tuple[str, int, str], np.ndarray]) -> None:
    print(f"log10(F - F*), mean and deviation over {len(next(iter(found.values())))} seeds, after round")
    print(f"{'M':>2}  {'step':<12}{'method':<10}" + "".join(f"{shown:>16}" for shown in SHOWN))
    for (method, m, step), values in found.items():
        line = "".join(f"{values[:, s - 1].mean():9.3f} {values[:, s - 1].std(ddof=1):6.3f}" for s in SHOWN)
        print(f"{m:2}  {step:<12}{method:<10}{line}")


def show_gains(found: dict[tuple[str, int, int], Gain], single_rounds: int, seeds: int) -> None:
    """By E and method, a line for each M."""
    print(f"\ngain M T_1 / T_M, mean and 95 % interval over {seeds} seeds; T_1 = {single_rounds}, step 0.1")
    for method, m, e in sorted(found, key=lambda task: (task[2], task[0], task[1])):
        print(f"E = {e:2}  {method:<10}M = {m:2}  {found[method, m, e]}")


def draw(path: Path, curves: dict[tuple[str, int, str], np.ndarray], gains: dict[tuple[str, int, int], Gain]) -> None:
    from matplotlib.figure import Figure

    colours = {"MFA-Rand": "tab:orange", "MFA-RR": "tab:blue"}
    sheet = Figure(figsize=(15, 8), layout="constrained")
    axes = sheet.subplots(2, 4)
    lengths = sorted({e for _, _, e in gains})
    for axis in axes[1, len(lengths) :]:
        sheet.delaxes(axis)
    for axis, (m, step) in zip(axes[0], product((FEW, MANY), STEPS), strict=True):
        for method, colour in colours.items():
            values, rounds = curves[method, m, step], np.arange(1, ROUNDS + 1)
            mean, deviation = values.mean(0), values.std(0, ddof=1)
            axis.plot(rounds, mean, color=colour, label=method, linewidth=1)
            axis.fill_between(rounds, mean - deviation, mean + deviation, color=colour, alpha=0.25, linewidth=0)
        axis.set(title=f"M = {m}, step {step}", xlabel="round", ylabel="log10(F - F*)")
        axis.legend()
    for axis, e in zip(axes[1], lengths, strict=False):
        for method, colour in colours.items():
            numbers = sorted({m for _, m, _ in gains})
            seen = {m: gains[method, m, e] for m in numbers if gains[method, m, e].mean is not None}
            mean = np.array([g.mean for g in seen.values()])
            ends = np.array([g.interval or (g.mean, g.mean) for g in seen.values()]).T
            errors = np.abs(ends - mean)
            axis.errorbar(list(seen), mean, errors, color=colour, label=method, marker="o", markersize=3, capsize=3)
        axis.axline((1, 1), slope=1, color="grey", linestyle=":", linewidth=1, label="gain = M")
        axis.set(title=f"E = {e}", xlabel="M", ylabel="gain", xticks=numbers)
        axis.legend()
    sheet.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="of (a), at least 2")
    parser.add_argument("--gain-seeds", type=int, default=10, help="of (b)")
    parser.add_argument("--single-rounds", type=int, default=250, help="T_1")
    parser.add_argument("--models", type=int, nargs="+", default=[1, 2, 4, 12], help="M of (b)")
    parser.add_argument("--local-steps", type=int, nargs="+", default=[5], help="E of (b), up to 4 of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--plot", type=Path, help="draw both to this file")
    options = parser.parse_args()
    started = time.perf_counter()
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        found = spread(pool, gaps, [(method, m, options.seeds) for m, method in product((FEW, MANY), METHODS)])
        kinds = product((FEW, MANY), STEPS, METHODS)
        curves = {(method, m, step): found[method, m, options.seeds][step] for m, step, method in kinds}
        show_gaps(curves)
        more = (options.single_rounds, options.gain_seeds)
        kinds = product(sorted(options.models, reverse=True), options.local_steps, METHODS)
        tasks = [(method, m, e, *more) for m, e, method in kinds]
        gains = spread(pool, gain, tasks)
        show_gains(gains, *more)
    print(f"\n{time.perf_counter() - started:.0f} s with {options.jobs} processes")
    if options.plot:
        draw(options.plot, curves, gains)


if __name__ == "__main__":
    main()
