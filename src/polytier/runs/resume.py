"""Continues runs: from the last checkpoint of a run folder, or from a result in this process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from polytier._errors import unknown
from polytier.data.federation import Federation
from polytier.files.read import Damaged
from polytier.method.algorithm import Algorithm
from polytier.runs import checkpoint, snapshot
from polytier.runs.assemble import assemble
from polytier.runs.callbacks import RunFolder
from polytier.runs.folder import reopen
from polytier.runs.loop import Callback, Loop
from polytier.runs.methods import fields_of, method_name
from polytier.runs.model_specs import RULES, OneOrEach
from polytier.runs.read_files import CHECKPOINTS, STORE, read_config
from polytier.runs.run import Run
from polytier.runs.spec import PYTHON, RunSpec, check_spec, identity, of_scope, spec_in, versions
from polytier.runs.trust import check_trusted

log = logging.getLogger("polytier")
PARTS = ("algorithm", *snapshot.NEEDED, "engine")  # what may be given again as Python objects


def resume(
    source: str | Path | Run,
    rounds: int | None = None,
    *,
    federation: OneOrEach[Federation] | None = None,
    model: OneOrEach[nn.Module] | None = None,
    callbacks: Iterable[Callback] = (),
    trust: bool = False,
    **others: Any,
) -> Run:
    """Continue a run. The result has the same bits as that of a run without interruption.

    Args:
        source: A run folder, whose files are continued; or the result of `polytier.train`, which is left as it is.
        rounds: Number of rounds completed at the end, counting those completed earlier; by default as before.
        federation: The data, if the run in a folder was started with data given as Python objects.
        model: The module with its initial parameters, if it was given as a Python object.
        callbacks: Objects whose methods are called during the run; see `polytier.Callback`.
        trust: Whether config.toml may name modules of the current folder. They are imported, which runs their code.
        **others: Other parts that were given as Python objects, by their names in `polytier.train` (`loss`, `metrics`,
            `topology`, `codec`, ...; `algorithm` for a method that cannot be imported by name), and settings of how the
            run is computed: `workers`, `tile`, `engine`, `on`, `batching`. A result in this process knows its parts.

    Returns:
        The result after the last round.

    Raises:
        ValueError: The folder has no checkpoint, a part that was given as a Python object is missing, or data, model
            or settings differ from those that the run was started with.
        TypeError: An argument is unknown.
        Diverged: See `polytier.train`.

    Examples:
        >>> import polytier
        >>> federation = polytier.build_federation("digits", devices=8, teams=2)
        >>> run = polytier.train(polytier.PerMFL(), federation, "mclr", rounds=2)
        >>> polytier.resume(run, rounds=3).rounds
        3

        From a folder, the data are given again:

        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> run.save(folder)
        >>> polytier.resume(folder, rounds=3, federation=federation).rounds
        3
    """
    settings, objects = settings_and_objects({"rounds": rounds, "federation": federation, "model": model, **others})
    folder = source.folder if isinstance(source, Run) else Path(source)
    if folder is None:
        assert isinstance(source, Run)
        with loop_of_run(source, settings, objects) as loop:
            return loop.run(loop.spec.rounds, callbacks)
    if isinstance(source, Run) and made_in_python(source.spec):
        modules = {name: part.module for name, part in source.models.items()}
        objects = {"model": modules or source.module, **objects}
    config = {name: value for name, value in read_config(folder).items() if name not in objects}
    if not trust:
        named = [value for value in settings.values() if isinstance(value, str)]
        again = f"use polytier.resume({str(folder)!r}, trust=True)"
        check_trusted({**config, **settings}, folder / "config.toml", again, named)
    with reopen(folder) as lock, resumed_loop(spec_of_folder(folder, **settings), folder, objects) as loop:
        return loop.run(loop.spec.rounds, [RunFolder(folder, resumed=True, lock=lock), *callbacks])


def settings_and_objects(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was given to `resume`: settings with their values, and parts that are Python objects, by name."""
    allowed = ["rounds", *(name for name in of_scope("compute") if name != "out"), *PARTS]
    for name in given:
        if name not in allowed:
            raise TypeError(str(unknown("argument of resume", name, allowed)))
    plain = str | int | float
    there = {name: value for name, value in given.items() if value is not None}
    settings = {k: v for k, v in there.items() if isinstance(v, plain) and k in RunSpec.model_fields}
    check_spec(settings)
    objects = {name: value for name, value in there.items() if name not in settings}
    if isinstance(objects.get("algorithm"), Algorithm):
        settings |= {"algorithm": method_name(objects["algorithm"]), "set": fields_of(objects["algorithm"])}
    return settings, objects


