"""CoBo's language experiment: the plan, and its readings of run folders."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from commands import call
from gguf_files import small_llama, write_gguf
from plans import check_runs, runs_of
from polytier import RunFolder
from polytier.data.tokens import make_tokenizer
from polytier.models.pretrained import CausalLM
from polytier.models.trainable import Trainable
from polytier.papers import cobo_language as language
from polytier.papers import items_of, verdicts
from polytier.runs.loop import Loop
from polytier.runs.spec import RunSpec, check_spec
from polytier.stack.objective import Objective
from polytier.studies import plan_cost
from polytier.tree.collaboration import FILE, Collaboration, save, when_kept

(ITEM,) = language.items("quick")
IDS = np.array(["ca-1", "ca-2", "de-1", "de-2", "es-1", "es-2"])


def write(folder: Path, chosen: float, by_client: list[float], round_: int = 64, model: str = "personal") -> Path:
    """A run that has this perplexity in the chosen round, and 1 less in the best one."""
    folder.mkdir(parents=True)
    found = {how: {"round": None, model: {"perplexity": chosen - (how == "best"), "round": round_}} for how in HOW}
    metrics = [{"name": "perplexity", "better": "lower", "unit": ""}]
    summary = {"rounds": 128, "metrics": metrics, model: {"perplexity": chosen}, **found}
    (folder / "summary.json").write_text(json.dumps(summary))
    with (folder / "devices.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["id", f"{model}_perplexity"])
        lines.writerows(zip(IDS.tolist(), by_client, strict=True))
    return folder


HOW = ("best", "chosen")


def weigh(folder: Path, same: float, ca_to_es: float, round_: int = 64) -> Path:
    """Weights in the chosen round: `same` within a language; the rest of Catalan's to Spanish by this share."""
    named = [name.partition("-")[0] for name in IDS.tolist()]
    w = np.zeros((6, 6))
    for i, own in enumerate(named):
        for j, other in enumerate(named):
            share = ca_to_es if other == "es" else 1 - ca_to_es
            w[i, j] = same if own == other else (1 - same) / 2 * (share if own == "ca" else 0.5)
    found, other = Collaboration.from_dense(w), Collaboration.from_dense(np.ones((6, 6)))
    assert found is not None
    assert other is not None
    save(folder / FILE, {round_: replace(found, ids=IDS), 2 * round_: replace(other, ids=IDS)}, np.array(named))
    return folder


def test_the_plan_holds_together_and_names_the_papers_values():
    check_runs([ITEM])
    runs = runs_of([ITEM])
    assert list(runs) == [f"language-{method}" for method in language.NAMES]
    rows = {row.labels: row for row in ITEM.rows}
    assert rows["CoBo", "perplexity"].paper == 39.28
    assert (rows["Local", "perplexity"].paper, rows["Local", "perplexity"].deviation) == (41.26, 0.38)
    assert rows["Validation-based", "clients better than Local, %"].paper == 75
    assert rows["CoBo, weights not learned", "perplexity"].paper is None
    assert len(rows) == 2 * len(language.NAMES) - 1
    assert all(row.differs for row in ITEM.rows)
    assert all("language" in [item.name for item in items_of("cobo", scale)] for scale in ("quick", "full"))


def test_full_is_the_papers():
    (item,) = language.items("full")
    check_runs([item])
    assert not item.reduced
    assert not any(row.differs for row in item.rows)
    for run in runs_of([item]).values():
        assert (run.settings["model"], run.settings["devices"]) == ("hf:gpt2", 4)
        steps = run.settings["set"].get("device_steps", 1)
        assert (steps * run.settings["rounds"], run.settings["batch_size"]) == (500, 50 * 4)
        assert run.settings["set"]["device_lr"] == 0.002
    assert language.same_language not in [claim.holds for claim in item.claims]


def test_full_takes_the_model_that_the_user_names(tmp_path):
    (plain,) = language.items("full", "models/smollm2.gguf")
    for run in runs_of([plain]).values():
        assert run.settings["model"] == "hf:models/smollm2.gguf"
        assert run.settings["data"].endswith("tokens=800000,tokenizer=models/smollm2.gguf")
    assert all("another pretrained model" in row.differs for row in plain.rows)
    for layers, is_the_papers in ((12, True), (24, False)):  # GPT-2 medium has 24
        transformers.GPT2Config(n_layer=layers).save_pretrained(tmp_path / str(layers))
        (item,) = language.items("full", str(tmp_path / str(layers)))
        assert {row.differs == "" for row in item.rows} == {is_the_papers}
    with pytest.raises(ValueError, match="only cobo/language --scale full takes a pretrained model"):
        items_of("cobo", "quick", "models/smollm2.gguf")


@pytest.fixture
def four_languages(tmp_path) -> tuple[Path, str]:
    """A folder with text/ca.txt, ..., and a small pretrained model with its tokenizer."""
    (tmp_path / "text").mkdir()
    sentences = [f"{name} {k} is a sentence of some words" for name in ("ca", "de", "es", "nl") for k in range(20)]
    for name in ("ca", "de", "es", "nl"):
        (tmp_path / "text" / f"{name}.txt").write_text("\n".join(line for line in sentences if line.startswith(name)))
    tokenizer = make_tokenizer("bpe:280", sentences)
    write_gguf(tmp_path / "model.gguf", small_llama(tokenizer.size, context=512), tokenizer.inner)
    return tmp_path, str(tmp_path / "model.gguf")


