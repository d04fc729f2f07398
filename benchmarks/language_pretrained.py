"""CoBo's experiment with language models, the plan of the scale "full", shortened to a few rounds of small batches.

It shows that all methods, readings and claims of the plan work with a pretrained model; so few rounds say nothing about
which method is ahead. The result is written to docs/results/language_pretrained.json:

    python benchmarks/language_pretrained.py DIR MODEL.gguf    # DIR/text has ca.txt.xz, de.txt.xz, es.txt.xz, nl.txt.xz
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from polytier import RunFolder
from polytier.papers import verdicts
from polytier.papers.cobo_language import Plan, full
from polytier.runs.estimate import memory_bytes
from polytier.runs.loop import Loop
from polytier.runs.spec import check_spec

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "language_pretrained.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder with text/ca.txt.xz, ...")
    parser.add_argument("model", type=Path, help="a folder of Transformers or a .gguf file")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=600, help="per client")
    options = parser.parse_args()
    size = full(str(options.model))
    shorter = size.data.replace("context=512", f"context={options.context}")
    short = replace(
        size,
        data=shorter.replace("tokens=800000", f"tokens={options.tokens}"),
        rounds=options.rounds,
        eval_every=options.rounds,
        batch_size=1,
        seeds=1,
        mix_every=2,
        tune_steps=2,
    )
    item = Plan(short).item()
    found: dict[str, Any] = {
        "model": options.model.name,
        "train": short.train,
        "shortened to": f"{options.rounds} rounds of 1 x {options.context} tokens, {options.tokens} tokens per client",
        "seconds": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        folders: dict[str, dict[int, Path]] = {}
        for run in item.runs():
            started, target = time.perf_counter(), Path(folder) / run.name
            spec = check_spec({**run.settings, "data_dir": str(options.data), "seed": 0, "workers": 1})
            with Loop.of(spec) as loop:
                found["estimated bytes"] = max(memory_bytes(loop), found.get("estimated bytes", 0))
                found["parameters that train"] = loop.context.objective.dimension
                loop.run(spec.rounds, [RunFolder(target)])
            folders[run.name] = {0: target}
            found["seconds"][run.name] = round(time.perf_counter() - started)
            print(run.name, found["seconds"][run.name], "s", flush=True)
        judged = verdicts.judge(item, folders)
    found["peak bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    found |= {"rows": judged["rows"], "claims": judged["claims"]}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
