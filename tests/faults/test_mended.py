"""What was wrong before faults were injected at every place: each test names what would be broken without its mend."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polytier
from commands import SMALL, call
from polytier import Run, Topology
from polytier.files.lock import FolderLock
from polytier.files.read import Damaged, read_json
from polytier.files.write import make_folder, write_json
from polytier.method.mapped_memory import MappedMemory
from polytier.runs import callbacks, checkpoint
from polytier.runs.read import RunRecord
from polytier.runs.read_files import finished_rounds, read_history, read_summary, read_tiers
from polytier.studies.study_folder import check_folder

TREE = Topology.build(np.arange(6), np.arange(6) // 3)
SHORT = ("run", *SMALL, "--rounds", 2, "--workers", 1, "--quiet")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Two finished runs that differ in their seed."""
    home = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        call(*SHORT, "--seed", seed, "--out", home / str(seed))
    return {"own": home / "0", "other": home / "1"}


@pytest.fixture
def own(runs, tmp_path) -> Path:
    return Path(shutil.copytree(runs["own"], tmp_path / "own"))


@pytest.mark.parametrize(
    ("name", "read"),
    [("summary.json", read_summary), ("topology.json", read_tiers), ("metrics.jsonl", read_history)],
)
def test_a_file_of_another_run_is_not_taken_for_its_own(runs, own, name, read):
    """Its digest is right; what it says is about other settings. `show` printed the results of the other run."""
    shutil.copy(runs["other"] / name, own / name)
    with pytest.raises(Damaged, match=name):
        read(own)
    assert finished_rounds(own, 2) is None
    call("resume", own, "--quiet")
    assert finished_rounds(own, 2) == 2
    assert RunRecord(own).summary == RunRecord(runs["own"]).summary or read(own)


