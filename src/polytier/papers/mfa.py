"""Multi-model federated learning (Bhuyan, Moharir, Joshi 2022): Figures 1-7, Tables 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polytier.papers import mfa_values as read
from polytier.papers.plan import Chart, Claim, Curve, Item, PlannedRun, Row
from polytier.papers.run_values import most_frequent

METHODS = {"MFA-Rand": "mfa-rand", "MFA-RR": "mfa-rr"}
STEPS = {"constant": 0.1, "decaying": "30/(100+t)"}
SPLITS = {"train": "training", "test": "test"}

# Section 7.1: devices, devices sampled per round, T_1, and the accuracy of FedAvg alone after T_1: train %, test %
ALONE = {
    ("figure6", "Synthetic(1,1)-A"): (100, None, 70, (51.0, 51.0)),
    ("figure6", "Synthetic(1,1)-B"): (100, None, 70, (42.7, 42.8)),
    ("figure6", "CelebA"): (96, None, 75, (79.0, 68.0)),
    ("figure7", "Synthetic(1,1)-A"): (200, 32, 200, (61.1, 61.3)),
    ("figure7", "Synthetic(1,1)-B"): (200, 32, 200, (58.4, 57.7)),
    ("figure7", "CelebA"): (96, 24, 75, (78.0, 71.5)),
}
# Table 4: train accuracy with T_1 = 50 and T_M = 117, test accuracy with T_1 = 50 and T_M = 126
TABLE_4 = {
    "Eyeglasses": (74.7, 84.6, 69.1, 71.9),
    "Bald": (74.0, 74.5, 66.8, 69.4),
    "Goatee": (74.3, 83.5, 64.7, 68.7),
    "Wearing_Necklace": (73.3, 80.3, 66.2, 72.6),
    "Smiling": (72.0, 78.7, 76.0, 79.7),
    "Mustache": (74.1, 82.1, 65.4, 72.1),
    "Male": (77.1, 85.0, 58.7, 63.5),
    "Wearing_Lipstick": (75.4, 83.8, 65.9, 72.7),
    "Double_Chin": (75.3, 83.9, 63.9, 69.3),
}
# Table 5: the same with T_1 = 100, T_M = 100 (train) and 142 (test)
TABLE_5 = {"Logistic regression": (51.9, 52.4, 52.8, 55.6), "Convolutional NN": (86.7, 87.2, 75.8, 77.5)}
GAINS = {"table4": (9 * 50 / 117, 9 * 50 / 126), "table5": (2 * 100 / 100, 2 * 100 / 142)}

SYNTHETIC = {
    "Synthetic(1,1)-A": "synthetic:alpha=1,beta=1,num_features=60,num_classes=5",
    "Synthetic(1,1)-B": "synthetic:alpha=1,beta=1,num_features=30,num_classes=10",
}
LOCAL = {"device_lr": 0.01, "device_steps": 10, "weights": "samples"}  # not stated in the paper
SHARED = {"teams": 0, "split": "9:0:1", "batch_size": 10}
SILENT = (
    "The paper gives no step size, number of local steps or mini-batch size for its data-driven experiments. Chosen "
    "here: step size 0.01, 10 steps per round, mini-batches of 10, and nine tenths of a device's samples for "
    "training. Accuracies are means over devices in rounds T_1 and T_M, so no round is chosen on validation data."
)
FACES = (
    "The devices of CelebA are persons drawn from identity_CelebA.txt. The network is LEAF's CNN with group norm "
    "instead of batch norm. All 202,599 images are read once for each attribute, which takes 4.3 GB of memory."
)
POOL = (
    "The paper does not state the number of devices; 96 are used. All models must have devices with the same names, "
    "so 3,000 of CelebA's images are distributed to them at random. The network is LEAF's CNN with group norm "
    "instead of batch norm."
)


@dataclass(frozen=True)
class Scale:
    """The sizes of the experiments at one scale.

    seeds    | number of seeds of every run; the paper does not state it
    pairs    | number of seeds of Figures 1 and 2, where the deviation is computed from only two models per run
    rounds   | number of rounds of the strongly convex runs with several models
    single   | T_1 of Figure 5, which the paper does not give
    longest  | the largest T_1 of the data-driven experiments
    patience | training together ends after this multiple of T_1, or after M times T_1 (a gain of 1) if that is less
    every    | number of rounds between evaluations
    coarse   | the same in runs on the strongly convex problem, and where T_1 is 200 rounds
    pixels   | the width of CelebA's images
    models   | the values of M, divisors of the number of participants, by experiment; the paper does not state them
    """

    seeds: int
    pairs: int
    rounds: int
    single: int
    longest: int
    patience: int
    every: int
    coarse: int
    pixels: int
    models: Mapping[str, tuple[int, ...]]


SCALES = {
    "full": Scale(
        10,
        10,
        1000,
        250,
        200,
        6,
        1,
        5,
        84,
        {
            "E = 1": (2, 3, 4, 6, 8, 12),
            "E = 5": (2, 3, 4, 6, 8, 12),
            "E = 10": (2, 3, 4, 6, 8, 12),
            "synthetic": (2, 4, 5, 10, 20),
            "synthetic-partial": (2, 4, 8, 16),
            "celeba": (2, 3, 4, 6, 8, 12),
            "celeba-partial": (2, 3, 4, 6, 8, 12),
        },
    ),
    "quick": Scale(
        1,
        2,
        300,
        100,
        100,
        3,
        5,
        5,
        32,
        {
            "E = 1": (2, 12),
            "E = 5": (2, 4, 12),
            "E = 10": (2, 12),
            "synthetic": (2, 10),
            "synthetic-partial": (2, 8),
            "celeba": (2, 8),
            "celeba-partial": (2, 8),
        },
    ),
}


def items(scale: str) -> list[Item]:
    """The figures and tables of MFA's paper."""
    size, quick = SCALES[scale], scale == "quick"
    return [
        *(
            comparison(number, size, m, step, quick)
            for number, (m, step) in enumerate(
                ((2, "constant"), (2, "decaying"), (12, "constant"), (12, "decaying")), 1
            )
        ),
        convex_gain(size, quick),
        driven_gain("figure6", size, quick),
        driven_gain("figure7", size, quick),
        *table("table4", size, quick),
        *table("table5", size, quick),
    ]


