"""Federated learning with a model for every device, every team of devices and the whole population."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polytier.algorithm import Algorithm, Children, Local
    from polytier.algorithms import (
        AL2GD,
        ALGORITHMS,
        APFL,
        FC,
        IFCA,
        MFARR,
        SCAFFOLD,
        CoBo,
        DemLearn,
        Ditto,
        FedAMP,
        FedAvg,
        FedAvgFT,
        FedProx,
        FedRep,
        HeurFedAMP,
        HierFedAvg,
        MFARand,
        Oracle,
        PerFedAvg,
        PerMFL,
        PFedBayes,
        PFedGP,
        PFedMe,
        PFedMT,
        SFedHP,
        ValidationWeights,
    )
    from polytier.callbacks import MLflow, Progress, RunFolder, TensorBoard
    from polytier.collaboration import Collaboration
    from polytier.contract import check_algorithm
    from polytier.data.build import build_federation
    from polytier.data.federation import Federation
    from polytier.fields import Step, parameter
    from polytier.gain import measure_gain
    from polytier.rows import Rows
    from polytier.run import Run
    from polytier.topology import Topology
    from polytier.training import Callback, Training, train
    from polytier.world import Diverged

__version__ = "0.1.0"

_HOME = {  # imported when asked for: torch takes seconds
    "polytier.algorithm": ("Algorithm", "Children", "Local"),
    "polytier.algorithms": (
        "ALGORITHMS", "AL2GD", "APFL", "CoBo", "DemLearn", "Ditto", "FC", "FedAMP", "FedAvg", "FedAvgFT", "FedProx",
        "FedRep", "HeurFedAMP", "HierFedAvg", "IFCA", "MFARR", "MFARand", "Oracle", "PFedBayes", "PFedGP", "PFedMT",
        "PFedMe", "PerFedAvg",
        "PerMFL", "SCAFFOLD", "SFedHP", "ValidationWeights",
    ),
    "polytier.callbacks": ("MLflow", "Progress", "RunFolder", "TensorBoard"),
    "polytier.collaboration": ("Collaboration",),
    "polytier.contract": ("check_algorithm",),
    "polytier.data.build": ("build_federation",),
    "polytier.data.federation": ("Federation",),
    "polytier.fields": ("Step", "parameter"),
    "polytier.gain": ("measure_gain",),
    "polytier.rows": ("Rows",),
    "polytier.run": ("Run",),
    "polytier.topology": ("Topology",),
    "polytier.training": ("Callback", "Training", "train"),
    "polytier.world": ("Diverged",),
}  # fmt: skip
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AL2GD",
    "ALGORITHMS",
    "APFL",
    "FC",
    "IFCA",
    "MFARR",
    "SCAFFOLD",
    "Algorithm",
    "Callback",
    "Children",
    "CoBo",
    "Collaboration",
    "DemLearn",
    "Ditto",
    "Diverged",
    "FedAMP",
    "FedAvg",
    "FedAvgFT",
    "FedProx",
    "FedRep",
    "Federation",
    "HeurFedAMP",
    "HierFedAvg",
    "Local",
    "MFARand",
    "MLflow",
    "Oracle",
    "PFedBayes", "PFedGP", "PFedMT",
    "PFedMe",
    "PerFedAvg",
    "PerMFL",
    "Progress",
    "Rows",
    "Run",
    "RunFolder",
    "SFedHP",
    "Step",
    "TensorBoard",
    "Topology",
    "Training",
    "ValidationWeights",
    "build_federation",
    "check_algorithm",
    "measure_gain",
    "parameter",
    "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"polytier has no {name!r}")
    return getattr(import_module(_MODULE[name]), name)
