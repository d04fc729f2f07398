"""CoBo's experiment with language models: Section 4.3, the right part of Table 2, and Figure 4.

The paper fine-tunes GPT-2 with LoRA at four clients, one language each; at the scale "full" the user provides GPT-2 or
another causal language model, such as SmolLM2, as a folder or a .gguf file. The scale "quick" trains a small model from
the start at eight clients, two per language.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from polytier.models.metrics import METRICS
from polytier.papers.cobo_values import Finished, Holds, told
from polytier.papers.plan import Chart, Claim, Curve, Item, Matrix, PlannedRun, Points, Reading, Row
from polytier.papers.run_values import by_round
from polytier.runs.read import RunRecord
from polytier.tree.collaboration import FILE, Collaboration, load

PERPLEXITY = METRICS["perplexity"]
# Table 2: perplexity, its deviation, and the percentage of clients that are better than when trained alone
TABLE_2: dict[str, tuple[float, float | None, float | None]] = {
    "local": (41.26, 0.38, None),
    "fedavg": (64.84, None, 0),
    "fedavg-ft": (46.70, None, 0),
    "ditto": (40.05, None, 100),
    "validation": (42.90, 1.68, 75),
    "cobo": (39.28, None, 100),
}
NAMES = {
    "local": "Local",
    "fedavg": "FedAvg",
    "fedavg-ft": "Fine-tuning FedAvg",
    "ditto": "Ditto",
    "validation": "Validation-based",
    "cobo": "CoBo",
    "cobo-fixed": "CoBo, weights not learned",
    "cobo-own": "CoBo with own weights",
    "cobo-own-fixed": "CoBo with own weights, not learned",
}
LEARNED = ("cobo", "cobo-own")
ALIKE, UNLIKE = 0.5, 0.15  # weights for clients of the same language are above, all others below


@dataclass(frozen=True)
class Scale:
    """The sizes of the experiment at one scale.

    lr        | the step size of AdamW, of all methods
    pull      | rho of CoBo
    weight_lr | gamma of CoBo
    mix_every | steps of the validation-based method from one mixing of models to the next, which is costly
    reduced   | what is smaller than in the paper; empty if nothing is
    differs   | why perplexities cannot be compared with the paper's; empty if they can
    """

    data: str
    model: str
    clients: int
    rounds: int
    eval_every: int
    batch_size: int
    seeds: int
    lr: float
    pull: float
    weight_lr: float | str
    temperature: float
    mix_every: int
    tune_steps: int
    train: str = "all"
    micro_batch: int | None = None
    reduced: str = ""
    differs: str = ""


QUICK = Scale(
    data="text:context=32,files=ca+de+es+nl,parts=2,tokens=10000",
    model="gpt:layers=2,width=32",
    clients=8,
    rounds=448,
    eval_every=64,  # weights are kept in these rounds
    batch_size=8,
    seeds=3,
    lr=0.003,
    pull=1.0,
    weight_lr=0.2,
    temperature=0.1,
    mix_every=4,
    tune_steps=50,
    reduced="a GPT of 2 layers and width 32 on bytes, trained from the start, instead of GPT-2 (124 million "
    "parameters) with LoRA; 8 clients, two per language, instead of 4; 10,000 bytes per client instead of 800,000 "
    "tokens; contexts of 32 instead of 512; 448 iterations of 8 samples instead of 500 of 200",
    differs="another model and other data",
)
GPT_2 = "gpt2"  # a folder in the current folder
# 589,824 parameters of GPT-2: rank 4 on the four projections of each of the 12 blocks, all layers but the last
LORA = "lora:rank=4,alpha=32,dropout=0.1"
FULL = Scale(
    data=f"text:context=512,files=ca+de+es+nl,tokens=800000,tokenizer={GPT_2}",
    model=f"hf:{GPT_2}",
    clients=4,
    rounds=500,
    eval_every=64,
    batch_size=200,
    seeds=3,
    lr=0.002,
    pull=1.0,
    weight_lr=0.2,
    temperature=0.1,
    mix_every=4,
    tune_steps=50,
    train=LORA,
    micro_batch=1,  # by the estimate for SmolLM2, a sample of 512 tokens takes about 2 GB per client, a batch 400
)
PRETRAINED = (
    "The model and its tokenizer are those that `--model` names: the folder of GPT-2 (config.json, model.safetensors, "
    "vocab.json and merges.txt; by default gpt2 in the current folder), or another causal language model of "
    "Transformers, as a folder or a .gguf file. LoRA has alpha = 32, which the paper does not give, and is on all "
    "linear layers but the last. The 800,000 tokens are taken to be per client."
)
READING = (
    "In an iteration every client takes one step of AdamW, whose state it keeps; it is a round, except that the "
    "validation-based method mixes models after every 4 steps. The paper does not give the optimiser, rho, gamma or "
    "the sampling of pairs. Here pairs are drawn with the constant rule 1/n. The "
    "perplexity of a client is the exponential of its mean loss per token on its test documents; values are means over "
    "clients, in the round that is best on test documents (best) and on validation documents (chosen)."
)
FIXED = (
    "The rows with weights that are not learned (gamma = 0) show what the pull alone does: all weights stay equal. "
    "With own weights, a client's simplex has a weight for itself too, as Figure 4 of the paper does; the figure's "
    "rule is not stated (see `polytier list algorithms cobo`)."
)
COUNTED = "Clients better than Local are counted by their perplexity after the last round."


def items(scale: str, model: str = GPT_2) -> list[Item]:
    """The language experiment; at the scale "full" with this pretrained model, a folder or a .gguf file."""
    return [Plan(QUICK if scale == "quick" else full(model)).item()]


def full(model: str) -> Scale:
    """The sizes of the paper, with a pretrained model."""
    differs = (
        "" if is_gpt2(Path(model).expanduser()) else "another pretrained model than GPT-2 (124 million parameters)"
    )
    return replace(
        FULL, data=FULL.data.replace(f"tokenizer={GPT_2}", f"tokenizer={model}"), model=f"hf:{model}", differs=differs
    )


def is_gpt2(folder: Path) -> bool:
    """Whether this is the paper's model, or the folder in which it is expected."""
    if not (folder / "config.json").is_file():
        return folder == Path(GPT_2)
    config = json.loads((folder / "config.json").read_text())
    return [config.get(key) for key in ("model_type", "n_layer", "n_embd")] == ["gpt2", 12, 768]


