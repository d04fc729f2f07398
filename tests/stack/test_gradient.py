"""The gradient without torch._dynamo: the bits of torch.func.grad, and a round that does not import it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.func import vmap

from polytier.stack import gradient

FUNCTIONS = {
    "products": lambda a, b: ((a @ b).softmax(0) * a.sum()).sum(),
    "kink": lambda a, b: (a.relu() @ b).logsumexp(0),
    "none": lambda a, b: b.sum(),  # does not depend on the first argument
    "twice": lambda a, b: gradient.grad(lambda c: (c**3 * b.sum()).sum())(a).sum(),
}


@pytest.fixture
def without_dynamo(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_bits_of_torch(name, without_dynamo):
    function, a, b = FUNCTIONS[name], torch.randn(5, 7), torch.randn(5, 7, 3)
    own = gradient.grad(function)
    assert own.__module__ == gradient.__name__  # not that of torch
    found = vmap(own)(a, b)
    expected = vmap(gradient.grad_of_torch(function))(a, b)
    assert torch.equal(found, expected)
    assert not found.requires_grad


def test_another_version_of_torch(monkeypatch, without_dynamo):
    monkeypatch.setattr(gradient, "grad_increment_nesting", None)
    own = gradient.grad(FUNCTIONS["products"])
    assert own.__module__ != gradient.__name__
    assert own(torch.ones(7), torch.ones(7, 3)).shape == (7,)


ROUND = """
import sys
import polytier
federation = polytier.build_federation("digits", devices=4, teams=2)
run = polytier.train("permfl", federation, "mclr", rounds=1, workers=1)
slow = {"torch._dynamo", "sympy", "torch.fx.experimental.symbolic_shapes"} & set(sys.modules)
assert not slow, slow
"""


def test_a_run_imports_neither_dynamo_nor_sympy():
    subprocess.run([sys.executable, "-c", ROUND], check=True)
