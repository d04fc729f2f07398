"""Pretrained models: GPT-2 and Llama architectures, small and random, stacked; their files, and what does not fit."""

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gguf_files import small_llama, write_gguf
from network_tree import Tree
from polytier import FedAvg, FedAvgFT, Federation, LocalTraining, Run, RunFolder, build_federation, resume, train
from polytier.data.batches import Batch, Group
from polytier.data.tokens import make_tokenizer
from polytier.engines.network.transport import InMemory
from polytier.models.trainable import Trainable
from polytier.models.zoo import make_model
from polytier.runs import evaluate
from polytier.runs.assemble import assemble
from polytier.runs.export import export
from polytier.runs.loop import make_loop
from polytier.runs.spec import check_spec
from polytier.stack.dropout import check_dropout
from polytier.stack.objective import Objective, choose_batching

VOCABULARY, CONTEXT = 48, 12
TARGETS = {"gpt2": "*c_attn+*c_proj", "llama": "*q_proj+*v_proj"}
NAMES = list(TARGETS)
LLAMA = "lora:rank=1,targets=*q_proj"


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    """Folders with a small GPT-2 and a small Llama."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    gpt2 = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    llama = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")
    transformers.LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    return {name: str(folder / name) for name in NAMES}


@pytest.fixture(scope="module")
def text() -> Federation:
    """Five devices with 6 samples of 12 tokens."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (30, CONTEXT + 1))
    device = np.repeat(np.arange(5), 6)
    return Federation.from_arrays(ids[:, :-1], ids[:, 1:], device, shares=(2, 0, 1), num_classes=VOCABULARY)


def objective_of(models, name: str, train: str, **more: Any) -> Objective:
    return Objective(
        make_model(f"hf:{models[name]}", (CONTEXT,), VOCABULARY, 0), trainable=Trainable.parse(train), **more
    )


def batch_of(objective: Objective, n: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, VOCABULARY, (n, 2, CONTEXT), generator=generator) for _ in range(2))
    key = torch.arange(n * 2).reshape(n, 2) if objective.dropouts else None
    return Batch([Group(slice(None), x, y, torch.full((n, 2), 0.5), key)], n)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_stack_are_those_of_autograd(models, name):
    choice = f"lora:rank=2,targets={TARGETS[name]}"
    objective = objective_of(models, name, choice)
    batch = batch_of(objective, 5)
    theta = objective.initial + 0.05 * torch.randn(5, objective.dimension, generator=torch.Generator().manual_seed(2))
    assert choose_batching(objective, batch) == "stacked"  # and so the same bits alone
    expected = objective_of(models, name, choice, batching="eager").grad(theta, batch)
    torch.testing.assert_close(objective.grad(theta, batch), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_has_the_same_bits(models, text, name):
    settings: dict[str, Any] = {"rounds": 1, "train": f"lora:rank=2,targets={TARGETS[name]}", "batch_size": 2}
    settings["optimizer"], method = "adamw", FedAvg(0.01, 2)
    first = train(method, text, f"hf:{models[name]}", tile=1, **settings)
    for more in ({"tile": 4}, {"tile": 8}, {"workers": 2}):
        assert torch.equal(train(method, text, f"hf:{models[name]}", **{**settings, **more}).row(), first.row()), more


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_our_lora_is_that_of_peft(models):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    for name, targets in (("gpt2", ["c_attn"]), ("llama", ["q_proj", "v_proj"])):
        model = make_model(f"hf:{models[name]}", (CONTEXT,), VOCABULARY, 0)
        ours = Trainable.parse(f"lora:rank=3,alpha=6,targets={'+'.join('*' + t for t in targets)}").apply(model)
        base = transformers.AutoModelForCausalLM.from_pretrained(models[name], attn_implementation="eager")
        config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, fan_in_fan_out=name == "gpt2")
        theirs = peft.get_peft_model(base, config).eval()
        generator = torch.Generator().manual_seed(0)
        values = dict(theirs.named_parameters())
        for key, parameter in ours.named_parameters():
            if key.endswith(("lora_A", "lora_B")):
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
                values[f"base_model.{key}.default.weight"].data = parameter.data
        ids = torch.randint(0, VOCABULARY, (3, CONTEXT), generator=generator)
        torch.testing.assert_close(ours.eval()(ids), theirs(ids).logits, rtol=0, atol=1e-5)