@dataclass(frozen=True)
class Plan:
    """Builds the item from the sizes of a scale."""

    size: Scale

    def fields(self, method: str) -> dict[str, Any]:
        """The fields of a method."""
        size, lr = self.size, self.size.lr
        average = {"device_lr": lr, "device_steps": 1, "weights": "samples"}
        cobo = {"device_lr": lr, "device_pull": size.pull, "domain": "simplex", "sampling": "constant"}
        return {
            "local": {"device_lr": lr, "device_steps": 1},
            "fedavg": average,
            "fedavg-ft": {**average, "tune_lr": lr, "tune_steps": size.tune_steps},
            "ditto": {**average, "personal_lr": lr, "personal_steps": 1, "device_pull": 0.1},
            "validation": {"device_lr": lr, "device_steps": size.mix_every, "temperature": size.temperature},
            "cobo": {**cobo, "weight_lr": size.weight_lr},
            "cobo-fixed": {**cobo, "weight_lr": 0.0},
            "cobo-own": {**cobo, "weight_lr": size.weight_lr, "own_weight": True},
            "cobo-own-fixed": {**cobo, "weight_lr": 0.0, "own_weight": True},
        }[method]

    def steps(self, method: str) -> int:
        """The number of iterations in a round."""
        return self.size.mix_every if method == "validation" else 1

    def run(self, method: str) -> PlannedRun:
        """The run of a row."""
        size, steps = self.size, self.steps(method)
        settings = {
            "algorithm": "cobo" if method.startswith("cobo") else method,
            "data": size.data,
            "model": size.model,
            "train": size.train,
            "devices": size.clients,
            "split": "8:1:1",
            "optimizer": "adamw:keep",
            "batch_size": size.batch_size,
            "rounds": size.rounds // steps,
            "eval_every": size.eval_every // steps,
            "set": self.fields(method),
            **({} if size.micro_batch is None else {"micro_batch": size.micro_batch}),
        }
        return PlannedRun(f"language-{method}", settings, size.seeds)

    def item(self) -> Item:
        """Perplexities, clients better than Local, curves, matrices and claims."""
        runs = {method: self.run(method) for method in NAMES}
        differs = self.size.differs
        rows = []
        for method, run in runs.items():
            paper, deviation, _ = TABLE_2.get(method, (None, None, None))
            rows.append(Row((NAMES[method], "perplexity"), (run,), perplexity, paper, deviation, differs))
        for method, run in runs.items():
            if method != "local":
                paper = TABLE_2.get(method, (None, None, None))[2]
                both = (run, runs["local"])
                rows.append(Row((NAMES[method], "clients better than Local, %"), both, improved, paper, None, differs))
        curves = [Curve(NAMES[m], (run,), by_iteration(model_of(m), self.steps(m))) for m, run in runs.items()]
        return Item(
            "language",
            "Language models (Section 4.3, Figure 4): perplexity, and who listens to whom",
            columns=("method", "what"),
            rows=rows,
            charts=[Chart("language models", "iteration", "test perplexity", curves)],
            matrices=[Matrix(NAMES[method], runs[method]) for method in LEARNED],
            claims=self.claims(runs),
            reduced=self.size.reduced,
            notes=(READING, FIXED, COUNTED, *(() if self.size.reduced else (PRETRAINED,))),
            unit="perplexity, or %",
            margin=2,
        )

    def claims(self, runs: dict[str, PlannedRun]) -> list[Claim]:
        """What the paper says, and two statements of ours about learned weights."""
        order = ["cobo", *(method for method in runs if not method.startswith("cobo"))]
        names = [NAMES[method] for method in order]
        found = [
            Claim("CoBo has the lowest perplexity", tuple(runs[m] for m in order), lowest(names)),
            Claim("All clients are better than Local with CoBo", (runs["cobo"], runs["local"]), all_improved),
        ]
        for method in LEARNED:
            text = f"Catalan gives Spanish more weight than German and Dutch ({NAMES[method]})"
            found.append(Claim(text, (runs[method],), prefers("ca", "es")))
        pair, text = ("cobo", "cobo-fixed"), "Not in the paper: learned weights lower the perplexity"
        found.append(Claim(text, tuple(runs[m] for m in pair), lowest([NAMES[m] for m in pair])))
        if self.size.clients > 4:  # several per language
            text = f"Not in the paper: weights for the same language are above {ALIKE}, all others below {UNLIKE}"
            found.append(Claim(text, (runs["cobo"],), same_language))
        return found


