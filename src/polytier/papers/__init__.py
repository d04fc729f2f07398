"""Reproduction plans of papers: the runs that each table or figure needs, and the values that the paper reports."""

from __future__ import annotations

from importlib import import_module

from polytier._errors import unknown
from polytier.papers.plan import Item

PAPERS = {
    "permfl": "Personalized Multi-Tier Federated Learning (Banerjee, Dadras, Yurtsever, Bhuyan)",
    "pfedmt": "Personalized Federated Multi-Tier Learning (Banerjee, Yurtsever, Bhuyan)",
    "sfedhp": "Sparse Federated Learning with Hierarchical Personalization Models (Liu, Wang, Shao, Li)",
    "mfa": "Multi-Model Federated Learning with Provable Guarantees (Bhuyan, Moharir, Joshi)",
    "cobo": "CoBo: Collaborative Learning via Bilevel Optimization (Hashemi, He, Jaggi)",
}
SCALES = ("quick", "full")


def items_of(paper: str, scale: str, model: str | None = None) -> list[Item]:
    """The tables and figures of a paper at a scale ("quick" or "full"), in the paper's order.

    Args:
        paper: The name of the paper.
        scale: "quick" or "full".
        model: The path of a pretrained model, for CoBo's language models at the scale "full".
    """
    if paper not in PAPERS:
        raise unknown("paper", paper, list(PAPERS))
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    if model is not None and (paper, scale) != ("cobo", "full"):
        raise ValueError(f"only cobo/language --scale full takes a pretrained model; leave out --model {model}")
    own = {} if model is None else {"model": model}
    return import_module(f"polytier.papers.{paper}").items(scale, **own)


def chosen(what: str, scale: str, model: str | None = None) -> tuple[str, list[Item]]:
    """The name of a paper and its items, from "PAPER" (all items) or "PAPER/ITEM,ITEM"."""
    paper, slash, names = what.partition("/")
    items = items_of(paper, scale, model)
    if not slash:
        return paper, items
    known = {item.name: item for item in items}
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise unknown(f"item of {paper}", name, list(known))
    return paper, [known[name] for name in wanted]


def restricted(items: list[Item], only: str | None) -> list[Item]:
    """The parts of these items whose runs match "PATTERN,PATTERN"; None: all of them.

    Raises:
        ValueError: No run matches.
    """
    if only is None:
        return items
    patterns = [pattern.strip() for pattern in only.split(",")]
    found = [kept for item in items if (kept := item.only(patterns)).runs()]
    if not found:
        names = list(dict.fromkeys(run.name for item in items for run in item.runs()))
        shown = ", ".join(names[:5])
        raise ValueError(f"no run matches --only {only}; runs are named {shown}, ... (`--dry-run` prints all)")
    return found
