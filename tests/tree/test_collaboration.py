"""Who listens to whom: groups, the file over time, its figure, teams from it; and schedules of joining and leaving."""

from __future__ import annotations

import pickle
import subprocess
import sys
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from polytier import HierFedAvg, train
from polytier.data.build import build_federation
from polytier.data.sources import Source
from polytier.report.heatmap import draw
from polytier.tree.collaboration import FILE, Collaboration, load, save, when_kept
from polytier.tree.participation import Participation


def matrix(base, weights: dict[tuple[int, int], float], ids=None) -> Collaboration:
    base = np.asarray(base, dtype=float)
    pairs = np.array(list(weights)).reshape(-1, 2)
    return Collaboration(np.arange(len(base)) if ids is None else ids, base, pairs, np.array(list(weights.values())))


def planted(true, within: float = 0.9, between: float = 0.1, ids=None) -> Collaboration:
    """Rows are `between`, with all pairs of a group listed."""
    true = np.asarray(true)
    pairs = np.argwhere((true[:, None] == true) & ~np.eye(len(true), dtype=bool))
    return matrix(np.full(len(true), between), {(int(i), int(j)): within for i, j in pairs}, ids)


# -- groups -------------------------------------------------------------------------------------------


def test_dense_and_part():
    found = matrix([0.5, 0.25, 1], {(2, 0): 0, (0, 1): 0.75})
    nan = np.nan
    np.testing.assert_array_equal(found.dense(), [[nan, 0.75, 0.5], [0.25, nan, 0.25], [0, 1, nan]])
    np.testing.assert_array_equal(found.take(np.array([2, 0])).dense(), [[nan, 0], [0.5, nan]])
    assert found.take(np.array([2, 0])).ids.tolist() == [2, 0]


def test_connected_groups_by_hand():
    chain = {(3, 1): 1.0, (1, 3): 1.0, (1, 0): 1.0}  # 0 - 1 only one way: the mean is 0.5
    assert matrix(np.zeros(4), chain).groups("connected").tolist() == [0, 0, 1, 0]
    assert matrix(np.zeros(4), chain).groups("connected", threshold=0.6).tolist() == [0, 1, 2, 1]
    everybody_but = {(0, j): 0.0 for j in (1, 2, 3)} | {(j, 0): 0.0 for j in (1, 2, 3)}
    assert matrix(np.ones(4), everybody_but).groups("connected").tolist() == [0, 1, 1, 1]
    assert matrix(np.zeros(3), {}).groups("connected").tolist() == [0, 1, 2]  # no weight at all joins nobody
    assert matrix(np.full(3, 0.5), {}).groups("connected").tolist() == [0, 0, 0]
    # rows on a simplex: 1/2 within a group of three, 0 elsewhere
    assert planted([0, 1, 0, 1, 1, 0], 0.5, 0.0).groups("connected").tolist() == [0, 1, 0, 1, 1, 0]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.integers(0, 2**32), st.sampled_from([0.3, 0.5, 0.75, 1.0]), st.booleans())
def test_connected_groups_agree_with_the_dense_matrix(n, seed, threshold, one_base):
    rng = np.random.default_rng(seed)
    levels = rng.integers(0, 5, size=4) / 4
    base = rng.choice(levels, size=1 if one_base else n) * np.ones(n)
    listed = (rng.random((n, n)) < rng.random()) & ~np.eye(n, dtype=bool)
    found = Collaboration(np.arange(n), base, np.argwhere(listed), rng.choice(levels, size=listed.sum()))
    dense = np.nan_to_num(found.dense())
    both = dense + dense.T
    number, expected = connected_components((both >= 2 * threshold * dense.max()) & (both > 0), directed=False)
    groups = found.groups("connected", threshold=threshold)
    assert groups.max() + 1 == number
    assert len(np.unique(np.stack([groups, expected]), axis=1).T) == number
    _, first = np.unique(groups, return_index=True)
    assert (np.diff(first) > 0).all()  # numbered by first appearance


def test_shared_neighbours_bear_noise():
    """One strong pair between two groups joins them by a chain; they have few neighbours in common."""
    for size in (2, 3, 7):
        true = np.repeat([0, 1, 2], size)
        dense = np.where(true[:, None] == true, 0.9, 0.05)
        dense[0, size] = dense[size, 0] = 1.0
        pairs = np.argwhere(~np.eye(3 * size, dtype=bool))
        noisy = Collaboration(np.arange(3 * size), np.ones(3 * size), pairs, dense[tuple(pairs.T)])
        assert len(set(noisy.groups("connected"))) == 2
        assert noisy.groups().tolist() == true.tolist()
        assert noisy.match(true)["adjusted_rand_index"] == 1
    assert matrix(np.zeros(3), {}).groups().tolist() == [0, 1, 2]  # no weight at all joins nobody
    assert matrix(np.full(3, 0.5), {}).groups().tolist() == [0, 0, 0]
    assert matrix(np.zeros(1), {}).groups().tolist() == [0]


