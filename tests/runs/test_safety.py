"""Run folders: one writer, no links, no mixtures of settings or data, and a true word about what was saved."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch

from commands import SMALL, call, own_file
from polytier import FedAvg, Run, RunFolder, build_federation, make_loop, train
from polytier.files.lock import FolderLock
from polytier.runs import callbacks, checkpoint
from polytier.runs.folder import claim, claim_next
from polytier.runs.loop import Callback, Loop
from polytier.runs.read_files import read_history, read_state

ARGS = (*SMALL, "--batching", "eager", "--quiet")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    call("run", *ARGS, "--rounds", 1, "--out", folder)
    return folder


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def change(folder: str, **settings: object) -> None:
    path = Path(folder) / "config.toml"
    path.write_text(tomli_w.dumps({**tomllib.loads(path.read_text()), **settings}))


# -- one writer ---------------------------------------------------------------------------------------


def test_a_second_writer_is_told_who_the_first_one_is():
    call("run", *ARGS, "--rounds", 2, "--out", "run")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    with FolderLock(Path("run")):
        for args in (("resume", "run", "--rounds", 4), ("run", *ARGS, "--out", "run")):
            assert f"in use by process {os.getpid()}" in call(*args, code=2).stderr or args[0] == "run"
        assert "permfl" in call("show", "run").stdout  # readers need no lock
        call("report", "run", "-o", "page.html")
    assert all(path.read_bytes() == content for path, content in before.items() if path.name != ".lock")
    call("resume", "run", "--rounds", 3, "--quiet")


def test_two_runs_on_one_folder_in_python():
    federation = build_federation("digits", devices=6, teams=2)

    class Second(Callback):
        def on_round(self, loop: Loop, record: dict) -> None:
            with pytest.raises(ValueError, match=r"not empty|in use by process"):
                train(FedAvg(device_steps=1), federation, "mclr", rounds=1, callbacks=[RunFolder("run")])

    train(FedAvg(device_steps=1), federation, "mclr", rounds=2, callbacks=[RunFolder("run"), Second()])
    assert len(read_history(Path("run"))) == 2


TAKE = """
from pathlib import Path
from polytier.files.write import next_folder
print(*(next_folder(Path("runs"), "fedavg-digits-0").name for _ in range(5)))
"""


def test_processes_that_start_together_get_different_folders():
    started = [subprocess.Popen([sys.executable, "-c", TAKE], stdout=subprocess.PIPE, text=True) for _ in range(8)]
    names = [name for process in started for name in process.communicate()[0].split()]
    assert sorted(names) == sorted({f"fedavg-digits-0-{k}" for k in range(1, 41)})


# -- links --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "state.json", ".lock", "checkpoints", "models", "store", "new.part"])
def test_a_folder_with_links_is_not_resumed(finished, name):
    shutil.copytree(finished, "run")
    Path("mine").write_text("mine")
    Path("there").mkdir()
    path = Path("run") / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(Path("there" if name in ("checkpoints", "models", "store") else "mine").resolve())
    said = call("resume", "run", "--rounds", 2, code=2).stderr
    assert f"run/{name} is a link" in said
    assert Path("mine").read_text() == "mine"
    assert not any(Path("there").iterdir())


# -- mixtures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 1},
        {"set": {"device_steps": 2, "team_rounds": 2, "device_lr": 0.5}},
        {"codec": "float16"},
        {"partition": "iid"},
        {"devices": 8},
        {"model": "dnn:16"},
        {"dtype": "float64"},
        {"batch_size": 7},
        {"algorithm": "local"},
        {"split": "2:1:1"},
        {"l2": 0.1},
    ],
)
def test_a_changed_setting_is_refused_by_resume(finished, changed):
    shutil.copytree(finished, "run")
    change("run", **changed)
    said = call("resume", "run", "--rounds", 2, code=2).stderr
    name = next(iter(changed))
    assert f"config.toml has changed since the run was started: {name} was" in said
    assert read_state(Path("run"))["state"] == "done"


def test_how_a_run_is_computed_may_change():
    call("run", *ARGS, "--rounds", 4, "--out", "whole")
    call("run", *ARGS, "--rounds", 2, "--out", "run")
    change("run", tile=1, workers=1, rounds=4)
    call("resume", "run", "--quiet")
    one, other = Run.load("whole").global_, Run.load("run").global_
    assert one is not None
    assert other is not None
    assert torch.equal(one, other)


def test_other_data_under_the_same_name_are_refused():
    own_file(Path("mine.npz"))
    args = ("fedavg", "--data", "mine.npz", "--set", "device_steps=1", "--batching", "eager", "--quiet")
    call("run", *args, "--rounds", 1, "--out", "run")
    with np.load("mine.npz") as file:
        arrays = dict(file)
    np.savez("mine.npz", **{**arrays, "x": arrays["x"] + 1})
    assert (
        "the data have changed since the run in run was started" in call("resume", "run", "--rounds", 2, code=2).stderr
    )
    np.savez("mine.npz", **arrays)
    call("resume", "run", "--rounds", 2, "--quiet")


# -- what was saved -----------------------------------------------------------------------------------


def test_a_run_without_a_checkpoint_says_so_and_its_folder_can_be_used(monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_new", full)
        said = call("run", *ARGS, "--rounds", 1, "--out", "run", code=3).stderr
    assert "nothing was saved in run: start the run again" in said
    assert "make room" in said
    assert "nothing was saved; start the run again" in call("resume", "run", code=2).stderr
    call("run", *ARGS, "--rounds", 1, "--out", "run")
    assert read_state(Path("run"))["state"] == "done"


def test_files_of_others_are_never_taken_for_a_run_that_saved_nothing():
    Path("run").mkdir()
    claim(Path("run")).release()
    Path("run/state.json").write_text("{}")
    Path("run/thesis.txt").write_text("mine")
    assert "not empty" in call("run", *ARGS, "--out", "run", code=2).stderr
    assert Path("run/thesis.txt").read_text() == "mine"


def test_the_checkpoint_before_a_damaged_one_is_used():
    call("run", *ARGS, "--rounds", 6, "--out", "whole")
    call("run", *ARGS, "--rounds", 4, "--out", "run")
    newest = checkpoint.found(Path("run/checkpoints"))[0]
    rows = bytearray((newest / checkpoint.ROWS).read_bytes())
    rows[-1] ^= 1
    (newest / checkpoint.ROWS).write_bytes(rows)
    said = call("resume", "run", "--rounds", 6).stderr
    assert f"{newest / checkpoint.ROWS} is damaged: its content does not match its digest" in said
    one, other = Run.load("whole").global_, Run.load("run").global_
    assert one is not None
    assert other is not None
    assert torch.equal(one, other)


def test_results_that_are_damaged_are_written_again_by_resume():
    call("run", *ARGS, "--rounds", 2, "--out", "run")
    for name in (
        "devices.csv",
        "models/team.safetensors",
        "topology.json",
        "summary.json",
        "metrics.jsonl",
        "state.json",
    ):
        path = Path("run") / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + b"?" + whole[-8:])
        assert f"{Path(name).name}" in call("resume", "run", "--quiet").stderr
        if name not in ("summary.json", "state.json", "metrics.jsonl"):  # these contain times or the process
            assert path.read_bytes() == whole
    assert "is finished" in call("resume", "run").stderr


def test_files_removed_during_a_run_are_written_again(caplog):
    federation = build_federation("digits", devices=6, teams=2)

    class Remove(Callback):
        def on_round(self, loop: Loop, record: dict) -> None:
            if loop.round == 2:
                for name in ("metrics.jsonl", "config.toml", "topology.json"):
                    Path("run", name).unlink()

    with make_loop(FedAvg(device_steps=1), federation, "mclr") as loop:
        loop.run(4, [RunFolder("run"), Remove()])
    assert len(read_history(Path("run"))) == 4
    assert "metrics.jsonl was changed by another program during the run" in caplog.text
    assert "config.toml and topology.json of run was removed during the run" in caplog.text
    assert Run.load("run").rounds == 4


def test_rows_in_files_are_compared_with_the_checkpoint(monkeypatch):
    monkeypatch.setattr(callbacks, "IN_FILES", 0)
    call("run", *ARGS, "--rounds", 4, "--out", "whole")
    for journals in (True, False):
        shutil.rmtree("run", ignore_errors=True)
        call("run", *ARGS, "--rounds", 3, "--out", "run")
        rows = next(Path("run/store").rglob("*.rows"))
        data = bytearray(rows.read_bytes())
        data[5] ^= 16
        rows.write_bytes(data)
        if journals:  # the earlier checkpoint restores the row
            assert "is damaged (block 0 of 1)" in call("resume", "run", "--rounds", 4).stderr
            assert Path("run/models/personal.safetensors").read_bytes() == whole_models()
        else:
            for path in Path("run/store").rglob("log-*"):
                path.unlink()
            said = call("resume", "run", "--rounds", 4, code=2).stderr
            assert "no checkpoint can be used; repeat the run" in said


def whole_models() -> bytes:
    return Path("whole/models/personal.safetensors").read_bytes()


def test_a_run_folder_of_others_runs_no_code(monkeypatch):
    """A folder whose journal is a pickle, as version 0.1 wrote them."""
    monkeypatch.setattr(callbacks, "IN_FILES", 0)
    call("run", *ARGS, "--rounds", 1, "--out", "run")
    Path("run/store/0/journal-1-1").write_bytes(b"\x10\0\0\0\0\0\0\0" + b"cos\nsystem\n(S'touch it-ran'\ntR.")
    assert "a journal of version 0.1" in call("resume", "run", "--rounds", 2, code=2).stderr
    assert not Path("it-ran").exists()


def test_default_folders_are_locked_at_once():
    with claim_next(Path("runs"), "a") as one, claim_next(Path("runs"), "a") as two:
        assert (one.folder.name, two.folder.name) == ("a-1", "a-2")
        with pytest.raises(ValueError, match="in use by process"):
            claim(one.folder)


def test_facts_name_the_settings_of_the_run():
    call("run", *ARGS, "--rounds", 1, "--seed", 3, "--out", "run")
    facts = json.loads((checkpoint.found(Path("run/checkpoints"))[0] / checkpoint.FACTS).read_text())
    assert facts["settings"]["seed"] == 3
    assert not {"rounds", "tile", "workers", "out"} & set(facts["settings"])
