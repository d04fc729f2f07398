"""The methods, one file each."""

from polytier.algorithm import Algorithm
from polytier.algorithms.fedavg import FedAvg
from polytier.algorithms.fedavg_ft import FedAvgFT
from polytier.algorithms.fedprox import FedProx
from polytier.algorithms.hier_fedavg import HierFedAvg
from polytier.algorithms.local import Local
from polytier.algorithms.permfl import PerMFL
from polytier.algorithms.pfedme import PFedMe
from polytier.algorithms.pfedmt import PFedMT

ALGORITHMS: dict[str, type[Algorithm]] = {
    "permfl": PerMFL,
    "pfedmt": PFedMT,
    "pfedme": PFedMe,
    "local": Local,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedprox": FedProx,
    "hier-fedavg": HierFedAvg,
}

__all__ = ["ALGORITHMS", "FedAvg", "FedAvgFT", "FedProx", "HierFedAvg", "Local", "PFedMT", "PFedMe", "PerMFL"]
