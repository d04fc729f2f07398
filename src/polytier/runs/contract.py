"""The contract that every method must follow, and `check_algorithm`, which tests it.

A program receives the rows of any number of nodes and returns one row per node. Each returned row depends only on the
row, memory and random draws of its own node. A program returns new rows, does not change its arguments, and stores
nothing in attributes. Under these conditions the result does not depend on tiles, workers, restarts or the network.
"""

from __future__ import annotations

import pickle
import random
import tempfile
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polytier.data.federation import Federation
from polytier.method.algorithm import Algorithm
from polytier.method.memory import RowName
from polytier.method.node import Node
from polytier.runs import checkpoint
from polytier.runs.loop import Callback, Loop, make_loop
from polytier.runs.run import Run
from polytier.stack.rows import Rows, as_dict, map_rows, pack

DRAWS = (
    "a program draws from the node it is given: node.uniform(purpose, k) is k numbers in [0, 1) per node, "
    "node.shared(purpose, k) the same k at all nodes, torch.special.ndtri(node.uniform(...)) normal ones"
)
ALONE = "a program treats each row by itself: no mean or sum over the first axis, no x @ M"


def check_algorithm(
    algorithm: Algorithm,
    *,
    federation: Federation | None = None,
    model: nn.Module | str = "mclr",
    rounds: int = 3,
    **settings: Any,
) -> None:
    """Test a method by running it on a few devices in several ways that must give identical results.

    The runs differ in the number of devices computed at once, the engine, and whether the run is stopped and resumed.

    Args:
        algorithm: The method.
        federation: The data; by default eleven devices in four teams, with two features and three classes.
        model: A module or the name of a built-in model; by default logistic regression.
        rounds: Number of rounds of each run.
        **settings: Other settings, as in `polytier.train`. By default float64, mini-batches of 4 samples, and only some
            teams and devices taking part in a round.

    Raises:
        AssertionError: The method does not follow the contract. The message says what is wrong and how to correct it.

    Examples:
        >>> import polytier
        >>> polytier.check_algorithm(polytier.FedAvg(device_steps=2), rounds=2)
    """
    check_class(algorithm)
    name, before = type(algorithm).__name__, pickle.dumps(algorithm)
    federation = federation or small_federation()
    settings = {
        "dtype": "float64",
        "batch_size": 4,
        "team_participation": 0.75,
        "device_participation": 0.6,
        **settings,
    }
    settings["objectives"] = {}  # shared by all runs, so that graphs are traced once
    with make_loop(algorithm, federation, model, **settings) as reference:
        objective = reference.context.parts[0].objective
        settings["batching"] = objective.batching

    def run(method: Any = algorithm, until: int = rounds, prepare: Callable = lambda t: None, **more: Any) -> Loop:
        with make_loop(method, federation, model, **{**settings, **more}) as loop:
            prepare(loop)
            loop.run(until, [Absent(name)])
            return loop

    def same(other: Loop, what: str, advice: str) -> None:
        wrong = differing(results(expected, True), results(other, True))
        assert not wrong, f"{name}: {what} gives another {wrong}; {advice}"

    run(Watched(algorithm))  # first, because its messages are more precise than those of the checks below
    expected = run()
    check_models(name, expected)
    lasting = "what lasts goes into local.keep or what server returns, never into attributes"
    same(run(), "a second run", f"{lasting}; {DRAWS}")
    same(run(tile=1), "one device at a time", f"device mixes rows; {ALONE}")
    same(run(inner_tile=1), "one team at a time", f"team mixes rows; {ALONE}")
    same(run(engine="loopback"), "every node alone, its messages as bytes,", ALONE)
    with tempfile.TemporaryDirectory() as folder:
        half = run(until=rounds // 2)
        checkpoint.save(Path(folder), half.round, *half.snapshot())
        found = checkpoint.latest(Path(folder))
        assert found is not None
        resumed = run(pickle.loads(before), prepare=lambda loop: loop.restore(*found[1:]))
    same(resumed, "a run stopped and resumed", "what lasts goes into local.keep or what server returns")
    assert pickle.dumps(algorithm) == before, f"{name} changes its own fields; return new rows instead"
    one, other = results(run(until=1), False), results(run(until=1, batching="eager"), False)
    wrong = differing(one, other, atol=1e-3 if objective.dtype == torch.float32 else 1e-6)
    assert not wrong, (
        f"{name}: autograd gives another {wrong} than the traced graph; a loss takes what changes as extra="
    )


def small_federation() -> Federation:
    """Eleven devices of 2 to 12 samples in four teams, two features and three classes."""
    sizes = np.array([5, 2, 9, 12, 3, 8, 4, 7, 10, 6, 11])
    rng = np.random.default_rng(0)
    device = np.repeat(np.arange(len(sizes)), sizes)
    x, y = rng.normal(size=(len(device), 2)), rng.integers(0, 3, len(device))
    return Federation.from_arrays(x, y, device, team=(device * 4) // len(sizes), cluster=device % 3, num_classes=3)


def check_class(algorithm: Any) -> None:
    """Check that the method is a frozen dataclass without extra attributes, and that it can be pickled."""
    kind, name = type(algorithm), type(algorithm).__name__
    assert isinstance(algorithm, Algorithm), f"{name} is not an Algorithm; derive it from polytier.Algorithm"
    # Python itself rejects an unfrozen subclass of a frozen dataclass, so only a missing decorator must be found
    assert "__dataclass_fields__" in vars(kind), f"{name} needs @dataclass(frozen=True): its fields are all it has"
    hidden = set(vars(algorithm)) - {field.name for field in fields(algorithm)}
    assert not hidden, f"{name} hides {', '.join(sorted(hidden))} beside its fields; make each a parameter(...)"
    try:
        copy = pickle.loads(pickle.dumps(algorithm))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(f"{name} cannot be pickled for workers ({error}); define it in a module") from None
    assert copy == algorithm, f"{name} is not equal to its pickled copy; fields are numbers, strings and tuples"


def results(loop: Loop, traffic: bool) -> dict[str, Any]:
    """Everything that must not differ between runs: the state of the server, the memory of nodes, and the history."""
    rows = pack("state", loop.state) | memory_of(loop)
    skipped = {"seconds"} if traffic else {"seconds", "bytes", "participants"}
    measured = {f"{k} in round {r['round']}": v for r in loop.history for k, v in r.items() if k not in skipped}
    return rows | measured


def differing(a: dict[str, Any], b: dict[str, Any], atol: float = 0.0) -> str:
    """The name of the first result that differs; empty if none does. With `atol` only tensors are compared."""
    for name in [*a, *(k for k in b if k not in a)]:
        one, two = a.get(name), b.get(name)
        if isinstance(one, Tensor) and isinstance(two, Tensor) and one.shape == two.shape:
            if not torch.allclose(one.double(), two.double(), rtol=0, atol=atol, equal_nan=True):
                return name or "rows"
        elif isinstance(one, Tensor) or isinstance(two, Tensor) or (one != two and not atol):
            return name or "rows"
    return ""


def check_models(name: str, loop: Loop) -> None:
    """Check that every model is one finite row per node, and that reading the models changes nothing."""
    before = {k: v.clone() if isinstance(v, Tensor) else v for k, v in results(loop, True).items()}
    run = loop.run(loop.round)
    wrong = differing(before, results(loop, True))
    assert not wrong, f"{name}: personal, publish or global_model change {wrong}; they may only read"
    for part in run.parts:
        check_rows(name, part)


def check_rows(name: str, run: Run) -> None:
    """Check shape and values of the personal, team and global models of one model."""
    everywhere, d = None if run.global_ is None else run.global_.unsqueeze(0), run.context.objective.dimension
    found = {
        "personal": (run.personal, len(run.device_ids)),
        "team": (run.team, len(run.team_ids)),
        "global": (everywhere, 1),
    }
    for what, (rows, n) in found.items():
        shape = None if rows is None else tuple(rows.shape)
        assert shape in (None, (n, d)), f"{name}: the {what} models are {shape}; they must be {(n, d)}"
        assert rows is None or torch.isfinite(rows).all(), f"{name}: {what} models are not finite; try smaller steps"
    some = run.personal is not None or run.team is not None or everywhere is not None
    assert some, f"{name} has neither personal nor team nor global models"


def memory_of(loop: Loop) -> dict[str, Tensor]:
    """The rows that nodes kept; the names begin with the name of the model if there are several."""
    parts = loop.context.parts
    return {f"{part.name}>{k}" if part.name else k: v for part in parts for k, v in part.memory.state().items()}


class Absent(Callback):
    """Checks that nodes which received no message keep their rows unchanged."""

    def __init__(self, name: str) -> None:
        self.name, self.before = name, {}

    def on_round(self, loop: Loop, record: dict[str, Any]) -> None:
        now = {k: v.clone() for k, v in memory_of(loop).items()}
        for key in self.before:
            name, _, rest = key.rpartition(">")
            ledger = loop.context.scope(name).ledger
            tier = RowName.parse(rest.rpartition("/")[0]).tier
            absent = ~ledger.took_part.get(tier, torch.ones(1, dtype=torch.bool))
            kept = torch.equal(self.before[key][absent], now[key][absent])
            assert kept, f"{self.name}: {key} changed at nodes that took no part; write with keep(), own rows only"
        self.before = now


class Watched:
    """Wraps a method and checks its programs: arguments are not changed, answers have the right dtype, no own draws."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm

    def __getattr__(self, name: str) -> Any:
        member, where = getattr(self._algorithm, name), f"{type(self._algorithm).__name__}.{name}"
        if name == "parts":
            return lambda: {part: Watched(method) for part, method in member().items()}
        if not callable(member):
            return member

        @wraps(member)  # its signature tells whether it is a program of devices
        def program(*given: Any) -> Any:
            rows, *others = given
            before = map_rows(torch.clone, rows) if isinstance(rows, Tensor | dict) else None
            drawn = global_draws()
            answer = member(*given)
            assert drawn == global_draws(), f"{where} draws random numbers from torch, NumPy or Python; {DRAWS}"
            left_alone = before is None or not differing(as_dict(before), as_dict(rows))
            assert left_alone, f"{where} changes its argument; return new rows (x = x - step, not x -= step)"
            if others and isinstance(others[0], Node) and answer is not None:
                check_answer(where, answer, others[0], before if name == "server" else None)
            return answer

        return program


def global_draws() -> tuple[bytes, str, Any]:
    """The states of the generators that all code of a process shares; they change when a number is drawn."""
    return torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), random.getstate()  # noqa: NPY002


def check_answer(where: str, answer: Any, node: Node, state: Rows | None) -> None:
    """Check type, dtype and shape of what a program returned, and that a server returned its whole state."""
    dtype, model = node._context.objective.dtype, (len(node.ids), node._context.objective.dimension)
    for field, value in as_dict(answer).items():
        assert isinstance(value, Tensor), (
            f"{where} answers {type(value).__name__} {field}; answer tensors, one row per node"
        )
        right = value.dtype == dtype or not value.is_floating_point()
        assert right, f"{where} answers {value.dtype} in a run of {dtype}; use .to(x.dtype)"
        right = not where.endswith(".personal") or tuple(value.shape) == model
        assert right, f"{where} answers {tuple(value.shape)}; one model per node is {model}"
    whole = state is None or as_dict(state).keys() == as_dict(answer).keys()
    assert whole, f"{where} returns {list(as_dict(answer))} of its state; return all of it"