def test_a_run_refuses_another_base(models, text, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(models["gpt2"], base)
    run = train(FedAvg(0.1, 1), text, f"hf:{base}", rounds=1, train="lora:rank=1,targets=*c_attn")
    run.save(tmp_path / "run")
    assert torch.equal(Run.load(tmp_path / "run").row(), run.row())
    weights = load_file(base / "model.safetensors")
    weights["transformer.h.0.ln_1.bias"] += 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="frozen parameters of this model are not those of the run"):
        Run.load(tmp_path / "run")
    with pytest.raises(ValueError, match="frozen parameters of the model have changed since the run .* was started"):
        resume(tmp_path / "run", rounds=2, federation=text)


def test_dropout_of_attention_is_switched_off_with_a_warning(models, caplog):
    model = make_model(f"hf:{models['gpt2']}", (CONTEXT,), VOCABULARY, 0)
    assert "attn_pdrop = 0.1 of the model is set to 0" in caplog.text
    check_dropout(Objective(model).module, torch.zeros(1, CONTEXT, dtype=torch.int64))
    assert len(Objective(model).dropouts) == 7  # those that are layers are drawn by sample


def test_what_does_not_fit_gives_advice(models, tmp_path):
    pytest.importorskip("transformers")
    place = models["gpt2"]
    for inputs, words, advice in (
        ((20,), 48, "at most 16; lower context"),
        ((12,), 90, "knows 48"),
        ((3, 8, 8), 48, "text"),
    ):
        with pytest.raises(ValueError, match=advice):
            make_model(f"hf:{place}", inputs, words, 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot be read as a causal language model"):
        make_model(f"hf:{tmp_path / 'empty'}", (12,), 48, 0)


def test_a_gguf_file_gives_the_outputs_of_its_model(tmp_path):
    tokenizer = make_tokenizer("bpe:270", ["a small text", "about small things"])
    model = small_llama(tokenizer.size)
    write_gguf(tmp_path / "model.gguf", model, tokenizer.inner)
    made = make_model(f"hf:{tmp_path / 'model.gguf'}", (CONTEXT,), tokenizer.size, 0).eval()
    ids = torch.randint(0, tokenizer.size, (3, CONTEXT))
    torch.testing.assert_close(made(ids), model(ids).logits, rtol=0, atol=1e-5)


def test_data_with_another_tokenizer_than_the_models_are_refused(tmp_path):
    documents = ["a small text", "about small things", "and some more", "of it"]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "anna.txt").write_text("\n".join(documents))
    own, other = make_tokenizer("bpe:270", documents), make_tokenizer("bpe:270", ["quite other words, other words"])
    small_llama(280).save_pretrained(tmp_path / "llama")
    own.inner.save(str(tmp_path / "llama" / "tokenizer.json"))
    other.inner.save(str(tmp_path / "other.json"))
    write_gguf(tmp_path / "llama.gguf", small_llama(own.size), own.inner)
    shared = {"algorithm": "fedavg", "rounds": 1, "train": "lora:rank=1"}

    def assembled(model: str, tokenizer: str) -> None:
        data = f"text:{tmp_path / 'texts'},context=8,tokenizer={tokenizer}"
        assemble(check_spec({**shared, "data": data, "model": f"hf:{tmp_path / model}"})).close()

    for model in ("llama", "llama.gguf"):
        for tokenizer in ("bytes", "bpe:270", tmp_path / "other.json"):
            with pytest.raises(ValueError, match=rf"is not the one that the model .* came with.*tokenizer=.*{model}"):
                assembled(model, str(tokenizer))
        for tokenizer in ("llama", "llama/tokenizer.json", "llama.gguf"):
            assembled(model, str(tmp_path / tokenizer))


