"""Runs with a run folder: from the start, or from the last checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polytier._errors import BAD_INPUT, INTERRUPTED, Stopped, is_out_of_memory, outcome
from polytier.files.lock import FolderLock
from polytier.files.read import Damaged
from polytier.method.call import Diverged
from polytier.runs import checkpoint, snapshot
from polytier.runs.assemble import assemble
from polytier.runs.callbacks import RunFolder
from polytier.runs.estimate import check_memory
from polytier.runs.folder import claim, claim_next, discard
from polytier.runs.loop import Callback, Loop
from polytier.runs.read_files import CHECKPOINTS, STORE, read_config
from polytier.runs.spec import RunSpec, check_named, identity, spec_in, versions

log = logging.getLogger("polytier")


# -- resume -------------------------------------------------------------------------------------------


def spec_of_folder(folder: Path, **changes: Any) -> RunSpec:
    """The specification of a run to continue, with changes; a change of None keeps the value."""
    values = read_config(folder)
    made_with = values.pop("versions", {})
    check_named(values, folder, "continue it in Python")
    spec = spec_in(folder, values | {name: value for name, value in changes.items() if value is not None})
    now = versions()
    changed = [f"{name} {version} (now {now[name]})" for name, version in made_with.items() if now.get(name) != version]
    if changed:
        log.warning(
            "started with %s: results may differ in rounding from those of a run without interruption",
            ", ".join(changed),
        )
    return spec


def resumed_loop(spec: RunSpec, folder: Path) -> Loop:
    """The run in the state of its last checkpoint that is not damaged. The caller holds the lock of the folder.

    Raises:
        ValueError: There is no checkpoint, or settings or data have changed that must stay the same.
        Damaged: No checkpoint can be used.
    """
    places = checkpoint.found(folder / CHECKPOINTS)
    if not places:
        again = f"polytier run {folder / 'config.toml'} --out {folder}"
        raise ValueError(f"{folder} holds no checkpoint: nothing was saved; start the run again: {again}")
    loop: Loop | None = None
    damage: list[Damaged] = []
    try:
        for place in places:
            try:
                tensors, facts = checkpoint.read(place)
                check_settings(spec, facts, folder)
                loop = loop or Loop(assemble(spec))
                restore(loop, folder, tensors, facts)
            except Damaged as error:
                log.warning("%s; the checkpoint before it is used if there is one", error)
                damage.append(error)
                continue
            for other in places[: len(damage)]:
                checkpoint.set_aside(other)
            log.info("continuing after round %d of %d", loop.round, spec.rounds)
            return loop
    except BaseException:
        if loop is not None:
            loop.close()
        raise
    if loop is not None:
        loop.close()
    raise Damaged(f"{damage[0]}; no checkpoint can be used; repeat the run: polytier run {folder / 'config.toml'}")


def check_settings(spec: RunSpec, facts: dict[str, Any], folder: Path) -> None:
    """Raise an error if a setting has changed that a resumed run must not change, or too few rounds are requested."""
    if facts["round"] > spec.rounds:
        raise ValueError(f"{folder} has completed {facts['round']} rounds; --rounds must be at least as large")
    before, now = facts.get("settings"), identity(spec.values())
    if before is None:  # a checkpoint of an earlier format
        return
    changed = [
        f"{name} was {before.get(name)!r} and is now {now.get(name)!r}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise ValueError(
            f"{folder / 'config.toml'} has changed since the run was started: {'; '.join(changed)}. A resumed run may "
            f"change its rounds and how it is computed: restore these settings, or start another run: polytier run "
            f"{folder / 'config.toml'} --out FOLDER"
        )


def restore(loop: Loop, folder: Path, tensors: dict[str, Any], facts: dict[str, Any]) -> None:
    """Set the run back to a checkpoint."""
    snapshot.check_same_inputs(loop.context, facts, folder)
    if facts.get("epochs") and not loop.stores:
        loop.keep_in(folder / STORE)
    loop.restore(tensors, facts)


# -- run ----------------------------------------------------------------------------------------------


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
