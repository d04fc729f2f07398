"""The part of a page about a run over a network."""

from __future__ import annotations

import pytest

from commands import SMALL, call
from polytier.files.write import write_json
from polytier.report.blocks import Heat, Section, Table, Text
from polytier.report.network_nodes import nodes
from polytier.report.page_contents import page_of
from polytier.report.server import Watched
from polytier.runs.read import RunRecord

HEADER = "round,call,tier,name,method,model,why\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run folder with the two files that a network run has more."""
    folder = tmp_path_factory.mktemp("runs") / "net"
    call("run", "permfl", *SMALL, "--rounds", 3, "--out", folder, "--quiet")
    tiers = RunRecord(folder).tiers
    (first, second), devices = tiers[1]["ids"], tiers[2]["ids"]
    there = [f"team/{first}", f"team/{second}", *(f"device/{d}" for d in devices[1:])]
    about = {"round": 3, "present": there[:2], "below": there, "bytes": {f"team/{first}": [1000, 2000]}, "time": 0}
    write_json(folder / "present.json", about)
    gone = f"1,0,device,{devices[0]},solve,,deadline\n2,0,device,{devices[0]},solve,,not connected\n"
    (folder / "absences.csv").write_text(HEADER + gone)
    return folder


def test_the_tree_says_who_is_there_and_who_was_absent(folder):
    (section,) = nodes(RunRecord(folder))
    text, table, heat = section.blocks
    assert isinstance(text, Text)
    assert text.text == "2 of 2 teams and 5 of 6 devices were there at the end. Calls that were not answered: 2."
    assert isinstance(table, Table)
    _, teams, devices = RunRecord(folder).tiers
    pairs = list(zip(devices["ids"], devices["parents"], strict=True))
    order = [text for t in teams["ids"] for text in (t, *(f"\u2003{d}" for d, parent in pairs if parent == t))]
    rows = {cell.text: row for row in table.rows if not isinstance(cell := row[0], str)}
    assert list(rows) == [str(name) for name in order]
    first = str(devices["ids"][0])
    assert [cell.text for cell in rows[f"\u2003{first}"][2:] if not isinstance(cell, str)] == [
        "not there",
        "2",
        "round 2: not connected",
        "-",
        "-",
    ]
    assert isinstance(heat, Heat)
    assert heat.rows == [f"device/{first}"]
    assert heat.values.tolist() == [[1, 1, 0]]


def test_large_trees_show_teams_and_those_who_were_absent(folder, monkeypatch):
    monkeypatch.setattr("polytier.report.network_nodes.LINES", 4)
    (section,) = nodes(RunRecord(folder))
    assert len(section.blocks[1].rows) == 3
    assert "5 nodes that are there and were never absent are left out" in section.blocks[1].note


def test_the_page_shows_the_nodes_and_changes_with_them(folder):
    assert any(isinstance(block, Section) and block.title == "Nodes" for block in page_of([folder])[2])
    watched = Watched(folder)
    before = watched.version()
    present = folder / "present.json"
    present.write_text(present.read_text() + " ")
    assert watched.version() != before
    present.unlink()
    assert not any(isinstance(block, Section) and block.title == "Nodes" for block in page_of([folder])[2])