# -- readings of run folders --------------------------------------------------------------------------


def model_of(method: str) -> str:
    """The kind of model that the paper reports for a method."""
    return "global" if method == "fedavg" else "personal"


def by_iteration(model: str, steps: int) -> Callable[[Sequence[Path]], Points]:
    """The test perplexity after each evaluated round of `steps` iterations."""

    def read(folders: Sequence[Path]) -> Points:
        rounds, values = by_round(model, "test", PERPLEXITY.name)(folders)
        return [steps * number for number in rounds], values

    return read


def perplexity(folders: Sequence[Path]) -> Reading:
    """The test perplexity in the best round on test documents, and in the round chosen on validation documents."""
    run = RunRecord(folders[0])
    summary: Any = run.summary or {}
    best, chosen = (((summary.get(how) or {}).get(run.judge) or {}).get("perplexity") for how in ("best", "chosen"))
    return best, chosen


def improved(folders: Sequence[Path]) -> Reading:
    """Percentage of clients whose perplexity after the last round is lower in the first run than in the second."""
    own, other = (RunRecord(folder).by_device(metric=PERPLEXITY) for folder in folders)
    assert own.keys() == other.keys(), "the runs have different clients"
    return 100 * fmean(own[device] < other[device] for device in own), None


def lowest(names: Sequence[str]) -> Holds:
    """Whether the first run has the lowest perplexity in the rounds chosen on validation documents."""

    def holds(finished: Finished) -> tuple[bool, str]:
        values = [fmean(perplexity([folder])[1] or 0.0 for folder in folders) for folders in finished]
        return values[0] < min(values[1:]), told(names, values)

    return holds


def all_improved(finished: Finished) -> tuple[bool, str]:
    """Whether all clients are better in the first run than in the second, with every seed."""
    shares = [improved(pair)[0] or 0.0 for pair in zip(*finished, strict=True)]
    return min(shares) == 100, f"better: {', '.join(f'{share:g} %' for share in shares)}"


def chosen_weights(folder: Path) -> Collaboration:
    """The weights in the round that is best on validation documents."""
    summary: Any = RunRecord(folder).summary
    snapshots, _ = load(folder / FILE)
    return snapshots[summary["chosen"]["personal"]["round"]]


def languages(weights: Collaboration) -> list[str]:
    """The language of each client, which its name begins with."""
    return [str(name).partition("-")[0] for name in weights.ids.tolist()]


def same_language(finished: Finished) -> tuple[bool, str]:
    """Whether weights for clients of the same language are above `ALIKE` and all others below `UNLIKE`."""
    least, most = [], []
    for weights in map(chosen_weights, finished[0]):
        named, w = languages(weights), weights.dense()
        pairs = [(i, j) for i in range(len(named)) for j in range(len(named)) if i != j]
        least.append(float(min(w[i, j] for i, j in pairs if named[i] == named[j])))
        most.append(float(max(w[i, j] for i, j in pairs if named[i] != named[j])))
    words = "; ".join(f"{a:.2f} and {b:.2f}" for a, b in zip(least, most, strict=True))
    return min(least) > ALIKE and max(most) < UNLIKE, f"lowest and highest by seed: {words}"


def prefers(language: str, other: str) -> Holds:
    """Whether clients of a language give one other language more weight than any third one, on average over seeds."""

    def holds(finished: Finished) -> tuple[bool, str]:
        sums: dict[str, list[float]] = {}
        for weights in map(chosen_weights, finished[0]):
            named, w = languages(weights), weights.dense()
            for i in (k for k, own in enumerate(named) if own == language):
                for third in dict.fromkeys(named):
                    if third != language:
                        sums.setdefault(third, []).append(sum(w[i, j] for j, own in enumerate(named) if own == third))
        means = {third: fmean(values) for third, values in sums.items()}
        rest = [value for third, value in means.items() if third != other]
        return means[other] > max(rest), told(list(means), list(means.values()))

    return holds
