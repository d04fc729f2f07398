"""The runs of PerMFL's experiments at both scales, and what the items of its plan share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polytier.papers.permfl_figures import DATA, TABLE1
from polytier.papers.plan import PlannedRun, Row
from polytier.papers.run_values import most_frequent

SOURCES = {
    "MNIST": "mnist:low=-1",
    "FMNIST": "fashion-mnist:low=-1",
    "EMNIST-10": "emnist-digits:low=-1",
    "FEMNIST": "emnist-byclass:low=-1",
    "CIFAR-100": "cifar-100:low=-1",
    "Synthetic": "synthetic:recipe=pfedme",
}
NETWORKS = {"MNIST": "cnn-mnist", "FMNIST": "cnn-fmnist", "EMNIST-10": "cnn-mnist", "Synthetic": "dnn:20"}
DEVICES = {"FEMNIST": 3500, "CIFAR-100": 350}  # Table 3
QUICK_DEVICES = {"FEMNIST": 70, "CIFAR-100": 20}
KINDS = {"PM": "personal", "GM": "global"}
NAMES = {
    "fedavg": "FedAvg",
    "per-fedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "pfedbayes": "pFedBayes",
    "ditto": "Ditto",
    "hier-fedavg": "h-SGD",
    "al2gd": "AL2GD as read here",
    "demlearn": "DemLearn as read here",
    "permfl": "PerMFL",
}

STEP = {"device_lr": 0.01, "device_steps": 20}
FIELDS: dict[str, dict[str, Any]] = {
    "permfl": {**STEP, "team_lr": 0.03, "server_lr": 0.99, "device_pull": 5.0, "team_pull": 5.0, "team_rounds": 10},
    "fedavg": STEP,
    "per-fedavg": {**STEP, "inner_lr": 0.01},
    "pfedme": {
        "device_lr": 0.01,
        "local_lr": 0.01,
        "server_lr": 0.5,
        "device_pull": 15.0,
        "device_steps": 5,
        "local_rounds": 20,
    },
    "pfedbayes": {**STEP, "global_lr": 0.01, "zeta": 1.0},
    "ditto": {**STEP, "personal_lr": 0.01, "personal_steps": 20, "device_pull": 1.0},
    "hier-fedavg": {**STEP, "team_rounds": 10},
    "al2gd": {"device_lr": 0.01, "device_pull": 1.0, "server_pull": 1.0, "p_team": 0.1, "p_server": 0.1, "steps": 20},
    "demlearn": {**STEP, "device_pull": 0.002, "levels": 4},
}
STATED = {"server_lr": 0.6, "device_pull": 0.5, "team_pull": 1.5}  # from Table 2; the paper gives none for Table 1
RIVALS = {  # the methods that the text compares PerMFL's models with
    "PM": ("per-fedavg", "pfedme", "pfedbayes", "al2gd", "demlearn"),
    "GM": ("fedavg", "pfedme", "ditto"),
}
ROUNDS = {"fedavg": 100, "per-fedavg": 100, "pfedme": 100}  # their values are copied from pFedMT's Table 1
USUAL = {
    "devices": 40,
    "teams": 4,
    "partition": "labels:2",
    "team_formation": "random",
    "team_participation": 1.0,
    "device_participation": 1.0,
}
LETTERS = {  # names of varied settings, for names of runs
    "server_lr": "beta",
    "team_pull": "gamma",
    "device_pull": "lambda",
    "team_rounds": "K",
    "teams": "teams",
    "team_participation": "share of teams",
    "device_participation": "share of devices",
    "team_formation": "formed",
}

CODE = "mini-batches of 124 and pixels from -1 to 1 are from the authors' code; MCLR's l2 is not given, 0.001 is used."
DEFAULTS = (
    "The paper gives no settings. The values are those that the authors' code has as defaults: lambda = gamma = "
    "5, beta = 0.99, K = 10, L = 20, alpha = 0.01, eta = 0.03. They are used in the paper's rule; the code itself "
    f"computes another lambda from them (table1-code). T = 400 is from Table 2; {CODE}"
)
CHOSEN = (
    "Settings that the paper does not state are those of Table 2: T = 400, K = 10, L = 20, lambda = 0.5, gamma = "
    f"1.5, beta = 0.6, alpha = 0.01; eta = 0.03 is that of the sweeps; {CODE}"
)
JUDGED = (
    "As in the authors' code, accuracy is computed over all test samples together, in the round that is best "
    "on test samples."
)
LONG = "20 rounds (5 for networks on images)"
NET = "a 784-32-10 network instead of the CNNs"


def make(quick: bool, method: str, data: str, model: str, **changes: Any) -> PlannedRun:
    """A run with "MCLR" or "network" as `model`; its name contains the settings that differ from Table 1."""
    usual = {**USUAL, **FIELDS[method]}
    changes = {k: changes[k] for k in (*LETTERS, "devices", "partition") if k in changes and changes[k] != usual[k]}
    fields = {k: changes.get(k, v) for k, v in FIELDS[method].items()}
    if method == "pfedme" and model_name(data, model) == "CNN":
        fields["server_lr"] = 0.4
    rounds = quick_rounds(data, model, bool(changes)) if quick else ROUNDS.get(method, 400)
    settings = {
        "algorithm": method,
        "data": SOURCES[data],
        "model": model_of(quick, data, model),
        "split": "27:3:10",
        "l2": 0.001 if model == "MCLR" else 0.0,
        "rounds": rounds,
        "batch_size": 32 if quick else 124,
        "eval_every": rounds // (5 if quick else 40) or 1,
        **USUAL,
        **{k: v for k, v in changes.items() if k in USUAL},
        "set": fields,
    }
    if data == "Synthetic":
        del settings["partition"]  # synthetic data are generated for each device
    words = [f"{LETTERS[k]}-{v}".replace(" ", "-") for k, v in changes.items() if k in LETTERS]
    return PlannedRun("-".join([method, data, model, *words]).lower(), settings, 1 if quick else 10)


def quick_rounds(data: str, model: str, changed: bool) -> int:
    """The number of rounds at the scale "quick"; `changed`: the settings differ from Table 1."""
    if data in DEVICES:
        return 2
    if model == "network" and data != "Synthetic":
        return 5
    return 10 if changed else 20


def model_of(quick: bool, data: str, model: str) -> str:
    """The model's name in the settings of `polytier run`."""
    if model == "MCLR":
        return "mclr"
    return "dnn:32" if quick and data != "Synthetic" else NETWORKS[data]


def model_name(data: str, model: str) -> str:
    """The model's name in the paper."""
    return "MCLR" if model == "MCLR" else "DNN" if data == "Synthetic" else "CNN"


def differs(quick: bool, data: str, model: str) -> str:
    """Why a row cannot be compared with the paper; empty if it can."""
    return "a 784-32-10 network, not the CNN" if quick and model == "network" and data != "Synthetic" else ""


def reduced(quick: bool, rounds: str, what: str) -> str:
    """What is smaller at the scale "quick"."""
    return f"{rounds}, mini-batches of 32 instead of 124, 1 seed instead of 10, {what}" if quick else ""


def label_row(place: tuple[str, ...], run: PlannedRun) -> Row:
    """The row of a table on synthetic data that needs no learning; `run` names the data."""
    return Row((*place, "most frequent label of each device"), (run,), most_frequent("pooled"))


def printed(data: str, model: str, kind: str, methods: Sequence[str]) -> dict[str, float]:
    """The values in Table 1 of those methods that it contains."""
    table, column = TABLE1[model], DATA.index(data)
    return {method: table[method, kind][column][0] for method in methods if (method, kind) in table}
