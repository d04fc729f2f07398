"""The examples in the documentation of the public names run as they stand there.

Every docstring with `>>>` lines in a module that defines a public name is found by itself.
"""

import doctest
import warnings
from importlib import import_module
from typing import Any

import pytest

import polytier


def public_modules() -> list[str]:
    """Every module in which a public name is defined."""
    homes = {polytier._MODULE[name] for name in polytier.__all__}
    return sorted(homes | {module for name in polytier.__all__ if (module := module_of(getattr(polytier, name)))})


def module_of(thing: Any) -> str:
    """The module of a class or function of the package; "" for anything else."""
    module = getattr(thing, "__module__", None) or ""
    return module if module.startswith("polytier.") else ""


def examples() -> dict[str, doctest.DocTest]:
    """By name: the docstrings of these modules, and of all that is defined in them, that have examples."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = (test for module in public_modules() for test in finder.find(import_module(module), module))
    return {test.name: test for test in found if test.examples}


EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        failed = runner.run(EXAMPLES[name], out=said.append).failed
    assert not failed, "".join(said)


@pytest.mark.parametrize("name", polytier.__all__)
def test_every_public_name_has_an_example(name):
    """A name that is no class or function cannot have a docstring: an example of its module uses it."""
    thing = getattr(polytier, name)
    if module_of(thing):
        assert f"{thing.__module__}.{thing.__qualname__}" in EXAMPLES
    else:
        module = polytier._MODULE[name]
        assert any(name in example.source for example in EXAMPLES[module].examples)
