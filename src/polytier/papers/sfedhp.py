"""sFedHP's experiments: Tables I-VII and Figures 2-5 (Liu, Wang, Shao, Li).

20 devices with 5 labels each, 4 edges, mini-batches of 20, K = 5 steps of size 0.05, T = 800 rounds with R = 20 edge
rounds each (pFedMe: local rounds).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from polytier.papers.claims import ahead as first
from polytier.papers.plan import Chart, Claim, Curve, Item, PlannedRun, Points, Row
from polytier.papers.run_values import accuracy, accuracy_after, by_round
from polytier.papers.sfedhp_figures import AHEAD, LAMBDAS, NONZEROS, SAVED, TABLE_I, TABLES, Place
from polytier.papers.sfedhp_runs import METHODS, NESTED, ROUNDS, figure_others, figure_sfedhp, table_run
from polytier.papers.sfedhp_values import (
    Figure,
    ahead,
    best,
    cumulated,
    final,
    nonzeros,
    nonzeros_left,
    rising,
    saved,
    sparsity,
    speed,
)

NAMES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar-10": "CIFAR-10"}
ROMAN = dict(zip(TABLES, ("II", "III", "IV", "V", "VI", "VII"), strict=True))
MODELS = ("personal", "global")
GAMMAS = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008)
# methods that the scale "quick" runs in addition to those of Table I
PERSONAL = ("heurfedamp-0.5", "per-fedavg", "pfedgp")
QUICK_MORE: dict[Place, tuple[str, ...]] = {
    ("mnist", 1): (*PERSONAL, "pfedme-30", "sfedhp-5", "sfedhp-30"),
    ("mnist", 2): PERSONAL,
    ("fashion-mnist", 1): PERSONAL,
    ("fashion-mnist", 2): PERSONAL,
}
QUICK_GRADIENTS = {"mnist": 400, "fashion-mnist": 400, "cifar-10": 100}
QUICK_LAMBDAS, QUICK_GAMMAS = (5, 25), (0.0, 0.001, 0.008)
REDUCED = (
    "25 rounds instead of 800 (methods with 5 steps per round: 100), a 784-30-10 network instead of 784-500-200-10, "
    "1 seed instead of 3"
)
REDUCED_CIFAR = (
    "5 rounds instead of 800 (methods with 5 steps per round: 20), a 3072-30-10 network instead of the VGG, 1 seed "
    "instead of 3"
)
READ = (
    "If these counts were per device (20 devices, 5 labels, 1,000 or 1,200 images per class), at least 100,000 "
    "images would be needed. They are read as counts over all devices, shared by the 10 devices that hold a class. "
    "The training and test files are merged first.",
    "R, which the tables do not state, is 20 as in the figures: a device takes 100 steps per round in HierFAVG, "
    "pFedMe and sFedHP, and 5 in the other methods.",
    "A tenth of each device's training samples is held out to choose the round.",
)
LAMBDA = (
    "lambda is the value whose accuracy Table I repeats: the best one for pFedMe, and 20 for sFedHP (CIFAR-10, "
    "setting 2: 30), although 25 or 30 is better in Tables II-V."
)
SILENT = (
    "Not stated, chosen here: sigma = 10 and pull = 1 of HeurFedAMP, the inner step 0.05 of Per-FedAvg, noise = 0.1 "
    "and at most 100 samples for predictions of pFedGP, and the start and momentum of Nesterov's steps.",
    "pFedGP is a regression on one-hot labels here; its paper classifies with a tree of binary processes.",
)
TWO_LABELS = (
    "The paper states 5 labels per device. Its personal accuracies (99 % on Fashion-MNIST) are typical of devices "
    "with 2 labels, as in the experiments that it follows. With 2 labels, the counts can be per device without "
    "exceeding the data (4 devices hold a class), and the global accuracies are plausible for that number of "
    "images."
)
DRAWN = (
    "The text does not give the settings of the curves: 800 rounds are used as in the tables, and all of MNIST with "
    "3/4 of it for training, a tenth of which is held out.",
    "Remark 1 counts 79,510 parameters, those of a 784-100-10 network, but the text states 784-500-200-10. The "
    "first is used, since the reported bytes are those of this network.",
    "Bytes are those that one edge (pFedMe: one device) receives from and sends to the server: 64 bits per non-zero "
    "and 1 bit per parameter, or 64 bits per parameter. Parameters whose magnitude is below rho are sent as zeros.",
    "gamma1 is reduced to 1e-6 when less than 20 % of the parameters are non-zero, gamma2 after 100 rounds; the "
    "paper does not state the value 1e-6.",
)
LAMBDAS_DRAWN = (
    "The text does not state the values of lambda; those of the tables are used, once with gamma = 0.008 as in the "
    "caption and once with 0.001 as in Figure 3."
)
GAMMAS_DRAWN = "The text does not state the values of gamma; they range from 0 (dense) to 0.008 as in Figure 4."
LEAPS = (
    "A step of an edge, 0.05 gamma tanh(w / rho), overshoots 0 if 0.05 gamma / rho is above 2, that is for gamma of "
    "at least 0.0024. Such weights then oscillate and do not stay within rho of 0."
)
Runs = Mapping[str, PlannedRun]  # by the name of the curve


def items(scale: str) -> list[Item]:
    """The tables and figures of sFedHP's paper."""
    quick = scale == "quick"
    tables = (table_i(quick), table_i_equal_steps(quick), *(table(place, quick) for place in TABLES), two_labels(quick))
    return [*tables, figure_2(quick), figure_3(quick), figure_4(quick), figure_5(quick)]


