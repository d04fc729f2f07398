"""Draw the test accuracy of the methods of a comparison, with 95 % intervals over seeds.

polytier compare local,fedavg,permfl --data digits-sites --split 3:1:1 --seeds 3 --out runs/mine
python examples/plot_comparison.py runs/mine -o comparison.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

KINDS = {  # of models: colour, marker, meaning
    "personal": ("#0b6e4f", "o", "one model per device"),
    "team": ("#c26a00", "s", "one model per team"),
    "global": ("#3b5b92", "D", "one model for all"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("comparison.png"))
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    methods = json.loads((options.folder / "compare.json").read_text())["methods"]
    figure, axes = plt.subplots(figsize=(7.2, 0.9 + 0.42 * len(methods)), layout="constrained")
    for kind, (colour, marker, meaning) in KINDS.items():
        rows = [(place, row[kind]) for place, row in enumerate(methods) if row[kind] is not None]
        if rows:
            mean, low, high = ([100 * found[name] for _, found in rows] for name in ("mean", "low", "high"))
            spread = [[m - a for m, a in zip(mean, low, strict=True)], [b - m for m, b in zip(mean, high, strict=True)]]
            places = [place for place, _ in rows]
            axes.errorbar(mean, places, xerr=spread, fmt=marker, color=colour, label=meaning, markersize=6, capsize=3)
    axes.set_yticks(range(len(methods)), [row["method"] for row in methods])
    axes.invert_yaxis()  # the best method is the first
    axes.set(xlabel="test accuracy (%), mean over devices", title=options.title)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.45, 1.17), ncols=3)
    figure.savefig(options.out, dpi=150)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
