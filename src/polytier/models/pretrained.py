"""Pretrained models: causal language models of Transformers from a folder or a GGUF file, and files of weights.

Nothing is downloaded: a path must exist. Transformers is imported when such a model is made (extra `language`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from polytier.data.tokens import ids_in

log = logging.getLogger("polytier")


class CausalLM(nn.Module):
    """A causal language model of Transformers: token ids [B, T] in, logits [B, T, V] out.

    The mask and the positions are made here, and no cache is used: what Transformers would make of them itself
    depends on the values of the inputs, which a traced graph cannot.

    Args:
        model: The model of Transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        length, dtype = ids.shape[-1], next(self.model.parameters()).dtype
        later = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        mask = torch.zeros(length, length, dtype=dtype, device=ids.device).masked_fill(later, torch.finfo(dtype).min)
        positions = torch.arange(length, device=ids.device).unsqueeze(0)
        mask = mask.expand(ids.shape[0], 1, length, length)  # `len(ids)` is a constant in an exported program
        return self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def from_transformers(inputs: tuple[int, ...], num_outputs: int, path: str) -> nn.Module:
    """A causal language model from a folder of Transformers or a .gguf file.

    Args:
        inputs: The shape of a sample, (T,): T token ids.
        num_outputs: The number of tokens of the data's vocabulary.
        path: The folder, with config.json and model.safetensors, or the file.

    Raises:
        ValueError: Transformers is not installed, there is no such model, or it does not fit the data.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise ValueError(
            f"there is no model at {place}; give hf:PATH, a folder with config.json and model.safetensors or a .gguf "
            "file; nothing is downloaded"
        )
    try:
        import transformers
    except ImportError:
        raise ValueError('Transformers is not installed; get it by: pip install "polytier[language]"') from None
    folder, more = (place.parent, {"gguf_file": place.name}) if place.suffix == ".gguf" else (place, {})
    kind: Any = transformers.AutoModelForCausalLM
    settings: dict[str, Any] = {"local_files_only": True, **more}
    try:
        with quiet_transformers():
            config = without_dropout_by_number(transformers.AutoConfig.from_pretrained(str(folder), **settings))
            settings |= {"config": config, "attn_implementation": "eager", "dtype": torch.float32}
            model = kind.from_pretrained(str(folder), **settings)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{place} cannot be read as a causal language model of Transformers: {reason}") from None
    check_fit(model.config, place, inputs, num_outputs)
    return CausalLM(model)


def without_dropout_by_number(config: Any) -> Any:
    """The configuration without dropout of attention weights; a warning says so if there was some.

    Transformers gives its probability to a function, whose masks cannot be drawn by sample (see stack/dropout.py).
    """
    for name in ("attn_pdrop", "attention_dropout"):
        if getattr(config, name, 0.0):
            log.warning("%s = %g of the model is set to 0: such masks cannot be drawn", name, getattr(config, name))
            setattr(config, name, 0.0)
    return config


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the progress bars and warnings of Transformers."""
    from transformers.utils import logging as their

    level, bars = their.get_verbosity(), their.is_progress_bar_enabled()
    their.set_verbosity_error()
    their.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):  # the bar of a GGUF file is drawn all the same
            yield
    finally:
        their.set_verbosity(level)
        if bars:
            their.enable_progress_bar()


def check_fit(config: Any, place: Path, inputs: tuple[int, ...], num_outputs: int) -> None:
    """Raise an error if the model does not fit the data."""
    if len(inputs) != 1:
        raise ValueError(
            f"{place} is a language model, which takes token ids of shape (T,), not samples of shape {inputs}; use "
            "data that are text"
        )
    longest, words = getattr(config, "max_position_embeddings", None), config.vocab_size
    if longest is not None and inputs[0] > longest:
        raise ValueError(f"samples have {inputs[0]} tokens and {place} takes at most {longest}; lower context=")
    if num_outputs is not None and num_outputs > words:
        raise ValueError(
            f"the data have {num_outputs} different tokens and {place} knows {words}; use the tokenizer of that model"
        )


def check_tokenizer(model: str, tokenizer: str) -> None:
    """Raise an error if a pretrained model came with another tokenizer than the data have.

    Args:
        model: The path of the model; one without a tokenizer fits all data.
        tokenizer: The name of the tokenizer of the data, "bytes", "bpe:SIZE" or a path.
    """
    place, path = (Path(name).expanduser().resolve() for name in (model, tokenizer))
    if place in (path, path.parent) or not (own := ids_in(place)):
        return
    few, many = sorted((own, ids_in(path)), key=len)  # one of them may have more tokens
    if not few or not few.items() <= many.items():
        raise ValueError(
            f"the tokenizer of the data, {tokenizer}, is not the one that the model {model} came with: its ids are "
            f"other tokens; write --data text:FOLDER,tokenizer={place}"
        )


def load_weights(module: nn.Module, path: str) -> None:
    """Load the parameters and buffers of a .safetensors file into a module.

    Raises:
        ValueError: The file is missing, cannot be read, or does not fit the module.
    """
    place = Path(path).expanduser()
    if not place.is_file():
        raise ValueError(f"weights={path}: there is no such file; give a .safetensors file")
    try:
        module.load_state_dict(load_file(place))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"weights={path} cannot be read as a .safetensors file: {error}") from None
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"weights={path} do not fit the model: {reason}") from None
