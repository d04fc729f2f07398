"""Peak memory of a FedAvg round.

As devices grow: `solve` holds sums, so what lies beyond the data stays flat.

    python benchmarks/memory.py [--devices 1000 10000 50000]

Of a large language model with LoRA, compared with the estimate before the first round; the result is written to
docs/results/memory.json:

    python benchmarks/memory.py --model SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "memory.json"
LORA = "lora:rank=4,alpha=32,targets=*q_proj+*v_proj"
CLIENTS, TOKENS = 4, 64
SAMPLES, FEATURES = 10, 60


def measure(devices: int) -> None:
    import numpy as np

    from polytier import FedAvg, Federation
    from polytier.runs.loop import make_loop

    rng = np.random.default_rng(0)
    x = rng.random((devices * SAMPLES, FEATURES), dtype=np.float32)
    federation = Federation.from_arrays(
        x, rng.integers(0, 10, len(x)), np.repeat(np.arange(devices), SAMPLES), shares=(1, 0, 0)
    )
    del x
    training = make_loop(FedAvg(device_steps=5), federation, "mclr", batch_size=10)
    training.step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    training.step()
    data = sum(t.numel() * t.element_size() for t in (federation.x, federation.y)) / 2**20
    models = devices * training.context.objective.dimension * 4 / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{devices:>9,}{data:>10.1f}{models:>20.1f}{peak:>11.1f}{(peak - before / 2**10):>18.1f}")


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def measure_model(path: Path) -> None:
    """One round of clients with one sample each: the estimate, and the peak."""
    import numpy as np

    from polytier import FedAvg, Federation
    from polytier.runs.estimate import memory_bytes, memory_of
    from polytier.runs.loop import make_loop

    ids = np.random.default_rng(0).integers(0, 49_000, (2 * CLIENTS, TOKENS + 1))
    owner = np.repeat(np.arange(CLIENTS), 2)  # one sample for training, one for testing
    data = Federation.from_arrays(ids[:, :-1], ids[:, 1:], owner, shares=(1, 0, 1), num_classes=49_152)
    settings = {"train": LORA, "batch_size": 1, "optimizer": "adamw"}
    found: dict[str, object] = {
        "model": path.name,
        "train": LORA,
        "clients": CLIENTS,
        "samples": f"1 x {TOKENS} tokens",
    }
    with make_loop(FedAvg(0.01, 1), data, f"hf:{path.resolve()}", **settings) as loop:
        found |= {"batching": loop.context.objective.batching, "peak when assembled": peak_bytes()}
        found |= {"estimate": memory_bytes(loop), "estimate by purpose": memory_of(loop, loop.context)}
        loop.step()
        found["peak after a round"] = peak_bytes()
        loop.evaluate()
        peak = found["peak after an evaluation"] = peak_bytes()
        found["estimate / peak"] = round(memory_bytes(loop) / peak, 3)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1_000, 10_000, 50_000])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help="a language model as a .gguf file or a folder of Transformers")
    options = parser.parse_args()
    if options.model:
        measure_model(options.model)
        return
    if options.one:
        measure(options.one)
        return
    print(f"{'devices':>9}{'data MiB':>10}{'all answers MiB':>20}{'peak MiB':>11}{'second round MiB':>18}", flush=True)
    for devices in options.devices:  # each in a process of its own: a peak never goes down
        subprocess.run([sys.executable, __file__, "--one", str(devices)], check=True)


if __name__ == "__main__":
    main()
