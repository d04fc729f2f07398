"""The methods, one file each, and their names on the command line.

The documentation of each method gives the paper, the objective, a table of its symbols, and what differs from the
paper. Conventions in these tables:

- f_i is the objective of device i: the mean loss over its training samples plus the l2 term; in deeper trees f_ij is
  that of device j of team i.
- n, m and d are the numbers of devices, teams and parameters; [n, d] are n models, one row per device.
- "kept as NAME" are rows that nodes keep from round to round; "model" is the one that is evaluated.
- "state" is what the server keeps; it is stored in checkpoints.
- A step size "one number, or one per device" is `Step`: a number, a schedule such as 3/(60+t), or a list.

>>> from polytier import ALGORITHMS
>>> ALGORITHMS["fedavg"](device_steps=2).device_steps  # the classes by their names on the command line
2
"""

from polytier.algorithms.al2gd import AL2GD
from polytier.algorithms.apfl import APFL
from polytier.algorithms.cobo import CoBo
from polytier.algorithms.demlearn import DemLearn
from polytier.algorithms.ditto import Ditto
from polytier.algorithms.fc import FC
from polytier.algorithms.fedamp import FedAMP, HeurFedAMP
from polytier.algorithms.fedavg import FedAvg
from polytier.algorithms.fedavg_ft import FedAvgFT
from polytier.algorithms.fedbn import FedBN
from polytier.algorithms.fedopt import FedOpt
from polytier.algorithms.fedprox import FedProx
from polytier.algorithms.fedrep import FedRep
from polytier.algorithms.hier_fedavg import HierFedAvg
from polytier.algorithms.ifca import IFCA
from polytier.algorithms.local import LocalTraining
from polytier.algorithms.multimodel import MFARR, MFARand
from polytier.algorithms.oracle import Oracle
from polytier.algorithms.per_fedavg import PerFedAvg
from polytier.algorithms.permfl import PerMFL
from polytier.algorithms.pfedbayes import PFedBayes
from polytier.algorithms.pfedgp import PFedGP
from polytier.algorithms.pfedme import PFedMe
from polytier.algorithms.pfedmt import PFedMT
from polytier.algorithms.scaffold import SCAFFOLD
from polytier.algorithms.sfedhp import SFedHP
from polytier.algorithms.validation import ValidationWeights
from polytier.method.algorithm import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {
    "permfl": PerMFL,
    "pfedmt": PFedMT,
    "sfedhp": SFedHP,
    "mfa-rand": MFARand,
    "mfa-rr": MFARR,
    "cobo": CoBo,
    "local": LocalTraining,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedprox": FedProx,
    "hier-fedavg": HierFedAvg,
    "pfedme": PFedMe,
    "per-fedavg": PerFedAvg,
    "pfedbayes": PFedBayes,
    "pfedgp": PFedGP,
    "ditto": Ditto,
    "al2gd": AL2GD,
    "demlearn": DemLearn,
    "fedamp": FedAMP,
    "heurfedamp": HeurFedAMP,
    "ifca": IFCA,
    "fc": FC,
    "validation": ValidationWeights,
    "oracle": Oracle,
    "scaffold": SCAFFOLD,
    "apfl": APFL,
    "fedrep": FedRep,
    "fedopt": FedOpt,
    "fedbn": FedBN,
}

__all__ = [
    "AL2GD",
    "ALGORITHMS",
    "APFL",
    "FC",
    "IFCA",
    "MFARR",
    "SCAFFOLD",
    "CoBo",
    "DemLearn",
    "Ditto",
    "FedAMP",
    "FedAvg",
    "FedAvgFT",
    "FedBN",
    "FedOpt",
    "FedProx",
    "FedRep",
    "HeurFedAMP",
    "HierFedAvg",
    "LocalTraining",
    "MFARand",
    "Oracle",
    "PFedBayes",
    "PFedGP",
    "PFedMT",
    "PFedMe",
    "PerFedAvg",
    "PerMFL",
    "SFedHP",
    "ValidationWeights",
]