def test_a_path_that_is_missing_gives_advice():
    with pytest.raises(ValueError, match="there is no model at /nowhere.*nothing is downloaded"):
        make_model("hf:/nowhere", (12,), 48, 0)


def test_weights_of_a_factory_are_read_from_a_file(tmp_path, monkeypatch):
    (tmp_path / "own_nets.py").write_text(
        "from torch import nn\n\ndef net(inputs, outputs):\n    return nn.Linear(inputs[0], outputs)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    weights = {"weight": torch.arange(6.0).reshape(3, 2), "bias": torch.ones(3)}
    save_file(weights, tmp_path / "net.safetensors")
    made = make_model(f"own_nets:net,weights={tmp_path / 'net.safetensors'}", (2,), 3, 0)
    assert torch.equal(made.weight, weights["weight"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no such file"):
        make_model("own_nets:net,weights=missing.safetensors", (2,), 3, 0)
    with pytest.raises(ValueError, match="do not fit the model"):
        make_model(f"own_nets:net,weights={tmp_path / 'net.safetensors'}", (4,), 3, 0)


class Dropping(nn.Module):
    """Dropout by a number, as attention has it."""

    def __init__(self, p: float, attention: bool) -> None:
        super().__init__()
        self.layer, self.p, self.attention = nn.Linear(4, 4), p, attention

    def forward(self, x):
        x = self.layer(x)
        if self.attention:
            p = self.p if self.training else 0.0
            return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=p)[:, 0]
        return nn.functional.dropout(x, self.p, self.training)


@pytest.mark.parametrize("attention", [False, True])
def test_dropout_by_a_number_is_refused(attention):
    with pytest.raises(ValueError, match="0.2.*use torch.nn.Dropout layers"):
        check_dropout(Dropping(0.2, attention).eval(), torch.randn(2, 4))
    module = Dropping(0.0, attention).eval()
    check_dropout(module, torch.randn(2, 4))
    assert not any(part.training for part in module.modules())
    with pytest.raises(ValueError, match="LSTM with dropout = 0.3"):
        check_dropout(nn.LSTM(4, 4, 2, dropout=0.3).eval(), torch.randn(2, 3, 4))


def test_a_model_whose_dropout_would_be_off_is_refused_before_the_first_round():
    data = Federation.from_arrays(torch.randn(8, 4), torch.arange(8) % 4, np.arange(8) % 2)
    with pytest.raises(ValueError, match="dropout with p = 0.1"):
        train("fedavg", data, Dropping(0.1, False), rounds=1)


def test_a_large_vocabulary_is_evaluated_in_few_samples(monkeypatch):
    """Outputs of 64 x 4096 numbers per sample: one forward pass has at most as many samples as fit."""
    words = 4096

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(words, 2), nn.Linear(2, words)

        def forward(self, x):
            return self.head(self.table(x))

    rng = np.random.default_rng(0)
    ids = rng.integers(0, words, (60, 65))
    data = Federation.from_arrays(ids[:, :-1], ids[:, 1:], np.arange(60) % 2, shares=(1, 0, 1), num_classes=words)
    seen = []
    outputs = Objective.outputs

    def watched(self, theta, inputs, statistics=None):
        seen.append(inputs.shape[:2])
        return outputs(self, theta, inputs, statistics)

    monkeypatch.setattr(Objective, "outputs", watched)
    with make_loop(FedAvg(0.1, 1), data, Words(), train="layers=head.bias", batch_size=2) as training:
        training.run(1)
    assert seen
    assert max(n * b for n, b in seen) * 64 * words * 4 <= evaluate.HELD
    assert max(b for _, b in seen) == evaluate.HELD // (64 * words * 4)


@pytest.mark.parametrize("name", NAMES)
def test_the_base_is_in_no_message_and_no_file_and_keeps_its_bits(models, text, tmp_path, monkeypatch, name):
    """Messages as bytes, between nodes that each have a world of their own, and all files of a run and of the nodes."""
    before = {path: path.read_bytes() for path in Path(models[name]).iterdir()}
    settings: dict[str, Any] = {"train": f"lora:rank=2,targets={TARGETS[name]}", "optimizer": "momentum:0.9:keep"}
    sent: list[bytes] = []
    dial = InMemory.dial

    def recorded(hub: InMemory, address: str, handle: Any) -> None:
        def of_child(data: bytes) -> bytes:
            sent.extend((data, answer := handle(data)))
            return answer

        dial(hub, address, of_child)

    monkeypatch.setattr(InMemory, "dial", recorded)
    with make_loop(FedAvg(0.1, 2), text, f"hf:{models[name]}", **settings) as loop:
        frozen = {key: p.clone() for key, p in loop.context.objective.frozen.items()}
        Tree(loop, folder=tmp_path / "nodes")
        over_network = loop.run(2, [RunFolder(tmp_path / "run")])
        assert all(torch.equal(p, frozen[key]) for key, p in loop.context.objective.frozen.items())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    written = b"".join([*sent, *(path.read_bytes() for path in files)])
    own = load_file(tmp_path / "run" / "models" / "global.safetensors")
    assert all(values.numpy().tobytes() in written for values in own.values())  # what trains is found
    parts = [
        part for p in frozen.values() for part in p.flatten().split(8) if len(part) == 8 and len(part.unique()) > 4
    ]
    assert len(parts) > 300
    assert not [part for part in parts if part.numpy().tobytes() in written]
    assert before == {path: path.read_bytes() for path in Path(models[name]).iterdir()}
    simulated = train(FedAvg(0.1, 2), text, f"hf:{models[name]}", rounds=2, **settings)
    assert torch.equal(over_network.row(), simulated.row())


def test_a_run_resumes_with_its_base(models, text, tmp_path):
    run = train(FedAvg(0.1, 1), text, f"hf:{models['gpt2']}", rounds=1, train="lora:rank=1,targets=*c_attn")
    again = resume(run, rounds=2)
    whole = train(FedAvg(0.1, 1), text, f"hf:{models['gpt2']}", rounds=2, train="lora:rank=1,targets=*c_attn")
    assert torch.equal(again.row(), whole.row())


# -- taking it away -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_peft_folder_gives_our_predictions(models, text, tmp_path, name):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    choice = f"lora:rank=2,alpha=8,targets={TARGETS[name]}"
    run = train(LocalTraining(0.5, 3), text, f"hf:{models[name]}", rounds=1, train=choice)
    export(run, run.whole_row(device=3), tmp_path / "adapter", "device 3", "peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(models[name], attn_implementation="eager")
    loaded, x = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval(), text.device(3)[0]
    ours = run.model(device=3)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x).logits, ours(x), rtol=0, atol=1e-5)
        with loaded.disable_adapter():
            assert not torch.allclose(loaded(x).logits, ours(x), atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_program_takes_any_number_of_samples(models, text, tmp_path, name):
    run = train(FedAvg(0.5, 1), text, f"hf:{models[name]}", rounds=1, train=f"lora:rank=1,targets={TARGETS[name]}")
    said = export(run, run.row(), tmp_path / "model.pt2", "all")
    assert f"of which {len(run.row()):,} were trained" in said
    program, x = torch.export.load(tmp_path / "model.pt2").module(), text.device(0)[0]
    for number in (1, 4):
        torch.testing.assert_close(program(x[:number]), run.model()(x[:number]), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_peft_folder_of_ones_own_module(tmp_path):
    peft = pytest.importorskip("peft")
    data = build_federation("digits", devices=4)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 8), nn.Linear(8, 10))
    run = train(FedAvg(0.5, 3), data, module, rounds=1, train="lora:rank=2,alpha=4,targets=0+3")
    said = export(run, run.row(), tmp_path / "adapter", "all", "peft")
    assert "the base is your model" in said
    x, ours = data.device(0, "test")[0], run.model()
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(module), str(tmp_path / "adapter")).eval()
    inputs = data.inputs(x, torch.float32)
    torch.testing.assert_close(loaded(inputs), ours(inputs), rtol=0, atol=1e-5)
    assert not torch.allclose(loaded(inputs), module(inputs), atol=1e-3)


