"""Do gradients and learned weights show families of languages: Catalan and Spanish, German and Dutch?

Two measurements on DIR/text/{ca,de,es,nl}.txt.xz, whose results are written to docs/results/language_families.json:

    python benchmarks/language_families.py gradients DIR MODEL.gguf   # LoRA gradients of a pretrained model
    python benchmarks/language_families.py weights DIR                # weights of CoBo with a small model
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import polytier
from polytier.data.batches import Batches
from polytier.method.local_problem import LocalProblem
from polytier.models.trainable import Trainable
from polytier.models.zoo import make_model
from polytier.runs.loop import make_loop
from polytier.stack.objective import Objective

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "language_families.json"
LANGUAGES = ("ca", "de", "es", "nl")
RELATIVE = {"ca": "es", "es": "ca", "de": "nl", "nl": "de"}
LORA = "lora:rank=4,alpha=32,targets=*q_proj+*v_proj"


def keep(name: str, found: Any) -> None:
    """Add a result to the file."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**known, name: found}, indent=1) + "\n")
    print(json.dumps(found, indent=1), flush=True)


# -- gradients of a pretrained model -------------------------------------------------------------------


def gradients(data: Path, model: Path, batches: int, size: int, rounds: int) -> None:
    """Cosines of LoRA gradients between languages, at the start and after some rounds of FedAvg with AdamW."""
    import transformers

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name)
        tokenizer.backend_tokenizer.save(str(Path(folder) / "tokenizer.json"))
        text = f"text:folder={data / 'text'},context=64,files={'+'.join(LANGUAGES)},tokens=40000,tokenizer={folder}"
        federation = polytier.build_federation(text, split=(8, 1, 1))
    settings: dict[str, Any] = {"train": LORA, "batch_size": size, "batching": "eager", "optimizer": "adamw:keep"}
    method = polytier.FedAvg(device_lr=0.002, device_steps=1)
    module = make_model(f"hf:{model}", (64,), federation.num_classes, 0)
    objective = Objective(module, trainable=Trainable.parse(LORA), batching="eager")
    found = {"start": cosines(objective, objective.initial, federation, batches, size)}
    print(found, f"{time.perf_counter() - started:.0f} s", flush=True)
    with make_loop(method, federation, module, **settings) as loop:  # without evaluations, which take longer
        for _ in range(rounds):
            loop.step()
        shared = method.global_model(loop.state)
    assert shared is not None
    found[f"after {rounds} rounds of FedAvg"] = cosines(objective, shared[0], federation, batches, size)
    keep(
        "gradients",
        {
            "model": model.name,
            "train": LORA,
            "gradients": f"{batches} batches of {size} x 64 tokens per language; cosines of their means",
            "same language": "the cosine of the means of the even and of the odd batches",
            "noise removed": "squared norms are the inner products of these two means",
            "seconds": round(time.perf_counter() - started),
            **found,
        },
    )


def cosines(objective: Objective, row: Tensor, federation: polytier.Federation, number: int, size: int) -> Any:
    """Cosines between the mean gradients of languages, and between two halves of the batches of a language."""
    names = [str(name) for name in federation.ids]
    walk = Batches(federation, 1, objective.dtype).walk(torch.arange(len(names)), 0, 0, size)
    theta = row.repeat(len(names), 1)
    drawn = torch.stack([objective.grad(theta, walk.next()) for _ in range(number)]).double()  # [batches, 4, d]
    whole, even, odd = drawn.mean(0), drawn[::2].mean(0), drawn[1::2].mean(0)
    pairs = list(combinations(range(len(names)), 2))
    batch = walk.next()
    return {
        "loss per token of one batch": dict(zip(names, objective.loss(theta, batch).tolist(), strict=True)),
        "languages": {f"{names[i]}-{names[j]}": cosine(whole[i], whole[j]) for i, j in pairs},
        "languages, noise removed": {
            f"{names[i]}-{names[j]}": float(whole[i] @ whole[j] / (even[[i, j]] * odd[[i, j]]).sum(1).prod().sqrt())
            for i, j in pairs
        },
        "same language": {name: cosine(even[k], odd[k]) for k, name in enumerate(names)},
        "norm of the mean": {name: float(whole[k].norm()) for k, name in enumerate(names)},
    }