def test_many_clients_need_no_dense_matrix(monkeypatch):
    monkeypatch.setattr(Collaboration, "dense", None)
    n, rng = 10_000, np.random.default_rng(0)
    pairs = rng.integers(1, n, size=(15_000, 2))
    pairs = np.concatenate([pairs, np.stack([np.zeros(n, dtype=int), np.arange(n)], axis=1)])
    pairs = np.unique(np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1), axis=0)
    pairs = np.concatenate([pairs, pairs[:, ::-1]])
    # all but the listed pairs: client 0 is listed with everybody
    found = Collaboration(np.arange(n), np.ones(n), pairs, np.zeros(len(pairs)))
    assert found.groups().tolist() == [0] + [1] * (n - 1)
    assert found.match(np.arange(n) > 0)["adjusted_rand_index"] == 1
    # the listed pairs alone, without those of client 0
    pairs = pairs[(pairs > 0).all(1)]
    found = Collaboration(np.arange(n), np.zeros(n), pairs, np.ones(len(pairs)))
    graph = coo_array((np.ones(len(pairs)), pairs.T), shape=(n, n))
    assert found.groups().tolist() == connected_components(graph, directed=False)[1].tolist()


def test_spectral_groups_find_blocks():
    true = np.array([0, 1, 2, 0, 1, 2, 2, 0, 1, 1])
    noise = np.random.default_rng(3).random((10, 10)) * 0.3
    dense = np.where(true[:, None] == true, 0.9, 0.1) + noise
    pairs = np.argwhere(~np.eye(10, dtype=bool))
    found = Collaboration(np.arange(10), np.zeros(10), pairs, dense[tuple(pairs.T)])
    for _ in range(2):
        assert found.groups("spectral", 3).tolist() == true.tolist()
    assert planted(true, 1.0, 0.0).groups("spectral", 3).tolist() == true.tolist()  # nothing between the blocks
    assert found.groups("spectral", 10).tolist() == list(range(10))
    assert matrix(np.zeros(3), {}).groups("spectral", 1).tolist() == [0, 0, 0]


def test_match_by_hand():
    found = matrix([0.25, 0.5, 0.0, 1.0], {(0, 1): 1.0, (1, 0): 1.0, (2, 3): 0.5, (3, 0): 0.25, (3, 1): 0.125})
    figures = found.match(np.array(["a", "a", "b", "b"]))
    within = (1 + 1 + 0.5 + 1) / 4
    between = (0.25 + 0.25 + 0.5 + 0.5 + 0 + 0 + 0.25 + 0.125) / 8
    assert figures == {"adjusted_rand_index": 1.0, "contrast": pytest.approx(within - between), "groups": 2}
    assert found.match(np.array([0, 1, 0, 1]))["adjusted_rand_index"] == -0.5
    assert np.isnan(found.match(np.zeros(4))["contrast"])


@pytest.mark.parametrize(
    ("ask", "advice"),
    [
        (lambda c: c.groups("spectral"), "need their number, from 1 to 3 clients; got None"),
        (lambda c: c.groups("spectral", 4), "from 1 to 3 clients; got 4"),
        (lambda c: c.groups("colour"), "allowed: connected, shared, spectral"),
        (lambda c: c.groups(threshold=0.0), r"in \(0, 1\]; got 0.0"),
        (lambda c: c.match([0, 1]), "got 2 for 3 clients"),
        (lambda c: matrix([1, np.nan], {}), "finite"),
        (lambda c: matrix([1, 1], {(0, 2): 1}), "numbers from 0 to 1"),
        (lambda c: matrix([1, 1], {(1, 1): 1}), "two different clients"),
        (lambda c: Collaboration(np.arange(2), np.ones(2), np.array([[0, 1], [0, 1]]), np.ones(2)), "listed twice"),
        (lambda c: Collaboration(np.arange(2), np.ones(3), np.zeros((0, 2)), np.ones(0)), r"got \(3,\) and \(0,\)"),
    ],
)
def test_collaboration_says_what_is_wrong(ask, advice):
    with pytest.raises(ValueError, match=advice):
        ask(matrix(np.ones(3), {}))


# -- over time ----------------------------------------------------------------------------------------


def test_when_kept():
    kept = [r for r in range(-1, 70) if when_kept(r)]
    assert kept == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]