# -- strongly convex (Section 6) ----------------------------------------------------------------------


def convex(size: Scale, method: str, steps: int, step: str = "constant", models: int = 1) -> PlannedRun:
    """A run on the tridiagonal problem, which is the same for all models; a single model is trained by FedAvg."""
    fields = {"device_lr": STEPS[step], "device_steps": steps, "weights": "uniform"}
    settings: dict[str, Any] = {
        "algorithm": method,
        "data": "tridiagonal",
        "model": "quadratic",
        "dtype": "float64",
        "devices": 24,
        "teams": 0,
        "batch_size": 1,
    }
    if models == 1:
        settings |= {"rounds": size.single, "eval_every": size.single, "set": fields}
        return PlannedRun(f"fedavg-tridiagonal-e{steps}", settings, size.seeds)
    settings |= {
        "models": models,
        "rounds": size.rounds,
        "eval_every": size.coarse,
        "set": fields | {"step": "average"},
    }
    seeds = size.pairs if (models, steps) == (2, 5) else size.seeds
    return PlannedRun(f"{method}-tridiagonal-m{models}-e{steps}-{step}", settings, seeds)


def comparison(number: int, size: Scale, models: int, step: str, quick: bool) -> Item:
    """One of Figures 1 to 4: MFA-Rand and MFA-RR on the strongly convex problem."""
    runs = tuple(convex(size, method, 5, step, models) for method in METHODS.values())
    gap = "log10(F - F*)"
    curves = {
        ("mean over the models", gap): read.mean_gap,
        ("deviation between the models", f"deviation of {gap}"): read.spread_of_gaps,
    }
    mean = Claim("The means of the two methods are similar", runs, read.same_mean)
    if models == 12:
        mean = Claim("MFA-RR is better on average", runs, read.rr_lower)
    seeds = {1: "1 seed", 2: "2 seeds"}
    return Item(
        f"figure{number}",
        f"{gap}, M = {models}, {step} step {STEPS[step]}",
        charts=[
            Chart(what, "round", y, [Curve(n, (r,), how) for n, r in zip(METHODS, runs, strict=True)])
            for (what, y), how in curves.items()
        ],
        claims=[
            mean,
            Claim("The models of MFA-Rand differ considerably more than those of MFA-RR", runs, read.rand_varies_more),
        ],
        reduced=f"{size.rounds} rounds instead of 1,000, {seeds[runs[0].seeds]} instead of 10" if quick else "",
        notes=(
            "The paper observes one of the M models and repeats the experiment; it does not state how often. Here "
            "all M models are trained on the same problem, and the deviation is that between the models.",
        ),
    )


