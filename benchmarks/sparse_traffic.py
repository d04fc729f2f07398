"""What sparse models save on the link between server and edges, and what they cost in accuracy.

sFedHP, sparse and dense, beside hierarchical FedAvg and pFedMe: MNIST, 20 devices with 5 labels each under 4
edges, a 784-100-10 network (79,510 parameters), lambda = 25, gamma = 0.001, rho = 6e-5, R = 20, K = 5, steps of
0.05, mini-batches of 20. Bytes are of one edge (for pFedMe: one device), the mean over all, down and up, by two
codecs: "paper" (64 bits a non-zero and a bitmap) and "sparse" (32 bits, the shortest form).

    python benchmarks/sparse_traffic.py --data-dir DIR [--rounds 120] [--seed 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polytier import Algorithm, Callback, Federation, HierFedAvg, PFedMe, build_federation
from polytier.algorithms.sfedhp import SFedHP
from polytier.messages.codec import CODECS
from polytier.runs.loop import Loop, make_loop

EVERY = 20  # rounds between two evaluations
METHODS: dict[str, Algorithm] = {
    "sFedHP sparse": SFedHP(),
    "sFedHP dense": SFedHP(device_sparsity=0.0, team_sparsity=0.0),
    "hierarchical FedAvg": HierFedAvg(device_lr=0.05, device_steps=5, team_rounds=20),
    "pFedMe": PFedMe(device_lr=0.05, local_lr=0.05, device_pull=25.0, device_steps=5, local_rounds=20),
}
COLUMNS = {
    "global %": "global",
    "personal %": "personal",
    "non-zeros global %": "nonzeros_global",
    "sent up %": "nonzeros_sent",
    "paper kB": "paper",
    "cumulated MB": "paper_total",
    "sparse kB": "sparse",
    "cumulated MB ": "sparse_total",
}


class Meter(Callback):
    """A dict a round: accuracies, shares of non-zeros, bytes on the server's link."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, Any]] = []
        self.totals = {"paper": 0.0, "sparse": 0.0}

    def on_start(self, training: Loop) -> None:
        self.sent_down = model(training)

    def on_round(self, training: Loop, record: dict[str, Any]) -> None:
        topology, after = training.context.topology, model(training)
        ids = torch.arange(topology.size(1))
        # pFedMe's devices keep no copy of what they send; it has no zeros, nor has the mean of it
        tree = topology.num_tiers > 2
        sent_up = training.context.memory.read(1, "model", ids, after.expand(len(ids), -1)) if tree else after
        row: dict[str, Any] = {
            "round": record["round"],
            "nonzeros_global": share(after),
            "nonzeros_sent": share(sent_up),
        }
        row |= {k: record[k]["test"]["accuracy"] for k in ("global", "personal") if k in record}
        for name in self.totals:
            nbytes = CODECS[name].nbytes
            row[name] = float(nbytes(self.sent_down).double().mean() + nbytes(sent_up).double().mean())
            self.totals[name] += row[name]
            row[f"{name}_total"] = self.totals[name]
        counted = training.ledger.rounds[-1][topology.link(1)]
        assert round(row["paper"] * len(ids)) == sum(counted.values()), (row, counted)
        self.rounds.append(row)
        self.sent_down = after


def model(training: Loop) -> Tensor:
    """[1, d] the global model, which is also what the server sends in the next round."""
    found = training.algorithm.global_model(training.state)
    assert found is not None
    return found.clone()


def share(rows: Tensor) -> float:
    return float((rows != 0).double().mean())


def measure(algorithm: Algorithm, federation: Federation, rounds: int, seed: int) -> list[dict[str, Any]]:
    meter = Meter()
    settings = {"batch_size": 20, "eval_every": EVERY, "codec": "paper"}
    with make_loop(algorithm, federation, "dnn:100", seed=seed, **settings) as training:
        training.run(rounds, [meter])
    return meter.rounds


def show(name: str, rounds: list[dict[str, Any]]) -> None:
    print(f"\n{name}\nround" + "".join(f"{c:>{len(c) + 2}}" for c in COLUMNS))
    for row in rounds:
        if "global" in row:
            cells = ""
            for column, key in COLUMNS.items():
                scale = 1e-6 if key.endswith("_total") else 1e-3 if key in CODECS else 100
                cells += f"{f'{row[key] * scale:.2f}' if key in row else '-':>{len(column) + 2}}"
            print(f"{row['round']:5}{cells}", flush=True)


def compare(sparse: list[dict[str, Any]], dense: list[dict[str, Any]]) -> None:
    """How much less the sparse setting sends, and what it loses."""
    print(
        "\nsparse beside dense\nround  global, points  non-zeros %  "
        + "  ".join(f"{c} bytes saved %  cumulated %" for c in ("paper", "sparse"))
    )
    for a, b in zip(sparse, dense, strict=True):
        if "global" in a:
            line = f"{a['round']:5}{100 * (a['global'] - b['global']):16.2f}{100 * a['nonzeros_global']:13.2f}"
            for codec in ("paper", "sparse"):
                total = f"{codec}_total"
                line += f"{100 * (1 - a[codec] / b[codec]):{len(codec) + 16}.2f}{100 * (1 - a[total] / b[total]):13.2f}"
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every round's figures to this file")
    options = parser.parse_args()
    federation = build_federation(
        "mnist", options.data_dir, devices=20, teams=4, partition="labels:5", seed=options.seed
    )
    found = {}
    for name, algorithm in METHODS.items():
        found[name] = measure(algorithm, federation, options.rounds, options.seed)
        show(name, found[name])
    compare(found["sFedHP sparse"], found["sFedHP dense"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
