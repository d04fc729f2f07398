"""The content of a checkpoint. Only this module knows the names of tensors and facts in a checkpoint.

tensors | state, state:FIELD                   | what the server keeps
        | memory:..., bytes:..., ever:..., ... | rows that nodes keep, and the ledger; of several models after `MODEL>`
        | collaboration:ROUND:...              | the learned collaboration
        | store:K:ROW                          | digests of rows that are stored in files
facts   | round, seconds, history, device_steps, traffic (of several models in `models`), collaboration, epochs,
        | settings, data, parameters           | what must stay the same when the run is resumed
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polytier.messages.ledger import Ledger
from polytier.method.context import Context
from polytier.runs.spec import RunSpec, identity
from polytier.stack.rows import Rows, pack, unpack
from polytier.tree.collaboration import Collaboration

if TYPE_CHECKING:
    from polytier.runs.loop import Loop
    from polytier.runs.run import Run

Tensors = dict[str, Tensor]
Facts = dict[str, Any]


def take(loop: Loop) -> tuple[Tensors, Facts]:
    """Everything that a run needs to continue, except rows that are stored in files."""
    tensors = pack("state", loop.state)
    for part in loop.context.parts:
        rows = {} if loop.stores else part.memory.state()
        tensors |= under(part.name, {f"memory:{k}": v for k, v in rows.items()} | part.ledger.state())
    for number, learned in loop.collaboration.items():
        arrays = {"base": learned.base, "pairs": learned.pairs, "weights": learned.weights}
        tensors |= {f"collaboration:{number}:{k}": torch.from_numpy(v) for k, v in arrays.items()}
    facts = {
        "round": loop.round,
        "seconds": loop.seconds,
        "history": loop.history,
        "collaboration": list(loop.collaboration),
        "epochs": [store.advance() for store in loop.stores],
        "settings": identity(loop.spec.values()),
        **inputs(loop.context),
        **counted(loop.context),
    }
    for k, store in enumerate(loop.stores):
        tensors |= {f"store:{k}:{row}": digests for row, digests in store.digests().items()}
    return tensors, facts


def of_run(run: Run) -> tuple[Tensors, Facts]:
    """The part of a finished run that is needed to load it, not to continue it."""
    tensors = pack("state", run.state)
    for part in run.context.parts:
        tensors |= under(part.name, part.ledger.state())
    return tensors, {"round": run.rounds, "seconds": run.seconds, **counted(run.context)}


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
    }


def run_name(context: Context, spec: RunSpec) -> str:
    """A text that files of this run contain, so that those of another run are not taken for them.

    Runs with the same settings and data have the same name, and the same results.
    """
    about = json.dumps([identity(spec.values()), inputs(context)["data"]], sort_keys=True, default=str)
    return sha256(about.encode()).hexdigest()[:16]


def check_same_inputs(context: Context, facts: Facts, folder: Path) -> None:
    """Raise an error if the data or the models are not those with which the run was started."""
    now = inputs(context)
    for key, what in (("data", "the data"), ("parameters", "the parameters of the model")):
        if key in facts and facts[key] != now[key]:
            raise ValueError(
                f"{what} have changed since the run in {folder} was started; a resumed run needs the same: restore "
                f"them, or start another run: polytier run {folder / 'config.toml'} --out FOLDER"
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
