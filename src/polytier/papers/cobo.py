"""CoBo: collaborative learning via bilevel optimisation (Hashemi, He, Jaggi 2024): Tables 1-2, Figures 2, 3, 5, 6."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polytier.papers import cobo_language as language
from polytier.papers import cobo_values as read
from polytier.papers.cobo_elastic import elastic
from polytier.papers.plan import Chart, Claim, Curve, Item, Matrix, PlannedRun, Row
from polytier.papers.run_values import accuracy, by_round

NAMES = {
    "local": "Local",
    "fedavg": "FedAvg",
    "fedavg-ft": "Fine-tuning FedAvg",
    "ditto": "Ditto",
    "ifca": "IFCA",
    "fc": "FC as read here",
    "cobo": "CoBo",
    "oracle": "Oracle",
}
SILO, DEVICE = "8 clients", "80 clients"
# Table 2: accuracy in %, its deviation, loss, and the percentage of clients that are better than when trained alone
TABLE_2 = {
    SILO: {
        "local": (64.9, 0.1, 1.67, None),
        "fedavg": (18.8, 0.1, 2.66, 0),
        "fedavg-ft": (70.2, 0.2, 1.77, 0),
        "ditto": (73.5, 0.3, 1.55, 100),
        "ifca": (18.6, 0.1, 2.75, 0),
        "fc": (55.1, 0.4, 1.79, 0),
        "cobo": (74.6, 0.2, 1.08, 100),
        "oracle": (75.4, 0.2, 1.07, 100),
    },
    DEVICE: {
        "local": (54.9, 0.1, 1.40, None),
        "fedavg": (53.9, 0.1, 1.79, 29),
        "fedavg-ft": (58.9, 0.1, 1.88, 94),
        "ditto": (70.3, 0.1, 1.21, 100),
        "ifca": (45.6, 0.8, 2.15, 4),
        "cobo": (79.6, 0.4, 0.97, 100),
        "oracle": (83.6, 0.3, 0.70, 100),
    },
}
# Table 1: label, accuracy in %, loss
TABLE_1 = {
    "constant": ("Constant (1/n)", 73.05, 1.104),
    "inverse": ("Time-dependent (1/t)", 73.18, 1.226),
    "mixed": ("Mixed", 74.77, 1.081),
    "all": ("No sampling (Oracle)", 74.93, 1.278),
}
LRS = {"ditto": 0.1, "fc": 0.05}  # 0.01 for all other methods (Appendix B)


@dataclass(frozen=True)
class Experiment:
    """The settings of the experiment with 8 clients, or of the one with 80.

    partition | the partition; {} stands for the number of clusters
    test      | parts of the samples for testing, in addition to nine parts for training and one for validation
    rounds    | the number of rounds, each with one mini-batch step
    weight_lr | gamma for each sampling rule
    lr        | the step size of all methods; None: as in the paper
    """

    data: str
    model: str
    partition: str
    test: float
    batch_size: int
    rounds: int
    eval_every: int
    weight_lr: Mapping[str, float]
    pull: float = 0.05
    lr: float | None = None


@dataclass(frozen=True)
class Scale:
    """The sizes of the experiments at one scale.

    seeds   | by experiment; IFCA, whose result depends on the models that it starts from, has seeds of its own
    reach   | the accuracy in % up to which iterations are counted
    factors | Figure 2a: shares of the data, numbers of clusters, numbers of clients in a cluster
    """

    experiments: Mapping[str, Experiment]
    seeds: Mapping[str, int]
    ifca_seeds: int
    tune_steps: int
    reach: float
    factors: tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...]]
    reduced: str = ""
    differs: str = ""


PAPERS_STEP = dict.fromkeys(TABLE_1, 0.01)
DISJOINT = "clusters-disjoint:sizes=6+6+7+7+8+8+9+9+10+10,classes_per_cluster="
SCALES = {
    "full": Scale(
        {
            SILO: Experiment("cifar-100", "resnet9", "clusters-permuted:{}", 2, 128, 40_000, 100, PAPERS_STEP),
            DEVICE: Experiment("cifar-100", "resnet9", DISJOINT + "10", 2, 128, 20_000, 100, PAPERS_STEP),
        },
        seeds={SILO: 3, DEVICE: 3},
        ifca_seeds=3,
        tune_steps=100,
        reach=60,
        factors=((0.25, 0.5, 0.75, 1), (2, 4, 8), (2, 4, 8)),
    ),
    "quick": Scale(
        {
            SILO: Experiment(
                "digits",
                "dnn:32",
                "clusters-permuted:{}",
                80,
                32,
                2_000,
                100,
                {"constant": 0.01, "inverse": 1.0, "mixed": 1.0, "all": 0.002},
                lr=0.1,
            ),
            DEVICE: Experiment(
                "cifar-100:coarse=true",
                "mclr",
                DISJOINT + "2",
                2,
                32,
                300,
                25,
                {"constant": 0.05},
                pull=0.5,
                lr=0.005,
            ),
        },
        seeds={SILO: 3, DEVICE: 1},
        ifca_seeds=5,
        tune_steps=50,
        reach=85,
        factors=((0.5, 1), (2, 4, 8), (2, 4)),
        reduced="80 clients: 1 seed instead of 3; 8 clients: digits (8x8 pixels, 10 classes) instead of CIFAR-100, a "
        "64-32-10 network instead of ResNet-9, 2,000 iterations instead of 40,000, step size 0.1 for all methods; 80 "
        "clients: the 20 coarse classes of CIFAR-100, two per cluster, logistic regression on pixels instead of "
        "ResNet-9, 300 iterations instead of 20,000, step size 0.005 for all methods, rho = 0.5, gamma = 0.05",
        differs="different data and a different network",
    ),
}

READING = (
    "An iteration is a round in which every client takes one mini-batch step. The paper gives the step sizes (Ditto "
    "0.1 with lambda = 1, FC 0.05, others 0.01) but neither rho nor gamma; 0.05 and 0.01 are used here, as in the "
    "authors' example. The number of fine-tuning steps and of repetitions is not given; 100 and 3 are used. "
    "Training and test images are merged and split 10 : 2 at every client; a tenth of the training samples is held "
    "out to choose the round."
)
LATER = "The columns of the language models are the item language."
SAMPLED = (
    "CoBo samples pairs with the constant rule 1/n, the paper's primary rule. Its accuracy in Table 2 (74.6) is "
    "closer to that of the mixed rule in Table 1 (74.77) than to that of the constant rule (73.05)."
)


def items(scale: str, model: str = language.GPT_2) -> list[Item]:
    """The tables and figures of CoBo's paper; at the scale "full", languages with this pretrained model."""
    plan = Plan(SCALES[scale])
    return [
        *plan.table_1(),
        plan.figure_2a(),
        plan.figure_2b(),
        plan.iterations(),
        plan.figure_3(),
        *plan.table_2(),
        plan.figure_5(),
        plan.figure_6(),
        elastic(plan.run(SILO, "cobo"), plan.run(SILO, "local"), plan.size.reduced, READING),
        *language.items(scale, model),
    ]


