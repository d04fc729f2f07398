"""Writes a small Llama with a tokenizer as a .gguf file, as converters do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import Tensor

# names in Transformers and in GGUF, of the model and of a layer
MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{y}" for x, y in zip("qkvo", ("q", "k", "v", "output"), strict=True)},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def small_llama(vocabulary: int, context: int = 16) -> Any:
    """A random model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=context,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def write_gguf(path: Path, model: Any, tokenizer: Any) -> None:
    """Write a `LlamaForCausalLM` and a `tokenizers.Tokenizer` (byte pairs) to a file."""
    config, writer = model.config, gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    content = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])  # 3: a control token
    writer.add_token_merges([" ".join(pair) for pair in content["merges"]])
    writer.add_eos_token_id(content["vocab"]["<|endoftext|>"])
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for name, values in model.state_dict().items():
        part = name.removesuffix(".weight")
        if part in MODEL:
            writer.add_tensor(f"{MODEL[part]}.weight", values.numpy())
            continue
        _, _, number, part = part.split(".", 3)
        values = interleaved(values, heads[part]) if part in heads else values
        writer.add_tensor(f"blk.{number}.{LAYER[part]}.weight", values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys as GGUF has them: the two halves of a head take turns."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
