"""Three models on one pool of devices: together they need fewer rounds than one after another.

python examples/three_models.py

In every round each device trains one of the models (MFA-RR: in turn), so a round costs a device what it costs with one
model. A model then sees a third of the devices a round, which is nearly as good as all of them, as devices resemble
each other. What is measured: each model alone for T1 rounds, on all devices; then the round of training all three
together in which each is as good as it was then.
"""

from dataclasses import replace

import polytier

digits = polytier.build_federation("digits", devices=30, partition="dirichlet:10")
federations = {
    "digit": digits,
    "odd": replace(digits, y=digits.y % 2, num_classes=2),  # another question about the same images
    "sensors": polytier.build_federation("synthetic:iid=true,max_samples=100", devices=30),
}
models = {"digit": "mclr", "odd": "dnn:32", "sensors": "mclr"}
methods = {name: polytier.FedAvg(device_lr=0.1, device_steps=5) for name in models}


def together(seed: int) -> polytier.Loop:
    return polytier.make_loop(polytier.MFARR(methods), federations, models, seed=seed)


alone = 10
gain = polytier.measure_gain(together, single_rounds=alone, seeds=(0, 1))
for seed, rounds in gain.rounds.items():
    reached = ", ".join(f"{name} {100 * accuracy:.1f} %" for name, accuracy in gain.targets[seed].items())
    print(f"seed {seed}: {reached} take {3 * alone} rounds one after another, {rounds} together")
print(f"gain: {gain.mean:.2f}")