@dataclass(frozen=True)
class Plan:
    """Builds the items of the paper from the sizes of a scale."""

    size: Scale

    def item(self, name: str, title: str, *notes: str, **rest: Any) -> Item:
        """An item with the notes that all items share."""
        return Item(name, title, reduced=self.size.reduced, notes=(READING, *notes), **rest)

    # -- runs -----------------------------------------------------------------------------------------

    def settings(self, where: str, clients: int, clusters: int, share: float = 1) -> dict[str, Any]:
        """Settings with a `share` of the training samples; all other samples are used for testing."""
        at = self.size.experiments[where]
        return {
            "data": at.data,
            "model": at.model,
            "batch_size": at.batch_size,
            "teams": 0,
            "devices": clients,
            "partition": at.partition.format(clusters),
            "rounds": at.rounds,
            "eval_every": at.eval_every,
            "split": f"{9 * share:g}:{share:g}:{at.test + 10 * (1 - share):g}",
        }

    def run(self, where: str, method: str) -> PlannedRun:
        """The run for a row of Table 2."""
        clients, clusters = (8, 4) if where == SILO else (80, 10)
        settings = {
            "algorithm": method,
            **self.settings(where, clients, clusters),
            "set": self.fields(where, method),
        }
        if (where, method) == (DEVICE, "ifca"):
            settings["device_participation"] = 0.1  # the paper: "to ensure scalability and fairness"
        seeds = self.size.seeds[where]
        return PlannedRun(f"{method}-{clients}", settings, self.size.ifca_seeds if method == "ifca" else seeds)

    def fields(self, where: str, method: str, sampling: str = "constant") -> dict[str, Any]:
        """The fields of a method in an experiment; `sampling` is CoBo's rule."""
        at = self.size.experiments[where]
        lr = at.lr or LRS.get(method, 0.01)
        average = {"device_lr": lr, "device_steps": 1, "weights": "samples"}
        return {
            "local": {"device_lr": lr, "device_steps": 1},
            "fedavg": average,
            "fedavg-ft": {**average, "tune_lr": lr, "tune_steps": self.size.tune_steps},
            "ditto": {**average, "personal_lr": lr, "personal_steps": 1, "device_pull": 1.0},
            "ifca": {**average, "num_clusters": 4 if where == SILO else 10},
            "fc": {"device_lr": lr, "momentum": 0.9, "nearest": 0},  # 0: use the true sizes of the clusters
            "cobo": {
                "device_lr": lr,
                "device_pull": at.pull,
                "weight_lr": at.weight_lr[sampling],
                "domain": "box",
                "sampling": sampling,
                "constant_rounds": at.rounds // 500,  # 0.2 %
            },
            "oracle": average,
        }[method]

    def sampled(self, rule: str) -> PlannedRun:
        """The run for a row of Table 1."""
        base = self.run(SILO, "cobo")
        if rule == "constant":
            return base
        return PlannedRun(f"cobo-8-{rule}", {**base.settings, "set": self.fields(SILO, "cobo", rule)}, base.seeds)

    def varied(self, share: float = 1, clusters: int = 4, members: int = 2) -> PlannedRun:
        """The run for a point of Figure 2a."""
        base = self.run(SILO, "cobo")
        if (share, clusters, members) == (1, 4, 2):
            return base
        settings = {**base.settings, **self.settings(SILO, clusters * members, clusters, share)}
        return PlannedRun(f"cobo-{clusters}-clusters-of-{members}-share-{share:g}", settings, base.seeds)

    def runs(self, where: str) -> dict[str, PlannedRun]:
        """The runs of all methods of an experiment, by method."""
        return {method: self.run(where, method) for method in TABLE_2[where]}

    # -- items ----------------------------------------------------------------------------------------

    def table_1(self) -> list[Item]:
        """Table 1 as two items: accuracy and loss."""
        runs = {rule: self.sampled(rule) for rule in TABLE_1}
        differs = self.size.differs
        first = [
            Row((label,), (runs[rule],), accuracy("personal"), paper, differs=differs)
            for rule, (label, paper, _) in TABLE_1.items()
        ]
        second = [
            Row((label,), (runs[rule],), read.loss("personal"), paper, differs=differs)
            for rule, (label, _, paper) in TABLE_1.items()
        ]
        every = tuple(runs.values())
        claims = [
            Claim("All rules are within 3 points of no sampling", every, read.near(TABLE_1, 3)),
            Claim("The mixed rule is the best of the three rules that sample", every[:3], read.highest(TABLE_1, 2)),
        ]
        scaled = (
            "At the scale quick, gamma is larger for rules that draw fewer pairs: 1 for 1/t and mixed, 0.002 "
            "for all pairs."
        )
        notes = (scaled,) if self.size.reduced else ()
        title = "CoBo with different rules for sampling pairs, 8 clients"
        return [
            self.item("table1", f"{title}: accuracy", *notes, columns=("rule",), rows=first, claims=claims),
            self.item("table1-loss", f"{title}: loss", *notes, columns=("rule",), rows=second, unit="loss", margin=0.1),
        ]

    def table_2(self) -> list[Item]:
        """Table 2 as three items: accuracy, loss and improved clients."""
        found: dict[str, list[Row]] = {"accuracy": [], "loss": [], "improved": []}
        for where, figures in TABLE_2.items():
            runs, differs = self.runs(where), self.size.differs
            for method, (percent, deviation, loss, improved) in figures.items():
                labels, run, model = (where, NAMES[method]), (runs[method],), model_of(method)
                found["accuracy"].append(Row(labels, run, accuracy(model), percent, deviation, differs))
                found["loss"].append(Row(labels, run, read.loss(model), loss, differs=differs))
                if improved is not None:
                    both = (runs[method], runs["local"])
                    found["improved"].append(Row(labels, both, read.improved, improved, differs=differs))
        columns, title = ("experiment", "method"), "All methods on CIFAR-100"
        counted = (
            "Clients are counted by their accuracy after the last round. The paper's column is inconsistent: with 8 "
            "clients, fine-tuned FedAvg has a higher accuracy than Local but improves no client (its loss is "
            "higher); with 80 clients its loss is higher too, but it improves 94 % of them."
        )
        return [
            self.item(
                "table2",
                f"{title}: accuracy",
                LATER,
                SAMPLED,
                columns=columns,
                rows=found["accuracy"],
                claims=[self.ahead(SILO), self.near_oracle(SILO), self.ahead(DEVICE)],
            ),
            self.item(
                "table2-loss",
                f"{title}: loss",
                LATER,
                SAMPLED,
                columns=columns,
                rows=found["loss"],
                unit="loss",
                margin=0.1,
            ),
            self.item(
                "table2-improved",
                f"{title}: clients with a higher accuracy than when trained alone",
                LATER,
                counted,
                columns=columns,
                rows=found["improved"],
                margin=10,
            ),
        ]

    def ahead(self, where: str) -> Claim:
        """The claim that CoBo is more accurate than all methods except the Oracle."""
        text = f"{where}: CoBo is more accurate than all other methods except the Oracle"
        if where == DEVICE:
            text += " (by at least 5.7 points in the text, 9.3 in the table)"
        runs = self.runs(where)
        order = ["cobo", *(method for method in runs if method not in ("cobo", "oracle"))]
        return Claim(text, tuple(runs[m] for m in order), read.first_of([NAMES[m] for m in order], order))

    def near_oracle(self, where: str) -> Claim:
        """The claim that CoBo is almost as accurate as the Oracle."""
        runs = self.runs(where)
        text = f"{where}: CoBo is almost as accurate as the Oracle (within 2 points)"
        return Claim(text, (runs["cobo"], runs["oracle"]), read.near({"cobo": "CoBo", "oracle": "Oracle"}, 2))

    def figure_2a(self) -> Item:
        """Figure 2a: accuracy by amount of data, number of clusters and clients per cluster."""
        shares, clusters, members = self.size.factors
        points = {
            "share of the data": (shares, [self.varied(share=s) for s in shares]),
            "clusters of two clients": (clusters, [self.varied(clusters=c) for c in clusters]),
            "clients in each of four clusters": (members, [self.varied(members=m) for m in members]),
        }
        charts = [
            Chart(what, what, "test accuracy %", [Curve("CoBo", tuple(runs), read.against(x))])
            for what, (x, runs) in points.items()
        ]
        (_, more), (_, parted), (_, crowded) = points.values()
        claims = [
            Claim("More data gives a higher accuracy", tuple(more), read.rising(shares)),
            Claim("The number of clusters has little effect (within 3 points)", tuple(parted), read.level(clusters, 3)),
            Claim(
                "The size of clusters has little effect, although each client has less data (within 5 points)",
                tuple(crowded),
                read.level(members, 5),
            ),
        ]
        values = (
            "The paper's text does not give the values on the axes. Training samples that a share leaves out are "
            "added to the test samples."
        )
        return self.item(
            "figure2a", "CoBo with less data, more clusters or larger clusters", values, charts=charts, claims=claims
        )

    def figure_2b(self) -> Item:
        """Figure 2b: accuracy by iteration with 8 clients."""
        return self.item(
            "figure2b", "Accuracy by iteration, 8 clients", charts=[self.curves(SILO)], claims=[self.near_oracle(SILO)]
        )

    def iterations(self) -> Item:
        """The iterations that Section 4.1 compares."""
        reach, runs = self.size.reach, self.runs(SILO)
        rows = [
            Row((NAMES[method],), (runs[method],), read.until(reach), paper, differs=self.size.differs)
            for method, paper in (("cobo", 4500), ("ditto", None))
        ]
        claims = [
            Claim("CoBo needs 30 % fewer iterations than Ditto", (runs["cobo"], runs["ditto"]), read.faster(reach, 0.7))
        ]
        return self.item(
            "iterations",
            f"Iterations until {reach:g} %, 8 clients (Section 4.1)",
            columns=("method",),
            rows=rows,
            claims=claims,
            unit="iterations",
            margin=500,
        )

    def figure_3(self) -> Item:
        """Figure 3: the learned weights between 8 clients."""
        runs = self.runs(SILO)
        eighth = runs["cobo"].settings["rounds"] // 8  # of the paper's 40,000 iterations: 5,000
        text = f"CoBo finds the clusters in the first eighth, within {eighth:,} iterations, and keeps them"
        claims = [
            Claim(text, (runs["cobo"],), read.found(eighth)),
            Claim("IFCA ends with all clients in one cluster", (runs["ifca"],), read.one_cluster),
            Claim("FC still has clients in wrong clusters in the second half", (runs["fc"],), read.mistakes),
        ]
        found = [Matrix(NAMES[method], runs[method]) for method in ("fc", "ifca", "cobo")]
        return self.item("figure3", "Who listens to whom, 8 clients", matrices=found, claims=claims)

    def figure_5(self) -> Item:
        """Figure 5: the learned weights between 80 clients."""
        run = self.run(DEVICE, "cobo")
        claims = [
            Claim(
                "After 300 iterations, weights within clusters are clearly larger than between clusters",
                (run,),
                read.parted(300),
            ),
            Claim("CoBo has found the clusters after the last iteration", (run,), read.found(run.settings["rounds"])),
        ]
        return self.item("figure5", "Who listens to whom, 80 clients", matrices=[Matrix("CoBo", run)], claims=claims)

    def figure_6(self) -> Item:
        """Figure 6: accuracy by iteration with 80 clients."""
        return self.item(
            "figure6", "Accuracy by iteration, 80 clients", charts=[self.curves(DEVICE)], claims=[self.ahead(DEVICE)]
        )

    def curves(self, where: str) -> Chart:
        """The test accuracy of all methods by iteration."""
        lines = [
            Curve(NAMES[method], (run,), by_round(model_of(method)), dashed=method == "oracle")
            for method, run in self.runs(where).items()
        ]
        return Chart(where, "iteration", "test accuracy %", lines)


def model_of(method: str) -> str:
    """The kind of model that the paper reports for a method."""
    return "global" if method == "fedavg" else "personal"