def test_parts_hold_what_trained_alone(models, text, tmp_path):
    run = train(FedAvg(0.1, 1), text, f"hf:{models['llama']}", rounds=1, train="lora:rank=1,targets=*q_proj")
    said = export(run, run.row(), tmp_path / "parts.safetensors", "all", "parts")
    parts = load_file(tmp_path / "parts.safetensors")
    assert sum(part.numel() for part in parts.values()) == len(run.row())
    assert "what was trained" in said
    said = export(run, run.row(), tmp_path / "whole.safetensors", "all")
    assert f"of which {len(run.row()):,} were trained" in said


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_an_exported_model(models, text, tmp_path, name):
    """The file in place of the one in the model's folder; the products of LoRA are added to its weights."""
    transformers = pytest.importorskip("transformers")
    run = train(FedAvg(0.5, 2), text, f"hf:{models[name]}", rounds=1, train=f"lora:rank=1,targets={TARGETS[name]}")
    folder, x = tmp_path / "tuned", text.device(0)[0]
    shutil.copytree(models[name], folder)
    (folder / "model.safetensors").unlink()
    export(run, run.row(), folder / "model.safetensors", "all")
    tuned, base = (transformers.AutoModelForCausalLM.from_pretrained(where).eval() for where in (folder, models[name]))
    with torch.no_grad():
        torch.testing.assert_close(tuned(x).logits, run.model()(x), rtol=0, atol=1e-5)
        assert not torch.allclose(base(x).logits, run.model()(x), atol=1e-3)