def convex_gain(size: Scale, quick: bool) -> Item:
    """Figure 5: the gain on the strongly convex problem."""
    charts, claims = [], []
    for steps in (1, 5, 10):
        curves, single = [], convex(size, "fedavg", steps)
        for name, method in METHODS.items():
            runs = (single, *(convex(size, method, steps, models=m) for m in size.models[f"E = {steps}"]))
            curves.append(Curve(name, runs, read.gain_by_models("train")))
            claims.append(Claim(f"E = {steps}: the gain of {name} grows with M", runs, read.growing("train")))
        charts.append(Chart(f"E = {steps}", "M", "gain", curves))
    return Item(
        "figure5",
        "Gain against M, strongly convex, constant step 0.1",
        charts=charts,
        claims=claims,
        reduced=f"T_1 = {size.single} rounds instead of 250, fewer values of M, evaluation every {size.every} "
        "rounds, 1 seed instead of 10"
        if quick
        else "",
        notes=(
            "The paper does not state the accuracy that must be reached. Here the target is the training loss after "
            f"{size.single} rounds of FedAvg with one model. Only the first device has b != 0, so in early rounds "
            "the gain shows how often that device takes part, whatever E is.",
        ),
    )


# -- data-driven (Section 7) --------------------------------------------------------------------------


def data_of(name: str, size: Scale, attribute: str = "Smiling") -> dict[str, Any]:
    """The settings of a data set; `attribute` is the label of CelebA."""
    if name in SYNTHETIC:
        return {"data": SYNTHETIC[name], "model": "mclr", "partition": "column"}
    data = f"celeba:attributes={attribute},image_size={size.pixels}"
    return {"data": data, "model": "cnn-celeba", "partition": "column"}


def alone(name: str, settings: Mapping[str, Any], size: Scale, single: int) -> PlannedRun:
    """The FedAvg run of one model for `single` rounds."""
    rounds = {"rounds": single, "eval_every": single}
    return PlannedRun(name, {"algorithm": "fedavg", **SHARED, **settings, **rounds, "set": LOCAL}, size.seeds)


def together(name: str, method: str, settings: Mapping[str, Any], models: Any, size: Scale, single: int) -> PlannedRun:
    """A run of several models; `models` is a number of equal models, or the settings of each model by name."""
    several = isinstance(models, int)
    rounds = single * min(models if several else len(models), size.patience)
    fields = {"step": "average", **(LOCAL if several else {})}
    every = size.coarse if single >= 200 else size.every
    more = {"models": models, "rounds": rounds, "eval_every": every, "set": fields}
    return PlannedRun(name, {"algorithm": method, **SHARED, **settings, **more}, size.seeds)


def driven_gain(figure: str, size: Scale, quick: bool) -> Item:
    """Figures 6 and 7: all models have the same task."""
    rows, charts, claims = [], [], []
    for (where, name), (devices, sampled, single, reached) in ALONE.items():
        if where != figure:
            continue
        settings = {**data_of(name, size), "devices": devices}
        settings |= {} if sampled is None else {"device_participation": f"count:{sampled}"}
        kind = ("celeba" if name == "CelebA" else "synthetic") + ("" if sampled is None else "-partial")
        short = kind.replace("synthetic", f"synthetic-{name[-1].lower()}")
        single = min(single, size.longest)
        first = alone(f"fedavg-{short}", settings, size, single)
        small = f"images of {size.pixels} x {size.pixels}" if quick and name == "CelebA" else ""
        for split, paper in zip(SPLITS, reached, strict=True):
            rows.append(Row((name, split), (first,), read.accuracy_alone(split), paper, differs=small))
        if name in SYNTHETIC:
            rows.append(Row((name, "most frequent label of each device"), (first,), most_frequent("mean")))
        curves = []
        for label, method in METHODS.items():
            several = [together(f"{method}-{short}-m{m}", method, settings, m, size, single) for m in size.models[kind]]
            for split in SPLITS:
                runs = (first, *several)
                curves.append(Curve(f"{label}, {split}", runs, read.gain_by_models(split), dashed=split == "train"))
                claims.append(claim_of(figure, f"{name}, {label}, {SPLITS[split]} accuracy", runs, split))
        charts.append(Chart(name, "M", "gain", curves))
    part = "full" if figure == "figure6" else "partial"
    shorter = f"T_1 = {size.longest} rounds instead of 200, " if figure == "figure7" else ""
    return Item(
        figure,
        f"Gain against M with {part} participation, and the accuracy of FedAvg with one model in round T_1",
        ("data", "split"),
        rows,
        charts,
        claims=claims,
        notes=(SILENT, FACES),
        reduced=f"{shorter}fewer values of M, evaluation every {size.every} rounds, 1 seed instead of 10, smaller "
        "CelebA images"
        if quick
        else "",
    )


