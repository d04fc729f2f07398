"""The examples in docstrings show what the code does."""

import doctest
from importlib import import_module

import pytest

WITH_EXAMPLES = (
    "polytier.engines.build",
    "polytier.engines.protocol",
    "polytier.messages.codec",
    "polytier.messages.transforms",
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of_a_module(name):
    result = doctest.testmod(import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