def cosine(a: Tensor, b: Tensor) -> float:
    """The cosine of two vectors."""
    return float(a @ b / (a.norm() * b.norm()))


# -- weights of CoBo -------------------------------------------------------------------------------------


class LargeMidpoints(polytier.CoBo):
    """CoBo whose gradients at midpoints are those of 64 samples."""

    def midpoint(self, z: Tensor, local: LocalProblem) -> Tensor:
        return local.grad(z, local.batch(64, stream="midpoint"))


def weights(data: Path, seeds: int, rounds: int) -> None:
    """The weights of CoBo at four clients, one per language, with a small GPT on bytes."""
    step = {"device_lr": 0.003}
    common: dict[str, Any] = {**step, "device_pull": 1.0, "domain": "simplex", "sampling": "all"}
    tried = {
        "Local": polytier.LocalTraining(device_steps=1, **step),
        "gamma 0": polytier.CoBo(weight_lr=0.0, **common),
        "gamma 0.2, pairs drawn with 1/n": polytier.CoBo(weight_lr=0.2, **{**common, "sampling": "constant"}),
        "gamma 0.2": polytier.CoBo(weight_lr=0.2, **common),
        "gamma 0.2, midpoints of 64 samples": LargeMidpoints(weight_lr=0.2, **common),
        "gamma 2/(10+t)": polytier.CoBo(weight_lr="2/(10+t)", **common),
        "gamma 2/(10+t), midpoints of 64 samples": LargeMidpoints(weight_lr="2/(10+t)", **common),
    }
    found: dict[str, Any] = {
        "clients": "4, one per language, 20,000 bytes each; GPT of 2 layers and width 32, batches of 8 x 32 bytes",
        "method": f"CoBo, simplex, rho 1, all pairs unless stated, {rounds} rounds of AdamW with step size 0.003",
    }
    text = f"text:folder={data / 'text'},context=32,files={'+'.join(LANGUAGES)},tokens=20000"
    for name, method in tried.items():
        found[name] = []
        for seed in range(seeds):
            federation = polytier.build_federation(text, split=(8, 1, 1), seed=seed)
            settings: dict[str, Any] = {"batch_size": 8, "optimizer": "adamw:keep", "eval_every": rounds}
            run = polytier.train(method, federation, "gpt:layers=2,width=32", rounds=rounds, seed=seed, **settings)
            found[name].append(family_weights(run))
        keep("weights", found)


def family_weights(run: polytier.Run) -> Any:
    """The perplexity, and the weights of the last round: is the largest one for the other language of the family?"""
    perplexity = round(run.history[-1]["personal"]["test"]["perplexity"], 2)
    if not run.collaboration:
        return {"perplexity": perplexity}
    last = run.collaboration[max(run.collaboration)]
    names, dense = [str(name) for name in last.ids.tolist()], last.dense()
    table = {a: {b: round(float(dense[i][j]), 3) for j, b in enumerate(names) if a != b} for i, a in enumerate(names)}
    right = sum(max(row, key=row.__getitem__) == RELATIVE[name] for name, row in table.items())
    return {
        "perplexity": round(perplexity, 2),
        "weights": table,
        "largest weight in the family": f"{right} of {len(names)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gradients", "weights"))
    parser.add_argument("data", type=Path, help="the folder with text/ca.txt.xz, ...")
    parser.add_argument("model", type=Path, nargs="?", help="for gradients: SmolLM2-135M as a .gguf file")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--size", type=int, default=4, help="samples of 64 tokens in a batch")
    parser.add_argument("--rounds", type=int, help="24 for gradients, 448 for weights")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.what == "gradients":
        if options.model is None:
            parser.error("gradients need MODEL.gguf")
        gradients(options.data, options.model, options.batches, options.size, options.rounds or 24)
    else:
        weights(options.data, options.seeds, options.rounds or 448)


if __name__ == "__main__":
    main()
