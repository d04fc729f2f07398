"""Sentences in four languages that come with the package: 600 each in Catalan, German, Spanish and Dutch.

They are sentences of Common Voice (https://commonvoice.mozilla.org), which volunteers read aloud; its text is in the
public domain (CC0 1.0). Those of 40 to 90 characters without digits were chosen, in the order of their SHA-256.
"""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np

from polytier.data.sources.text import Holding, TextSource, check_digest, text_source, tokenizer_setting
from polytier.data.teams import blocks
from polytier.data.tokens import BYTES, make_tokenizer

FILE = Path(__file__).with_name("sentences.txt.xz")


def sentences(
    data_dir: Path | None = None,
    num_devices: int = 8,
    seed: int = 0,
    *,
    context: int = 64,
    tokenizer: str = BYTES,
    digest: str = "",
) -> TextSource:
    """2,400 bundled sentences in Catalan, German, Spanish and Dutch (Common Voice, CC0); a language is a team.

    The sentences of a language are dealt to its devices. For language models: the targets are the next tokens.

    Args:
        data_dir: not used.
        num_devices: a quarter of them for each language.
        seed: not used.
        context: the number of tokens of a sample.
        tokenizer: as for the data set text.
        digest: as for the data set text.

    Raises:
        ValueError: there are fewer than four devices, or the tokenizer does not exist.
    """
    lines = lzma.decompress(FILE.read_bytes()).decode().splitlines()
    by_language: dict[str, list[str]] = {}
    for line in lines:
        language, _, sentence = line.partition("\t")
        by_language.setdefault(language, []).append(sentence)
    made = make_tokenizer(tokenizer, [each for part in by_language.values() for each in part])
    check_digest(made, tokenizer, digest)
    owner = blocks(num_devices, len(by_language), "languages")
    holdings = []
    for number, (language, own) in enumerate(by_language.items()):
        count = int(np.sum(owner == number))
        for k in range(count):
            holdings.append(Holding(f"{language}-{k + 1}", language, made.encode(own[k::count])))
    setting = f"sentences:context={context},{tokenizer_setting(made, tokenizer)}"
    return text_source(holdings, made, context, setting)
