"""Write the tables of docs/reproduction.md and docs/papers/*.md anew from the results in docs/results.

    PYTHONPATH=$PWD/src python docs/make_reproduction.py [--collect FOLDER]

With --collect, FOLDER/PAPER/*.json and FOLDER/PAPER-quick.json are first copied to docs/results.

A table stands between two comments. The first one says what it shows:

    <!-- rows: permfl/table1 full MNIST, MCLR -->    rows of an item whose labels contain all these
    <!-- claims: permfl/table1 full MNIST -->        claims whose text contains all these
    <!-- overview: permfl -->                        how many rows agree and claims hold, by item, at both scales
    <!-- sentences: permfl -->                      sentences of abstract and conclusions, with their state
    <!-- standing: all -->                          rows and claims of each paper at both scales
    <!-- rates: bounds -->                          docs/results/theory_rates.json; also `samples`
    <!-- estimates: runs -->                        docs/results/plan_estimates.json; also `dry-runs`
    <!-- origin: permfl -->                          commits, machines and hours of the runs
    <!-- picture: permfl/figure2 full TITLE -->      the chart of an item with this title, drawn to docs/images
    <!-- end -->

Results at the full scale are docs/results/PAPER/RUN-SEED.json, one per finished run (`polytier reproduce --results`);
at the quick scale they are docs/results/PAPER-quick*.json, files reproduction.json of `polytier reproduce PAPER`. The
language item of cobo, which takes longest, has a file of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from polytier import papers
from polytier.papers import sentences as of_papers
from polytier.papers import verdicts
from polytier.papers.stored_runs import StoredRun, stored_runs
from polytier.report.blocks import Lines
from polytier.report.figures import save
from polytier.report.intervals import with_spread

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
IMAGES = ROOT / "docs/images"
PAGES = [ROOT / "docs/reproduction.md", ROOT / "docs/theory.md", *sorted((ROOT / "docs/papers").glob("*.md"))]
HOW = ("estimate", "measured")
BLOCK = re.compile(
    r"<!-- (rows|claims|overview|sentences|standing|rates|estimates|origin|picture): (.*?) -->\n.*?<!-- end -->",
    re.DOTALL,
)


def refreshed(text: str) -> str:
    """The page with all tables made anew."""
    return BLOCK.sub(lambda found: f"<!-- {found[1]}: {found[2]} -->\n{MAKE[found[1]](found[2])}\n<!-- end -->", text)


@cache
def judged(paper: str, scale: str) -> dict[str, Any]:
    """What is known of each item of a paper: its columns, rows and claims, by the item's name."""
    items = papers.items_of(paper, scale)
    if scale == "full":
        runs = stored_runs(RESULTS / paper, items, scale)
        found = [verdicts.judge(item, runs) for item in items]
    else:
        files = sorted(RESULTS.glob(f"{paper}-quick*.json"))
        found = [item for path in files for item in json.loads(path.read_text(encoding="utf-8"))["items"]]
    columns = {item.name: item.columns for item in items}
    return {each["name"]: {**each, "columns": columns[each["name"]]} for each in found}


def chosen(text: str) -> tuple[dict[str, Any] | None, list[str]]:
    """The item that "PAPER/ITEM SCALE WORD, WORD" names (None if it was not run), and the words."""
    what, scale, *rest = text.split(" ", 2)
    paper, _, name = what.partition("/")
    words = [word.strip() for word in rest[0].split(",")] if rest else []
    return judged(paper, scale).get(name), words


def none(text: str) -> str:
    """What stands where there is no result."""
    what, scale, *_ = text.split(" ")
    return f"\n`{what}`, {scale} scale: no stored result.\n"


# -- tables -------------------------------------------------------------------------------------------


