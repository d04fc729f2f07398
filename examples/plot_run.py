"""Draw the accuracy of personal, team and global models by round, from run folders.

polytier run permfl --out runs/permfl
polytier run fedavg --out runs/fedavg
python examples/plot_run.py runs/permfl runs/fedavg -o accuracy.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"personal": "#0b6e4f", "team": "#e08e1b", "global": "#3b5b92"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("accuracy.png"))
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    for style, folder in zip(("-", "--", ":", "-."), options.runs, strict=False):
        rounds = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        name = json.loads((folder / "summary.json").read_text())["algorithm"]
        for model, colour in COLOURS.items():
            points = [(r["round"], 100 * r[model]["test"]["accuracy"]) for r in rounds if model in r]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    color=colour,
                    label=f"{name}, {model} model",
                    linewidth=1.8,
                )
    axes.set(xlabel="round", ylabel="test accuracy (%), mean over devices", title=options.title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(options.out, dpi=150)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
