"""CoBo finds who has the same task: clients in clusters that name Fashion-MNIST's classes differently.

Each client has --samples training samples and as many test samples of its own. Prints the test accuracy of the clients'
models, as they are after the last round and as the mean over the last quarter of the rounds (with a constant step a
model's accuracy goes up and down by some points from round to round), and how well CoBo's weights show the clusters.
Oracle is FedAvg in every true cluster alone.

    python benchmarks/cobo_clusters.py --data-dir FOLDER [--rounds 2000]
    python benchmarks/cobo_clusters.py --data-dir FOLDER --clients 80 --clusters 10 --lr 0.3 --weight-lr 0.05 \
        --rounds 5000
    python benchmarks/cobo_clusters.py --data-dir FOLDER --clients 80 --clusters 10 --lr 0.3 --weight-lr 0.05 \
        --rounds 1500 --only CoBo Ditto IFCA "fine-tuned FedAvg" Local --out docs/results/cobo_80_fashion.json

With 80 clients in 10 clusters there are 6, 6, 7, 7, 8, 8, 9, 9, 10 and 10 clients in a cluster, as in the paper. A pair
is drawn a tenth as often as with 8, so the weights need longer steps, and more rounds (the paper has 20,000). Steps of
0.1 find the clusters too, but end further below the Oracle. IFCA, which is given the number of clusters, then uses a
tenth of the clients in each round, as in the paper. Ditto has lambda = 1, fine-tuned FedAvg 100 steps of fine-tuning.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from polytier import Callback, FedAvg, Federation, train
from polytier.algorithms import IFCA, Ditto, FedAvgFT, LocalTraining
from polytier.algorithms.cobo import CoBo
from polytier.data.sources import Source
from polytier.data.sources.idx import fashion_mnist
from polytier.files.write import write_text
from polytier.studies.store_runs import origin

PAPER = [6, 6, 7, 7, 8, 8, 9, 9, 10, 10]


def clusters_of(clients: int, clusters: int) -> np.ndarray:
    """[clients] the cluster of each."""
    if (clients, clusters) == (80, 10):
        return np.repeat(np.arange(10), PAPER)
    return np.arange(clients) * clusters // clients


def federation(source: Source, cluster: np.ndarray, samples: int, seed: int) -> Federation:
    """Within a cluster no sample is at two clients; no two clusters give a class the same name."""
    rng = np.random.default_rng(seed)
    each = 2 * samples
    ring = rng.permutation(10)  # the classes in a ring, which a cluster turns by its number
    place = np.argsort(ring)
    index, y = [], []
    for number in np.unique(cluster):
        index.append(rng.permutation(len(source.y))[: each * (cluster == number).sum()])
        y.append(ring[(place[source.y[index[-1]]] + number) % 10])
    split = np.tile(np.repeat([0, 2], [samples, samples]), len(cluster))
    device = np.repeat(np.arange(len(cluster)), each)
    x = source.x[np.concatenate(index)]
    labels = np.concatenate(y)
    return Federation.from_arrays(x, labels, device, split=split, cluster=np.repeat(cluster, each), num_classes=10)


def subset(data: Federation, clients: np.ndarray) -> Federation:
    """Some of the clients alone."""
    spans = [data.bounds[i] for i in clients]
    x, y = (np.concatenate([v[s[0] : s[3]].numpy() for s in spans]) for v in (data.x, data.y))
    split = np.concatenate([np.repeat([0, 2], [int(s[1] - s[0]), int(s[3] - s[2])]) for s in spans])
    device = np.concatenate([np.full(int(s[3] - s[0]), data.ids[i]) for i, s in zip(clients, spans, strict=True)])
    return Federation.from_arrays(x, y, device, split=split, num_classes=10)


class Trail(Callback):
    """Each client's test accuracy, by its own model or by the one for all."""

    def __init__(self) -> None:
        self.values: list[np.ndarray] = []

    def on_round(self, training: Any, record: dict[str, Any]) -> None:
        if kind := next((k for k in ("personal", "global") if k in record), None):
            self.values.append(training.evaluations[""].by_device(kind, "test", "accuracy"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--clusters", type=int, default=4)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=0.1, help="the step of all methods")
    parser.add_argument("--sampling", default="constant")
    parser.add_argument("--weight-lr", default="0.01", help="a number or a schedule A/(B+t)")
    parser.add_argument("--pull", type=float, default=0.05)
    parser.add_argument("--model", default="dnn:100")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="+", default=["Local", "FedAvg", "Oracle", "CoBo"], help="methods, in this order"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results, written after every method")
    options = parser.parse_args()
    cluster = clusters_of(options.clients, options.clusters)
    data = federation(fashion_mnist(options.data_dir), cluster, options.samples, options.seed)
    every = max(1, options.rounds // 40)
    settings = {"rounds": options.rounds, "eval_every": every, "batch_size": 64, "seed": options.seed, "workers": 1}
    step: Any = {"device_lr": options.lr, "device_steps": 1, "weights": "uniform"}
    average = FedAvg(**step)
    weight_lr = options.weight_lr if "/" in options.weight_lr else float(options.weight_lr)
    cobo = CoBo(options.lr, options.pull, weight_lr, sampling=options.sampling)
    learned = {}

    def accuracy(algorithm: Any, some: Federation, share: float = 1.0) -> np.ndarray:
        """[2, clients] after the last round, and the mean over the last quarter; `share` of the clients in a round."""
        trail = Trail()
        run = train(algorithm, some, options.model, callbacks=[trail], device_participation=share, **settings)
        learned.update({r: c.match(cluster) for r, c in run.collaboration.items()})
        return np.stack([trail.values[-1], np.mean(trail.values[-10:], 0)])

    def oracle() -> np.ndarray:
        groups = [np.flatnonzero(cluster == c) for c in np.unique(cluster)]
        return np.concatenate([accuracy(average, subset(data, group)) for group in groups], 1)

    few = 0.1 if options.clients == 80 else 1.0
    works: dict[str, Callable[[], np.ndarray]] = {
        "Local": lambda: accuracy(LocalTraining(options.lr, 1), data),
        "FedAvg": lambda: accuracy(average, data),
        "fine-tuned FedAvg": lambda: accuracy(FedAvgFT(**step, tune_lr=options.lr, tune_steps=100), data),
        "Ditto": lambda: accuracy(Ditto(**step, personal_lr=options.lr, personal_steps=1, device_pull=1.0), data),
        "IFCA": lambda: accuracy(IFCA(**step, num_clusters=options.clusters), data, few),
        "Oracle": oracle,
        "CoBo": lambda: accuracy(cobo, data),
    }
    found: dict[str, dict[str, Any]] = {}
    print(f"{'':18}{'last round':>12}{'last quarter':>14}")
    for name in options.only:
        started = time.process_time()
        last, quarter = 100 * works[name]().mean(1)
        seconds = time.process_time() - started
        found[name] = {"last round": round(last, 2), "last quarter": round(quarter, 2), "seconds": round(seconds)}
        print(f"{name:18}{last:12.2f}{quarter:14.2f}{seconds:8.0f} s", flush=True)
        if options.out is not None:
            given = {key: str(value) for key, value in vars(options).items() if key not in ("data_dir", "out", "only")}
            groups = {number: match["adjusted_rand_index"] for number, match in learned.items()}
            command = "python benchmarks/cobo_clusters.py --data-dir DIR " + " ".join(
                f"--{key.replace('_', '-')} {value}" for key, value in given.items()
            )
            content = {"command": command, **origin(), "methods": found, "adjusted_rand_index": groups}
            write_text(options.out, json.dumps(content, indent=1) + "\n")
    for number, match in learned.items():
        if number == max(learned) or number.bit_count() == 1:
            print(
                f"round {number}: adjusted Rand index {match['adjusted_rand_index']:.3f}, "
                f"contrast {match['contrast']:.3f}, {match['groups']} groups"
            )


if __name__ == "__main__":
    main()
