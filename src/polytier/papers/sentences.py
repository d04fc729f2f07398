"""The sentences of the papers' abstracts, lists of contributions and conclusions, and the claims that each rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polytier.papers.verdicts import AGREES, CLAIM_TONES, FAILS, HIGHER, HOLDS, LEVEL, LOWER, UNTESTED

PARTLY = "in part"
THEORY = "theory"  # stands for docs/results/theory_rates.json
SLOWEST = -0.9  # exponent of T up to which a rate counts as O(1/T)


@dataclass(frozen=True)
class Sentence:
    """A sentence of a paper, and the claims that it rests on.

    text  | the sentence, shortened
    where | where it stands
    rests | names of items, each with words that their claims contain: "table1: personal, MCLR". "table1 rows: MNIST"
            are rows with these labels; such a row holds if it agrees or is higher. None: the sentence was not tested
    """

    text: str
    where: str
    rests: tuple[str, ...] = ()

    def claims(self, items: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Its claims as `judge` returns them, from the judged items by name."""
        found = []
        for place in self.rests:
            name, _, words = place.partition(": ")
            wanted = [word for word in words.split(", ") if word]
            item = items.get(name.removesuffix(" rows"), {})
            rows = name.endswith(" rows")
            there = [as_claim(row) for row in item.get("rows", ())] if rows else item.get("claims", ())
            found += [claim for claim in there if all(word in claim["text"] for word in wanted)]
        return found


