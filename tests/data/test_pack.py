"""Federations in folders: written once, mapped by whoever uses them."""

from __future__ import annotations

import copy
import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from commands import QUICK, call, own_file
from polytier import FedAvg, Federation, build_federation
from polytier.data import pack as mapped
from polytier.engines import workers as processes
from polytier.runs.loop import Callback, make_loop

RUN = (*QUICK, "--rounds", 2, "--seed", 5, "--batching", "eager", "--quiet")  # no graphs: workers start faster


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def made(kind: str) -> Federation:
    """Three devices of four samples."""
    rng = np.random.default_rng(3)
    device = np.repeat([0, 1, 2], 4)
    floats, y = rng.normal(size=(12, 3)), rng.integers(0, 5, 12)
    if kind == "images":
        x, names = rng.integers(0, 256, (12, 1, 2, 2), dtype=np.uint8), np.array(["anna", "bo", "Čeněk"])
        team, cluster = np.array(["north", "south", "north"]), np.array([1, 0, 1])
        return Federation.from_arrays(x, y, names[device], team, shares=(2, 1, 1), seed=7, cluster=cluster)
    if kind == "standardized":
        return Federation.from_arrays(floats, y, device, num_classes=9).standardized()
    if kind == "targets":  # several real ones a sample
        return Federation.from_arrays(floats, rng.normal(size=(12, 2)), device, team=device % 2)
    assert kind == "tokens"
    return Federation.from_arrays(rng.integers(0, 50, (12, 6)), rng.integers(0, 50, (12, 6)), 10 - device)


def assert_same(a: Federation, b: Federation) -> None:
    for name in (field.name for field in fields(Federation)):
        mine, other = getattr(a, name), getattr(b, name)
        assert type(mine) is type(other), name
        if isinstance(mine, Tensor | np.ndarray):
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape), name
            assert np.asarray(mine).tobytes() == np.asarray(other).tobytes(), name
        else:
            assert mine == other, name


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- there and back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["images", "standardized", "targets", "tokens"])
def test_round_trip(kind):
    federation = made(kind)
    federation.save("packed")
    assert_same(Federation.open("packed"), federation)
    assert mapped.is_stored("packed")
    assert mapped.is_stored(Path("packed"))


def test_a_copy_of_a_mapped_one(tmp_path):
    made("images").save("one")
    Federation.open("one").save(tmp_path / "deep" / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "deep" / "two")


