"""pFedMT: personalised federated multi-tier learning (Banerjee, Yurtsever, Bhuyan).

PerMFL's objective and steps, with means weighted by samples: delta_j within a team, tau_i across teams.

Differs from the paper: its step 12, x <- (1 - beta gamma) x + beta w_bar, contradicts its own Eq. 4,
which has beta gamma w_bar and is what stands here; as printed, x grows by 1 + beta (1 - gamma) a round.
Loops printed 0 .. L are L steps. Symbols and fields are PerMFL's.
"""

from dataclasses import dataclass

from polytier.algorithms.permfl import PerMFL
from polytier.method.parameters import Step, parameter


@dataclass(frozen=True)
class PFedMT(PerMFL):
    server_lr: float = parameter(1.0, "beta", "step size of the server", above=0)
    device_pull: float = parameter(15.0, "lambda", "pull of a device's model to its team's", least=0)
    team_pull: Step = parameter(0.1, "gamma", "pull of a team's model to the server's", least=0, per="tier")
    team_rounds: Step = parameter(30, "K", "rounds of a team in a round of the server", least=1, per="tier")
    weights: str = parameter("samples", "delta, tau", "how models are averaged", choices=("samples", "uniform"))