def arguments(objects: Mapping[str, Any]) -> dict[str, Any]:
    """These parts as arguments of `assemble`, which takes both rules of participation together."""
    own = {name: value for name, value in objects.items() if name not in RULES}
    rules = tuple(objects.get(name) for name in RULES)
    return own if rules == (None, None) else {**own, "participation": rules}


def made_in_python(spec: RunSpec) -> bool:
    """Whether a model of the run was given as a Python object."""
    tables = spec.models.values() if isinstance(spec.models, dict) else ()
    return PYTHON in (spec.model, *(table.get("model") for table in tables))


def loop_of_run(run: Run, settings: Mapping[str, Any], objects: Mapping[str, Any]) -> Loop:
    """A run in this process after its last round, as a loop of its own."""
    if run.context.name:
        raise ValueError(f"{run.context.name} is one of several models; resume the run that they belong to")
    tensors, facts = copy.deepcopy(snapshot.of_run(run))
    if "history" not in facts:
        raise ValueError(
            "the models of this run are in files or in other processes; train with callbacks=[RunFolder(FOLDER)] and "
            "use polytier.resume(FOLDER)"
        )
    spec = run.spec.replace(**settings)
    check_settings(spec, facts)
    loop = Loop(assemble(spec, **{**run.objects, **arguments(objects)}))
    try:
        snapshot.check_same_inputs(loop.context, facts)
        loop.restore(tensors, facts)
    except BaseException:
        loop.close()
        raise
    return loop


# -- from a run folder --------------------------------------------------------------------------------


def spec_of_folder(folder: Path, **changes: Any) -> RunSpec:
    """The specification of a run to continue, with changes; a change of None keeps the value."""
    values = read_config(folder)
    made_with = values.pop("versions", {})
    spec = spec_in(folder, values | {name: value for name, value in changes.items() if value is not None})
    now = versions()
    changed = [f"{name} {version} (now {now[name]})" for name, version in made_with.items() if now.get(name) != version]
    if changed:
        log.warning(
            "started with %s: results may differ in rounding from those of a run without interruption",
            ", ".join(changed),
        )
    return spec


def resumed_loop(spec: RunSpec, folder: Path, objects: Mapping[str, Any] | None = None) -> Loop:
    """The run in the state of its last checkpoint that is not damaged. The caller holds the lock of the folder.

    Args:
        spec: The settings.
        folder: The run folder.
        objects: The parts that are given as Python objects, by name.

    Raises:
        ValueError: There is no checkpoint, a part is missing, or settings or data have changed that must stay the same.
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
                check_objects(spec, objects or {}, facts, folder)
                loop = loop or Loop(assemble(spec, **arguments(objects or {})))
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


def check_objects(spec: RunSpec, given: Collection[str], facts: dict[str, Any], folder: Path) -> None:
    """Raise an error if parts that were given as Python objects are missing, or the run cannot be continued at all."""
    needed = [*facts.get("objects", ()), *(["federation"] if spec.data == PYTHON else [])]
    needed += ["model"] if made_in_python(spec) else []
    missing = [name for name in dict.fromkeys(needed) if name not in given]
    if missing:
        again = ", ".join(f"{name}=..." for name in missing)
        raise ValueError(
            f"the run in {folder} was made in Python with {', '.join(missing)} given as Python objects, which files "
            f"cannot contain; continue it in Python: polytier.resume({str(folder)!r}, {again})"
        )
    if "history" not in facts:
        raise ValueError(
            f"{folder} was written by Run.save without what is needed to continue it; start it again with "
            "callbacks=[polytier.RunFolder(FOLDER)]"
        )


def check_settings(spec: RunSpec, facts: dict[str, Any], folder: Path | None = None) -> None:
    """Raise an error if a setting has changed that a resumed run must not change, or too few rounds are requested."""
    if facts["round"] > spec.rounds:
        raise ValueError(
            f"{folder or 'this run'} has completed {facts['round']} rounds; rounds must be at least as large"
        )
    before, now = facts.get("settings"), identity(spec.values())
    if before is None:  # a checkpoint of an earlier format
        return
    changed = [
        f"{name} was {before.get(name)!r} and is now {now.get(name)!r}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if changed:
        where = "a setting" if folder is None else folder / "config.toml"
        raise ValueError(
            f"{where} has changed since the run was started: {'; '.join(changed)}. A resumed run may change its rounds "
            f"and how it is computed: restore these settings, or start another run{snapshot.again(folder)}"
        )


def restore(loop: Loop, folder: Path, tensors: dict[str, Any], facts: dict[str, Any]) -> None:
    """Set the run back to a checkpoint."""
    snapshot.check_same_inputs(loop.context, facts, folder)
    if facts.get("epochs") and not loop.stores:
        loop.keep_in(folder / STORE)
    loop.restore(tensors, facts)
