"""CoBo's elasticity (Sections 1 and 2): clients join and leave during training, and some seldom take part.

8 clients, of which 0 and 1, 2 and 3, 4 and 5, 6 and 7 are a cluster. The paper has no values for this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from polytier.papers.claims import Finished, compare, told
from polytier.papers.cobo_values import by_device
from polytier.papers.plan import Claim, Item, PlannedRun, Reading, Row

ALL = tuple("01234567")
CLUSTERS, OTHERS = ALL[:4], ALL[4:]  # two clusters, and the other two
FIRSTS, PARTNERS = ALL[::2], ALL[1::2]  # one client of each cluster, and the other one
POINTS = 3.0  # percentage points that count as "no worse"
SHARES = (0.5, 0.25)
JOINED = {2: "half", 8: "an eighth", 20: "a twentieth"}  # rounds after joining, as a part of all rounds


def elastic(cobo: PlannedRun, local: PlannedRun, reduced: str, note: str) -> Item:
    """The item; `cobo` and `local` are the runs of these methods with all 8 clients in all rounds."""
    rounds = cobo.settings["rounds"]
    leave = changed(cobo, "clusters-leave", lines(OTHERS, "1", str(rounds // 2 + 1)))
    alone = changed(cobo, "partners-leave", lines(PARTNERS, "1", str(rounds // 2 + 1)))
    rows = [
        row("all clients stay", ALL, cobo),
        row("two clusters leave after half of the rounds: those who stay", CLUSTERS, leave),
        row("the same clients if all stay", CLUSTERS, cobo),
        row("one client of each cluster leaves after half of the rounds: those who stay", FIRSTS, alone),
        row("the same clients if all stay", FIRSTS, cobo),
    ]
    claims = [
        no_worse("Those who stay are no worse off when two clusters leave", CLUSTERS, leave, cobo),
        no_worse("Those who stay are no worse off when their partners leave", FIRSTS, alone, cobo),
    ]
    rows.append(row("newcomers, compared with them: the same clients if they are there from the start", PARTNERS, cobo))
    for part, name in JOINED.items():
        k = rounds // part
        late = changed(cobo, f"join-{k}", lines(PARTNERS, str(rounds - k + 1), ""))
        own = replace(local, name=f"{local.name}-{k}", settings={**local.settings, "rounds": k})
        when = f"after {k:,} rounds"
        rows += [row(f"newcomers {when}", PARTNERS, late), row(f"Local {when}", PARTNERS, own)]
        claims += [
            no_worse(f"Newcomers {when} ({name}) are no worse than clients from the start", PARTNERS, late, cobo),
            better(f"Newcomers {when} are better than clients that train alone for as many", PARTNERS, late, own),
        ]
    for share in SHARES:
        some = changed(cobo, f"{share:g}-of-clients", share)
        rows.append(row(f"{100 * share:g} % of the clients take part in a round", ALL, some))
        claims.append(no_worse(f"No worse with {100 * share:g} % of the clients in each round", ALL, some, cobo))
    return Item(
        "elastic",
        "Clients join and leave, and some seldom take part, 8 clients",
        ("clients",),
        rows,
        claims=claims,
        reduced=reduced,
        notes=(
            note,
            "The paper states that CoBo is elastic and robust to stragglers, and has no experiment about it. "
            f"Accuracies are those after the last round. No worse: less than {POINTS:g} points below.",
            "A client that is absent trains nothing, is in no pair and pulls nobody; one that joins starts with the "
            "initial model and weights of one.",
        ),
    )


def lines(clients: Sequence[str], join: str, leave: str) -> str:
    """The schedule of clients that are there from round `join` to the one before `leave`."""
    return "lines:" + ";".join(f"{client},{join},{leave}" for client in clients)


def changed(run: PlannedRun, name: str, participation: Any) -> PlannedRun:
    """The run with another participation of clients."""
    return replace(run, name=f"{run.name}-{name}", settings={**run.settings, "device_participation": participation})


def row(label: str, clients: Sequence[str], run: PlannedRun) -> Row:
    """The mean accuracy of some clients after the last round."""
    return Row((label,), (run,), final(clients))


def final(clients: Sequence[str]) -> Callable[[Sequence[Path]], Reading]:
    """The mean test accuracy of these clients after the last round, in percent."""

    def read(folders: Sequence[Path]) -> Reading:
        values = by_device(folders[0])
        return 100 * fmean(values[client] for client in clients), None

    return read


def no_worse(text: str, clients: Sequence[str], run: PlannedRun, other: PlannedRun) -> Claim:
    """The claim that these clients are less than POINTS below those of the other run."""
    return compared(f"{text} ({POINTS:g} points)", clients, run, other, -POINTS)


def better(text: str, clients: Sequence[str], run: PlannedRun, other: PlannedRun) -> Claim:
    """The claim that these clients are above those of the other run."""
    return compared(text, clients, run, other, 0.0)


def compared(text: str, clients: Sequence[str], run: PlannedRun, other: PlannedRun, margin: float) -> Claim:
    """The claim that the mean accuracy of these clients is above that of the other run plus the margin."""

    def holds(finished: Finished) -> tuple[bool | None, str]:
        own, others = ([final(clients)([f])[0] or 0.0 for f in folders] for folders in finished)
        order = compare(own, [value + margin for value in others])
        return None if order == 0 else order > 0, told(["here", "compared with"], [own, others])

    return Claim(text, (run, other), holds)
