"""The content of a checkpoint. Only this module knows the names of tensors and facts in a checkpoint.

tensors | state, state:FIELD                   | what the server keeps
        | memory:..., bytes:..., ever:..., ... | rows that nodes keep, and the ledger; of several models after `MODEL>`
        | collaboration:ROUND:...              | the learned collaboration
        | store:K:ROW                          | digests of rows that are stored in files
facts   | round, seconds, history, device_steps, traffic (of several models in `models`), collaboration, epochs,
        | settings, data, parameters, initial, | what must stay the same when the run is resumed
        | objects                              |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polytier.engines.protocol import engine_of
from polytier.messages.ledger import Ledger
from polytier.method.context import Context
from polytier.method.mapped_memory import MappedMemory
from polytier.models.trainable import digest
from polytier.runs.model_specs import RULES
from polytier.runs.spec import RunSpec, identity
from polytier.stack.rows import Rows, pack, unpack
from polytier.tree.collaboration import Collaboration, when_kept

if TYPE_CHECKING:
    from polytier.runs.loop import Loop
    from polytier.runs.run import Run

# objects that config.toml does not describe; the method is described by its name and fields
NEEDED = ("federation", "model", "topology", "loss", "metrics", *RULES, "codec", "upload")

Tensors = dict[str, Tensor]
Facts = dict[str, Any]


def take(loop: Loop) -> tuple[Tensors, Facts]:
    """Everything that a run needs to continue, except rows that are stored in files."""
    tensors, facts = content(loop, loop.round, loop.collaboration, loop.assembly.objects)
    return tensors, {**facts, **loop.notes}


def of_run(run: Run) -> tuple[Tensors, Facts]:
    """Everything that a finished run needs to continue.

    If the rows of its nodes are in files or in other processes: only the part that is needed to load it.

    Raises:
        ValueError: More rounds have been computed since, so that the rows are those of a later round.
    """
    parts = run.context.parts
    later = max(len(part.ledger.rounds) for part in parts)
    if later != run.rounds:
        raise ValueError(
            f"this is the result after round {run.rounds}, and its loop has gone on to round {later}; use that result"
        )
    if any(isinstance(part.memory, MappedMemory) for part in parts) or engine_of(run.context).remote:
        tensors = pack("state", run.state)
        for part in parts:
            tensors |= under(part.name, part.ledger.state())
        return tensors, {"round": run.rounds, "seconds": run.seconds, **counted(run.context)}
    kept = {number: learned for number, learned in run.collaboration.items() if when_kept(number)}
    return content(run, run.rounds, kept, run.objects)


def content(
    run: Loop | Run, number: int, collaboration: Mapping[int, Collaboration], objects: Mapping[str, Any]
) -> tuple[Tensors, Facts]:
    """The tensors and facts after round `number`; `objects` are the parts that were given as Python objects."""
    tensors, stores = pack("state", run.state), stores_of(run.context)
    for part in run.context.parts:
        rows = {} if stores else part.memory.state()
        tensors |= under(part.name, {f"memory:{k}": v for k, v in rows.items()} | part.ledger.state())
    for when, learned in collaboration.items():
        arrays = {"base": learned.base, "pairs": learned.pairs, "weights": learned.weights}
        tensors |= {f"collaboration:{when}:{k}": torch.from_numpy(v) for k, v in arrays.items()}
    facts = {
        "round": number,
        "seconds": run.seconds,
        "history": run.history,
        "collaboration": list(collaboration),
        "epochs": [store.advance() for store in stores],
        "settings": identity(run.spec.values()),
        "objects": object_names(objects),
        **inputs(run.context),
        **counted(run.context),
    }
    for k, store in enumerate(stores):
        tensors |= {f"store:{k}:{row}": digests for row, digests in store.digests().items()}
    return tensors, facts


def stores_of(context: Context) -> list[MappedMemory]:
    """The memories of a run that are stored in files."""
    return [part.memory for part in context.parts if isinstance(part.memory, MappedMemory)]


def put_back(loop: Loop, tensors: Tensors, facts: Facts) -> None:
    """Set state, memory and ledger of a run back to a snapshot."""
    loop.state, loop.round = unpack("state", tensors), facts["round"]
    if len(loop.stores) != len(epochs := facts.get("epochs", [])):
        raise ValueError(
            "the rows of this checkpoint are in files of their own; call keep_in(FOLDER) first (engine stacked)"
        )
    for k, (store, epoch) in enumerate(zip(loop.stores, epochs, strict=True)):
        store.undo(epoch)
        store.check({n.removeprefix(f"store:{k}:"): v for n, v in tensors.items() if n.startswith(f"store:{k}:")})
    for part in loop.context.parts:
        own, its = of_model(tensors, part.name), facts_of(facts, part.name)
        part.memory.load({k.removeprefix("memory:"): v for k, v in own.items() if k.startswith("memory:")})
        part.ledger.load(own, its["traffic"])
        part.device_steps = its["device_steps"]
    ids = loop.context.topology.names[1]
    for number in facts.get("collaboration", ()):
        arrays = (tensors[f"collaboration:{number}:{k}"].numpy() for k in ("base", "pairs", "weights"))
        loop.collaboration[number] = Collaboration(ids, *arrays)


# -- the inputs of a run ------------------------------------------------------------------------------


def inputs(context: Context) -> Facts:
    """What identifies the data and the models of a run: their content, wherever the files are."""
    return {
        "data": {part.name: part.batches.federation.fingerprint for part in context.parts},
        "parameters": {
            part.name: dict(zip(part.objective.names, map(list, part.objective.shapes), strict=True))
            for part in context.parts
        },
        "initial": {part.name: digest({"": part.objective.initial}) for part in context.parts},
        "frozen": {part.name: part.objective.frozen_digest for part in context.parts},
    }


def object_names(objects: Mapping[str, Any]) -> list[str]:
    """The names of those Python objects without which `polytier.resume` cannot continue a run."""
    rules = zip(RULES, objects.get("participation") or (), strict=False)
    found = {**objects, **{name: rule for name, rule in rules if rule is not None}}
    return [name for name in NEEDED if name in found]


def run_name(context: Context, spec: RunSpec) -> str:
    """A text that files of this run contain, so that those of another run are not taken for them.

    Runs with the same settings and data have the same name, and the same results.
    """
    about = json.dumps([identity(spec.values()), inputs(context)["data"]], sort_keys=True, default=str)
    return sha256(about.encode()).hexdigest()[:16]


def again(folder: Path | None) -> str:
    """The command that starts another run with the settings of a run folder; nothing for a run without one."""
    return "" if folder is None else f": polytier run {folder / 'config.toml'} --out FOLDER"


def check_same_inputs(context: Context, facts: Facts, folder: Path | None = None) -> None:
    """Raise an error if the data or the models are not those with which the run was started.

    The initial parameters of a model by name follow from the seed, up to rounding on another machine.
    """
    now, named = inputs(context), "model" not in facts.get("objects", ())
    compared = {
        "data": "the data",
        "parameters": "the parameters of the model",
        "initial": "the initial values of the model's parameters",
        "frozen": "the frozen parameters of the model",
    }
    for key, what in compared.items():
        if key in facts and facts[key] != now[key] and not (key == "initial" and named):
            which = "this run" if folder is None else f"the run in {folder}"
            raise ValueError(
                f"{what} have changed since {which} was started; a resumed run needs the same: restore them, or start "
                f"another run{again(folder)}"
            )


# -- of one model -------------------------------------------------------------------------------------


def state_of(tensors: Mapping[str, Tensor], name: str) -> Rows:
    """What the server kept of a model."""
    return unpack(f"state:{name}" if name else "state", tensors)


def load_ledger(ledger: Ledger, tensors: Tensors, facts: Facts, name: str, rounds: list[dict[str, Any]]) -> None:
    """Fill the ledger of a model; `rounds` are its bytes per round, for facts that do not hold them."""
    ledger.load(of_model(tensors, name), facts_of(facts, name).get("traffic") or rounds)


def facts_of(facts: Facts, name: str) -> Facts:
    """The facts about one model."""
    return {**facts, **facts["models"][name]} if name else facts


def of_model(tensors: Mapping[str, Tensor], name: str) -> Tensors:
    """The tensors of one model, with the prefix of its name removed."""
    prefix = f"{name}>" if name else ""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def under(name: str, tensors: Tensors) -> Tensors:
    """The tensors with names that begin with the name of the model."""
    return {f"{name}>{k}": v for k, v in tensors.items()} if name else tensors


def counted(context: Context) -> Facts:
    """Device steps and bytes per round of each model."""
    of_each = {p.name: {"device_steps": p.device_steps, "traffic": p.ledger.rounds} for p in context.parts}
    return of_each.get("") or {"device_steps": context.all_steps, "models": of_each}
