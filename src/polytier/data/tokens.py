"""Tokenizers: from text to token ids.

A tokenizer is named by a text: "bytes" (the default), "bpe:SIZE" (trained on the documents themselves), or a path: a
tokenizer.json, a folder that has one, a folder with vocab.json and merges.txt of GPT-2, or a .gguf file. All but
"bytes" need the package `tokenizers`; .gguf files need Transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from polytier._text import whole
from polytier.files.read import reading

BYTES, BPE = "bytes", "bpe:"
END = "<|endoftext|>"  # the end token of tokenizers that are trained here
ENDS = (END, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")  # known end tokens, in order of preference
FILES = "a tokenizer.json, a folder with tokenizer.json or with vocab.json and merges.txt, or a .gguf file"
FEWEST = 257  # the least size of a vocabulary of pairs of bytes: all bytes and the end token


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back.

    Args:
        inner: a `tokenizers.Tokenizer`, or None for bytes.
        end: the id of the token that ends a document.
        size: the number of tokens, the end token among them.

    Examples:
        >>> tokenizer = make_tokenizer("bytes")
        >>> tokenizer.size, tokenizer.end, tokenizer.encode(["né"])[0].tolist()
        (257, 256, [110, 195, 169])
        >>> tokenizer.decode([110, 195, 169, 256])
        'né'
    """

    inner: Any
    end: int
    size: int

    def encode(self, documents: Sequence[str]) -> list[np.ndarray]:
        """The ids of each document, without an end token."""
        if self.inner is None:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in documents]
        found = self.inner.encode_batch(list(documents), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int64) for each in found]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; end tokens are left out."""
        kept = [int(token) for token in ids if token != self.end]
        return bytes(kept).decode(errors="replace") if self.inner is None else self.inner.decode(kept)

    @cached_property
    def digest(self) -> str:
        """Equal for tokenizers that give the same ids. Losses per token are comparable only if it is equal."""
        if self.inner is None:
            return BYTES
        content = json.loads(self.inner.to_str())
        kept = {key: content.get(key) for key in ("normalizer", "pre_tokenizer", "added_tokens", "model")}
        return sha256(json.dumps([kept, self.end], sort_keys=True).encode()).hexdigest()[:16]


def make_tokenizer(name: str, documents: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer of a name.

    Args:
        name: "bytes", "bpe:SIZE" or a path, see above.
        documents: what "bpe:SIZE" is trained on.

    Returns:
        The tokenizer.

    Raises:
        ValueError: there is no such tokenizer, it has no end token, or the package `tokenizers` is not installed.
    """
    if name == BYTES:
        return Tokenizer(None, 256, 257)
    if name.startswith(BPE):
        return trained(name, documents)
    path = Path(name).expanduser()
    if not path.exists():
        raise ValueError(
            f"there is no tokenizer {name!r}; allowed: {BYTES}, {BPE}SIZE to train one on the documents, {FILES}"
        )
    return with_end(read(path), name)


def library() -> Any:
    """The package `tokenizers`."""
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(
            'this tokenizer needs an extra: pip install "polytier[language]"; tokenizer=bytes does without'
        ) from error
    return tokenizers


def trained(name: str, documents: Sequence[str]) -> Tokenizer:
    """Byte pair encoding of this many tokens, trained on the documents."""
    try:
        size = whole(name.removeprefix(BPE))
    except ValueError:
        size = 0
    if size < FEWEST:
        raise ValueError(f"tokenizer {name!r}: the number of tokens is {FEWEST} or more, as in {BPE}1000")
    tokenizers = library()
    inner = of_bytes(tokenizers, tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(documents, trainer)
    return with_end(inner, name)


def of_bytes(tokenizers: Any, model: Any) -> Any:
    """A tokenizer of bytes in the way of GPT-2, with this model of tokens."""
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return inner


def read(path: Path) -> Any:
    """The tokenizer in a file, or in a folder."""
    tokenizers = library()
    file = path / "tokenizer.json" if path.is_dir() else path
    with reading(path, "a tokenizer", f"give {FILES}"):
        if path.suffix == ".gguf":
            return of_gguf(path)
        if file.is_file():
            return tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        vocab, merges = path / "vocab.json", path / "merges.txt"
        if not (vocab.is_file() and merges.is_file()):
            raise ValueError("it has neither tokenizer.json nor vocab.json and merges.txt")
        return of_bytes(tokenizers, tokenizers.models.BPE.from_file(str(vocab), str(merges)))


def ids_in(path: Path) -> dict[str, int]:
    """The id of each token of the tokenizer at a path; none if there is no tokenizer."""
    parts = [(path / name).is_file() for name in ("tokenizer.json", "vocab.json", "merges.txt")]
    there = path.is_file() or parts[0] or (parts[1] and parts[2])
    return read(path).get_vocab(with_added_tokens=True) if there else {}


def of_gguf(path: Path) -> Any:
    """The tokenizer inside of a .gguf file, as Transformers reads it."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError('Transformers is not installed; get it by: pip install "polytier[language]"') from error
    found: Any = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    return found.backend_tokenizer


def with_end(inner: Any, name: str) -> Tokenizer:
    """The tokenizer, with the first known end token that it has."""
    inner.no_truncation()
    inner.no_padding()
    ids = [inner.token_to_id(token) for token in ENDS]
    end = next((each for each in ids if each is not None), None)
    if end is None:
        raise ValueError(
            f"tokenizer {name!r} has no end token, which separates documents; add one of {', '.join(ENDS)}"
        )
    size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
    return Tokenizer(inner, end, size)
