"""Answers that come too late, nodes that are gone, nodes that start again: the models are those of the replay."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from network_tree import Tree, data, over_network, replayed, same, simulated
from polytier import MFARR, CoBo, FedAvg, PerMFL
from polytier.engines.network.message import decode
from polytier.engines.network.parent import Patience
from polytier.runs.loop import make_loop
from short_methods import short

SETTINGS: dict[str, Any] = {"batch_size": 4, "seed": 3}
SHORT = Patience(device=0.05, team=0.1, quorum=0.34)


class Crash(BaseException):
    """The process of a node ends."""


def at_random(share: float, seed: int = 0, kinds: tuple[str, ...] = ("team", "device")) -> Any:
    """Lose some answers to calls, and none of evaluations."""
    draw = random.Random(seed)

    def lose(address: str, data: bytes) -> bool:
        training = decode(data, 1 << 30).kind == "answer"
        return training and address.startswith(kinds) and draw.random() < share

    return lose


@pytest.mark.parametrize(
    "method",
    [short("permfl"), short("fedavg"), short("scaffold"), short("hier-fedavg")],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("seed", [1, 2])
def test_lost_answers_are_absences_and_the_replay_has_the_same_bits(method, seed):
    federation = data(9, 3)
    tree, other = over_network(method, federation, 4, lose=at_random(0.25, seed), patience=SHORT, **SETTINGS)
    absences = tree.server.absences
    assert absences
    same(replayed(method, federation, absences, 4, **SETTINGS), tree, other, figures=False)


def test_lost_answers_with_several_models_have_the_bits_of_the_replay():
    method, federation = (
        MFARR({"deep": PerMFL(device_steps=2, team_rounds=2), "flat": FedAvg(device_steps=2)}),
        data(9, 3),
    )
    tree, other = over_network(method, federation, 4, lose=at_random(0.25), patience=SHORT, **SETTINGS)
    assert {line.model for line in tree.server.absences} == {"deep", "flat"}
    same(replayed(method, federation, tree.server.absences, 4, **SETTINGS), tree, other, figures=False)


def test_a_method_that_needs_all_answers_of_a_call_waits_for_them():
    method, federation = CoBo(sampling="all"), data()
    lost = at_random(0.2, 1)

    def lose(address: str, data: bytes) -> bool:
        message = decode(data, 1 << 30)
        return "model" not in message.facts.get("rows", {}).get("fields", {}) and lost(address, data)

    tree, other = over_network(method, federation, 3, lose=lose, patience=SHORT, **SETTINGS)
    assert tree.server.absences == []
    same(simulated(method, federation, 3, **SETTINGS), tree, other)


def test_nodes_that_start_again_between_rounds_continue_from_their_files(tmp_path):
    method, federation = short("permfl"), data()
    with make_loop(method, federation, "mclr", **SETTINGS) as loop:
        tree = Tree(loop, folder=tmp_path)
        loop.run(1)
        for name in list(tree.nodes):
            tree.start(name)
        loop.run(2)
        for name in ("team/t0", "device/d3"):
            tree.start(name)
        other = loop.run(3)
    run = simulated(method, federation, 3, **SETTINGS)
    same(run, tree, other, figures=False)
    for folder in tmp_path.glob("*/*/m-"):  # after the last call, before it, and where the calls above it began
        assert len(list(folder.glob("*.safetensors"))) <= 4


def test_a_server_that_repeats_a_round_gets_the_same_bits(tmp_path):
    method, federation = short("permfl"), data()
    with make_loop(method, federation, "mclr", **SETTINGS) as loop:
        tree = Tree(loop, folder=tmp_path)
        loop.run(1)
        tensors, facts = loop.snapshot()
        saved = {k: v.clone() for k, v in tensors.items()}, dict(facts, history=list(loop.history))
        calls = []

        def fail_once(address: str, data: bytes) -> bool:
            calls.append(address)
            if len(calls) == 2:
                raise KeyboardInterrupt  # the server ends while the first team has answered and the second has not
            return False

        tree.hubs["server"].lose = fail_once
        with pytest.raises(KeyboardInterrupt):
            loop.run(2)
        tree.hubs["server"].lose = lambda address, data: False
        loop.restore(*saved)
        other = loop.run(3)
    same(simulated(method, federation, 3, **SETTINGS), tree, other, figures=False)


def test_a_team_that_starts_again_in_the_middle_of_a_call_is_absent_and_its_devices_go_back(tmp_path):
    method, federation = PerMFL(device_steps=2, team_rounds=3), data()
    with make_loop(method, federation, "mclr", **SETTINGS) as loop:
        tree = Tree(loop, folder=tmp_path, patience=SHORT)
        loop.run(1)
        seen = []

        def crash(address: str, data: bytes) -> bool:
            seen.append(address)
            if len(seen) == 5:  # in the second call of team t0 to its three devices
                raise Crash
            return False

        handle = tree.hubs["server"].children["team/t0"]

        def crashing(data: bytes) -> bytes | None:
            try:
                return handle(data)
            except Crash:
                tree.hubs["team/t0"].lose = lambda address, data: False
                tree.start("team/t0")
                return None

        tree.hubs["team/t0"].lose = crash
        tree.hubs["server"].dial("team/t0", crashing)
        other = loop.run(4)
    absences = tree.server.absences
    assert [(line.round, line.tier, line.name, line.why) for line in absences] == [(2, "team", "t0", "link closed")]
    same(replayed(method, federation, absences, 4, **SETTINGS), tree, other, figures=False)


def test_a_node_whose_rows_are_gone_says_so_and_is_absent(tmp_path, caplog):
    with make_loop(short("fedavg"), data(), "mclr", **SETTINGS) as loop:
        tree = Tree(loop, patience=SHORT)
        loop.run(1)
        tree.start("device/d1")  # its rows were in memory alone
        loop.run(2)
    assert [(line.name, line.why) for line in tree.server.absences] == [("d1", "rows lost")]
    assert "restore the folder" in caplog.text


def test_an_evaluation_that_nobody_answers_is_empty_and_does_not_end_the_run():
    def lose(address: str, data: bytes) -> bool:
        return decode(data, 1 << 30).kind == "measured"

    _, run = over_network(short("permfl"), data(), 2, lose=lose, patience=SHORT, **SETTINGS)
    assert run.rounds == 2
    assert "personal" not in run.history[0]


def test_an_evaluation_counts_only_those_who_answered():
    def lose(address: str, data: bytes) -> bool:
        return decode(data, 1 << 30).kind == "measured" and address == "device/d1"

    method, federation = short("fedavg"), data()
    _, run = over_network(method, federation, 1, lose=lose, patience=SHORT, **SETTINGS)
    full = simulated(method, federation, 1, **SETTINGS)
    assert run.evaluation is not None
    assert full.evaluation is not None
    here = run.evaluation.by_device("global", "test", "accuracy")
    there = full.evaluation.by_device("global", "test", "accuracy")
    assert (here != here).tolist() == [False, True, False, False, False, False]
    assert [v for v in here if v == v] == [v for k, v in enumerate(there) if k != 1]


class Deaf(deque):
    """Late answers that never come."""

    def append(self, item: object) -> None:
        pass


def test_a_device_that_is_gone_costs_one_deadline_until_it_returns():
    method, federation = PerMFL(device_steps=2, team_rounds=3), data()
    gone: list[bytes] = []

    def lose(address: str, data: bytes) -> bool:
        if away and address == "device/d0":
            gone.append(data)
        return away and address == "device/d0"

    with make_loop(method, federation, "mclr", **SETTINGS) as loop:
        tree = Tree(loop, lose, patience=Patience(device=5, team=100, quorum=0.3))
        away, hub = False, tree.hubs["team/t0"]
        loop.run(1)
        there, hub._late, away, before = hub._late, Deaf(), True, hub.time
        loop.run(3)  # six calls, and two evaluations
        assert 5 <= hub.time - before < 6
        assert [line.why for line in tree.server.absences] == ["deadline", *["late"] * 5]
        assert len(gone) == 1
        hub._late, away = there, False
        hub._late.append(("device/d0", gone[0]))  # it is heard from
        other = loop.run(4)
        assert len(tree.server.absences) == 6
    same(replayed(method, federation, tree.server.absences, 4, **SETTINGS), tree, other, figures=False)