# -- tables -------------------------------------------------------------------------------------------


def table_i(quick: bool) -> Item:
    """Table I: global models."""
    rows, claims = [], []
    for place, deviations in TABLE_I.items():
        at = (NAMES[place[0]], str(place[1]))
        rows += [row(at, method, "global", place, quick, deviation=some) for method, some in deviations.items()]
        fedavg, hier, fedprox, pfedme, own = deviations
        order = (own, hier, fedavg, fedprox, pfedme)
        names, runs = titles(order), tuple(table_run(method, place, quick) for method in order)
        text, figure = f"{at[0]}, setting {at[1]}: ", best("global")
        claims += [
            Claim(
                text + f"sFedHP's global model is more than {AHEAD[place]} points above all others",
                runs,
                ahead(figure, names, margin=AHEAD[place]),
            ),
            Claim(
                text + "both methods with edges are better than those without", runs, ahead(figure, names, 2, of=min)
            ),
        ]
    return Item(
        "table-i",
        "Table I: global models",
        ("data", "setting", "method", "model"),
        rows,
        claims=claims,
        reduced=f"{REDUCED}; CIFAR-10: {REDUCED_CIFAR}" if quick else "",
        notes=(*READ, LAMBDA),
    )


def table_i_equal_steps(quick: bool) -> Item:
    """Table I after equal numbers of gradients."""
    rows, claims = [], []
    for place, methods in TABLE_I.items():
        at = (NAMES[place[0]], str(place[1]))
        reads = {method: accuracy_after("global", rounds_of(method, place, quick), "accuracy") for method in methods}
        runs = {method: table_run(method, place, quick) for method in methods}
        rows += [Row((*at, METHODS[m][0], "global"), (runs[m],), read) for m, read in reads.items()]
        *others, own = methods
        order = [own, *others]
        text = f"{at[0]}, setting {at[1]}: sFedHP's global model is above all others"
        claims.append(first(text, [runs[m] for m in order], titles(order), [reads[m] for m in order]))
    return Item(
        "table-i-equal-steps",
        "Table I after equal numbers of gradients",
        ("data", "setting", "method", "model"),
        rows,
        claims=claims,
        reduced=f"400 gradients per device, CIFAR-10: 100; {REDUCED}; CIFAR-10: {REDUCED_CIFAR}" if quick else "",
        notes=(
            "The runs of Table I; at the full scale after the 4,000 gradients per device that FedAvg computes in 800 "
            "rounds: HierFAVG, pFedMe and sFedHP in round 40, with 100 gradients per round instead of 5.",
            LAMBDA,
        ),
    )


def rounds_of(method: str, place: Place, quick: bool) -> int:
    """The round in which a device has computed as many gradients as in all other methods; all are evaluated there."""
    gradients = QUICK_GRADIENTS[place[0]] if quick else 5 * ROUNDS
    return gradients // (100 if METHODS[method][1] in NESTED else 5)