def rows(text: str) -> str:
    """The rows of an item that were run: the paper's value, ours in both protocols, and the verdict."""
    item, words = chosen(text)
    wanted = [row for row in (item["rows"] if item else ()) if all(word in row["labels"] for word in words)]
    there = [row for row in wanted if row["best"]["ours"] is not None]
    if item is None or not there:
        return none(text)
    kept = [k for k in range(len(item["columns"])) if len({row["labels"][k] for row in there}) > 1] or [0]
    validated = any(row["chosen"]["ours"] for row in there)
    head = [*(item["columns"][k] for k in kept), "paper", "best", *(["chosen"] if validated else []), "seeds", ""]
    lines = []
    for row in there:
        ours = [row[how]["ours"] for how in ("best", *(["chosen"] if validated else []))]
        values = [with_spread(each, "{:.2f}".format) if each else "" for each in ours]
        paper = "" if row["paper"] is None else f"{row['paper']:.2f}"
        word = row["differs"] or ("" if row["paper"] is None else row["best"]["verdict"])
        lines.append([*(row["labels"][k] for k in kept), paper, *values, str(ours[0]["seeds"]), word])
    missing = len(wanted) - len(there)
    return table(head, lines) + (f"\n{missing} more rows were not run.\n" if missing else "")


def claims(text: str) -> str:
    """The claims of an item that were tested."""
    item, words = chosen(text)
    wanted = [claim for claim in (item["claims"] if item else ()) if all(word in claim["text"] for word in words)]
    there = [claim for claim in wanted if claim["state"] != verdicts.UNTESTED]
    if not there:
        return none(text)
    lines = [[claim["text"], claim["state"], claim["rests_on"], str(claim["seeds"])] for claim in there]
    missing = len(wanted) - len(there)
    made = table(["claim", "here", "decided by", "seeds"], lines)
    return made + (f"\n{missing} more claims were not tested.\n" if missing else "")


def overview(paper: str) -> str:
    """For each item how many rows agree and how many claims hold, at both scales."""
    full, quick = (judged(paper, scale) for scale in ("full", "quick"))
    lines = [[name, *counts(quick.get(name)), *counts(each)] for name, each in full.items()]
    lines.append(["all", *total(quick), *total(full)])
    columns = ("rows, {}", "claims, {}")
    return table(["item", *(c.format(s) for s in ("quick", "full") for c in columns)], lines)


def sentences(paper: str) -> str:
    """The sentences of a paper's abstract and conclusions, with their state at both scales and what they rest on."""
    theory = {of_papers.THEORY: {"claims": of_papers.theory_claims(theory_rates())}}
    lines = []
    for sentence in of_papers.SENTENCES[paper]:
        found = [sentence.claims({**judged(paper, scale), **theory}) for scale in ("quick", "full")]
        cells = [f"{of_papers.state(claims)}{f' ({of_papers.counted(claims)})' if claims else ''}" for claims in found]
        if all(place.startswith(of_papers.THEORY) for place in sentence.rests):
            cells[1] = ""  # measured once, at no scale
        places = list(dict.fromkeys(place.partition(":")[0].removesuffix(" rows") for place in sentence.rests))
        lines.append([sentence.text, sentence.where, *cells, ", ".join(places)])
    return table(["sentence", "where", "quick", "full", "rests on"], lines)


@cache
def theory_rates() -> dict[str, Any]:
    """What benchmarks/theory_rates.py has measured."""
    return json.loads((RESULTS / "theory_rates.json").read_text(encoding="utf-8"))


def rates(what: str) -> str:
    """Bounds of theorems beside runs, or the exponents of MFA-RR with different mini-batches."""
    found = theory_rates()
    if what == "samples":
        lines = [
            [name, f"{rate['mean']:.2f} ({rate['low']:.2f} to {rate['high']:.2f})", str(rate["seeds"])]
            for name, rate in found["samples"].items()
        ]
        return table(["mini-batches", "exponent p of T^p", "models"], lines)
    lines = []
    for check in found["bounds"].values():
        for model in check["models"]:
            ends = [f"{model[key]:.3g}" for key in ("first", "last", "bound")]
            kept = "never exceeded" if model["keeps"] else f"exceeded {model['worst']:.3g} times"
            lines.append([f"`{check['command']}`", model["where"], model["what"].replace("|", "\\|"), *ends, kept])
    return table(["command", "bound", "measured", "first", "last", "bound at the end", ""], lines)


