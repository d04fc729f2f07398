"""What is reachable on this machine where `polytier bench` stays behind its goals: bounds of bare kernels.

    python benchmarks/bounds.py [apart half serial call cobo mfa evaluation ...]

    apart      | as many engines with one worker each as there are cores, in processes of their own that have nothing to
                 do with each other, beside one alone: whether memory or processor limits what workers gain
    half       | a round of an engine with one worker and all devices, beside one with the half that the larger part of
                 two workers computes: two workers cannot gain more than this ratio
    serial     | of two workers, what the process of the run computes in a round besides its part of the devices
    call       | the passes over models that a call of `teams` cannot avoid, beside the fixed cost of a call
    cobo       | the matrix products of a round of `cobo` and `cobo80` alone, beside the hand-written loop
    mfa        | the gradients of a round of `mfa` alone, model by model and in one stack, beside the hand-written loop
    evaluation | reading and scaling 70,000 images once and the products with three models, beside the evaluation

All but the first use one thread and count its processor time, the fastest of several repetitions. For the first,
nothing else may run on the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from polytier import Federation, PerMFL
from polytier.runs.loop import make_loop
from polytier.studies.bench_methods import METHOD_WORKS, CoBoWork
from polytier.studies.bench_works import WORKS, run_engine

SECONDS = 2.0  # of one measurement of the processes
REPEAT = 15
IMAGES, DEVICES, CLASSES, PIXELS, CHUNK = 70_000, 40, 10, 784, 128


def fastest(run: Callable[[], Any], repeat: int = REPEAT) -> float:
    """Milliseconds of processor time of a run: the fastest of several."""
    return in_turns([run], repeat)[0]


def in_turns(runs: list[Callable[[], Any]], repeat: int = REPEAT) -> list[float]:
    """The same for several runs, which take turns."""
    found: list[list[float]] = [[] for _ in runs]
    for turn in range(repeat + 1):
        for run, times in zip(runs, found, strict=True):
            started = time.thread_time()
            run()
            if turn:  # graphs are traced in the first one
                times.append(time.thread_time() - started)
    return [1000 * min(times) for times in found]


# -- processes that have nothing to do with each other -------------------------------------------------


def engine_alone(name: str) -> None:
    """The program of a process: rounds per second of a work with one worker, each time a line is read."""
    work = WORKS[name]
    with work.engine(work.federation(*work.data()), 1) as loop:
        run_engine(loop, 5)
        print("ready", flush=True)
        for _ in sys.stdin:
            started, rounds = time.perf_counter(), 0
            while time.perf_counter() - started < SECONDS:
                loop.step()
                rounds += 1
            print(rounds / (time.perf_counter() - started), flush=True)


def rate(processes: list[subprocess.Popen[str]]) -> float:
    """The rounds per second of these processes together."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return sum(float(process.stdout.readline()) for process in processes if process.stdout is not None)


def apart() -> None:
    for name in ("common", "synthetic"):
        words = [sys.executable, __file__, "--engine", name]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(words, **pipes) for _ in range(os.cpu_count() or 1)]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        ratios = sorted(rate(processes) / rate(processes[:1]) for _ in range(5))
        for process in processes:
            process.communicate()
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"apart {name}: {len(processes)} processes {ratios[2]:.2f} times one ({spread})")


# -- two workers ---------------------------------------------------------------------------------------


def half() -> None:
    for name, part in (("common", 20), ("synthetic", 52), ("round", 20)):  # blocks of 2 and of 4 devices stay whole
        works = [WORKS[name], replace(WORKS[name], devices=part)]
        with ExitStack() as stack:
            loops = [stack.enter_context(work.engine(work.federation(*work.data()), 1)) for work in works]
            whole, half = in_turns([lambda loop=loop: run_engine(loop, 10) for loop in loops])
        print(f"half {name}: {whole / 10:.2f} ms, {part} devices {half / 10:.2f}: two workers gain {whole / half:.2f}")


def serial() -> None:
    for name in ("common", "synthetic"):
        work, rounds, own = WORKS[name], 10, []
        with work.engine(work.federation(*work.data()), 2) as loop:
            engine: Any = loop.context.engine
            engine._times = Shared()
            run_engine(loop, 5)  # the other process has started
            program = engine._processes.compute

            def timed(*given: Any, program=program, own=own) -> Any:
                started = time.thread_time()
                found = program(*given)
                own.append(time.thread_time() - started)
                return found

            engine._processes.compute = timed
            whole, rest = fastest(partial(run_engine, loop, rounds)), []
            for _ in range(REPEAT):
                own.clear()
                started = time.thread_time()
                run_engine(loop, rounds)
                rest.append(1000 * (time.thread_time() - started - sum(own)) / rounds)
        print(f"serial {name}: {min(rest):.2f} ms of the {whole / rounds:.2f} that the process of the run computes")


class Shared(dict):
    """In place of the times of an engine: workers compute every call."""

    def setdefault(self, key: Any, default: Any = None) -> Any:
        default.alone_is_faster = lambda: False
        return default


# -- a call --------------------------------------------------------------------------------------------