def claim_of(figure: str, what: str, runs: tuple[PlannedRun, ...], split: str) -> Claim:
    """The claim of Figure 6 or 7 about the gain."""
    if figure == "figure6":
        return Claim(f"{what}: the gain grows with M, but is less than M", runs, read.sublinear(split))
    return Claim(f"{what}: the gain is above 1", runs, read.above_one(split))


def table(name: str, size: Scale, quick: bool) -> list[Item]:
    """Table 4 or 5, models with different tasks trained by MFA-RR: one item for accuracies, one for gains."""
    tasks = faces(size) if name == "table4" else mixed(size)
    figures = TABLE_4 if name == "table4" else TABLE_5
    single, at = (50, (117, 126)) if name == "table4" else (100, (100, 142))
    own = {key: {**settings, "set": LOCAL} for key, settings in tasks.items()}
    settings = {**next(iter(tasks.values())), "devices": 96}  # replaced by the settings of each model
    singles = tuple(
        alone(f"fedavg-{name}-{key.lower()}", {**each, "devices": 96}, size, single) for key, each in tasks.items()
    )
    both = (*singles, together(f"mfa-rr-{name}", "mfa-rr", settings, own, size, single))
    small = f"images of {size.pixels} x {size.pixels}" if quick else ""
    rows = []
    for (label, paper), key, run in zip(figures.items(), tasks, singles, strict=True):
        for k, split in enumerate(SPLITS):
            before, after = paper[2 * k : 2 * k + 2]
            rows.append(Row((label, split, f"T_1 = {single}"), (run,), read.accuracy_alone(split), before, None, small))
            reader = read.accuracy_together(split, key)
            rows.append(Row((label, split, f"T_M = {at[k]}"), both, reader, after, differs=small))
    gains = [
        Row((split,), both, read.gain(split), paper, differs=small)
        for split, paper in zip(SPLITS, GAINS[name], strict=True)
    ]
    reduced = f"CelebA images of {size.pixels} x {size.pixels} pixels, evaluation every {size.every} rounds, 1 seed "
    reduced = f"{reduced}instead of 10" if quick else ""
    title = "MFA-RR trains " + ("nine binary CNNs" if name == "table4" else "a logistic regression and a CNN")
    told = "The labels show the paper's T_M; our accuracies are from the round T_M of our runs."
    notes = (SILENT, FACES, told) if name == "table4" else (SILENT, POOL, told)
    return [
        Item(name, f"{title}: accuracy", ("model", "split", "rounds"), rows, reduced=reduced, notes=notes),
        Item(
            f"{name}-gain", f"{title}: gain", ("split",), gains, reduced=reduced, notes=notes, unit="gain", margin=0.5
        ),
    ]


def faces(size: Scale) -> dict[str, dict[str, Any]]:
    """The tasks of Table 4: a binary attribute of CelebA for each model."""
    return {attribute: data_of("CelebA", size, attribute) for attribute in TABLE_4}


def mixed(size: Scale) -> dict[str, dict[str, Any]]:
    """The tasks of Table 5: a logistic regression on synthetic data, and a CNN on CelebA."""
    dealt = {"data": f"celeba:attributes=Eyeglasses,image_size={size.pixels},limit=3000", "partition": "iid"}
    return {"logistic": data_of("Synthetic(1,1)-A", size), "cnn": {**data_of("CelebA", size), **dealt}}