def as_claim(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as a claim that the value of the paper is reached."""
    states = {AGREES: HOLDS, HIGHER: HOLDS, LOWER: FAILS}
    return {"text": ", ".join(row["labels"]), "state": states.get(row["best"]["verdict"], UNTESTED)}


def theory_claims(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The claims of theorems, from docs/results/theory_rates.json.

    A bound holds if all models keep it in all rounds, with settings that satisfy all conditions. A rate O(1/T) holds if
    the 95 % interval of the exponent is below SLOWEST.
    """
    claims = []
    for name, check in found["bounds"].items():
        keeps = all(model["keeps"] and not model["broken"] for model in check["models"])
        claims.append({"text": name, "state": HOLDS if keeps else FAILS})
    for name, rate in found["samples"].items():
        claims.append({"text": f"O(1/T) with {name}", "state": HOLDS if rate["high"] < SLOWEST else FAILS})
    return claims


def state(claims: Sequence[Mapping[str, Any]]) -> str:
    """The state of a sentence: that of its tested claims if they agree, otherwise "in part".

    Claims that are level decide nothing if others are tested.
    """
    found = {claim["state"] for claim in claims} - {UNTESTED}
    if not found:
        return UNTESTED
    decided = found - {LEVEL}
    return LEVEL if not decided else decided.pop() if len(decided) == 1 else PARTLY


def counted(claims: Sequence[Mapping[str, Any]]) -> str:
    """How many of the claims have which state, as "3 holds, 2 not tested"."""
    found = Counter(claim["state"] for claim in claims)
    return ", ".join(f"{found[word]} {word}" for word in CLAIM_TONES if found[word])


ABSTRACT, LIST, END, TEXT = "abstract", "contributions", "conclusions", "text"
SENTENCES: dict[str, tuple[Sentence, ...]] = {
    "permfl": (
        Sentence("linear convergence for smooth strongly convex problems", ABSTRACT, (f"{THEORY}: permfl-theorem-1",)),
        Sentence("sublinear convergence for smooth non-convex problems", ABSTRACT, (f"{THEORY}: permfl-theorem-2",)),
        Sentence(
            "outperforming the state of the art in multiple personalized tasks",
            ABSTRACT,
            ("table1: personal model is better", "table3"),
        ),
        Sentence("personal models are the best in 6 of 8 experiments", TEXT, ("table1: 6 of 8",)),
        Sentence("the global model outperforms FedAvg, pFedMe and Ditto", TEXT, ("table1: global model is better",)),
        Sentence("PerMFL (PM) converges quickly", END, ("figure2: (PM)", "figures61-63: (PM)")),
        Sentence(
            "it performs best when teams and devices participate fully",
            END,
            ("figure4: full participation", "figure4: c: MNIST", "figures43-48"),
        ),
        Sentence(
            "few participants degrade the global model",
            END,
            ("figure4: (GM), share", "figures31-42", "figures49-51: (GM)"),
        ),
        Sentence("with few participants it needs more team iterations", END, ("figures57-60: 20 % of teams",)),
        Sentence(
            "with 2 % of the teams more team iterations are insufficient",
            TEXT,
            ("figures57-60: 10 teams, 2 % of teams",),
        ),
        Sentence("more teams do not harm personal models", TEXT, ("figures23-30: (PM)", "figure4: a: ")),
        Sentence("more teams can slow the global model (Fig. 29)", TEXT, ("figures23-30: (GM)",)),
        Sentence(
            "the global model is worse in the worst case of team formation", END, ("table2: global model is better",)
        ),
        Sentence("personal models keep their performance in the worst case", END, ("table2: personal models",)),
        Sentence(
            "the right lambda, beta and gamma enhance convergence (larger is faster)",
            END,
            ("figures5-10", "figures11-16", "figures17-22"),
        ),
    ),
    "pfedmt": (
        Sentence(
            "the personal model is better than FedAvg, Per-FedAvg and pFedMe",
            ABSTRACT,
            ("table1-100: personal model is better", "table1-600: personal model is better"),
        ),
        Sentence(
            "98.30 % on MNIST in convex settings",
            ABSTRACT,
            ("table1-100 rows: MNIST, MCLR, pFedMT (PM)", "table1-600 rows: MNIST, MCLR, pFedMT (PM)"),
        ),
        Sentence("99.71 % on MNIST in non-convex settings", ABSTRACT, ("table1-600 rows: MNIST, CNN, pFedMT (PM)",)),
        Sentence(
            "its global model is above its personal models on synthetic data",
            TEXT,
            ("table1-600: its personal models",),
        ),
        Sentence(
            "it is communication-efficient: faster than others, and converges in fewer than 100 rounds",
            END,
            ("figure2",),
        ),
        Sentence(
            "the global model generalises well",
            END,
            ("table1-100: global model is better than FedAvg", "table1-600: global model is better than FedAvg"),
        ),
    ),
    "sfedhp": (
        Sentence("significantly improves the global model", ABSTRACT, ("table-i: points above all others",)),
        Sentence(
            "outperforms hierarchical FedAvg and personalised methods",
            END,
            ("table-i", "figure2: better", "figure3: better"),
        ),
        Sentence(
            "state-of-the-art performance of personal models",
            LIST,
            tuple(f"table-{n}" for n in ("ii", "iii", "iv", "v", "vi", "vii")),
        ),
        Sentence("with 80 % fewer parameters, as good as pFedMe", LIST, ("figure3: sparse sFedHP's global model",)),
        Sentence("80 % less traffic and 20 % of the parameters", TEXT, ("figure3 rows: ",)),
        Sentence("sparsity costs little convergence speed", ABSTRACT, ("figure3: costs little",)),
        Sentence("converges with linear speed-up", ABSTRACT),
    ),
    "mfa": (
        Sentence("MFA-Rand and MFA-RR converge", ABSTRACT, (f"{THEORY}: mfa",)),
        Sentence("MFA-RR is O(1/T) with growing samples", END, (f"{THEORY}: O(1/T) with growing",)),
        Sentence(
            "with the same computation several models are better than each alone",
            ABSTRACT,
            ("figure5", "figure7"),
        ),
        Sentence("the gain grows with M, but less than M", TEXT, ("figure6",)),
        Sentence("MFA-RR typically outperforms MFA-Rand", LIST, ("figure3: better", "figure4: better")),
        Sentence("MFA-Rand varies considerably more", TEXT, tuple(f"figure{k}: considerably" for k in (1, 2, 3, 4))),
        Sentence("with few of the devices too, several models are an advantage", END, ("figure7",)),
    ),
    "cobo": (
        Sentence("surpasses popular methods by 9.3 % with 80 clients", ABSTRACT, ("table2: 80 clients",)),
        Sentence("CoBo is elastic: clients join and leave", ABSTRACT, ("elastic: stay", "elastic: Newcomers")),
        Sentence("it is robust to stragglers", TEXT, ("elastic: of the clients in each round",)),
        Sentence("obtains models of higher quality (8 clients)", TEXT, ("table2: 8 clients, more accurate",)),
        Sentence("identifies the cluster structure", TEXT, ("figure3: CoBo", "figure5")),
        Sentence(
            "surpasses other methods on language models",
            LIST,
            ("language: CoBo has the lowest", "language: All clients"),
        ),
        Sentence("its convergence is guaranteed", ABSTRACT),
    ),
}
