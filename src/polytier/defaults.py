"""What a method is set to on the data and models that the papers use, each value with its source.

`polytier run` takes these where neither a flag nor a file says otherwise; on other data the method's own defaults hold.
Rows that were tuned for a number of gradient steps a round are for `polytier compare --steps` of that number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MCLR, DNN, CNN, VGG = ("mclr",), ("dnn",), ("cnn-mnist", "cnn-fmnist"), ("vgg",)
MNISTS = ("mnist", "fashion-mnist")
HALF = "sFedHP, Tables II-VII: 0.1 and 0.5 were tried, 0.5 was better throughout"


@dataclass(frozen=True)
class Row:
    """Fields of some methods on some data and models; `steps`: only if a device takes so many a round."""

    algorithms: tuple[str, ...]
    data: tuple[str, ...]
    models: tuple[str, ...]
    fields: Mapping[str, Any]
    source: str
    steps: int | None = None

    def fits(self, algorithm: str, data: str, model: str, steps: int | None) -> bool:
        """Names may carry arguments, as in dnn:500x200."""
        found = (algorithm, data.partition(":")[0], model.partition(":")[0])
        named = zip(found, (self.algorithms, self.data, self.models), strict=True)
        return all(name in names for name, names in named) and self.steps == steps


TABLE = (
    # PerMFL
    Row(
        ("permfl",), (*MNISTS, "emnist-digits", "synthetic"), (*MCLR, *DNN, *CNN),
        {"device_lr": 0.01, "team_lr": 0.03, "server_lr": 0.6, "device_pull": 0.5, "team_pull": 1.5,
         "device_steps": 20, "team_rounds": 10},
        "PerMFL, Table 2; team_lr: its sweeps",
    ),
    # pFedMT: two layers on synthetic, a CNN on MNIST
    Row(
        ("pfedmt",), ("mnist", "synthetic"), (*MCLR, *DNN, *CNN),
        {"device_lr": 0.01, "team_lr": 0.03, "server_lr": 1.0, "device_steps": 20, "team_rounds": 30},
        "pFedMT, Section 4",
    ),
    Row(("pfedmt",), ("mnist", "synthetic"), MCLR, {"device_pull": 15.0, "team_pull": 0.1}, "pFedMT, Table 1"),
    Row(("pfedmt",), ("synthetic",), DNN, {"device_pull": 15.0, "team_pull": 1.0}, "pFedMT, Table 1"),
    Row(("pfedmt",), ("mnist",), CNN, {"device_pull": 3.0, "team_pull": 1.0}, "pFedMT, Table 1"),
    *(
        row
        for data, models, beta in (
            (("mnist", "synthetic"), MCLR, 0.5), (("synthetic",), DNN, 0.5), (("mnist",), CNN, 0.4),
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
            (("mnist",), DNN, 20.0), (("fashion-mnist",), DNN, 25.0), (("cifar-10",), VGG, 30.0),
        )
        for row in (
            Row(
                ("fedavg", "hier-fedavg", "fedprox", "per-fedavg", "pfedgp", "heurfedamp"), data, models,
                {"device_lr": 0.05, "device_steps": 5}, "sFedHP, Tables II-VII",
            ),
            Row(("fedprox",), data, models, {"device_pull": 0.001}, "sFedHP, Tables II-VII"),
            Row(("heurfedamp",), data, models, {"self_weight": 0.5}, HALF),
            Row(
                ("pfedme",), data, models,
                {"device_lr": 0.05, "local_lr": 0.05, "device_steps": 5, "device_pull": pull},
                "sFedHP, Tables II-VII: the pull of the best personal model, setting 2",
            ),
            Row(
                ("sfedhp",), data, models,
                {"device_lr": 0.05, "team_lr": 0.05, "device_steps": 5, "team_rounds": 20, "server_lr": 1.0,
                 "device_pull": 20.0, "team_pull": 20.0},
                "sFedHP, Table I and Section V",
            ),
        )
    ),
    # CoBo
    Row(
        ("cobo", "local", "fedavg", "fedavg-ft", "ifca", "oracle"), ("cifar-100",), ("resnet9",), {"device_lr": 0.01},
        "CoBo, Appendix B",
    ),
    Row(
        ("ditto",), ("cifar-100",), ("resnet9",), {"device_lr": 0.1, "personal_lr": 0.1, "device_pull": 1.0},
        "CoBo, Appendix B",
    ),
    Row(("fc",), ("cifar-100",), ("resnet9",), {"device_lr": 0.05}, "CoBo, Appendix B"),
)  # fmt: skip


def settings(algorithm: str, data: str, model: str, steps: int | None = None) -> dict[str, tuple[Any, str]]:
    """Value and source of each field that the table has something to say about; `steps`: for that number alone."""
    rows = [row for row in TABLE if row.fits(algorithm, data, model, steps)]
    return {name: (value, row.source) for row in rows for name, value in row.fields.items()}
