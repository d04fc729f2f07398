"""Default fields of methods for the data and models that the papers use and for bundled data, each with its source.

`polytier run` uses these values if neither a flag nor a file sets the field. For other data the defaults of the method
apply. Rows tuned for a number of gradient steps per round apply only to `polytier compare --steps` with that number.
Where the table gives pulls but no steps of teams and of the server, these follow from the pulls (`exact_steps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MCLR, DNN, CNN, VGG = ("mclr",), ("dnn",), ("cnn-mnist", "cnn-fmnist"), ("vgg",)
MNISTS = ("mnist", "fashion-mnist")
HERE = "tuned here by `polytier tune`; how: docs/methods.md"
CHOSEN = "chosen here, not searched for"
DEMO = "tuned here by benchmarks/demo.py"
BUNDLED = "tuned here by benchmarks/bundled_defaults.py"
SHARED_OUT = "chosen here on validation data: see docs/methods.md"
HALF = "sFedHP, Tables II-VII: 0.1 and 0.5 were tried, 0.5 was better throughout"


@dataclass(frozen=True)
class Row:
    """Fields of some methods for some data and models; if `steps` is set, only for that many steps per round."""

    algorithms: tuple[str, ...]
    data: tuple[str, ...]
    models: tuple[str, ...]
    fields: Mapping[str, Any]
    source: str
    steps: int | None = None

    def fits(self, algorithm: str, data: str, model: str, steps: int | None) -> bool:
        """Whether the row applies. Names may have arguments, as in dnn:500x200."""
        found = (algorithm, data.partition(":")[0], model.partition(":")[0])
        named = zip(found, (self.algorithms, self.data, self.models), strict=True)
        return all(name in names for name, names in named) and self.steps == steps


# 40 devices with 2 labels each, mini-batches of 32, 100 rounds of 20 gradients per device
TUNED = {
    "permfl": {
        "device_lr": 0.12,
        "team_lr": 0.82,
        "server_lr": 0.33,
        "device_pull": 0.31,
        "team_pull": 1.4,
        "device_steps": 20,
        "team_rounds": 1,
    },
    "pfedmt": {"device_lr": 0.09, "team_lr": 0.39, "device_pull": 0.36, "team_pull": 0.41},
    "sfedhp": {"device_lr": 0.03, "team_lr": 0.082, "device_pull": 2.9, "team_pull": 7.3},
    "al2gd": {"device_lr": 0.05, "device_pull": 0.017, "server_pull": 0.01, "steps": 25},
    "local": {"device_lr": 0.034},
    "fedavg": {"device_lr": 0.44},
    "fedprox": {"device_lr": 0.054, "device_pull": 0.01},
    "scaffold": {"device_lr": 0.44},
    "hier-fedavg": {"device_lr": 0.44, "device_steps": 5, "team_rounds": 4},
    "fedavg-ft": {"device_lr": 0.027, "tune_lr": 0.2},
    "pfedme": {"device_lr": 0.086, "local_lr": 0.035, "server_lr": 0.5, "device_pull": 4.6},
    "per-fedavg": {"device_lr": 0.027, "inner_lr": 0.36},
    "pfedbayes": {"device_lr": 0.04, "global_lr": 0.092, "zeta": 0.017},
    "pfedgp": {"device_lr": 0.021, "noise": 0.06},
    "ditto": {"device_lr": 0.021, "personal_lr": 0.018, "device_pull": 0.019},
    "apfl": {"device_lr": 0.091, "alpha": 0.5},
    "fedamp": {"device_lr": 0.021, "device_pull": 0.092, "attention_lr": 0.017, "sigma": 0.17},
    "heurfedamp": {"device_lr": 0.04, "device_pull": 0.015, "self_weight": 0.1, "sigma": 29.0},
    "ifca": {"device_lr": 0.054, "num_clusters": 4},
    "validation": {"device_lr": 0.27, "temperature": 0.053, "candidates": 4},
    "demlearn": {"device_lr": 0.27, "device_pull": 0.0034, "mix": 0.95},
}

# the bundled digits: 40 devices with 2 labels each, 4 teams
DIGITS = {
    "permfl": {"device_lr": 0.54, "device_pull": 0.014, "team_pull": 0.012},
    "sfedhp": {"device_lr": 0.56, "server_lr": 1.8, "device_pull": 0.078, "team_pull": 0.033},
    "al2gd": {"device_lr": 0.18, "device_pull": 0.42, "server_pull": 0.13},
    "local": {"device_lr": 0.086},
    "fedavg": {"device_lr": 2.5},
    "fedprox": {"device_lr": 1.1, "device_pull": 0.0007},
    "scaffold": {"device_lr": 1.0, "server_lr": 1.4},
    "fedopt": {"device_lr": 0.18, "server_lr": 0.099},
    "hier-fedavg": {"device_lr": 5.4},
    "fedavg-ft": {"device_lr": 0.56, "tune_lr": 0.79},
    "pfedme": {"device_lr": 0.55, "local_lr": 0.55, "device_pull": 1.8},
    "per-fedavg": {"device_lr": 0.55, "inner_lr": 0.55},
    "ditto": {"device_lr": 0.18, "personal_lr": 0.64, "device_pull": 0.061},
    "apfl": {"device_lr": 0.086},
    "fedrep": {"device_lr": 0.18},
    "fedamp": {"device_lr": 0.18, "device_pull": 1.2, "attention_lr": 0.034},
    "heurfedamp": {"device_lr": 0.41, "device_pull": 0.1},
    "ifca": {"device_lr": 5.0},
    "demlearn": {"device_lr": 4.7, "device_pull": 0.006},
    "oracle": {"device_lr": 2.9},
    "pfedgp": {"device_lr": 0.18},
    "validation": {"device_lr": 0.55},
    "cobo": {"device_lr": 0.2, "device_pull": 0.0096, "weight_lr": 8.1},
    "fc": {"device_lr": 1.2},
    "pfedbayes": {"device_lr": 0.35, "global_lr": 1.8, "server_lr": 1.6},
}

# the bundled digits at four sites: 60 devices
SITES = {
    "local": {"device_lr": 0.46},
    "fedavg": {"device_lr": 0.61},
    "fedavg-ft": {"device_lr": 1.3, "tune_lr": 3.4},
    "hier-fedavg": {"device_lr": 0.19},
    "ditto": {"device_lr": 0.28, "personal_lr": 1.0, "device_pull": 0.023},
    "permfl": {"device_lr": 0.88, "device_pull": 0.029, "team_pull": 0.0016},
}

# how 20 gradients per round are shared out: a round with 100 gradients counts as five
DIGITS_STEPS = {
    "permfl": {"device_steps": 20, "team_rounds": 5},
    "sfedhp": {"device_steps": 5, "team_rounds": 20},
    "pfedme": {"device_steps": 5, "local_rounds": 20},
    "hier-fedavg": {"device_steps": 5, "team_rounds": 4},
}
SITES_STEPS = {
    "permfl": {"device_steps": 20, "team_rounds": 10},
    "hier-fedavg": {"device_steps": 20, "team_rounds": 25},
}

TABLE = (
    # PerMFL
    Row(
        ("permfl",),
        (*MNISTS, "emnist-digits", "synthetic"),
        (*MCLR, *DNN, *CNN),
        {
            "device_lr": 0.01,
            "team_lr": 0.03,
            "server_lr": 0.6,
            "device_pull": 0.5,
            "team_pull": 1.5,
            "device_steps": 20,
            "team_rounds": 10,
        },
        "PerMFL, Table 2; team_lr: its sweeps",
    ),
    # pFedMT: two layers on synthetic, a CNN on MNIST
    Row(
        ("pfedmt",),
        ("mnist", "synthetic"),
        (*MCLR, *DNN, *CNN),
        {"device_lr": 0.01, "team_lr": 0.03, "server_lr": 1.0, "device_steps": 20, "team_rounds": 30},
        "pFedMT, Section 4",
    ),
    Row(("pfedmt",), ("mnist", "synthetic"), MCLR, {"device_pull": 15.0, "team_pull": 0.1}, "pFedMT, Table 1"),
    Row(("pfedmt",), ("synthetic",), DNN, {"device_pull": 15.0, "team_pull": 1.0}, "pFedMT, Table 1"),
    Row(("pfedmt",), ("mnist",), CNN, {"device_pull": 3.0, "team_pull": 1.0}, "pFedMT, Table 1"),
    *(
        row
        for data, models, beta in (
            (("mnist", "synthetic"), MCLR, 0.5),
            (("synthetic",), DNN, 0.5),
            (("mnist",), CNN, 0.4),
        )
        for row in (
            Row(("fedavg", "per-fedavg", "pfedme"), data, models, {"device_lr": 0.01}, "pFedMT, Section 4"),
            Row(("pfedme",), data, models, {"device_pull": 15.0, "server_lr": beta}, "pFedMT, Table 1"),
        )
    ),
    # sFedHP: DNN on MNIST and Fashion-MNIST, VGG on CIFAR-10
    *(
        row
        for data, models, pull in (
            (("mnist",), DNN, 20.0),
            (("fashion-mnist",), DNN, 25.0),
            (("cifar-10",), VGG, 30.0),
        )
        for row in (
            Row(
                ("fedavg", "hier-fedavg", "fedprox", "per-fedavg", "pfedgp", "heurfedamp"),
                data,
                models,
                {"device_lr": 0.05, "device_steps": 5},
                "sFedHP, Tables II-VII",
            ),
            Row(("fedprox",), data, models, {"device_pull": 0.001}, "sFedHP, Tables II-VII"),
            Row(("heurfedamp",), data, models, {"self_weight": 0.5}, HALF),
            Row(
                ("pfedme",),
                data,
                models,
                {"device_lr": 0.05, "local_lr": 0.05, "device_steps": 5, "device_pull": pull},
                "sFedHP, Tables II-VII: the pull of the best personal model, setting 2",
            ),
            Row(
                ("sfedhp",),
                data,
                models,
                {
                    "device_lr": 0.05,
                    "team_lr": 0.05,
                    "device_steps": 5,
                    "team_rounds": 20,
                    "server_lr": 1.0,
                    "device_pull": 20.0,
                    "team_pull": 20.0,
                },
                "sFedHP, Table I and Section V",
            ),
        )
    ),
    # CoBo
    Row(
        ("cobo", "local", "fedavg", "fedavg-ft", "ifca", "oracle"),
        ("cifar-100",),
        ("resnet9",),
        {"device_lr": 0.01},
        "CoBo, Appendix B",
    ),
    Row(
        ("ditto",),
        ("cifar-100",),
        ("resnet9",),
        {"device_lr": 0.1, "personal_lr": 0.1, "device_pull": 1.0},
        "CoBo, Appendix B",
    ),
    Row(("fc",), ("cifar-100",), ("resnet9",), {"device_lr": 0.05}, "CoBo, Appendix B"),
    # bundled data
    *(Row((name,), ("digits",), MCLR, fields, BUNDLED) for name, fields in DIGITS.items()),
    Row(("pfedmt",), ("digits",), MCLR, DIGITS["permfl"], "as permfl, whose means have other weights"),
    *(Row((name,), ("digits-sites",), MCLR, fields, DEMO) for name, fields in SITES.items()),
    *(Row((name,), ("digits",), MCLR, fields, SHARED_OUT, steps=20) for name, fields in DIGITS_STEPS.items()),
    *(Row((name,), ("digits-sites",), MCLR, fields, DEMO, steps=20) for name, fields in SITES_STEPS.items()),
    # the comparison on MNIST
    *(Row((name,), ("mnist",), MCLR, fields, HERE, steps=20) for name, fields in TUNED.items()),
    Row(("cobo",), ("mnist",), MCLR, {"device_lr": 0.05, "device_pull": 0.01}, CHOSEN, steps=20),
    Row(("fc",), ("mnist",), MCLR, {"nearest": 4}, CHOSEN, steps=20),
    Row(("fedrep",), ("mnist",), MCLR, {"device_lr": 0.034}, "as local: a model that is all head", steps=20),
)


def settings(algorithm: str, data: str, model: str, steps: int | None = None) -> dict[str, tuple[Any, str]]:
    """Value and source of each field that the table sets; rows with `steps` only if the number is the same."""
    rows = [row for row in TABLE if row.fits(algorithm, data, model, steps)]
    return {name: (value, row.source) for row in rows for name, value in row.fields.items()}
