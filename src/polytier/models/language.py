"""Language models: token ids [B, T] to scores of the next token [B, T, V].

Sums over positions are written as plain products and loops, so that a row of a stack has the same bits as alone:
`nn.LSTM` and fused attention cannot be stacked.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def gpt(
    inputs: tuple[int, ...],
    num_outputs: int,
    *,
    layers: int = 3,
    width: int = 128,
    heads: int = 4,
    context: int = 0,
    tied: bool = True,
    dropout: float = 0.0,
) -> nn.Module:
    """A small GPT: learned positions, blocks of causal attention and an MLP, each after a layer norm.

    Args:
        inputs: (T,), the length of a sample.
        num_outputs: V, the number of tokens.
        layers: the number of blocks.
        width: the length of the vector at each position.
        heads: the number of heads of the attention; divides the width.
        context: the longest sample; by default that of the data.
        tied: whether the head has the weights of the embedding, `tokens.weight`. Methods that find the head by its name
            (FedRep) need tied=false.
        dropout: the probability with which a number is set to 0 after each half of a block.
    """
    check_sizes("gpt", layers=layers, width=width, heads=heads)
    if width % heads:
        raise ValueError(f"heads = {heads} does not divide width = {width} of gpt; try gpt:width={heads * 32}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout of gpt is a probability below 1; got {dropout}")
    return GPT(context or length_of("gpt", inputs), num_outputs, layers, width, heads, tied, dropout)


def lstm(inputs: tuple[int, ...], num_outputs: int, *, layers: int = 1, width: int = 128) -> nn.Module:
    """A long short-term memory. layers: cells on top of each other; width: the length of a cell's state."""
    check_sizes("lstm", layers=layers, width=width)
    length_of("lstm", inputs)
    return LSTM(num_outputs, layers, width)


def check_sizes(name: str, **sizes: int) -> None:
    """Raise an error for a size below 1."""
    for key, value in sizes.items():
        if value < 1:
            raise ValueError(f"{key} of {name} must be 1 or more; got {value}")


def length_of(name: str, inputs: tuple[int, ...]) -> int:
    """T, the number of tokens of a sample."""
    if len(inputs) != 1:
        raise ValueError(f"model {name} takes samples of token ids [T], not {tuple(inputs)}; use text, or mclr or dnn")
    return inputs[0]


class Attention(nn.Module):
    """Causal attention with several heads."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.heads)  # [B, heads, T, T]
        later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        weights = torch.softmax(scores.masked_fill(later, -math.inf), -1)
        return self.out((weights @ v).transpose(1, 2).reshape(B, T, d))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """See `gpt`."""

    def __init__(self, context: int, tokens: int, layers: int, width: int, heads: int, tied: bool, dropout: float):
        super().__init__()
        self.context, self.vocabulary = context, tokens
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        for name, parameter in self.named_parameters():  # as GPT-2
            if parameter.ndim > 1:
                last = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Cell(nn.Module):
    """One layer of an LSTM; its gates are those of input, forget, cell and output, in this order."""

    def __init__(self, width: int):
        super().__init__()
        self.input, self.state = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x[:, 0])
        outputs, gates = [], self.input(x)  # [B, T, 4 width]
        for t in range(x.shape[1]):
            i, f, g, o = (gates[:, t] + self.state(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, 1)


class LSTM(nn.Module):
    """See `lstm`."""

    def __init__(self, tokens: int, layers: int, width: int):
        super().__init__()
        self.vocabulary = tokens
        self.tokens = nn.Embedding(tokens, width)
        self.cells = nn.ModuleList([Cell(width) for _ in range(layers)])
        self.head = nn.Linear(width, tokens)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for cell in self.cells:
            x = cell(x)
        return self.head(x)
