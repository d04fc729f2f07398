"""Runs with a run folder: from the start, or from the last checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polytier._errors import FAULT, INTERRUPTED, Stopped
from polytier.method import mapped_memory
from polytier.method.call import Diverged, NodesLost
from polytier.runs.assemble import assemble
from polytier.runs.callbacks import RunFolder
from polytier.runs.estimate import check_memory
from polytier.runs.load import latest
from polytier.runs.loop import Callback, Loop
from polytier.runs.read import read_config
from polytier.runs.spec import RunSpec, check_named, check_spec, versions

log = logging.getLogger("polytier")


def spec_of_folder(folder: Path, **changes: Any) -> RunSpec:
    """The specification of a run to continue, with changes; a change of None keeps the value."""
    values = read_config(folder)
    made_with = values.pop("versions", {})
    check_named(values, folder, "continue it in Python")
    spec = check_spec(values | {name: value for name, value in changes.items() if value is not None})
    now = versions()
    changed = [f"{name} {version} (now {now[name]})" for name, version in made_with.items() if now.get(name) != version]
    if changed:
        log.warning(
            "started with %s: results may differ in rounding from those of a run without interruption",
            ", ".join(changed),
        )
    return spec


def resumed_loop(spec: RunSpec, folder: Path) -> Loop:
    """The run in the state of its last checkpoint."""
    found = latest(folder)
    if found is None:
        raise ValueError(f"{folder} holds no checkpoint; repeat the run: polytier run {folder / 'config.toml'}")
    number, tensors, facts = found
    if number > spec.rounds:
        raise ValueError(f"{folder} has completed {number} rounds; --rounds must be at least as large")
    loop = Loop(assemble(spec))
    try:
        if facts.get("epochs"):
            loop.keep_in(folder / mapped_memory.FOLDER)
        loop.restore(tensors, facts)
    except BaseException:
        loop.close()
        raise
    log.info("continuing after round %d of %d", number, spec.rounds)
    return loop


def run_in_folder(
    loop: Loop,
    folder: Path,
    callbacks: Sequence[Callback] = (),
    stop: Callable[[], bool] = lambda: False,
    resumed: bool = False,
) -> None:
    """Run the rounds of the specification and write the folder.

    Raises:
        Stopped: The run ended before its last round. The message says how to continue.
        ValueError: The method found that the input is invalid. The folder is removed.
    """
    check_memory(loop)
    writer, again = RunFolder(folder, resumed), f"polytier resume {folder}"
    try:
        loop.run(loop.spec.rounds, [writer, *callbacks], stop)
    except ValueError:
        if loop.round == 0 and not resumed:
            writer.discard()
        raise
    except Diverged as error:
        raise Stopped(f"{error}. {after_divergence(folder, writer.saved)}", FAULT) from None
    except NodesLost as error:
        raise Stopped(f"{error}: {again}", FAULT) from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        less = "memory is insufficient: continue with a smaller --tile or fewer --workers"
        raise Stopped(f"stopped in round {loop.round + 1}, {less}: {again} --tile 4 --workers 1", FAULT) from None
    except KeyboardInterrupt:
        raise Stopped(f"stopped in round {loop.round + 1}; continue with: {again}", INTERRUPTED) from None
    except OSError as error:
        log.debug("where this came from:", exc_info=error)
        raise Stopped(f"stopped by an error: {error}; after correcting it, continue with: {again}", FAULT) from None
    if loop.round < loop.spec.rounds:
        done = f"interrupted after round {loop.round} of {loop.spec.rounds}"
        raise Stopped(f"{done}; continue with: {again}", INTERRUPTED)


def after_divergence(folder: Path, saved: int) -> str:
    """Advice after a divergence; `saved` is the round of the last checkpoint."""
    again = f"Try again with `polytier run {folder / 'config.toml'} --set FIELD=VALUE`"
    last = f"`polytier resume {folder} --rounds {saved}` gives the models of round {saved}, the last checkpoint"
    return again if saved < 1 else f"{again}; {last}"


def folder_stem(spec: RunSpec) -> str:
    """ALGORITHM-DATA-SEED as the name of a folder."""
    data = Path(spec.data).stem if spec.data.lower().endswith(".npz") else Path(spec.data).name
    return re.sub(r"[^\w.-]+", "-", f"{spec.algorithm}-{data}-{spec.seed}")
