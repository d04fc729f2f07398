"""The values that sFedHP's paper reports: test accuracies in percent."""

from __future__ import annotations

LAMBDAS = (5, 15, 20, 25, 30)
Pair = tuple[float | None, float | None]  # accuracy of the personal models, and of the global model
Place = tuple[str, int]  # data, setting


def table(
    plain: tuple[float, float, float],
    attentive: tuple[float, float],
    per_fedavg: float,
    pfedgp: float,
    pfedme: tuple[tuple[float, ...], tuple[float, ...]],
    sfedhp: tuple[tuple[float, ...], tuple[float, ...]],
) -> dict[str, Pair]:
    """One of Tables II-VII: (personal, global) by method, in the table's order.

    plain          | the global models of FedAvg, HierFAVG and FedProx
    attentive      | HeurFedAMP with alpha 0.1 and 0.5
    pfedme, sfedhp | for each lambda the personal models, then the global ones
    """
    fedavg, hier, prox = plain
    return {
        "fedavg": (None, fedavg),
        "hier-fedavg": (None, hier),
        "heurfedamp-0.1": (attentive[0], None),
        "heurfedamp-0.5": (attentive[1], None),
        "fedprox": (None, prox),
        "per-fedavg": (per_fedavg, None),
        **{f"pfedme-{k}": (own, shared) for k, own, shared in zip(LAMBDAS, *pfedme, strict=True)},
        "pfedgp": (pfedgp, None),
        **{f"sfedhp-{k}": (own, shared) for k, own, shared in zip(LAMBDAS, *sfedhp, strict=True)},
    }


TABLES: dict[Place, dict[str, Pair]] = {
    ("mnist", 1): table(
        (91.63, 93.22, 93.43),
        (97.11, 98.55),
        56.5,
        98.12,
        ((98.8, 98.92, 98.91, 97.6, 52.07), (88.83, 89.34, 89.06, 80.12, 10.41)),
        ((98.24, 96.55, 97.83, 96.63, 96.23), (93.06, 91.85, 94.93, 95.39, 95.63)),
    ),
    ("mnist", 2): table(
        (94.31, 95.05, 90.04),
        (97.65, 98.8),
        78.15,
        99.18,
        ((99.17, 99.38, 99.39, 98.72, 52.08), (91.14, 91.60, 93.04, 89.47, 10.53)),
        ((99.01, 98.04, 99.08, 98.63, 98.32), (94.69, 94.06, 97.66, 97.87, 97.94)),
    ),
    ("fashion-mnist", 1): table(
        (79.11, 83.55, 78.67),
        (95.00, 98.28),
        96.95,
        98.88,
        ((98.84, 98.80, 98.81, 98.90, 98.94), (79.76, 80.22, 79.66, 80.19, 80.57)),
        ((98.55, 97.61, 98.42, 95.86, 91.94), (84.01, 82.75, 85.64, 86.51, 86.86)),
    ),
    ("fashion-mnist", 2): table(
        (84.48, 85.48, 84.33),
        (97.43, 98.97),
        96.47,
        99.20,
        ((99.12, 99.14, 99.14, 99.17, 99.16), (82.21, 82.18, 84.42, 85.14, 84.74)),
        ((98.93, 98.5, 98.98, 96.73, 93.35), (85.73, 83.7, 89.29, 89.47, 89.05)),
    ),
    ("cifar-10", 1): table(
        (42.36, 52.76, 39.10),
        (71.36, 82.26),
        77.20,
        85.14,
        ((85.46, 85.45, 87.33, 88.36, 88.45), (34.75, 43.26, 48.25, 52.39, 58.66)),
        ((78.00, 75.53, 83.95, 76.98, 76.24), (47.91, 68.48, 78.44, 65.83, 66.39)),
    ),
    ("cifar-10", 2): table(
        (81.74, 87.28, 72.98),
        (83.51, 88.13),
        84.92,
        85.98,
        ((89.22, 90.08, 92.08, 93.17, 93.40), (51.70, 62.06, 71.77, 86.95, 90.31)),
        ((88.44, 88.86, 92.39, 93.16, 93.98), (83.17, 87.62, 92.42, 93.27, 94.09)),
    ),
}

# Table I repeats the global accuracies of Tables II-VII and adds their deviations; sFedHP is the last one
TABLE_I: dict[Place, dict[str, float]] = {
    ("mnist", 1): {"fedavg": 0.12, "hier-fedavg": 0.03, "fedprox": 0.15, "pfedme-15": 0.04, "sfedhp-20": 0.03},
    ("mnist", 2): {"fedavg": 0.08, "hier-fedavg": 0.07, "fedprox": 0.08, "pfedme-20": 0.14, "sfedhp-20": 0.06},
    ("fashion-mnist", 1): {"fedavg": 0.09, "hier-fedavg": 0.15, "fedprox": 0.04, "pfedme-30": 0.07, "sfedhp-20": 0.04},
    ("fashion-mnist", 2): {"fedavg": 0.06, "hier-fedavg": 0.08, "fedprox": 0.10, "pfedme-25": 0.11, "sfedhp-20": 0.05},
    ("cifar-10", 1): {"fedavg": 0.19, "hier-fedavg": 0.21, "fedprox": 0.23, "pfedme-30": 0.15, "sfedhp-20": 0.08},
    ("cifar-10", 2): {"fedavg": 0.17, "hier-fedavg": 0.13, "fedprox": 0.35, "pfedme-30": 0.22, "sfedhp-30": 0.10},
}
# "by more than ... %": the lead of sFedHP's global model according to the text about Table I
AHEAD: dict[Place, float] = dict(zip(TABLES, (1, 2, 2, 3, 19, 3), strict=True))
NONZEROS, SAVED = 20.0, 80.0  # Figure 3, in percent: target share of non-zeros; bytes saved compared with pFedMe