def test_the_plan_runs_with_a_pretrained_model(four_languages, tmp_path):
    data, model = four_languages
    size = language.full(model)
    short = replace(size, data=size.data.replace("context=512", "context=8"), rounds=2, eval_every=2, batch_size=2)
    item = language.Plan(short).item()
    folders = {}
    for run in (run for run in item.runs() if run.name in ("language-local", "language-cobo-own")):
        spec = check_spec({**run.settings, "data_dir": str(data), "seed": 0, "workers": 1})
        with Loop.of(spec) as loop:
            assert loop.context.objective.names[0].endswith("lora_A")
            loop.run(2, [RunFolder(tmp_path / run.name)])
        folders[run.name] = {0: tmp_path / run.name}
    judged = verdicts.judge(item, folders)
    ours = {tuple(row["labels"]): row["chosen"]["ours"] for row in judged["rows"]}
    assert all(ours[name, "perplexity"]["mean"] > 100 for name in ("Local", "CoBo with own weights"))
    claims = {claim["text"]: claim["state"] for claim in judged["claims"]}
    assert (
        claims[f"Catalan gives Spanish more weight than German and Dutch ({language.NAMES['cobo-own']})"] != "untested"
    )


def test_a_dry_run_with_a_pretrained_model_times_single_samples(four_languages, monkeypatch):
    """A batch of the full scale would take more memory than there is."""
    data, model = four_languages
    sizes = []
    real = plan_cost.assemble

    def assemble(spec: RunSpec, **parts: Any) -> Any:
        if spec.model.startswith("hf:"):  # other models stand in for this one to count steps
            sizes.append(spec.batch_size)
        return real(spec, **parts)

    monkeypatch.setattr(plan_cost, "assemble", assemble)
    place = ["--scale", "full", "--model", model, "--data-dir", str(data)]
    shown = call("reproduce", "cobo/language", *place, "--only", "language-local", "--dry-run").stdout
    assert "no data" not in shown
    assert set(sizes) == {1}
    assert "3 runs; 3 to do" in shown


def test_lora_of_the_plan_has_the_papers_number_of_parameters():
    config = transformers.GPT2Config(n_layer=2, vocab_size=9, n_positions=8)  # blocks of GPT-2, 2 of 12
    module = CausalLM(transformers.GPT2LMHeadModel(config))
    objective = Objective(module, trainable=Trainable.parse(language.FULL.train))
    assert 6 * objective.dimension == 589_824


def test_runs_of_cobo_differ_in_what_their_names_say():
    fields = {name.removeprefix("language-"): run.settings["set"] for name, run in runs_of([ITEM]).items()}
    for name in ("cobo", "cobo-own"):
        assert fields[name]["domain"] == "simplex"
        assert fields[f"{name}-fixed"] == {**fields[name], "weight_lr": 0.0}
    assert fields["cobo-own"] == {**fields["cobo"], "own_weight": True}
    assert fields["ditto"]["device_pull"] == 0.1
    assert all(run.settings["rounds"] % run.settings["eval_every"] == 0 for run in runs_of([ITEM]).values())


def test_weights_are_kept_in_all_rounds_that_can_be_chosen():
    size = language.QUICK
    assert all(when_kept(k) for k in range(size.eval_every, size.rounds + 1, size.eval_every))


def test_perplexities_and_improved_clients(tmp_path):
    one = write(tmp_path / "one", 9.0, [8, 8, 9, 9, 10, 10])
    local = write(tmp_path / "local", 10.0, [9, 9, 9, 10, 11, 9])
    shared = write(tmp_path / "shared", 12.0, [11, 12, 12, 13, 12, 12], model="global")
    assert language.perplexity([one]) == (8.0, 9.0)
    assert language.perplexity([shared]) == (11.0, 12.0)
    assert language.improved([one, local]) == (pytest.approx(400 / 6), None)
    assert language.improved([shared, local])[0] == 0
    assert language.all_improved([[one], [local]]) == (False, "better: 66.6667 %")
    assert language.all_improved([[local], [shared]]) == (True, "better: 100 %")
    assert language.lowest(["a", "b"])([[one], [local]]) == (True, "a: 9.00, b: 10.00")
    assert language.lowest(["a", "b"])([[local, local], [one, shared]]) == (True, "a: 10.00, b: 10.50")
    assert not language.lowest(["a", "b"])([[shared], [local]])[0]


def test_claims_about_weights_use_the_chosen_round(tmp_path):
    seeds = [weigh(write(tmp_path / f"seed-{k}", 9.0, [9] * 6), 0.8, share) for k, share in enumerate((0.9, 0.6))]
    holds, words = language.same_language([seeds])
    assert holds is True  # a number of NumPy could not be written to reproduction.json
    assert words == "lowest and highest by seed: 0.80 and 0.09; 0.80 and 0.06"
    assert language.prefers("ca", "es")([seeds]) == (True, "de: 0.05, es: 0.15")
    assert not language.prefers("ca", "de")([seeds])[0]
    weak = weigh(write(tmp_path / "weak", 9.0, [9] * 6), 0.4, 0.5)
    assert not language.same_language([[*seeds, weak]])[0]
