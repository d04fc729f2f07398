"""Four tiers: devices at sites, sites in regions, regions under one server; a model at every node.

python examples/four_tiers.py

The data are made: what 20 sensors mean differs from region to region, from site to site and from device to device, so
the nearer a model is to a device, the better it fits; but the less data it has seen. PerMFL pulls every model to the
one above it.
"""

import numpy as np

import polytier

rng = np.random.default_rng(0)
x, y, device, site = [], [], [], []
everywhere = rng.normal(scale=0.5, size=(20, 3))
for region in ("north", "south"):
    in_region = everywhere + rng.normal(scale=0.5, size=(20, 3))
    for number in range(4):
        at_site = in_region + rng.normal(scale=0.5, size=(20, 3))
        for machine in range(6):
            meaning = at_site + rng.normal(scale=0.5, size=(20, 3))
            sensors = rng.normal(size=(60, 20))
            x.append(sensors)
            y.append((sensors @ meaning + rng.normal(size=(60, 3))).argmax(1))
            site += 60 * [f"{region}-{number}"]
            device += 60 * [f"{region}-{number}-{machine}"]
federation = polytier.Federation.from_arrays(np.concatenate(x), np.concatenate(y), device=device, team=site)

# the tree from the inside out: the site of every device, then the region of every site in the order of their names
region = [name.split("-")[0] for name in np.unique(site)]
topology = polytier.Topology.build(federation.ids, federation.team, region)

# tiers of teams are called team1 (regions), team2 (sites); a field may differ between them
method = polytier.PerMFL(
    device_lr=0.3,
    device_pull=1,
    device_steps=4,
    team_rounds={"team1": 2, "team2": 4},
    team_lr={"team1": 5, "team2": 1},
    team_pull={"team1": 0.05, "team2": 0.1},
    server_lr=10,
)
run = polytier.train(method, federation, "mclr", rounds=15, eval_every=15, topology=topology)

last = run.history[-1]
print(f"{len(federation)} devices at {len(run.team_ids)} sites in 2 regions; test accuracy in %, mean over devices")
for kind, whose in {"global": "server", "team1": "region", "team": "site", "personal": "device"}.items():
    print(f"  model of the {whose:8} {100 * last[kind]['test']['accuracy']:5.1f}")
print("\nsent in all rounds, down and up, in kB")
for link, ways in run.ledger.total().items():
    print(f"  {link:14} {ways['down'] / 1000:9,.0f} {ways['up'] / 1000:9,.0f}")