def table(place: Place, quick: bool) -> Item:
    """One of Tables II-VII."""
    shown = {*TABLE_I[place], *QUICK_MORE.get(place, ())} if quick else TABLES[place]
    methods = [method for method in TABLES[place] if method in shown]
    own = [method for method in methods if method.startswith("sfedhp")]
    order = own + [method for method in methods if method not in own and TABLES[place][method][0] is not None]
    personal = Claim(
        "sFedHP's personal models are among the best: with its best lambda, less than a point below every other method",
        tuple(table_run(method, place, quick) for method in order),
        ahead(best("personal"), titles(order), len(own), -1.0),
    )
    smaller = REDUCED_CIFAR if place[0] == "cifar-10" else REDUCED
    return Item(
        f"table-{ROMAN[place].lower()}",
        f"Table {ROMAN[place]}: {NAMES[place[0]]}, setting {place[1]}",
        ("method", "model"),
        rows_of((), methods, place, quick),
        claims=[personal],
        reduced=f"{smaller}, fewer methods and values of lambda" if quick else "",
        notes=(*READ, *SILENT),
    )


def two_labels(quick: bool) -> Item:
    """The tables with 2 labels per device, which their figures suggest; the text states 5."""
    rows = []
    for place in [("fashion-mnist", 1)] if quick else TABLES:
        methods = [method for method in TABLE_I[place] if not quick or method.startswith(("pfedme", "sfedhp"))]
        rows += rows_of((NAMES[place[0]], str(place[1])), methods, place, quick, labels=2)
    return Item(
        "tables-two-labels",
        "Tables I-VII with 2 labels per device",
        ("data", "setting", "method", "model"),
        rows,
        reduced=f"{REDUCED}, only Fashion-MNIST in setting 1" if quick else "",
        notes=(TWO_LABELS, *READ[1:], LAMBDA),
    )


def rows_of(at: tuple[str, ...], methods: Sequence[str], place: Place, quick: bool, labels: int = 5) -> list[Row]:
    """The personal and the global value of each method, if the paper has them."""
    return [
        row(at, method, model, place, quick, labels)
        for method in methods
        for model, figure in zip(MODELS, TABLES[place][method], strict=True)
        if figure is not None
    ]


def row(
    at: tuple[str, ...],
    method: str,
    model: str,
    place: Place,
    quick: bool,
    labels: int = 5,
    deviation: float | None = None,
) -> Row:
    """The row of a method and a kind of model ("personal" or "global")."""
    return Row(
        (*at, METHODS[method][0], model),
        (table_run(method, place, quick, labels),),
        accuracy(model),
        TABLES[place][method][MODELS.index(model)],
        deviation,
        "a fully connected network instead of the VGG" if quick and place[0] == "cifar-10" else "",
    )


def titles(methods: Sequence[str]) -> list[str]:
    """The names of methods as the tables show them."""
    return [METHODS[method][0] for method in methods]


# -- figures ------------------------------------------------------------------------------------------


def figure_2(quick: bool) -> Item:
    """Figure 2: logistic regression on MNIST."""
    pfedme, hier = figure_others(quick, convex=True)
    runs = {"sFedHP": figure_sfedhp(25, 0.0, quick, convex=True), "pFedMe": pfedme, "HierFAVG": hier}
    return Item(
        "figure2",
        "Figure 2: logistic regression on MNIST",
        charts=[accuracies(runs)],
        claims=[
            claim("sFedHP and pFedMe end with better global models than HierFAVG", runs, final, firsts=2),
            claim("sFedHP ends with a better global model than pFedMe", runs, final, only=("sFedHP", "pFedMe")),
            claim(
                "sFedHP converges faster than pFedMe: its mean over the rounds is higher",
                runs,
                speed,
                only=("sFedHP", "pFedMe"),
            ),
        ],
        reduced="40 rounds instead of 800, 1 seed instead of 3" if quick else "",
        notes=(DRAWN[0], "The l2 coefficient is not given; 0.001 is used."),
    )