def call() -> None:
    work = WORKS["teams"]
    data, works = work.federation(*work.data()), [work, replace(work, steps=5)]
    with ExitStack() as stack:
        loops = [stack.enter_context(each.engine(data, 1)) for each in works * 2]
        for loop in loops[2:]:
            engine: Any = loop.context.engine
            engine.tiles = {"": work.devices}
        times = in_turns([lambda loop=loop: run_engine(loop, 1) for loop in loops], 8)
        dimension = loops[0].context.objective.dimension
    fixed, whole = ((short - (long - short) / 4) / work.team_rounds for short, long in (times[:2], times[2:]))
    sent, kept = torch.randn(work.teams, dimension), torch.empty(work.devices, dimension)
    of_device = torch.arange(work.devices) // (work.devices // work.teams)
    sums = torch.zeros(work.teams, dimension)

    def passes() -> None:
        theta = sent.index_select(0, of_device)  # what a device starts from
        kept.copy_(theta)  # its model, for the evaluation
        float(theta.sum())  # whether all of it is finite
        sums.index_add_(0, of_device, theta)

    alone = fastest(passes, 200)
    print(
        f"call: {fixed:.2f} ms besides its step, {whole:.2f} if all devices are one tile; "
        f"passes over the models alone {alone:.2f}, in the cache"
    )


# -- products ------------------------------------------------------------------------------------------


def cobo() -> None:
    for name in ("cobo", "cobo80"):
        work = METHOD_WORKS[name]
        assert isinstance(work, CoBoWork)
        hand = work.loop(*work.data())
        by_loop = fastest(lambda hand=hand: hand.run(3), 5) / 3
        # gradients of the clients and, on average, at the midpoints
        factors = [pair for rows in (work.devices, work.devices - 1) for pair in factors_of(rows, work.batch)]
        alone = fastest(lambda factors=factors: [torch.bmm(*pair) for pair in factors])
        most = by_loop / alone
        print(f"{name}: products {alone:.2f} ms per round, loop {by_loop:.2f}: at most {most:.2f} times it on one core")


def factors_of(rows: int, batch: int, hidden: int = 100) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The factors of the five products of a gradient of 784-100-10, for a stack of models."""
    x, h, e = torch.randn(rows, batch, PIXELS), torch.randn(rows, batch, hidden), torch.randn(rows, CLASSES, batch)
    w, v = torch.randn(rows, hidden, PIXELS), torch.randn(rows, CLASSES, hidden)
    forward = [(w, x.transpose(1, 2)), (v, h.transpose(1, 2))]
    return [*forward, (v.transpose(1, 2), e), (e, h), (h.transpose(1, 2), x)]


def mfa() -> None:
    work = METHOD_WORKS["mfa"]
    x, y = work.data()
    hand = work.loop(x, y)
    by_loop = fastest(lambda: hand.run(12), 5) / 12
    with work.engine(work.federation(x, y), 1) as loop:
        run_engine(loop, 12)
        objective, batches = loop.context.parts[0].objective, loop.context.parts[0].batches
        rows = work.devices // work.num_models
        batch = batches.walk(torch.arange(rows), 0, 0, 1).next()
        theta = objective.initial.repeat(rows, 1)
        together = batches.walk(torch.arange(work.devices), 0, 0, 1).next()
        all_theta = objective.initial.repeat(work.devices, 1)
        by_engine = fastest(lambda: run_engine(loop, 12), 10) / 12

    def gradients() -> None:
        for _ in range(work.num_models * work.steps):
            objective.grad(theta, batch)

    def stacked() -> None:
        for _ in range(work.steps):
            objective.grad(all_theta, together)

    alone, in_one = fastest(gradients), fastest(stacked)
    print(
        f"mfa: gradients {alone:.2f} ms per round, engine {by_engine:.2f}, loop {by_loop:.2f}: at most "
        f"{by_loop / alone:.2f} times the loop as long as models are computed one after the other; all gradients in "
        f"one stack {in_one:.2f} ms"
    )


def evaluation() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (IMAGES, 1, 28, 28), dtype=np.uint8)
    owner = np.repeat(np.arange(DEVICES), IMAGES // DEVICES)
    data = Federation.from_arrays(x, rng.integers(0, CLASSES, IMAGES), owner, owner // 10, num_classes=CLASSES)
    with make_loop(PerMFL(), data, "mclr", workers=1) as loop:
        loop.step()
        by_engine, by_round = fastest(loop.evaluate, 5), fastest(loop.step, 5)
    w = torch.randn(DEVICES, CLASSES, PIXELS)
    images, of_device = data.x.reshape(IMAGES, PIXELS), IMAGES // DEVICES
    index = torch.arange(DEVICES).unsqueeze(1) * of_device + torch.arange(CHUNK)

    def read(models: int) -> None:
        for part in range(of_device // CHUNK):
            batch = images.index_select(0, (index + part * CHUNK).flatten()).to(torch.float32).mul_(1 / 255)
            for _ in range(models):
                torch.bmm(w, batch.view(DEVICES, CHUNK, PIXELS).transpose(1, 2))

    whole = of_device / (of_device // CHUNK * CHUNK)  # what is left of each device is not in a full chunk
    reading, all_of_it = whole * fastest(lambda: read(0), 5), whole * fastest(lambda: read(3), 5)
    print(
        f"evaluation: {by_engine:.0f} ms, of which at least {reading:.0f} ms reading and {all_of_it - reading:.0f} ms "
        f"products; a round of PerMFL takes {by_round:.0f} ms"
    )


PARTS = {
    "apart": apart,
    "half": half,
    "serial": serial,
    "call": call,
    "cobo": cobo,
    "mfa": mfa,
    "evaluation": evaluation,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        engine_alone(sys.argv[2])
    elif set(sys.argv[1:]) - set(PARTS):
        sys.exit(f"parts are {', '.join(PARTS)}; got {' '.join(sys.argv[1:])}; give some of them, or none for all")
    else:
        torch.set_num_threads(1)
        for part in sys.argv[1:] or PARTS:
            PARTS[part]()
