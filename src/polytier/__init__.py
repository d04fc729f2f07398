"""Federated learning with a model for every device, every team of devices and the whole population."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        FedBN,
        FedOpt,
        FedProx,
        FedRep,
        HeurFedAMP,
        HierFedAvg,
        LocalTraining,
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
    from polytier.data.build import build_federation
    from polytier.data.federation import Federation
    from polytier.data.partition import Assignment
    from polytier.data.population import Population
    from polytier.data.sources import Source
    from polytier.engines.build import make_engine
    from polytier.engines.protocol import Engine
    from polytier.messages.codec import Codec
    from polytier.messages.transforms import Transform
    from polytier.method.algorithm import Algorithm
    from polytier.method.call import Diverged
    from polytier.method.children import Children
    from polytier.method.local_problem import LocalProblem
    from polytier.method.parameters import Step, parameter
    from polytier.models.metrics import Metric
    from polytier.models.trainable import Trainable
    from polytier.runs.assemble import assemble
    from polytier.runs.callbacks import EarlyStopping, Progress, RunFolder
    from polytier.runs.contract import check_algorithm
    from polytier.runs.loop import Callback, Loop, make_loop, train
    from polytier.runs.resume import resume
    from polytier.runs.run import Run
    from polytier.runs.sklearn_classifier import PersonalizedClassifier
    from polytier.runs.spec import RunSpec
    from polytier.runs.trackers import MLflow, TensorBoard, WandB
    from polytier.stack.rows import Rows
    from polytier.studies.gain import measure_gain
    from polytier.tree.collaboration import Collaboration
    from polytier.tree.participation import Participation
    from polytier.tree.topology import Topology

__version__ = "0.2.0"

# Where each public name lives. A module is imported when one of its names is first used: torch takes seconds.
_HOME = {
    "polytier.algorithms": (
        "AL2GD",
        "ALGORITHMS",
        "APFL",
        "CoBo",
        "DemLearn",
        "Ditto",
        "FC",
        "FedAMP",
        "FedAvg",
        "FedAvgFT",
        "FedBN",
        "FedOpt",
        "FedProx",
        "FedRep",
        "HeurFedAMP",
        "HierFedAvg",
        "IFCA",
        "LocalTraining",
        "MFARR",
        "MFARand",
        "Oracle",
        "PFedBayes",
        "PFedGP",
        "PFedMT",
        "PFedMe",
        "PerFedAvg",
        "PerMFL",
        "SCAFFOLD",
        "SFedHP",
        "ValidationWeights",
    ),
    "polytier.data.build": ("build_federation",),
    "polytier.data.federation": ("Federation",),
    "polytier.engines.build": ("make_engine",),
    "polytier.engines.protocol": ("Engine",),
    "polytier.messages.codec": ("Codec",),
    "polytier.messages.transforms": ("Transform",),
    "polytier.data.partition": ("Assignment",),
    "polytier.data.population": ("Population",),
    "polytier.data.sources": ("Source",),
    "polytier.method.algorithm": ("Algorithm",),
    "polytier.method.call": ("Diverged",),
    "polytier.method.children": ("Children",),
    "polytier.method.local_problem": ("LocalProblem",),
    "polytier.method.parameters": (
        "Step",
        "parameter",
    ),
    "polytier.models.metrics": ("Metric",),
    "polytier.models.trainable": ("Trainable",),
    "polytier.runs.callbacks": (
        "EarlyStopping",
        "Progress",
        "RunFolder",
    ),
    "polytier.runs.contract": ("check_algorithm",),
    "polytier.runs.sklearn_classifier": ("PersonalizedClassifier",),
    "polytier.runs.loop": (
        "Callback",
        "Loop",
        "make_loop",
        "train",
    ),
    "polytier.runs.assemble": ("assemble",),
    "polytier.runs.resume": ("resume",),
    "polytier.runs.run": ("Run",),
    "polytier.runs.spec": ("RunSpec",),
    "polytier.runs.trackers": (
        "MLflow",
        "TensorBoard",
        "WandB",
    ),
    "polytier.stack.rows": ("Rows",),
    "polytier.studies.gain": ("measure_gain",),
    "polytier.tree.collaboration": ("Collaboration",),
    "polytier.tree.participation": ("Participation",),
    "polytier.tree.topology": ("Topology",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}
_RENAMED = {
    "Local": "LocalProblem",
    "Training": "make_loop",
}  # names of version 0.1, which work in 0.2 and are gone in 0.3

__all__ = list(_MODULE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        import warnings

        new = _RENAMED[name]
        warnings.warn(f"polytier.{name} is now polytier.{new}", DeprecationWarning, stacklevel=2)
        name = new
    if name not in _MODULE:
        raise AttributeError(f"polytier has no {name!r}")
    return getattr(import_module(_MODULE[name]), name)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
