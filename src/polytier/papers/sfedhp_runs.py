"""The runs of sFedHP's experiments at both scales, by the method names of the tables."""

from __future__ import annotations

from typing import Any

from polytier.papers.plan import PlannedRun
from polytier.papers.sfedhp_figures import LAMBDAS, Place

ROUNDS, SEEDS = 800, 3
COUNTS = {"mnist": ("200:800", "900:300"), "fashion-mnist": ("200:800", "900:300"), "cifar-10": ("100:400", "450:150")}
DNN, VGG = "dnn:500x200", "vgg:16-M-32-M-64-M-128-M-128-M"
# at the scale "quick": rounds of methods in which a device takes 100 steps per round, and of those with 5 steps
QUICK_ROUNDS = {"mnist": (25, 100), "fashion-mnist": (25, 100), "cifar-10": (5, 20)}
STEPS: dict[str, Any] = {"device_lr": 0.05, "device_steps": 5}
NESTED = ("hier-fedavg", "pfedme", "sfedhp")  # 20 times as many steps per round


def pfedme(pull: float) -> dict[str, Any]:
    """The fields of pFedMe."""
    return {
        **STEPS,
        "local_lr": 0.05,
        "server_lr": 1.0,
        "device_pull": float(pull),
        "local_rounds": 20,
        "weights": "uniform",
    }


def sfedhp(pull: float, gamma: float = 0.0) -> dict[str, Any]:
    """The fields of sFedHP."""
    return {
        **STEPS,
        "team_lr": 0.05,
        "server_lr": 1.0,
        "device_pull": float(pull),
        "team_pull": float(pull),
        "team_rounds": 20,
        "device_sparsity": gamma,
        "team_sparsity": gamma,
        "smoothing": 6e-5,
        "least_nonzeros": 0.2,
        "sparse_rounds": 100,
        "tiny": 1e-6,
        "threshold": 1.0,
        "accuracy": 0.0,
        "solver": "nesterov",
        "weights": "uniform",
    }


# for each row of the tables: the name that is shown, the method, its fields
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fedavg": ("FedAvg", "fedavg", {**STEPS, "weights": "samples"}),
    "hier-fedavg": ("HierFAVG", "hier-fedavg", {**STEPS, "team_rounds": 20, "weights": "samples"}),
    **{
        f"heurfedamp-{alpha}": (
            f"HeurFedAMP, alpha = {alpha}",
            "heurfedamp",
            {**STEPS, "self_weight": alpha, "device_pull": 1.0, "sigma": 10.0},
        )
        for alpha in (0.1, 0.5)
    },
    "fedprox": ("FedProx, lambda = 0.001", "fedprox", {**STEPS, "device_pull": 0.001, "weights": "samples"}),
    "per-fedavg": (
        "Per-FedAvg",
        "per-fedavg",
        {**STEPS, "inner_lr": 0.05, "variant": "first-order", "adapt_steps": 1, "weights": "samples"},
    ),
    **{f"pfedme-{k}": (f"pFedMe, lambda = {k}", "pfedme", pfedme(k)) for k in LAMBDAS},
    "pfedgp": ("pFedGP as read here", "pfedgp", {**STEPS, "noise": 0.1, "inducing": 100, "weights": "samples"}),
    **{f"sfedhp-{k}": (f"sFedHP, lambda = {k}", "sfedhp", sfedhp(k)) for k in LAMBDAS},
}


def run(name: str, quick: bool, rounds: int, **settings: Any) -> PlannedRun:
    """A run with the settings that all experiments share."""
    shared = {"devices": 20, "teams": 4, "team_formation": "random", "batch_size": 20, "rounds": rounds}
    every = max(1, rounds // (10 if quick else 40))
    return PlannedRun(name, {**settings, **shared, "eval_every": every}, 1 if quick else SEEDS)


def table_run(method: str, place: Place, quick: bool, labels: int = 5) -> PlannedRun:
    """The run for a row of Tables II-VII.

    With 5 labels per device, the counts per class are shared by the devices that hold the class. With 2 labels, each
    of the 4 devices that hold a class has these counts, with different images.
    """
    (data, setting), (_, algorithm, fields) = place, METHODS[method]
    nested = algorithm in NESTED
    rounds = QUICK_ROUNDS[data][0 if nested else 1] if quick else ROUNDS
    model = "dnn:30" if quick else VGG if data == "cifar-10" else DNN
    train, test = map(int, COUNTS[data][setting - 1].split(":"))
    holders = 1 if labels == 5 else 2 * labels
    return run(
        f"{method}-{data}-setting-{setting}" + ("" if labels == 5 else f"-{labels}-labels"),
        quick,
        rounds,
        algorithm=algorithm,
        set=fields,
        data=data,
        model=model,
        partition=f"labels:{labels}",
        per_class=f"{holders * train}:{holders * test}",
        split="9:1:0",
    )


def figure_run(name: str, algorithm: str, fields: dict[str, Any], convex: bool, quick: bool) -> PlannedRun:
    """The run of a curve in Figures 2-5, on all of MNIST with 3/4 of it for training."""
    more = {"model": "mclr", "l2": 0.001} if convex else {"model": "dnn:50" if quick else "dnn:100", "codec": "paper"}
    return run(
        f"{name}-mnist-{'mclr' if convex else 'dnn'}",
        quick,
        40 if quick else ROUNDS,
        algorithm=algorithm,
        set=fields,
        data="mnist",
        partition="labels:5",
        split="27:3:10",
        **more,
    )


def figure_sfedhp(pull: float, gamma: float, quick: bool, convex: bool = False) -> PlannedRun:
    """The run of sFedHP in one of Figures 2-5."""
    return figure_run(f"sfedhp-{pull:g}-gamma-{gamma:g}", "sfedhp", sfedhp(pull, gamma), convex, quick)


def figure_others(quick: bool, convex: bool = False) -> tuple[PlannedRun, PlannedRun]:
    """The runs that sFedHP is compared with: pFedMe with the same lambda, and hierarchical FedAvg."""
    return (
        figure_run("pfedme-25", "pfedme", pfedme(25), convex, quick),
        figure_run("hier-fedavg", "hier-fedavg", METHODS["hier-fedavg"][2], convex, quick),
    )
