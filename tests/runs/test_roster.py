"""Changes of the roster: who takes part when, and rows that are carried over by name."""

from __future__ import annotations

import pytest
import torch

from polytier import Topology
from polytier.engines.network.versions import NodeMemory, Versions, carried
from polytier.runs.job import TEMPLATE, make_job, read_job
from polytier.runs.roster import (
    Change,
    RosterFile,
    change_roster,
    members,
    moved,
    next_changes,
    paths,
    read_changes,
    stages,
    with_roster,
    write_changes,
)
from polytier.runs.serve import limits_of

CHANGES = [Change(1, 3, "joins", "eve"), Change(2, 3, "leaves", "ann"), Change(3, 5, "joins", "ann")]


def test_changes_are_read_as_written(tmp_path):
    assert read_changes(tmp_path / "roster.csv") == []
    write_changes(tmp_path / "roster.csv", CHANGES)
    assert read_changes(tmp_path / "roster.csv") == CHANGES
    (tmp_path / "roster.csv").write_text("number,round,action,device\n1,2,explodes,ann\n")
    with pytest.raises(ValueError, match="restore it"):
        read_changes(tmp_path / "roster.csv")


def test_who_takes_part_in_which_rounds():
    assert members({"ann", "bob"}, CHANGES[:2]) == {"bob", "eve"}
    assert list(stages(["ann", "bob"], CHANGES, 9)) == [
        (3, {"ann", "bob"}),
        (5, {"bob", "eve"}),
        (9, {"ann", "bob", "eve"}),
    ]
    due = next_changes({"ann", "bob"}, {"bob", "eve", "fay"}, ["eve", "mallory"], 2, 7)
    assert due == [Change(3, 7, "leaves", "ann"), Change(4, 7, "joins", "eve")]


def test_rows_and_bytes_of_a_checkpoint_follow_their_nodes():
    old = Topology.build(["ann", "bob", "cleo"], ["n", "n", "s"])
    new = Topology.build(["abe", "bob", "cleo"], ["n", "n", "s"])
    tensors = {
        "state": torch.arange(3),
        "memory:2/own/model/rows": torch.tensor([[1.0], [2.0], [3.0]]),
        "memory:2/own/model/kept": torch.tensor([True, True, True]),
        "memory:1/own/model/rows": torch.tensor([[8.0], [9.0]]),
        "bytes:team-device:up": torch.tensor([5, 6, 7]),
        "rounds:team-device:up": torch.tensor([[1, 2, 3], [4, 5, 6]]),
        "ever:2": torch.tensor([True, False, True]),
    }
    found = {name: value.tolist() for name, value in moved(tensors, old, new).items()}
    assert found == {
        "state": [0, 1, 2],
        "memory:2/own/model/rows": [[0.0], [2.0], [3.0]],
        "memory:2/own/model/kept": [False, True, True],
        "memory:1/own/model/rows": [[8.0], [9.0]],
        "bytes:team-device:up": [0, 6, 7],
        "rounds:team-device:up": [[0, 2, 3], [0, 5, 6]],
        "ever:2": [False, False, True],
    }
    assert carried(torch.tensor([1, 2]), ["a", "b"], ["b", "c", "a"]).tolist() == [2, 0, 1]


def test_a_team_finds_the_rows_of_its_children_by_name_after_a_change(tmp_path):
    def versions(*devices: str) -> Versions:
        return Versions(NodeMemory(Topology.build(list(devices), ["n"] * len(devices))), tmp_path)

    before = versions("ann", "cleo")
    before.memory.write(2, "heard", torch.tensor([0, 1]), torch.tensor([11, 12]), "call")
    before.commit(5)
    after = versions("ann", "bob", "cleo")
    assert after.last == 5
    read = after.memory.read(2, "heard", torch.arange(3), torch.zeros(3, dtype=torch.int64), "call")
    assert read.tolist() == [11, 0, 12]


def test_the_roster_of_a_job_file_is_changed_and_read_again(tmp_path, caplog):
    path = tmp_path / "job.toml"
    path.write_text(TEMPLATE)
    job, roster = read_job(path), RosterFile(path)
    assert roster(job) is job
    change_roster(path, "eve", "north", there=True)
    now = roster(job)
    assert paths(now)["eve"] == ("north",)
    assert paths(job) != paths(now)
    change_roster(path, "eve", None, there=False)
    assert paths(roster(now)) == paths(job)
    for device, team, there, text in (
        ("ann", "north", True, "already in the roster"),
        ("zoe", None, False, "not in the roster"),
        ("zoe", "west", True, "one of north, south"),
        ("zoe", None, True, "one of north, south"),
        ("../zoe", "north", True, "no name of a node"),
    ):
        with pytest.raises(ValueError, match=text):
            change_roster(path, device, team, there=there)
    path.write_text("nonsense")
    assert roster(now) is now
    assert "the roster stays as it was" in caplog.text


def test_the_roster_of_a_run_keeps_those_who_left_and_nobody_changes_teams():
    def job(**teams: list[str]):
        return make_job({"algorithm": "permfl"}, {"shape": [3], "teams": teams}, "a test")

    whole = with_roster(job(n=["ann"], s=["bob"]), job(n=["eve"], s=["bob"]))
    assert whole["teams"] == {"n": ["ann", "eve"], "s": ["bob"]}
    with pytest.raises(ValueError, match="cannot change its team"):
        with_roster(job(n=["ann"], s=["bob"]), job(n=["bob"], s=["eve"]))
    flat = {"shape": [3], "devices": ["ann"]}
    first = make_job({"algorithm": "fedavg"}, flat, "a test")
    second = make_job({"algorithm": "fedavg"}, {**flat, "devices": ["bob"]}, "a test")
    assert with_roster(first, second)["devices"] == ["ann", "bob"]


@pytest.mark.parametrize(("algorithm", "fixed"), [("permfl", False), ("scaffold", False), ("cobo", True)])
def test_methods_that_keep_something_per_device_have_a_fixed_roster(algorithm, fixed):
    network = {"shape": [3], "classes": 3, "devices": ["a", "b", "c", "d"]}
    network = network if algorithm != "permfl" else {**network, "devices": [], "teams": {"n": ["a", "b", "c", "d"]}}
    assert limits_of(make_job({"algorithm": algorithm, "batching": "stacked"}, network, "a test")).fixed is fixed
