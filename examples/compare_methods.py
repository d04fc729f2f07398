"""Compare methods on an .npz of your own: one split, one protocol, a table.

python examples/compare_methods.py [FOLDER]      where the file goes

The file holds a row a sample: x, y, and the names of its device and its team. The data here are made: 32 machines in
four plants watch 20 sensors and tell three states apart. What the sensors mean differs a lot from plant to plant and a
little from machine to machine, and a machine has only 30 samples to learn from.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import polytier

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
rng = np.random.default_rng(0)
x, y, device, team = [], [], [], []
everywhere = rng.normal(scale=0.5, size=(20, 3))
for plant in ("north", "east", "south", "west"):
    here = everywhere + rng.normal(scale=0.5, size=(20, 3))
    for machine in range(8):
        meaning = here + rng.normal(scale=0.4, size=(20, 3))
        sensors = rng.normal(size=(40, 20))
        x.append(sensors)
        y.append((sensors @ meaning + rng.normal(size=(40, 3))).argmax(1))
        device += 40 * [f"{plant}-{machine}"]
        team += 40 * [plant]
file = folder / "machines.npz"
np.savez(file, x=np.concatenate(x), y=np.concatenate(y), device=device, team=team)

# From here on it is your file. Every method takes 20 gradients a round at every device.
federation = polytier.build_federation(file)
methods = {
    "each machine alone": polytier.ALGORITHMS["local"](device_lr=0.1),
    "one model for all (FedAvg)": polytier.FedAvg(device_lr=0.1),
    "one a plant (hierarchical FedAvg)": polytier.HierFedAvg(device_lr=0.3, device_steps=4, team_rounds=5),
    "one each (PerMFL)": polytier.PerMFL(
        device_lr=0.3, team_lr=1, server_lr=10, device_pull=1, team_pull=0.05, device_steps=4, team_rounds=5
    ),
}
print(f"{len(federation)} machines in {len(np.unique(team))} plants, test accuracy in % after 20 rounds\n")
print(f"{'':34}{'personal':>9}{'team':>9}{'global':>9}")
for name, method in methods.items():
    last = polytier.train(method, federation, "mclr", rounds=20, eval_every=20).history[-1]
    cells = [100 * last[kind]["test"]["accuracy"] if kind in last else None for kind in ("personal", "team", "global")]
    print(f"{name:34}" + "".join(f"{'-' if cell is None else format(cell, '.1f'):>9}" for cell in cells))
print(f"\nwith intervals over seeds: polytier compare local,fedavg,hier-fedavg,permfl --data {file}")
