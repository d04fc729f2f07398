"""What runs have shown, in words: which models lead, which are level with them, what Local and a global model reach.

A model is ahead of another if the paired test over devices and seeds separates them and it is better on more devices
than it is worse on. Otherwise the two are level, whatever their means are. Of several methods each is represented by
its best kind of model; of one method all kinds are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polytier._text import counted
from polytier.models.metrics import MetricInfo
from polytier.report.intervals import LEVEL, interval_text, paired_test
from polytier.runs.read import JUDGES
from polytier.runs.read_files import KINDS, Record

MANY = ("personal", "team")  # kinds with one model per node
NAMED = 3  # models or devices that a list names; the others are counted

Values = Mapping[tuple[str, str], Mapping[tuple[int, str], float]]  # [method, kind of model][seed, device]


@dataclass(frozen=True, eq=False)
class Entry:
    """The models of one kind of a method, with the interval of their mean and the value at each device.

    `name` stands alone, `item` is the name in a list, with the mean.
    """

    method: str
    kind: str
    name: str
    item: str
    found: Record
    values: Mapping[tuple[int, str], float]


def finding(methods: Sequence[Record], values: Values, metric: MetricInfo, local: str | None = None) -> str:
    """One or two sentences on what the runs of a comparison, or of one method, have shown.

    Args:
        methods: Rows of `comparison.by_method`.
        values: The test value of each device by method and kind of model, then by seed and device.
        metric: What methods are judged by.
        local: The method that trains each device alone, if it is one of them.

    Returns:
        The sentences; "" if nothing was measured on test samples.

    Examples:
        >>> from polytier.models.metrics import ACCURACY
        >>> mean = {"mean": 0.8, "half": None, "seeds": 1}
        >>> row = {"method": "fedavg", "seeds": 1, "personal": None, "team": None, "global": mean}
        >>> found = finding([row], {("fedavg", "global"): {(0, "a"): 0.9, (0, "b"): 0.7}}, ACCURACY)
        >>> print(found.replace(". ", ".\\n"))
        The global model of fedavg reaches 80.00 % test accuracy, seen with one seed only.
        The worst-off device is b (70.00 %).
    """
    done = [row for row in methods if row["seeds"]]
    entries = [entry for row in done for entry in entries_of(row, values, metric, local, len(done) > 1)]
    if not entries:
        return ""
    entries.sort(key=lambda entry: -metric.sign * entry.found["mean"])
    compared = list({entry.method: entry for entry in reversed(entries)}.values()) if len(done) > 1 else entries
    leader, *others = sorted(compared, key=entries.index)
    others = [other for other in others if pairs_of(leader, other)]
    level = [other for other in others if not is_ahead(leader, other, metric)]
    known = references(entries, [leader, *level], local) if len(done) > 1 else {}
    behind = [other for other in others if other not in level and other not in known.values()]
    first = leading_sentence(leader, level, behind, metric, bool(others) and not level)
    if known:
        alone = [f"{name} reaches {metric.text(entry.found['mean'])}" for name, entry in known.items()]
        return f"{first} {sentence(' and '.join(alone))}"
    return first + (worst_off(leader.values, metric) if len(done) == 1 and done[0]["seeds"] == 1 else "")


def entries_of(row: Record, values: Values, metric: MetricInfo, local: str | None, several: bool) -> list[Entry]:
    """The kinds of models of a method; `several`: whether there are other methods."""
    method, found = row["method"], []
    for kind in (kind for kind in KINDS if row[kind] is not None):
        models, mean = f"{kind} model{'s' if kind in MANY else ''}", metric.text(row[kind]["mean"])
        name = f"training alone ({method})" if method == local else f"the {models} of {method}"
        item = f"{method} ({mean})" if kind == JUDGES[0] else f"{method} ({models}, {mean})"
        item = item if several else f"its {models} ({mean})"
        found.append(Entry(method, kind, name, item, row[kind], values.get((method, kind), {})))
    return found


def pairs_of(one: Entry, other: Entry) -> list[tuple[float, float]]:
    """The values of both at each device and seed that they share."""
    return [(value, other.values[where]) for where, value in one.values.items() if where in other.values]


def is_ahead(one: Entry, other: Entry, metric: MetricInfo) -> bool:
    """Whether the paired test separates two kinds of models, and the first one is better on more devices."""
    pairs = pairs_of(one, other)
    gains, p_value = [metric.sign * (a - b) for a, b in pairs], paired_test(pairs)
    return p_value is not None and p_value <= LEVEL and sum(g > 0 for g in gains) > sum(g < 0 for g in gains)


def references(entries: Sequence[Entry], named: Sequence[Entry], local: str | None) -> dict[str, Entry]:
    """Local and the best global model with their names, unless they are among those named already."""
    found = {}
    alone = next((entry for entry in entries if entry.method == local), None)
    if alone is not None and alone not in named:
        found[alone.name] = alone
    shared = next((entry for entry in entries if entry.kind == "global"), None)
    if shared is not None and shared not in named:
        found[f"the best global model ({shared.method})"] = shared
    return found


def leading_sentence(
    leader: Entry, level: Sequence[Entry], behind: Sequence[Entry], metric: MetricInfo, leads: bool
) -> str:
    """Which models have the best mean, and which are level with them or behind."""
    seeds, one = leader.found["seeds"], leader.kind not in MANY or leader.name.startswith("training")
    verb = f"lead{'s' * one} with" if leads else f"reach{'es' * one}"
    text = f"{leader.name} {verb} {interval_text(leader.found, metric)} test {metric.name}"
    text += ", seen with one seed only" if seeds == 1 else f" over {seeds} seeds"
    text += f", level with {enumerated([entry.item for entry in level])}" if level else ""
    return sentence(text + (f", ahead of {enumerated([entry.item for entry in behind])}" if behind else ""))


def worst_off(values: Mapping[tuple[int, str], float], metric: MetricInfo) -> str:
    """The devices with the worst value, as a sentence after another one; "" if all have the same."""
    worst = min(values.values(), key=lambda value: metric.sign * value, default=None)
    names = [name for (_, name), value in values.items() if value == worst]
    if worst is None or len(names) == len(values):
        return ""
    who = f"device is {names[0]}" if len(names) == 1 else f"devices are {enumerated(names)}"
    return f" The worst-off {who} ({metric.text(worst)})."


def of_models(records: Sequence[Record], metric: MetricInfo) -> str:
    """What the figures of runs of several models are means of; of one run, what each model reaches."""
    if not any(record.get("models") for record in records):
        return ""
    text = " Figures are means over all models of a run"
    if len(records) > 1:
        return f"{text}."
    best = {name: next((m[k] for k in JUDGES if m.get(k)), None) for name, m in records[0]["models"].items()}
    each = [f"{name} {metric.text(found[metric.name])}" for name, found in best.items() if found]
    return f"{text}: {', '.join(each)}."


def of_groups(records: Sequence[Record]) -> str:
    """How many groups of clients one run has learned, and whether they are the true ones; "" if it learns none.

    Examples:
        >>> of_groups([{"collaboration": {"groups": 4, "clients": 16, "adjusted_rand_index": 1.0}}])
        ' It learned 4 groups of 16 clients, which are the true ones.'
    """
    found = records[0].get("collaboration") if len(records) == 1 else None
    if not found or "clients" not in found:
        return ""
    text = f"{counted(found['groups'], 'group')} of {counted(found['clients'], 'client')}"
    if (index := found.get("adjusted_rand_index")) is None:
        return f" It learned {text}."
    match = "which are the true ones" if index == 1 else f"adjusted Rand index {index:.2f} with the true ones"
    return f" It learned {text}, {match}."


def enumerated(names: Sequence[str]) -> str:
    """Names as "a, b and c", or "a, b, c and 4 more" if there are more than `NAMED`.

    Examples:
        >>> enumerated(["a", "b"]), enumerated(list("abcdef"))
        ('a and b', 'a, b, c and 3 more')
    """
    shown = list(names[:NAMED]) + ([f"{len(names) - NAMED} more"] if len(names) > NAMED else [])
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:]}."
