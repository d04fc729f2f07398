"""Write a method in 30 lines: Ditto over teams, checked and compared.

python examples/own_method.py

Ditto gives every device a personal model that is pulled to the global one. Here it is pulled to its team's instead.
On the command line, from this folder: polytier run own_method:TeamDitto --teams 4
"""

from dataclasses import dataclass

import polytier
from polytier import Algorithm, Step, check_algorithm, parameter


@dataclass(frozen=True)  # its fields are all it has: what lasts is returned or kept, never hidden
class TeamDitto(Algorithm):
    device_lr: Step = parameter(0.5, "eta", "step size of a device", above=0, per="node")
    device_pull: float = parameter(1.0, "lambda", "pull of a device's model to its team's", least=0)
    team_pull: float = parameter(0.03, "gamma", "share of the global model in a team's", least=0, most=1)
    device_steps: int = parameter(10, "s", "steps of a device on either model", least=1)

    def server(self, x, teams):  # x [1, d], the global model
        return teams.solve(x).mean("samples")  # runs team() at every team that takes part

    def team(self, x, devices):  # x [m, d], what each of m teams was sent
        w = devices.memory("model", x)  # what the team kept last time
        w = w + self.team_pull * (x - w)
        w = devices.solve(w).mean("samples")  # runs device() at every device that takes part
        devices.keep(model=w)  # is judged as the team's model
        return w

    def device(self, w, local):  # w [n, d], a row for each of n devices; `local` is the only way to data
        lr, team, own = local.value(self.device_lr), w, local.memory("model", w)
        for _ in range(self.device_steps):
            own = own - lr * (local.grad(own) + self.device_pull * (own - team))
            w = w - lr * local.grad(w)
        local.keep(model=own)  # is judged as the personal model
        return w


if __name__ == "__main__":
    check_algorithm(TeamDitto(device_steps=2))  # tiles, a restart, absent devices, messages as bytes: no bit may change
    print("TeamDitto keeps the contract")

    # four groups of ten devices that name the ten digits differently; teams are the groups
    federation = polytier.build_federation(
        "digits", devices=40, teams=4, team_formation="sequential", partition="clusters-permuted:4,whole=false"
    )
    methods = {
        "Local": polytier.ALGORITHMS["local"](device_lr=0.5, device_steps=20),
        "Ditto": polytier.Ditto(device_lr=0.5, device_steps=10, personal_lr=0.5, personal_steps=10, device_pull=1),
        "TeamDitto": TeamDitto(),
    }
    print("\ntest accuracy in % after 20 rounds of 20 gradients a device")
    for name, method in methods.items():
        last = polytier.train(method, federation, "mclr", rounds=20, eval_every=20).history[-1]
        found = [(kind, last[kind]["test"]["accuracy"]) for kind in ("personal", "team", "global") if kind in last]
        print(f"{name:10}", "  ".join(f"{kind} {100 * accuracy:5.1f}" for kind, accuracy in found))