def test_what_is_written_at_once_makes_no_difference(tmp_path, monkeypatch):
    federation = made("images")
    federation.save("one")
    monkeypatch.setattr(mapped, "CHUNK", 9)  # two images
    federation.save("two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_tensors_of_all_kinds_in_files(tmp_path):
    numbers = torch.arange(24).reshape(2, 3, 4)
    for k, values in enumerate(
        (
            numbers.permute(2, 0, 1),
            numbers[:, ::2],
            numbers % 2 == 0,
            numbers[:0],
            numbers.double() / 7,
            numbers.short(),
        )
    ):
        file = mapped.as_file(values, tmp_path / str(k))
        assert file[0] == tmp_path / str(k)
        back = mapped.from_file(*file)
        assert back.dtype == values.dtype
        assert torch.equal(back, values)
        assert mapped.as_file(back, tmp_path / "unused") == file
    assert not (tmp_path / "unused").exists()


def test_changes_stay_with_whoever_makes_them(tmp_path):
    made("images").save("packed")
    before = contents(tmp_path / "packed")
    mine, other = Federation.open("packed"), Federation.open("packed")
    mine.x.zero_()
    mine.y[0] = 4 - mine.y[0]
    mine.bounds.zero_()
    assert contents(tmp_path / "packed") == before
    assert_same(other, made("images"))
    assert_same(Federation.open("packed"), made("images"))


def test_it_is_found_from_another_folder(tmp_path, monkeypatch):
    made("targets").save("packed")
    federation = Federation.open("packed")
    monkeypatch.chdir("/")
    assert mapped.as_file(federation.x, tmp_path / "unused") == (tmp_path / "packed" / "x", "float32", [12, 3])


def test_names_that_are_objects():
    """As a table of pandas has them."""
    federation = made("images")
    named = Federation.from_arrays(federation.x, federation.y, np.repeat(federation.ids, 4).astype(object))
    named.save("packed")
    assert Federation.open("packed").ids.tolist() == federation.ids.tolist()


def test_what_an_attempt_left_behind_does_no_harm(tmp_path):
    (tmp_path / "packed").mkdir()
    np.save(tmp_path / "packed" / "team.npy", np.array([7, 8, 9]))  # of one that was killed before its end
    made("tokens").save("packed")
    assert Federation.open("packed").team is None


# -- samples are not copied ---------------------------------------------------------------------------


def test_workers_map_the_packed_file(tmp_path):
    made("images").save("packed")
    packed = tmp_path / "packed"
    with make_loop(FedAvg(), Federation.open("packed"), "mclr", workers=2, batching="eager") as training:
        engine: Any = training.context.engine
        folder: Path = engine._processes.folder
        sent = processes.describe_shared(training.context, folder / "0")
        assert sent["x"] == (packed / "x", "uint8", [12, 1, 2, 2])
        assert sent["y"] == (packed / "y", "int64", [12])
        assert len(sent["federation"].x) == len(sent["federation"].y) == 0
        assert not [path.name for path in folder.rglob("[xy]")]


def test_samples_in_memory_are_written_once_for_workers(tmp_path):
    federation = made("images")
    with make_loop(FedAvg(), federation, "mclr", workers=2, batching="eager") as training:
        engine: Any = training.context.engine
        sent = processes.describe_shared(training.context, engine._processes.folder / "0")
        assert sent["x"][0] == engine._processes.folder / "0" / "x"
        assert torch.equal(mapped.from_file(*sent["x"]), federation.x)
        assert torch.equal(training.context.batches.federation.x, federation.x)


def test_tensors_made_from_a_mapped_one_are_not_its_file(tmp_path):
    made("images").save("packed")
    federation = Federation.open("packed")
    for k, values in enumerate((federation.x[1:], federation.x + 1, federation.x.clone(), federation.x.flip(0))):
        assert mapped.as_file(values, tmp_path / str(k))[0] == tmp_path / str(k)
        assert torch.equal(mapped.from_file(*mapped.as_file(values, tmp_path / str(k))), values)


@pytest.mark.parametrize("copied", [False, True], ids=["itself", "a deep copy"])
def test_workers_see_what_was_changed(tmp_path, copied):
    made("images").save("packed")
    federation = Federation.open("packed")
    federation = copy.deepcopy(federation) if copied else federation
    federation.x[0] = 255 - federation.x[0]
    assert torch.equal(mapped.from_file(*mapped.as_file(federation.x, tmp_path / "x")), federation.x)


# -- the commands -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A folder with a file of one's own, the same packed, and a run on the file."""
    folder = tmp_path_factory.mktemp("source")
    own_file(folder / "mine.npz")
    call("data", "pack", folder / "packed", "--data", folder / "mine.npz", "--seed", 5)
    call("run", "--data", folder / "mine.npz", *RUN, "--out", folder / "run")
    return folder


def results(folder: Path) -> dict[str, Any]:
    """The numbers of a run without its times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "device_steps_per_second", "crc32")
    files = [*sorted((folder / "models").iterdir()), *(folder / f for f in ("devices.csv", "traffic.csv"))]
    return {
        "metrics": [{k: v for k, v in line.items() if k not in timed} for line in lines],
        **{path.name: path.read_bytes() for path in files},
    }


def test_pack_says_what_it_did(source):
    said = call("data", "pack", "here", "--data", source / "mine.npz").stderr
    assert "4 devices with 400 samples in here" in said
    federation = Federation.open("here")
    assert federation.ids.tolist() == ["anna", "bert", "chen", "dora"]
    assert federation.x.dtype == torch.uint8
    assert_same(federation, build_federation(source / "mine.npz"))


def test_pack_takes_the_options_of_the_data():
    words = ("--devices", 6, "--teams", 2, "--partition", "labels:3", "--split", "3:1:1", "--standardize")
    call("data", "pack", "packed", "--data", "digits", *words, "--seed", 7)
    expected = build_federation("digits", None, 6, 2, "labels:3", split=(3, 1, 1), standardize=True, seed=7)
    assert_same(Federation.open("packed"), expected)


def test_a_run_on_the_folder_has_the_same_bits(source):
    call("run", "--data", source / "packed", *RUN, "--out", "run")
    assert results(Path("run")) == results(source / "run")


def test_a_run_with_workers_has_the_same_bits(source, monkeypatch):
    started, real = [], processes.Workers._started
    monkeypatch.setattr(processes.Workers, "_started", lambda self: started.append(1) or real(self))
    call("run", "--data", source / "packed", *RUN, "--workers", 2, "--out", "run")
    assert started
    assert results(Path("run")) == results(source / "run")


def test_a_resumed_run_has_the_same_bits(source, monkeypatch):
    call("run", "--data", source / "packed", *RUN, "--rounds", 1, "--out", "run")
    folder = Path("run").resolve()
    monkeypatch.chdir("/")
    call("resume", folder, "--rounds", 2, "--quiet")
    assert results(folder) == results(source / "run")


def test_teams_as_the_folder_has_them_may_be_said(source):
    call("run", "--data", source / "packed", *RUN, "--teams", 2, "--rounds", 1, "--out", "run")
    assert 'teams = "2"' in Path("run/config.toml").read_text()


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        *((f"--{words}", "2 teams") for words in ("devices 3", "teams 3", "teams 0", "partition labels:2")),
        ("--per-class 2:1", "2 teams"),
        ("--team-formation sequential", "2 teams"),
        ("--split 3:1:1", "omit --split"),
    ],
)
def test_what_the_folder_has_settled_cannot_be_changed(source, words, advice):
    said = call("run", "--data", source / "packed", *RUN, *words.split(), "--out", "run", code=2).stderr
    assert advice in said
    assert "pack the data a" in said
    assert not Path("run").exists()


def test_nothing_is_written_over(source):
    before = contents(source / "packed")
    said = call("data", "pack", source / "packed", "--data", source / "mine.npz", "--seed", 6, code=2).stderr
    assert "holds a federation already" in said
    assert "name a new folder" in said
    assert contents(source / "packed") == before
    with pytest.raises(ValueError, match="name a new folder"):
        made("images").save(source / "packed")
    assert contents(source / "packed") == before


def test_a_folder_that_is_no_federation(tmp_path):
    (tmp_path / "plain").mkdir()
    assert not mapped.is_stored("plain")
    assert "plain" in call("run", "--data", "plain", *RUN, code=2).stderr
    with pytest.raises(ValueError, match="plain is no federation .*polytier data pack"):
        Federation.open("plain")


def spoil(folder: Path, how: str) -> None:
    """Break a packed federation of four devices with 400 images of 8 x 8."""
    if how == "x is short":
        with (folder / "x").open("r+b") as file:
            file.truncate(400 * 64 - 1)
    elif how == "y is long":
        with (folder / "y").open("ab") as file:
            file.write(b"0")
    elif how == "no y":
        (folder / "y").unlink()
    elif how == "no ids":
        (folder / "ids.npy").unlink()
    elif how == "other ids":
        np.save(folder / "ids.npy", np.arange(5))
    elif how == "other bounds":
        np.save(folder / "bounds.npy", np.load(folder / "bounds.npy") + 1)
    elif how == "no words":
        (folder / mapped.FILE).write_text("{")
    elif how == "other words":
        (folder / mapped.FILE).write_text("[]")
    elif how == "unknown type":
        text = (folder / mapped.FILE).read_text()
        (folder / mapped.FILE).write_text(text.replace("uint8", "uint99"))
    elif how == "empty ids":
        (folder / "ids.npy").write_bytes(b"")
    elif how == "no devices":
        np.save(folder / "ids.npy", np.arange(0))
        np.save(folder / "bounds.npy", np.zeros((0, 4), dtype=np.int64))
    elif how == "other team":
        np.save(folder / "team.npy", np.arange(5))
    elif how == "bounds below 0":
        np.save(folder / "bounds.npy", np.load(folder / "bounds.npy") - 1)
    elif how == "bounds in a line":
        np.save(folder / "bounds.npy", np.arange(4))


BROKEN = {
    "x is short": "x has 25599 bytes, not 25600",
    "y is long": "y has 3201 bytes, not 3200",
    "no y": "No such file",
    "no ids": "ids",
    "other ids": "do not belong together",
    "other bounds": "do not belong together",
    "no words": "no federation",
    "other words": "no federation",
    "unknown type": "uint99",
    "empty ids": "no federation",
    "no devices": "no federation",
    "other team": "do not belong together",
    "bounds below 0": "do not belong together",
    "bounds in a line": "do not belong together",
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("digests", [False, True])
def test_a_broken_folder_is_told_from_a_good_one(source, tmp_path, how, digests):
    """With digests, and in folders of earlier versions, which have none."""
    shutil.copytree(source / "packed", tmp_path / "packed")
    if not digests:
        about = json.loads((tmp_path / "packed" / mapped.FILE).read_text())
        kept = {k: v for k, v in about.items() if k not in ("format", "digests", "sha256")}
        (tmp_path / "packed" / mapped.FILE).write_text(json.dumps(kept))
    spoil(tmp_path / "packed", how)
    said = call("run", "--data", "packed", *RUN, "--out", "run", code=2).stderr
    assert f"{tmp_path / 'packed'} is no federation" in said
    assert (BROKEN[how] in said) != digests or "cannot be read" in said or "damaged" in said
    assert "polytier data pack" in said
    assert not Path("run").exists()


def test_every_flipped_bit_is_found(source, tmp_path):
    shutil.copytree(source / "packed", tmp_path / "packed")
    assert "is whole" in call("data", "verify", "packed").stderr
    for path in sorted(Path("packed").iterdir()):
        whole = path.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            for command in (("data", "verify", "packed"), ("run", "--data", "packed", *RUN, "--out", "run")):
                assert path.name in call(*command, code=2).stderr
        path.write_bytes(whole)
    assert "is whole" in call("data", "verify", "packed").stderr
    assert "holds no federation" in call("data", "verify", tmp_path, code=2).stderr


def test_blocks_that_are_not_sampled_are_found_by_verify(source, tmp_path, monkeypatch):
    federation = Federation.open(source / "packed")
    monkeypatch.setattr(mapped, "BLOCK", 100)
    monkeypatch.setattr(mapped, "SAMPLED", 2)
    federation.save("small")
    x = Path("small/x").read_bytes()
    Path("small/x").write_bytes(x[:1000] + bytes([x[1000] ^ 4]) + x[1001:])
    Federation.open("small")
    assert "block 10 of 256" in call("data", "verify", "small", code=2).stderr


def test_data_cut_during_a_run_stop_it_with_a_word(source, tmp_path):
    shutil.copytree(source / "packed", tmp_path / "packed")

    class Cut(Callback):
        def on_round(self, loop, record):
            if loop.round == 2:
                os.truncate(tmp_path / "packed" / "x", 1000)

    with make_loop(FedAvg(device_steps=1), Federation.open(tmp_path / "packed"), "mclr") as loop:
        with pytest.raises(RuntimeError, match=r"x has 1000 bytes, not 25600: it was changed during the run"):
            loop.run(5, [Cut()])
        assert loop.round == 2