def test_files_come_back_and_are_the_same_bytes(tmp_path):
    ids = np.array(["x", "y", "z"])
    first, second = matrix([1, 1, 0.5], {(2, 0): 0.25, (0, 1): 0.125}, ids), matrix([0, 0, 1], {}, ids)
    turned = Collaboration(ids, first.base, first.pairs[::-1], first.weights[::-1])
    save(tmp_path / "a.npz", {8: second, 1: first}, np.array([0, 1, 0]))
    save(tmp_path / "b.npz", {1: turned, 8: second}, np.array([0, 1, 0]))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}  # and not the time of day
    found, true = load(tmp_path / "a.npz")
    assert true is not None
    assert true.tolist() == [0, 1, 0]
    assert list(found) == [1, 8]
    for r, expected in ((1, first), (8, second)):
        for name in ("ids", "base", "pairs", "weights"):
            value, wanted = getattr(found[r], name), getattr(expected, name)
            assert value.dtype == wanted.dtype
            np.testing.assert_array_equal(value, wanted)
    save(tmp_path / "c.npz", {1: first})
    assert load(tmp_path / "c.npz")[1] is None


def test_bad_files_are_said_to_be_so(tmp_path):
    path = tmp_path / FILE
    save(path, {1: planted([0, 0, 1])})
    whole = path.read_bytes()
    good = dict(np.load(path))
    for change, advice in (
        ({"base": good["base"][:, :2]}, "do not fit together"),
        ({"offsets": np.array([0, 1])}, "do not fit together"),
        ({"rounds": np.array([], dtype=int)}, "do not fit together"),
        ({"true": np.zeros(2)}, "do not fit together"),
        ({"pairs": good["pairs"] + 5}, "numbers from 0 to 2"),
        ({"weights": good["weights"] * np.nan}, "finite"),
        ({"ids": np.array([{}, {}, {}])}, "pickle"),
    ):
        np.savez(path, **{**good, **change})
        with pytest.raises(ValueError, match=f"{FILE} cannot be read as collaboration: .*{advice}"):
            load(path)
    np.savez(path, **{k: v for k, v in good.items() if k != "weights"})
    with pytest.raises(ValueError, match="but no weights"):
        load(path)
    for content in (b"", whole[: len(whole) // 2], b"round,weight\n"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as collaboration"):
            load(path)
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(ValueError, match="one array without a name"):
        load(path)
    with pytest.raises(ValueError, match="there is no file"):
        load(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("n", "rounds", "known"), [(6, range(1, 12), True), (450, [3], False), (7, [1, 2, 3, 4], False)]
)
def test_heat_map(tmp_path, n, rounds, known):
    true = np.arange(n) % 3
    save(tmp_path / FILE, {r: planted(true, between=0.5 / r) for r in rounds}, true if known else None)
    draw(tmp_path / FILE, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_reports_need_no_torch():
    code = "import sys, polytier.report.heatmap; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- learned teams ------------------------------------------------------------------------------------


def test_learned_teams(tmp_path):
    true = np.random.default_rng(1).integers(3, size=12)
    true[:3] = 0, 1, 2  # by first appearance
    folder = tmp_path / "runs" / "a:b-1"
    folder.mkdir(parents=True)
    save(folder / FILE, {1: planted(np.zeros(12)), 4: planted(true)})
    ways: tuple[dict[str, Any], ...] = (
        {"team_formation": f"learned:{folder}"},
        {"team_formation": f"learned:{folder / FILE}", "teams": 3},
        {"team_formation": f"learned:source={folder},by=spectral", "teams": 3},
    )
    for words in ways:
        federation = build_federation(devices=12, **words)
        assert federation.team is not None
        assert federation.team.tolist() == true.tolist()
    plain = build_federation(devices=12, team_formation="random")
    assert torch.equal(plain.x, federation.x)  # who holds what does not depend on it
    fewer = build_federation(devices=5, team_formation=f"learned:{folder}")
    assert fewer.team is not None
    assert (np.equal.outer(fewer.team, fewer.team) == np.equal.outer(true[:5], true[:5])).all()
    spectral = build_federation(devices=12, team_formation=f"learned:{folder},spectral")
    assert spectral.team is not None
    assert len(np.unique(spectral.team)) == 4
    one = build_federation(devices=12, team_formation=f"learned:{folder},threshold=0.1")
    assert one.team is not None
    assert not one.team.any()
    assert build_federation(devices=12, team_formation=f"learned:{folder}", teams=0).team is None


def test_learned_teams_know_devices_by_name(tmp_path):
    names = np.array(["ann", "bob", "cy", "dee"])
    save(tmp_path / FILE, {1: planted([0, 1, 1, 0], ids=names[::-1])})
    x = np.arange(16, dtype=np.float32)[:, None]
    source = Source(x, np.arange(16) % 2, 2, device=np.repeat(names, 4), team=np.repeat(["one", "two"], 8))
    federation = build_federation(source, team_formation=f"learned:{tmp_path}")  # in place of the data's own teams
    assert federation.team is not None
    assert federation.team.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ({"team_formation": "learned"}, "learned:RUN_FOLDER"),
        ({"team_formation": "learned:DIR", "teams": 4}, "4 teams asked for, .* has 3; leave out teams, .*by=spectral"),
        ({"team_formation": "learned:DIR", "devices": 13}, "0, 1, 2, ... .12 clients. and has no device 12"),
        ({"team_formation": "learned:DIR/none"}, "none cannot be read as collaboration"),
        ({"team_formation": "learned:DIR,by=size"}, "allowed: connected, shared, spectral"),
        ({"team_formation": "learned:DIR,threshold=2"}, "got 2"),
    ],
)
def test_learned_teams_give_advice(tmp_path, words, advice):
    save(tmp_path / FILE, {2: planted(np.arange(12) % 3)})
    words = {"devices": 12, **words, "team_formation": words["team_formation"].replace("DIR", str(tmp_path))}
    with pytest.raises(ValueError, match=advice):
        build_federation(**words)


# -- schedules ----------------------------------------------------------------------------------------

NAMES = np.array([10, 11, 12, 13])


def taking_part(rule: Participation, rounds: int, names: np.ndarray = NAMES) -> list[list[int]]:
    kids, one = torch.arange(len(names)), torch.zeros(len(names), dtype=torch.int64)
    rule = pickle.loads(pickle.dumps(rule.of(names)))  # as it goes to workers
    masks = [rule.draw(t, t, kids, kids, one, 1) for t in range(rounds)]
    return [names[mask.numpy()].tolist() for mask in masks]


def test_a_schedule_by_hand(tmp_path):
    text = "id,join,leave\n11,3,\n 12, 1, 2\n\n13,2,4\n13,5,6\n"
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "b.csv").write_text(text.removeprefix("id,join,leave\n"))
    given = [(11, 3, None), ("12", 1, 2), (np.int64(13), 2, 4), (13, "5", "6")]
    expected = [[10, 12], [10, 13], [10, 11, 13], [10, 11], [10, 11, 13], [10, 11]]
    for rule in (
        Participation.parse(f"schedule:{tmp_path / 'a.csv'}"),
        Participation.parse(f"schedule:{tmp_path / 'b.csv'}"),
        Participation(schedule=given),
        Participation.parse("lines:11,3,;12,1,2;13,2,4;13,5,6"),
    ):
        assert not rule.everybody
        assert not rule.of(NAMES).everybody
        assert taking_part(rule, 6) == expected
    assert taking_part(Participation(schedule=given), 6, NAMES[::-1]) == [r[::-1] for r in expected]
    some = taking_part(Participation(count=1, schedule=given), 6)
    assert [len(r) for r in some] == [1] * 6
    assert all(set(a) <= set(b) for a, b in zip(some, expected, strict=True))
    assert taking_part(Participation(schedule=[(10, 2, None), (11, 3, 4), (12, 9, 10), (13, 9, 10)]), 1) == [[]]
    table = torch.tensor([[1, 1, 1, 0]]).bool()
    assert taking_part(Participation(table=table, schedule=given), 2) == [[10, 12], [10]]