def figure_3(quick: bool) -> Item:
    """Figure 3: a network on MNIST, sparse and dense."""
    pfedme, hier = figure_others(quick)
    sparse, dense = (figure_sfedhp(25, gamma, quick) for gamma in (0.001, 0.0))
    runs = {"sFedHP, sparse": sparse, "sFedHP, dense": dense, "pFedMe": pfedme, "HierFAVG": hier}
    rows = [
        Row(("bytes that sparse sFedHP saves compared with pFedMe",), (sparse, pfedme), saved, SAVED),
        Row(("non-zeros of its global model",), (sparse,), nonzeros_left, NONZEROS),
    ]
    return Item(
        "figure3",
        "Figure 3: a network on MNIST, sparse and dense",
        ("figure",),
        rows,
        charts=[accuracies(runs), sparsities(runs), traffic(runs)],
        claims=[
            claim(
                "sparse sFedHP's global model is about as good as pFedMe's (less than 2 points below)",
                runs,
                final,
                only=("sFedHP, sparse", "pFedMe"),
                margin=-2.0,
            ),
            claim(
                "dense sFedHP ends with a better global model than pFedMe",
                runs,
                final,
                only=("sFedHP, dense", "pFedMe"),
            ),
            claim(
                "sparsity costs little speed: the mean over the rounds is less than 2 points below dense sFedHP's",
                runs,
                speed,
                only=("sFedHP, sparse", "sFedHP, dense"),
                margin=-2.0,
            ),
            claim(
                "sparse and dense sFedHP end with better global models than HierFAVG",
                runs,
                final,
                firsts=2,
                only=("sFedHP, sparse", "sFedHP, dense", "HierFAVG"),
            ),
            claim(
                "dense sFedHP converges faster than pFedMe and HierFAVG: its mean over the rounds is higher",
                runs,
                speed,
                only=("sFedHP, dense", "pFedMe", "HierFAVG"),
            ),
        ],
        reduced=less(quick),
        notes=DRAWN,
        margin=5.0,
    )


def figure_4(quick: bool) -> Item:
    """Figure 4: different values of lambda."""
    values, charts, claims = QUICK_LAMBDAS if quick else LAMBDAS, [], []
    for gamma in (0.008, 0.001):
        runs = {f"lambda = {value}, gamma = {gamma}": figure_sfedhp(value, gamma, quick) for value in values}
        charts += [accuracies(runs), sparsities(runs)]
        claims += [
            sweep("a larger lambda ends with a better global model", runs, final),
            sweep("a larger lambda converges faster: the mean over the rounds is higher", runs, speed),
        ]
    return Item(
        "figure4",
        "Figure 4: different values of lambda, on MNIST",
        charts=charts,
        claims=claims,
        reduced=less(quick, ", fewer values of lambda"),
        notes=(LAMBDAS_DRAWN, LEAPS, *DRAWN),
    )


def figure_5(quick: bool) -> Item:
    """Figure 5: different values of gamma."""
    values = QUICK_GAMMAS if quick else GAMMAS
    runs = {f"gamma = {value:g}": figure_sfedhp(25, value, quick) for value in values}
    return Item(
        "figure5",
        "Figure 5: different values of gamma, on MNIST",
        charts=[accuracies(runs), sparsities(runs), traffic(runs)],
        claims=[
            sweep("a larger gamma leaves fewer non-zeros", runs, sparsity, sign=-1),
            sweep("a larger gamma ends with a worse global model", runs, final, sign=-1),
            sweep("a larger gamma converges more slowly: the mean over the rounds is lower", runs, speed, sign=-1),
        ],
        reduced=less(quick, ", fewer values of gamma"),
        notes=(GAMMAS_DRAWN, LEAPS, *DRAWN),
    )


def accuracies(runs: Runs) -> Chart:
    """The test accuracy of the global model by round."""
    return chart("global model", "test accuracy %", runs, by_round("global"))


def sparsities(runs: Runs) -> Chart:
    """The share of non-zeros in the global model by round."""
    return chart("non-zeros of the global model", "non-zeros %", runs, nonzeros)


def traffic(runs: Runs) -> Chart:
    """The bytes sent so far by round."""
    return chart("bytes of one edge so far (pFedMe: one device)", "MB", runs, cumulated)


def chart(title: str, y: str, runs: Runs, read: Callable[[Sequence[Path]], Points]) -> Chart:
    """A chart with one curve per run."""
    return Chart(title, "round", y, [Curve(name, (run,), read) for name, run in runs.items()])


def claim(
    text: str, runs: Runs, figure: Figure, *, firsts: int = 1, margin: float = 0.0, only: Sequence[str] = ()
) -> Claim:
    """The claim that each of the `firsts` first runs is above all others; `only` restricts it to the named runs."""
    names = list(only or runs)
    return Claim(text, tuple(runs[name] for name in names), ahead(figure, names, firsts, margin, min))


def sweep(text: str, runs: Runs, figure: Figure, sign: int = 1) -> Claim:
    """The claim that a value rises (with sign -1: falls) from each run to the next."""
    return Claim(text, tuple(runs.values()), rising(figure, list(runs), sign))


def less(quick: bool, more: str = "") -> str:
    """What is smaller at the scale "quick"; `more` is appended."""
    told = "40 rounds instead of 800, 1 seed instead of 3, a 784-50-10 network instead of 784-100-10"
    return told + more if quick else ""