def test_a_newcomer_trains_what_trains(models, text):
    run = train(FedAvgFT(0.1, 1, tune_lr=0.5, tune_steps=2), text, f"hf:{models['llama']}", rounds=1, train=LLAMA)
    x, y = text.device(0)
    adapted, before = run.adapt(x, y), run.model()
    changed = [name for name, p in adapted.named_parameters() if not torch.equal(p, before.get_parameter(name))]
    assert changed
    assert all(name.endswith(("lora_A", "lora_B")) for name in changed)


def test_a_model_without_lora_is_no_peft_folder(text, tmp_path, models):
    run = train(FedAvg(0.1, 1), text, f"hf:{models['llama']}", rounds=1, train="layers=*norm.weight")
    with pytest.raises(ValueError, match="has no LoRA layers.*train=lora"):
        export(run, run.row(), tmp_path / "adapter", "all", "peft")
    with pytest.raises(ValueError, match="format 'nonsense'"):
        export(run, run.row(), tmp_path / "adapter", "all", "nonsense")


def test_the_features_before_the_last_layer_can_be_kept(models, text):
    settings: dict[str, Any] = {"train": "head", "rounds": 2, "dtype": "float64"}
    both = [train(FedAvg(0.1, 2), text, f"hf:{models['llama']}", cache_features=on, **settings) for on in (False, True)]
    assert both[1].context.batches.federation.x.shape[1:] == (CONTEXT, 16)
    torch.testing.assert_close(both[1].row(), both[0].row(), rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="are one parameter, which trains"):
        train(FedAvg(), text, f"hf:{models['gpt2']}", cache_features=True, train="head", rounds=1)
