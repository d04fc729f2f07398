"""Learn with whom to collaborate by CoBo, make teams of it, and train PerMFL on them.

python examples/learned_teams.py [FOLDER]      where the run of CoBo goes, with a picture of who listened to whom

16 devices hold digits, but they are of four kinds that name the digits differently, and nobody has told them of which
kind they are. CoBo compares gradients and learns whom to listen to. PerMFL is then trained twice: with teams drawn at
random, and with the teams that CoBo has found.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import polytier

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "cobo"
data = {"data": "digits", "devices": 16, "partition": "clusters-permuted:4,whole=false"}

cobo = polytier.CoBo(device_lr=0.2, weight_lr="20/(50+t)", sampling="all")
federation = polytier.build_federation(**data)
run = polytier.train(cobo, federation, "mclr", rounds=100, eval_every=100)
run.save(folder)
print(f"CoBo, alone and without teams: personal models {100 * run.history[-1]['personal']['test']['accuracy']:.1f} %")
print(f"who listened to whom: {folder}\n")

method = polytier.PerMFL(
    device_lr=0.5, team_lr=10, server_lr=10, device_pull=0.1, team_pull=0.01, device_steps=20, team_rounds=8
)
for name, formation in {"random": "random", "learned": f"learned:{folder}"}.items():
    federation = polytier.build_federation(**data, team_formation=formation)
    last = polytier.train(method, federation, "mclr", rounds=5, eval_every=5).history[-1]
    teams = [federation.cluster[federation.team == team] for team in np.unique(federation.team)]
    accuracy = {kind: 100 * last[kind]["test"]["accuracy"] for kind in ("personal", "team", "global")}
    print(f"{name} teams, by the kinds of their devices: {' | '.join(' '.join(map(str, kinds)) for kinds in teams)}")
    print("  PerMFL's test accuracy:", ", ".join(f"{kind} {value:.1f} %" for kind, value in accuracy.items()))
