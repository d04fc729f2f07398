"""The methods, one file each."""

from polytier.algorithm import Algorithm
from polytier.algorithms.cobo import CoBo
from polytier.algorithms.fedavg import FedAvg
from polytier.algorithms.fedavg_ft import FedAvgFT
from polytier.algorithms.fedprox import FedProx
from polytier.algorithms.hier_fedavg import HierFedAvg
from polytier.algorithms.local import Local
from polytier.algorithms.multimodel import MFARR, MFARand
from polytier.algorithms.permfl import PerMFL
from polytier.algorithms.pfedme import PFedMe
from polytier.algorithms.pfedmt import PFedMT
from polytier.algorithms.sfedhp import SFedHP

ALGORITHMS: dict[str, type[Algorithm]] = {
    "permfl": PerMFL,
    "pfedmt": PFedMT,
    "sfedhp": SFedHP,
    "mfa-rand": MFARand,
    "mfa-rr": MFARR,
    "cobo": CoBo,
    "pfedme": PFedMe,
    "local": Local,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedprox": FedProx,
    "hier-fedavg": HierFedAvg,
}

__all__ = [
    "ALGORITHMS", "MFARR", "CoBo", "FedAvg", "FedAvgFT", "FedProx", "HierFedAvg", "Local", "MFARand", "PFedMT",
    "PFedMe", "PerMFL", "SFedHP",
]  # fmt: skip
