"""Texts in CSV files are texts for a spreadsheet, too, and come back as they were."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytier import MFARR, FedAvg, Federation, Run, RunFolder, train
from polytier.report import comparison
from polytier.runs.csv_cells import FORMULA, as_cell, csv_lines, from_cell
from polytier.runs.read import RunRecord

IDS = ["=1+1", "+a", "-2", "@sum(a)", "\ttab", "\rreturn", "a\r=1+1", "'quoted", "''twice", "plain", "'=both"]


@given(st.text(st.sampled_from("=+-@\t\r'a1\n, \"")) | st.text())
def test_cells_come_back(text):
    assert from_cell(as_cell(text)) == text
    assert not as_cell(text).startswith(FORMULA)


@given(st.lists(st.lists(st.text() | st.integers(), min_size=2, max_size=2)))
def test_no_text_begins_a_line(rows):
    lines = list(csv_lines(rows))
    assert len(lines) == len(rows)
    read = list(csv.reader(io.StringIO("".join(lines), newline="")))
    assert read == [[str(cell) for cell in row] for row in rows]


@pytest.mark.parametrize("value", [-1, -0.5, 3, 2.5, True, None])
def test_numbers_stay(value):
    assert as_cell(value) is value


def test_cells_of_version_0_1_stay():
    assert from_cell("'abc") == "'abc"
    assert from_cell("-0.5") == "-0.5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run whose devices, teams and models have names that a spreadsheet would compute."""
    rng, device = np.random.default_rng(0), np.repeat(np.arange(len(IDS)), 4)
    team = np.array(["=north", "@south"])[device % 2]
    data = Federation.from_arrays(
        rng.normal(size=(len(device), 2)),
        rng.integers(0, 2, len(device)),
        np.array(IDS)[device],
        team=team,
        split=np.tile([0, 0, 2, 2], len(IDS)),
    )
    method = MFARR({"-one": FedAvg(device_steps=1), "two": FedAvg(device_steps=1)})
    path = tmp_path_factory.mktemp("runs") / "run"
    train(method, data, "mclr", rounds=1, callbacks=[RunFolder(path)])
    return path


def cells(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def test_devices_and_traffic(folder):
    for name in ("devices.csv", "traffic.csv"):
        found = cells(folder / name)
        texts = [cell for row in found for cell in row if not number(cell)]
        assert not [cell for cell in texts if cell.startswith(FORMULA)]
    devices = RunRecord(folder).devices
    assert devices["id"] == [str(name) for name in Run.load(folder).device_ids]
    assert sorted(devices["id"]) == sorted(IDS)
    assert set(devices["team"]) == {"=north", "@south"}
    assert "-one_samples" in devices
    assert "'-one_samples" in cells(folder / "devices.csv")[0]
    assert set(RunRecord(folder).by_device()) == set(IDS)


def test_a_text_that_is_a_number_is_marked_and_a_number_is_not(folder):
    rows = {row[0]: row for row in cells(folder / "devices.csv")}
    assert "'-2" in rows
    assert "-2" not in rows


def test_comparisons(tmp_path):
    records: list[Any] = [{"method": "=cmd|' /C calc'!A0", "seed": -1, "personal": {"-loss": -0.5}, "reason": "@why"}]
    comparison.write(tmp_path, {}, records, [])
    assert cells(tmp_path / "compare.csv") == [
        ["method", "seed", "personal_-loss", "reason"],
        ["'=cmd|' /C calc'!A0", "-1", "-0.5", "'@why"],
    ]