def estimates(what: str) -> str:
    """Estimates of dry runs beside short runs, or what the dry runs of the papers say and need."""
    path = RESULTS / "plan_estimates.json"
    if not path.exists():
        return "\nNo stored result.\n"
    found = json.loads(path.read_text(encoding="utf-8"))
    if what == "dry-runs":
        lines = [[paper, own["says"], f"{own['MiB']:,} MiB"] for paper, own in found["dry runs"].items()]
        return table(["paper, full scale", "last line of `--dry-run`", "memory"], lines)
    lines = [
        [name, *(f"{own[part][how]:.3g}" for part in ("round", "evaluation") for how in HOW), f"{own['ratio']:.2f}"]
        if "ratio" in own
        else [name, own["reason"], "", "", "", ""]
        for name, own in found["runs"].items()
    ]
    columns = (f"{part}, {how}" for part in ("round", "evaluation") for how in HOW)
    return table(["model and method", *columns, "hours, estimate / measured"], lines)


def standing(_: str) -> str:
    """Rows and claims of each paper at both scales."""
    lines = [[paper, *total(judged(paper, "quick")), *total(judged(paper, "full"))] for paper in papers.PAPERS]
    return table(["paper", "rows, quick", "claims, quick", "rows, full", "claims, full"], lines)


def counts(item: dict[str, Any] | None) -> list[str]:
    """The rows and the claims of an item by verdict, as text."""
    if item is None:
        return ["", ""]
    return [
        told(Counter(row["best"]["verdict"] for row in item["rows"] if row["paper"] is not None), verdicts.TONES),
        told(Counter(claim["state"] for claim in item["claims"]), verdicts.CLAIM_TONES),
    ]


def total(items: dict[str, Any]) -> list[str]:
    """The same for all items together."""
    merged = {
        "rows": [row for item in items.values() for row in item["rows"]],
        "claims": [claim for item in items.values() for claim in item["claims"]],
    }
    return counts(merged) if items else ["", ""]


def told(found: Counter[str], order: Any) -> str:
    """Counts as "3 agrees, 1 lower"."""
    return ", ".join(f"{found[word]} {word}" for word in order if found[word])


def origin(paper: str) -> str:
    """Where the results at the full scale come from."""
    runs = [StoredRun(path).content for path in sorted((RESULTS / paper).glob("*.json"))]
    if not runs:
        return "\nNo run at the full scale.\n"
    hours = sum(run["figures"]["summary"]["seconds"] for run in runs) / 3600
    machines = sorted({f"{run['machine']['processor']}, {run['machine']['cores']} cores" for run in runs})
    commits = sorted({run["commit"][:7] for run in runs if run["commit"]})
    made = f"{len(runs)} runs at the full scale, {hours:.1f} hours of training on one core of {'; '.join(machines)}"
    return f"\n{made} (commits {', '.join(commits)}; `docs/results/{paper}/`).\n"


def picture(text: str) -> str:
    """A link to the picture of a chart, if its runs are there."""
    drawn, path = chart(text)
    if not drawn.series:
        return none(text)
    return f"\n![{drawn.title}](../images/{path.name})\n"


def chart(text: str) -> tuple[Lines, Path]:
    """The chart that "PAPER/ITEM full TITLE" names, and the file of its picture."""
    what, _, title = text.split(" ", 2)
    paper, _, name = what.partition("/")
    items = papers.items_of(paper, "full")
    item = next(item for item in items if item.name == name)
    planned = next(each for each in item.charts if each.title == title)
    return verdicts.lines(planned, stored_runs(RESULTS / paper, items, "full")), IMAGES / f"{paper}-{name}.png"


def table(head: list[str], lines: list[list[str]]) -> str:
    """A pipe table."""
    shown = [head, ["---"] * len(head), *lines]
    return "\n" + "\n".join("| " + " | ".join(line) + " |" for line in shown) + "\n"


MAKE = {
    "rows": rows,
    "claims": claims,
    "overview": overview,
    "sentences": sentences,
    "standing": standing,
    "rates": rates,
    "estimates": estimates,
    "origin": origin,
    "picture": picture,
}


def collect(folder: Path) -> None:
    """Copy files of finished runs to docs/results."""
    for path in [*folder.glob("*/*.json"), *folder.glob("*-quick.json")]:
        place = RESULTS / path.relative_to(folder)
        place.parent.mkdir(exist_ok=True)
        shutil.copy(path, place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--collect", type=Path, help="folder with PAPER/RUN-SEED.json")
    given = parser.parse_args()
    if given.collect is not None:
        collect(given.collect)
    for page in PAGES:
        for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
            if found[1] == "picture" and (drawn := chart(found[2]))[0].series:
                save(*drawn)
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
