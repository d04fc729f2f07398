"""`polytier bench`: measures the speed of the engine, of a hand-written loop and of bare kernels."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polytier._errors import unknown
from polytier._terminal import say, wide_console
from polytier.report.bench_table import print_speeds
from polytier.runs.spec import versions
from polytier.studies.bench_methods import METHOD_WORKS, CoBoWork, MFAWork
from polytier.studies.bench_works import WORKS as STEP_WORKS
from polytier.studies.bench_works import Kernels, Work, run_engine

MORE_STEPS = 5  # local steps beside which a round of one step is measured, to tell its fixed cost
WORKS: dict[str, Work | CoBoWork | MFAWork] = {**STEP_WORKS, **METHOD_WORKS}

Rounds = Callable[[int], Any]  # computes a given number of rounds


def bench_works(names: Sequence[str], file: Path | None, repeat: int, workers: int | None, seconds: float) -> None:
    """Measure the works with these names (all if none are given), print a table, and write `file` as JSON.

    One measurement takes about this number of seconds, and at least one round.
    """
    for name in names:
        if name not in WORKS:
            raise unknown("work", name, list(WORKS))
    if file is not None:
        check_writable(file)
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    facts = {"versions": versions(), "cores": cores, "threads": threads, "workers": workers or cores, "repeat": repeat}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # not available on Windows
    if load > cores / 2:
        say(
            f"the machine is busy (load {load:.1f} on {cores} cores); this slows down the loop and the kernels most, "
            "because they use threads"
        )
    figures: list[dict[str, Any]] = []
    for name in dict.fromkeys(names or WORKS):
        say(f"{name}: {WORKS[name].described()}")
        figures.append(
            {"work": name, "setting": asdict(WORKS[name]), **measure(WORKS[name], repeat, workers or cores, seconds)}
        )
        if file is not None:  # after each work, so that an interrupt loses only one
            file.write_text(json.dumps({**facts, "works": figures}, indent=2) + "\n", encoding="utf-8")
    print_speeds(wide_console(), {**facts, "works": figures})


def check_writable(file: Path) -> None:
    """Raise an error if the file cannot be written, before measurements that take minutes."""
    if file.is_dir() or not file.parent.is_dir():
        wrong = f"{file} is a folder" if file.is_dir() else f"the folder {file.parent} does not exist"
        raise ValueError(f"--json {file}: {wrong}; give a file such as bench.json")
    if file.exists() and not file.is_file():
        raise ValueError(f"--json {file} is a pipe or a device; give a file such as bench.json")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"--json {file} cannot be written; give a file in a folder with write permission")


def measure(work: Work | CoBoWork | MFAWork, repeat: int, workers: int, target: float) -> dict[str, Any]:
    """Device steps per second of each contender, and the engine's speed as a multiple of the others'."""
    threads = torch.get_num_threads()
    x, y = work.data()
    federation = work.federation(x, y)
    runs: dict[str, Rounds] = {"loop": work.loop(x, y).run}
    runs |= {name: fastest(kernels).run for name, kernels in work.bounds(x, y).items()}
    with ExitStack() as stack:
        for name, number in (("engine", workers), ("one_worker", 1)):
            if name == "engine" or workers > 1:
                runs[name] = partial(run_engine, stack.enter_context(work.engine(federation, number)))
        short = work if isinstance(work, Work) and work.steps == 1 else None
        if short is not None:
            longer = replace(short, steps=MORE_STEPS).engine(federation, 1)
            runs["more_steps"] = partial(run_engine, stack.enter_context(longer))
        own = {name: threads if name in ("loop", "kernels", "gathered") else 1 for name in runs}
        rounds = {name: calibrate(run, own[name], target) for name, run in runs.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}  # per round
        for _ in range(repeat):  # interleaved, so that other load on the machine is visible as spread
            for name, run in runs.items():
                seconds[name].append(timed(run, rounds[name], own[name]) / rounds[name])
    median = {name: statistics.median(values) for name, values in seconds.items()}
    contenders = [name for name in runs if name != "more_steps"]
    result: dict[str, Any] = {name: speeds(work.device_steps, seconds[name]) for name in contenders}
    for other in ("loop", "kernels", "gathered"):
        result[f"engine_over_{other}"] = median[other] / median["engine"] if other in median else None
    one = "one_worker" if "one_worker" in median else "engine"
    result["engine_over_one_worker"] = median[one] / median["engine"]
    result["round_ms"] = 1000 * median[one]
    if short is not None:
        fixed = 1000 * (median[one] - (median["more_steps"] - median[one]) / (MORE_STEPS - 1))
        result |= {"fixed_round_ms": fixed, "fixed_call_ms": fixed / short.team_rounds}
    return result


def speeds(device_steps: int, seconds: list[float]) -> dict[str, float]:
    """Device steps per second: the median, the lowest and the highest of the measurements."""
    found = [device_steps / each for each in seconds]
    return {"median": device_steps / statistics.median(seconds), "min": min(found), "max": max(found)}


def timed(run: Rounds, rounds: int, threads: int) -> float:
    """Seconds that a number of rounds takes with this number of threads."""
    torch.set_num_threads(threads)
    started = time.perf_counter()
    run(rounds)
    return time.perf_counter() - started


def calibrate(run: Rounds, threads: int, seconds: float) -> int:
    """The number of rounds for one measurement. Its trial runs also trace graphs and start workers."""
    timed(run, 2, threads)
    rounds = 1
    while (took := timed(run, rounds, threads)) < seconds / 2:
        rounds *= 2
    return max(1, round(rounds * seconds / took))


def fastest(kernels: Kernels) -> Kernels:
    """The kernels with the fastest tile size. All sizes are tried, because the kernels serve as the upper bound."""
    took = {}
    for tile in kernels.tiles():
        kernels.tile = tile
        passes = [timed(lambda _: kernels.fedavg_round(kernels.state), 1, torch.get_num_threads()) for _ in range(3)]
        took[tile] = min(passes)
    kernels.tile = min(took, key=took.__getitem__)
    return kernels
