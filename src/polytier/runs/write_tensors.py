"""Writes safetensors files piece by piece, without a copy of all tensors, with equal bytes for equal content.

The library's writer has neither property: it orders the metadata at random. Files are read with the library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def pieces(tensors: Mapping[str, Tensor], **meta: str) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file: the length of the header, the header, the tensors.

    Args:
        tensors: The tensors by name.
        **meta: Texts to store in the header.

    Examples:
        >>> from safetensors.torch import load
        >>> load(b"".join(pieces({"a": torch.ones(2)}, note="x")))
        {'a': tensor([1., 1.])}
    """
    header: dict[str, object] = {"__metadata__": dict(sorted(meta.items()))} if meta else {}
    # wide types first, so that every tensor begins at a multiple of its element size
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        about = {"dtype": NAMES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [start, end]}
        header[name] = about
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        if tensors[name].numel():
            yield memoryview(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
