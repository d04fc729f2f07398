"""Bad inputs are refused with advice, and nothing is written: a sample of them, and all that once were not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.bad_files import prepare
from faults.bad_inputs import Bad, bad_inputs
from faults.fuzz import REFUSED, judge_all

EVERY = 60  # one of so many inputs is in the sample; `make fuzz` runs all
ONCE_FAILED = Path(__file__).with_name("once_failed.txt")


@pytest.fixture(scope="module")
def inputs() -> list[Bad]:
    return bad_inputs()


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    """A folder with the files that bad inputs name."""
    folder = tmp_path_factory.mktemp("material")
    prepare(folder)
    return folder


@pytest.fixture(autouse=True)
def _inside(material, monkeypatch) -> Iterator[None]:
    monkeypatch.chdir(material)
    monkeypatch.setenv("POLYTIER_DATA", str(material / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # models of one's own add the current folder
    yield
    assert not os.path.exists("cache")


def failures(chosen: list[Bad]) -> list[str]:
    found = judge_all(chosen)
    return [f"{outcome.what}: {bad.name}\n{outcome.text}" for bad, outcome in found if outcome.what != REFUSED]


def test_there_are_many_different_inputs(inputs):
    assert len({bad.name for bad in inputs}) == len(inputs) >= 3000


def test_a_sample_is_refused(inputs):
    assert failures(inputs[::EVERY]) == []


def test_what_once_failed_is_refused(inputs):
    known = {bad.name: bad for bad in inputs}
    names = ONCE_FAILED.read_text(encoding="utf-8").splitlines()
    assert sorted(set(names) - set(known)) == []
    assert failures([known[name] for name in names]) == []
