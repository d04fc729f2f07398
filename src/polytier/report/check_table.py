"""The report that `polytier check` prints: constants, conditions of a theorem, predictions, verdict."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from polytier.report.tables import line, table

HOLDS = {True: "holds", False: "BROKEN", None: "not checked"}


def print_check(console: Console, found: dict[str, Any]) -> None:
    """Print the report about one model; `found` is its `as_dict()`."""
    name = f"{found['model']}: " if found["model"] else ""
    line(console, f"{name}{found['method']}: {found['theory']}", style="bold")
    if found["curvature"] is not None:
        c = found["curvature"]
        low, high = c["range"]
        told = f"mu {c['mu']:.4g}, smoothness {c['smoothness']:.4g} (devices {low:.4g} to {high:.4g})"
        line(console, f"curvature, {c['kind']}: {told}; {c['how']}")
    line(console, "values: " + ", ".join(f"{k} = {known(v)}" for k, v in found["letters"].items()))
    console.print()
    rows = [
        (c["where"], c["formula"], number(c["value"]), c["allowed"], state(c), c["note"]) for c in found["conditions"]
    ]
    console.print(table(("condition of", "formula", "value", "allowed", "", ""), rows))
    rows = [(p["where"], p["what"], p["formula"], promised(p), p["note"]) for p in found["predictions"]]
    if rows:
        console.print()
        console.print(table(("if all hold", "what", "formula", "value", ""), rows))
    console.print()
    counts = [sum(c["holds"] is holds for c in found["conditions"]) for holds in (False, None)]
    line(console, f"{counts[0]} of {len(found['conditions'])} conditions broken, {counts[1]} not checked")
    line(console, f"{found['verdict']}: {found['why']}")
    if found["measured"] is not None:
        print_measured(console, found["measured"])
    console.print()


def print_measured(console: Console, m: dict[str, Any]) -> None:
    """Print the measured values of a report."""
    if m["stopped"]:
        line(console, f"measured: {m['stopped']}")
    for kind, (first, last) in m["loss"].items():
        line(console, f"measured: training loss of the {kind} model {first:.4g} -> {last:.4g} in {m['rounds']} rounds")
    if m["what"] is None:
        return
    told = f"measured: {m['what']} {m['first']:.4g} -> {m['last']:.4g}, a factor of {number(m['factor'])} per round"
    if "bound" in m:
        kept = "never above" if m["keeps"] else f"up to {m['worst']:.3g} times"
        told += f"; {kept} the bound of {m['where']}, which is {m['bound'][-1]:.4g} at the end"
    line(console, told)


def number(value: float | None) -> str:
    """The number as text; empty if there is none."""
    return "" if value is None else f"{value:.4g}"


def known(value: float | None) -> str:
    """The value of a letter as text; JSON has None for infinity."""
    return "infinite" if value is None else f"{value:.6g}"


def state(condition: dict[str, Any]) -> str:
    """Whether a condition holds, and the letters that were not given."""
    missing = f": {', '.join(condition['missing'])} not given" if condition["missing"] else ""
    return HOLDS[condition["holds"]] + missing


def promised(prediction: dict[str, Any]) -> str:
    """The predicted value, or the letters that were not given."""
    if prediction["missing"]:
        return f"not known: {', '.join(prediction['missing'])} not given"
    return f"{prediction['value']:.6g}"
