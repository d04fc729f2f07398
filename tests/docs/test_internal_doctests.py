"""The examples in docstrings of data, models and stack are run."""

import doctest
import pkgutil
from importlib import import_module

import pytest

import polytier.data
import polytier.method.memory
import polytier.models
import polytier.stack

ROOMS = (polytier.data, polytier.models, polytier.stack)
MODULES = [found.name for room in ROOMS for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]


@pytest.mark.parametrize("name", [*MODULES, "polytier.method.memory"])
def test_examples(name):
    assert doctest.testmod(import_module(name)).failed == 0


@pytest.mark.parametrize(
    "name",
    ["data.build", "data.federation", "data.population", "data.partition", "models.trainable", "stack.objective"],
)
def test_public_modules_have_examples(name):
    module = import_module(f"polytier.{name}")
    assert any(found.examples for found in doctest.DocTestFinder().find(module))
