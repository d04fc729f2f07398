"""Runs with a run folder, as the command line makes them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from polytier._errors import BAD_INPUT, INTERRUPTED, Stopped, is_out_of_memory, outcome
from polytier.files.lock import FolderLock
from polytier.method.call import Diverged
from polytier.runs.callbacks import RunFolder
from polytier.runs.estimate import check_memory
from polytier.runs.folder import claim, claim_next, discard
from polytier.runs.loop import Callback, Loop
from polytier.runs.spec import RunSpec

log = logging.getLogger("polytier")


def run_in_folder(
    loop: Loop,
    folder: Path | None = None,
    callbacks: Sequence[Callback] = (),
    stop: Callable[[], bool] = lambda: False,
    resumed: FolderLock | None = None,
) -> Path:
    """Run the rounds of the specification and write the folder.

    Args:
        loop: The run.
        folder: The run folder; by default a new one, runs/ALGORITHM-DATA-SEED-N.
        callbacks: Objects whose methods are called during the run.
        stop: Called before each round; the run stops if it returns True.
        resumed: The lock of the folder, if the run was restored from a checkpoint in it.

    Returns:
        The run folder.

    Raises:
        Stopped: The run ended before its last round. The message says how to continue.
        ValueError: The method found that the input is invalid. The folder is removed.
    """
    check_memory(loop)
    held = resumed or (claim_next(Path("runs"), folder_stem(loop.spec)) if folder is None else claim(folder))
    writer = RunFolder(held.folder, resumed is not None, held)
    try:
        loop.run(loop.spec.rounds, [writer, *callbacks], stop)
    except BaseException as error:
        code, text = outcome(error)
        if code == BAD_INPUT and loop.round == 0 and resumed is None:
            discard(held)
            raise
        if code in (None, BAD_INPUT):
            raise
        log.debug("where this came from:", exc_info=error)
        raise Stopped(f"{text}; {advice(error, loop, held.folder, writer.saved)}", code) from None
    finally:
        held.release()
    if loop.round < loop.spec.rounds:
        done = f"interrupted after round {loop.round} of {loop.spec.rounds}"
        raise Stopped(f"{done}; continue with: polytier resume {held.folder}", INTERRUPTED)
    return held.folder


def advice(error: BaseException, loop: Loop, folder: Path, saved: int) -> str:
    """What to do after a run has stopped; `saved` is the round of its last checkpoint, or -1."""
    if saved < 0:
        return f"nothing was saved in {folder}: start the run again"
    if isinstance(error, Diverged):
        return after_divergence(folder, saved)
    fewer = " --tile 4 --workers 1" if is_out_of_memory(error) else ""
    return f"stopped in round {loop.round + 1}; continue with: polytier resume {folder}{fewer}"


def after_divergence(folder: Path, saved: int) -> str:
    """Advice after a divergence; `saved` is the round of the last checkpoint."""
    again = f"try again with `polytier run {folder / 'config.toml'} --set FIELD=VALUE`"
    last = f"`polytier resume {folder} --rounds {saved}` gives the models of round {saved}, the last checkpoint"
    return again if saved < 1 else f"{again}; {last}"


def folder_stem(spec: RunSpec) -> str:
    """ALGORITHM-DATA-SEED as the name of a folder."""
    data = Path(spec.data).stem if spec.data.lower().endswith(".npz") else Path(spec.data).name
    return re.sub(r"[^\w.-]+", "-", f"{spec.algorithm}-{data}-{spec.seed}")
