"""PerMFL's Table 1 in other ways: as the authors' code computes it, with 50 devices, and after equal gradients.

The authors' code gives its devices L in the place of lambda, while teams use the lambda that was given. This is the
paper's rule with other numbers: with r = L / lambda, it has lambda r, gamma r, eta / r and beta / r.
"""

from __future__ import annotations

from typing import Any

from polytier.papers.claims import ahead
from polytier.papers.permfl_figures import DATA, TABLE1, UNCERTAIN
from polytier.papers.permfl_runs import JUDGED, KINDS, NAMES, RIVALS, label_row, make, model_name, printed
from polytier.papers.plan import Item, PlannedRun, Row
from polytier.papers.run_values import accuracy_after, pooled

# gradients per device and round; a step of AL2GD is a gradient with a probability of 0.85 on average
GRADIENTS = {
    "fedavg": 20,
    "per-fedavg": 40,
    "pfedme": 100,
    "pfedbayes": 20,
    "ditto": 40,
    "hier-fedavg": 200,
    "al2gd": 17,
    "demlearn": 20,
    "permfl": 200,
}
BUDGET = 2000  # gradients per device: those of FedAvg in 100 rounds
AS_CODED = (
    "The fields of PerMFL that table1 has, as the authors' code computes them: its devices get L = 20 in the place of "
    "lambda = 5, while its teams use 5. That is the paper's rule with lambda = 20, gamma = 20, eta = 0.0075 and beta = "
    "0.2475. MCLR has 62 outputs on images and no l2 term; mini-batches of 124 are not shuffled (the first one of a "
    "call is drawn); samples of a label are given out first come, first served; a quarter of a device's samples is "
    "for the test."
)
FIFTY = (
    "PerMFL's paper states 40 devices. The values of FedAvg, Per-FedAvg and pFedMe on synthetic data are those of "
    "pFedMT's paper, which has 50 (the same generator, 5 teams of 10 here). All else as in table1."
)
EQUAL = (
    f"The runs of Table 1 after {BUDGET:,} gradients per device, in the last evaluated round by then: FedAvg, DemLearn "
    "and pFedBayes in round 100, Per-FedAvg and Ditto in 50, pFedMe in 20, AL2GD in 110, PerMFL and h-SGD in 10. In "
    "Table 1 a device of PerMFL computes 80,000 gradients, and one of FedAvg 2,000."
)


def coded(run: PlannedRun) -> PlannedRun:
    """A run of PerMFL as the authors' code computes it."""
    fields: dict[str, Any] = dict(run.settings["set"])
    ratio = fields["device_steps"] / fields["device_pull"]
    fields |= {"device_pull": fields["device_pull"] * ratio, "team_pull": fields["team_pull"] * ratio}
    fields |= {"team_lr": fields["team_lr"] / ratio, "server_lr": fields["server_lr"] / ratio}
    settings = {**run.settings, "set": fields, "l2": 0.0, "shuffle": False, "split": "3:0:1"}
    if "partition" in settings:
        settings["partition"] = "labels-first-come:2"
        settings["model"] = "mclr:62" if settings["model"] == "mclr" else settings["model"]
    return PlannedRun(f"{run.name}-code", settings, run.seeds)


def table1_code(quick: bool, reduced: str) -> Item:
    """PerMFL's rows of Table 1, as the authors' code computes them."""
    rows = []
    for kind in KINDS:
        for data, (value, deviation) in zip(DATA, TABLE1["MCLR"]["permfl", kind], strict=True):
            run = coded(make(quick, "permfl", data, "MCLR"))
            rows.append(Row((data, f"PerMFL ({kind})"), (run,), pooled(KINDS[kind]), value, deviation))
    rows.append(label_row(("Synthetic",), coded(make(quick, "permfl", "Synthetic", "MCLR"))))
    return Item(
        "table1-code",
        "PerMFL as the authors' code computes it (MCLR)",
        ("data", "method"),
        rows,
        reduced=reduced,
        notes=(AS_CODED, JUDGED),
    )


def table1_50_devices(quick: bool, reduced: str) -> Item:
    """Table 1 on the synthetic data of 50 devices."""

    def run(method: str) -> PlannedRun:
        made = make(quick, method, "Synthetic", "MCLR", devices=50, teams=5)
        return PlannedRun(made.name.replace("teams-5", "50-devices"), made.settings, made.seeds)

    column = DATA.index("Synthetic")
    rows = []
    for (method, kind), figures in TABLE1["MCLR"].items():
        uncertain = "Synthetic" in UNCERTAIN.get(("MCLR", method, kind), ())
        why = "the column is uncertain in the paper's text" if uncertain else ""
        read = pooled(KINDS[kind])
        rows.append(Row((f"{NAMES[method]} ({kind})",), (run(method),), read, *figures[column], why))
    rows.append(label_row((), run("permfl")))
    return Item(
        "table1-50-devices",
        "Table 1 on the synthetic data of 50 devices (MCLR)",
        ("method",),
        rows,
        reduced=reduced,
        notes=(FIFTY, JUDGED),
    )


def table1_equal_steps() -> Item:
    """Table 1 after equal numbers of gradients; at the full scale only."""
    rows, claims = [], []
    for model, table in TABLE1.items():
        for method, kind in table:
            for data in DATA:
                labels = (data, model_name(data, model), f"{NAMES[method]} ({kind})")
                rows.append(Row(labels, (make(False, method, data, model),), after(method, kind)))
        for kind, rivals in RIVALS.items():
            for data in DATA:
                methods = list(printed(data, model, kind, ("permfl", *rivals)))
                whom = ", ".join(NAMES[m] for m in methods[1:])
                text = f"{data}, {model_name(data, model)}: PerMFL's {KINDS[kind]} model is better than {whom}"
                runs = [make(False, m, data, model) for m in methods]
                reads = [after(m, kind) for m in methods]
                claims.append(ahead(text, runs, [NAMES[m] for m in methods], reads))
    return Item(
        "table1-equal-steps",
        f"Table 1 after {BUDGET:,} gradients per device",
        ("data", "model", "method"),
        rows,
        claims=claims,
        notes=(EQUAL,),
    )


def after(method: str, kind: str) -> Any:
    """Reads a method's accuracy when its devices have computed `BUDGET` gradients."""
    return accuracy_after(KINDS[kind], BUDGET // GRADIENTS[method])
