"""pFedMT: PerMFL with means weighted by samples (Banerjee, Yurtsever, Bhuyan 2022).

Banerjee, Yurtsever, Bhuyan, "Personalized Multi-tier Federated Learning", 2022.

Minimises the objective of PerMFL by its steps, with means weighted by samples: delta_j within a team, tau_i across
teams.

symbol     | field   | shape | meaning
delta, tau | weights |       | how models are averaged

All other symbols and fields are those of PerMFL (permfl.py), with other default values.

Differs from the paper: step 12 as printed, x <- (1 - beta gamma) x + beta w_bar, contradicts Eq. 4, which has
beta gamma w_bar; Eq. 4 is implemented. As printed, x would grow by the factor 1 + beta (1 - gamma) per round. Loops
printed as 0 .. L are L steps.
"""

from dataclasses import dataclass

from polytier.algorithms.permfl import PerMFL
from polytier.method.parameters import Step, parameter


@dataclass(frozen=True)
class PFedMT(PerMFL):
    server_lr: float = parameter(1.0, "beta", "step size of the server", above=0)
    device_pull: float = parameter(15.0, "lambda", "pull of a device's model to its team's", least=0)
    team_pull: Step = parameter(0.1, "gamma", "pull of a team's model to its parent's", least=0, per="tier")
    team_rounds: Step = parameter(30, "K", "team rounds per round of the server", least=1, per="tier")
    weights: str = parameter("samples", "delta, tau", "how models are averaged", choices=("samples", "uniform"))