def test_a_run_keeps_to_a_schedule(tmp_path):
    (tmp_path / "s.csv").write_text("3,2,\n0,1,2\n")
    federation = build_federation(devices=4, teams=2)  # the tree has the devices in another order
    run = train(
        HierFedAvg(0.1, 1, team_rounds=1),
        federation,
        "mclr",
        rounds=2,
        absent="skip",
        device_participation=f"schedule:{tmp_path / 's.csv'}",
    )
    assert [record["participants"]["device"] for record in run.history] == [3, 3]
    with pytest.raises(ValueError, match="names '3'"):
        train(HierFedAvg(), federation, "mclr", team_participation=Participation(schedule=[(3, 1, 2)]))


def test_a_schedule_says_what_is_wrong(tmp_path):
    for line in ("10,1", "10,1,2,3", "10,x,", "10,0,4", "10,4,4", "10,,4", "10,1.5,4"):
        (tmp_path / "s.csv").write_text(f"11,1,2\n{line}\n")
        with pytest.raises(ValueError, match=r"is id,join,leave, rounds from 1 .*got \('10', "):
            Participation.parse(f"schedule:{tmp_path / 's.csv'}")
    with pytest.raises(ValueError, match=r"cannot read the participation schedule .*none\.csv"):
        Participation.parse(f"schedule:{tmp_path / 'none.csv'}")
    with pytest.raises(ValueError, match="names 'device-22'; ids are such as device-2"):
        Participation(schedule=[("device-22", 1, 2)]).of(np.array(["phone", "device-1", "device-2"]))
    with pytest.raises(ValueError, match="names 'x'; ids are such as 10, 11, 12"):
        Participation(schedule=[("x", 1, 2)]).of(NAMES)