def cut(path: Path, lines: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


def test_rounds_after_the_last_checkpoint_of_a_killed_run_are_not_shown(own):
    """Such lines may be lost at the end of a line: `show` and `report` took what was left for the whole run."""
    write_json(own / "state.json", {**read_json(own / "state.json"), "state": "running"})
    (own / "summary.json").unlink()
    shutil.rmtree(checkpoint.found(own / "checkpoints")[0])
    before = call("show", own).stdout
    assert [record["round"] for record in read_history(own)] == [1]
    cut(own / "metrics.jsonl", 1)
    assert call("show", own).stdout == before
    cut(own / "metrics.jsonl", 0)
    said = " ".join(call("show", own, code=2).stderr.split())
    assert f"metrics.jsonl is damaged: it ends after round 0, round 1 is missing; `polytier resume {own}`" in said


def test_lost_lines_of_a_run_that_ended_with_an_error_are_noticed(tmp_path, monkeypatch):
    """No checkpoint has the rounds since the last one, and `show` took the lines that were left for all of them."""

    class Fails(polytier.Callback):
        def on_round(self, loop: Any, record: dict[str, Any]) -> None:
            if loop.round == 3:
                raise RuntimeError("no more")

    monkeypatch.setattr(callbacks, "PATIENCE", 1e9)  # no checkpoint after the first round
    federation = polytier.build_federation("digits", devices=4, teams=2)
    with pytest.raises(RuntimeError):
        polytier.train("fedavg", federation, "mclr", rounds=4, callbacks=[callbacks.RunFolder(tmp_path), Fails()])
    assert len(read_history(tmp_path)) == 3
    cut(tmp_path / "metrics.jsonl", 1)
    with pytest.raises(Damaged, match=r"ends after round 1, rounds 2 to 3 are missing; `polytier resume"):
        read_history(tmp_path)


def test_a_run_that_continues_from_an_earlier_checkpoint_can_be_read(own):
    """The damaged checkpoint and the summary of later rounds made its metrics.jsonl look damaged."""
    seen: list[int] = []

    class Reads(polytier.Callback):
        def on_start(self, loop: Any) -> None:
            seen.append(len(read_history(own)))

    newest = checkpoint.found(own / "checkpoints")[0]
    (newest / "facts.json").write_bytes((newest / "facts.json").read_bytes()[:-9])
    polytier.resume(own, callbacks=[Reads()])
    assert seen == [1]
    assert finished_rounds(own, 2) == 2


def test_a_missing_summary_of_a_run_that_is_done_is_noticed(own):
    """`show` said that the run was not finished, with exit code 0."""
    (own / "summary.json").unlink()
    assert "summary.json is missing" in call("show", own, code=2).stderr
    call("resume", own, "--quiet")
    assert "2 rounds" in call("show", own).output


def test_a_missing_tree_is_noticed(own):
    """`report` made a page without the tree."""
    (own / "topology.json").unlink()
    assert "topology.json" in call("report", own, "-o", own.parent / "page.html", code=2).stderr


def test_the_state_of_a_loaded_run_is_that_of_its_models(own):
    """With a damaged newest checkpoint, the models of the last round came with the state of the round before."""
    newest = checkpoint.found(own / "checkpoints")[0]
    (newest / "facts.json").write_bytes((newest / "facts.json").read_bytes()[:-9])
    with pytest.raises(Damaged, match="facts.json"):
        Run.load(own)
    call("resume", own, "--quiet")
    assert Run.load(own).rounds == 2


def test_resume_judges_the_settings_of_a_finished_run(own):
    """It said that the run was finished, whatever config.toml said."""
    config = (own / "config.toml").read_text()
    (own / "config.toml").write_text(config.replace("seed = 0", "seed = 7"))
    assert "seed was 0 and is now 7" in call("resume", own, code=2).stderr


def test_a_run_whose_last_state_could_not_be_written_becomes_done(own):
    """After an error in the last write, the run was finished and its state was `stopped` for ever."""
    state = (own / "state.json").read_text()
    assert '"done"' in state
    write_json(own / "state.json", {**read_json(own / "state.json"), "state": "stopped", "reason": "EIO"})
    call("resume", own, "--quiet")
    assert read_json(own / "state.json")["state"] == "done"


def test_resume_of_a_folder_that_does_not_exist(tmp_path):
    """With --rounds, the message was that of the operating system."""
    assert "does not exist; `polytier run` makes one" in call("resume", tmp_path / "no", "--rounds", 3, code=2).stderr


def test_resume_of_an_empty_folder_says_that_nothing_was_saved(tmp_path):
    """A loss of power right after the folder was made."""
    assert "nothing was saved" in call("resume", tmp_path, code=2).stderr


def test_a_full_disk_is_no_bad_input(tmp_path, monkeypatch):
    """A folder that could not be made for lack of room was called a bad path, with exit code 2."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(OSError, match="space"):
        make_folder(tmp_path / "new")


# -- rows in files -------------------------------------------------------------------------------------


def rows(value: float) -> torch.Tensor:
    return torch.full((6, 2), value)


def test_rows_that_a_checkpoint_did_not_have_are_noticed(tmp_path):
    """A checkpoint before the first rows has no digests; with a lost journal, later rows were taken for its own."""
    memory = MappedMemory(TREE, tmp_path)
    epoch = memory.advance()
    memory.write(2, "model", torch.arange(6), rows(1.0))
    next(tmp_path.glob(f"log-{epoch}-*")).unlink()
    again = MappedMemory(TREE, tmp_path)
    again.undo(epoch)
    with pytest.raises(Damaged, match="kept"):
        again.check({})


def test_files_that_were_lost_before_their_first_sync_need_no_undo(tmp_path):
    """The journal is synced at once, new files with the next checkpoint: after a loss of power they may be missing."""
    memory = MappedMemory(TREE, tmp_path)
    epoch = memory.advance()
    memory.write(2, "model", torch.arange(6), rows(1.0))
    shutil.rmtree(tmp_path / "2")
    again = MappedMemory(TREE, tmp_path)
    again.undo(epoch)
    again.check({})


def test_flags_without_rows_are_not_used(tmp_path):
    """A loss of power may keep one of the files of new rows: its flags would make zeros the rows of devices."""
    memory = MappedMemory(TREE, tmp_path)
    epoch = memory.advance()
    memory.write(2, "model", torch.arange(6), rows(1.0))
    next(tmp_path.glob("2/**/*.rows")).unlink()
    again = MappedMemory(TREE, tmp_path)
    again.undo(epoch)
    again.write(2, "model", torch.tensor([0]), rows(2.0)[:1])
    assert torch.equal(again.read(2, "model", torch.arange(1, 6), rows(5.0)[1:]), rows(5.0)[1:])


def test_damaged_notes_do_not_keep_rows_from_the_journal(tmp_path):
    """A row that seems to be in the journal already would be overwritten without a copy."""
    memory = MappedMemory(TREE, tmp_path)
    memory.write(2, "model", torch.arange(6), rows(1.0))
    epoch = memory.advance()
    noted = next(tmp_path.glob("2/**/*.noted"))
    noted.write_bytes(np.full(6, epoch + 1, dtype=np.int64).tobytes())
    again = MappedMemory(TREE, tmp_path)
    again.undo(epoch)
    assert again.epoch == epoch + 1
    again.write(2, "model", torch.arange(6), rows(2.0))
    last = MappedMemory(TREE, tmp_path)
    last.undo(epoch)
    assert torch.equal(last.read(2, "model", torch.arange(6), rows(0.0)), rows(1.0))


def test_a_record_of_zeros_at_the_end_is_one_that_was_not_written(tmp_path):
    """After a loss of power the end of a journal may be zeros. They passed as a record that nobody could read."""
    memory = MappedMemory(TREE, tmp_path)
    memory.write(2, "model", torch.arange(6), rows(1.0))
    epoch = memory.advance()
    memory.write(2, "model", torch.tensor([0]), rows(5.0)[:1])
    journal = next(tmp_path.glob(f"log-{epoch}-*"))
    journal.write_bytes(journal.read_bytes() + bytes(300))
    again = MappedMemory(TREE, tmp_path)
    again.undo(epoch)
    assert torch.equal(again.read(2, "model", torch.arange(6), rows(0.0)), rows(1.0))


def test_a_study_that_was_killed_before_its_first_file_was_complete_starts_again(tmp_path):
    """The unfinished file made the folder look like one of somebody else."""
    for name in (".lock", ".compare.json.0123456789abcdef.partial"):
        (tmp_path / name).touch()
    check_folder(tmp_path, "compare.json", "a comparison")
    (tmp_path / "mine").touch()
    with pytest.raises(ValueError, match="is not a comparison"):
        check_folder(tmp_path, "compare.json", "a comparison")


def test_a_lock_whose_file_cannot_be_closed_is_released(tmp_path, monkeypatch):
    """It was closed a second time: a bad file descriptor, after a run that was done."""
    lock = FolderLock(tmp_path)
    with monkeypatch.context() as patch:
        real = os.close

        def close(file: int) -> None:
            real(file)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, "close", close)
        lock.release()
        lock.release()
    FolderLock(tmp_path).release()


@pytest.mark.parametrize(("line", "said"), [('model = "mclr"', "no model"), ('algorithm = "permfl"', "no algorithm")])
def test_a_damaged_name_in_config_toml_is_found_by_the_name_of_the_file(tmp_path, line, said):
    folder = tmp_path / "run"
    call("run", *SMALL, "--rounds", 1, "--out", folder, "--quiet")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace(line, line[:-2] + 'x"'))
    result = call("export", folder, "--global", "-o", tmp_path / "model.safetensors", code=2)
    assert f"{config}: {said}" in " ".join(result.stderr.split())


def test_a_folder_in_place_of_a_file_of_rows_is_named(tmp_path):
    memory = MappedMemory(TREE, tmp_path / "store")
    del memory
    os.remove(tmp_path / "store" / "epoch")
    (tmp_path / "store" / "epoch").mkdir()
    with pytest.raises(Damaged, match="epoch is a folder"):
        MappedMemory(TREE, tmp_path / "store")


def test_a_missing_collaboration_is_noticed_and_its_picture_drawn_again(tmp_path):
    folder = tmp_path / "run"
    call("run", "cobo", "--devices", 6, "--rounds", 2, "--out", folder, "--quiet")
    (folder / "collaboration.png").unlink()
    call("resume", folder, "--quiet")
    assert (folder / "collaboration.png").is_file()
    (folder / "collaboration.npz").unlink()
    result = call("report", folder, "-o", tmp_path / "page.html", code=2)
    assert "collaboration.npz" in result.stderr
