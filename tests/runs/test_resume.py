"""Training goes on in Python: the same bits as without interruption, and a check of everything that is given again."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import nn

import polytier
from commands import call
from polytier import MFARR, SCAFFOLD, Callback, CoBo, FedAvg, PerMFL, Run, RunFolder, build_federation, resume, train

QUICK: Any = {"device_steps": 2, "team_rounds": 2}


@pytest.fixture(scope="module")
def federation():
    return build_federation(devices=6, teams=2)


def network(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def doubled(outputs, targets):
    return 2 * nn.functional.cross_entropy(outputs, targets, reduction="none")


def rows_of(run: Run) -> list[torch.Tensor]:
    found = [row for part in run.parts for row in (part.personal, part.team, part.global_) if row is not None]
    assert found
    return found


def assert_same(one: Run, other: Run) -> None:
    assert all(torch.equal(a, b) for a, b in zip(rows_of(one), rows_of(other), strict=True))
    without_time = [[{**r, "seconds": 0} for r in run.history] for run in (one, other)]
    assert without_time[0] == without_time[1]
    assert one.ledger is None or one.ledger.total() == other.ledger.total()


METHODS = {
    "PerMFL": (lambda: PerMFL(**QUICK), {"team_participation": 0.5}),
    "rows that devices keep": (lambda: SCAFFOLD(device_steps=2), {"device_participation": 0.5}),
    "a learned collaboration": (lambda: CoBo(), {}),
    "several models": (lambda: MFARR({"a": PerMFL(**QUICK), "b": FedAvg(device_steps=2)}), {}),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_result_is_continued_with_the_same_bits(name, federation):
    make, settings = METHODS[name]
    whole = train(make(), federation, "mclr", rounds=4, seed=2, **settings)
    half = train(make(), federation, "mclr", rounds=2, seed=2, **settings)
    before = [row.clone() for row in rows_of(half)]
    again = resume(resume(half, rounds=3), rounds=4)
    assert_same(again, whole)
    assert list(again.collaboration) == list(whole.collaboration)
    assert half.rounds == 2
    assert all(torch.equal(a, b) for a, b in zip(rows_of(half), before, strict=True))


def test_own_data_model_and_loss_are_continued_with_the_same_bits(federation, tmp_path):
    def first(rounds, *callbacks):
        return train(PerMFL(**QUICK), federation, network(), rounds=rounds, loss=doubled, callbacks=callbacks)

    whole = first(4)
    assert_same(resume(first(2), rounds=4), whole)
    first(2).save(tmp_path / "saved")
    first(2, RunFolder(tmp_path / "written"))
    for name in ("saved", "written"):
        again = resume(tmp_path / name, 4, federation=federation, model=network(), loss=doubled)
        assert_same(again, whole)
        assert_same(Run.load(tmp_path / name, network()), whole)


def test_a_loaded_run_knows_its_folder_and_its_model(federation, tmp_path):
    whole = train(FedAvg(device_steps=2), federation, network(), rounds=3)
    train(FedAvg(device_steps=2), federation, network(), rounds=2).save(tmp_path / "run")
    assert_same(resume(Run.load(tmp_path / "run", network()), 3, federation=federation), whole)


def test_rows_of_worker_processes_are_continued(federation):
    settings: Any = {"seed": 1, "device_participation": 0.5}
    whole = train(SCAFFOLD(device_steps=2), federation, "mclr", rounds=2, **settings)
    half = train(SCAFFOLD(device_steps=2), federation, "mclr", rounds=1, workers=2, **settings)
    assert_same(resume(half, rounds=2, workers=1), whole)


def test_a_stopped_run_goes_on_to_the_rounds_it_was_started_with(federation, tmp_path):
    class StopAfter2(Callback):
        def on_round(self, loop, record):
            if loop.round == 2:
                loop.stop("enough")

    folder = tmp_path / "run"
    stopped = train(FedAvg(), federation, "mclr", rounds=4, callbacks=[StopAfter2(), RunFolder(folder)])
    whole = train(FedAvg(), federation, "mclr", rounds=4)
    assert_same(resume(folder, federation=federation), whole)
    assert_same(resume(stopped), whole)
    assert_same(Run.load(folder), whole)


def test_a_run_of_the_command_line_is_continued_in_python(tmp_path):
    run = ["run", "fedavg", "--devices", "6", "--teams", "2", "--set", "device_steps=2"]
    call(*run, "--rounds", "1", "--out", str(tmp_path / "half"))
    call(*run, "--rounds", "2", "--out", str(tmp_path / "whole"))
    resume(tmp_path / "half", rounds=2)
    assert_same(Run.load(tmp_path / "half"), Run.load(tmp_path / "whole"))


# -- what is checked ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(federation, tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "python"
    train(FedAvg(device_steps=2), federation, network(), rounds=2, loss=doubled).save(place)
    return place


def test_what_is_missing_is_named(folder, federation):
    again = re.escape(f"polytier.resume({str(folder)!r}, model=..., loss=...)")
    with pytest.raises(ValueError, match=again):
        resume(folder, 3, federation=federation)
    said = call("resume", str(folder), "--rounds", "3", code=2).stderr
    assert "federation=..., model=..., loss=..." in " ".join(said.split())


def test_other_data_models_and_settings_are_refused(folder, federation):
    given: Any = {"federation": federation, "model": network(), "loss": doubled}
    other = build_federation(devices=6, teams=2, seed=1)
    with pytest.raises(ValueError, match="the data have changed"):
        resume(folder, 3, **{**given, "federation": other})
    with pytest.raises(ValueError, match="initial values of the model's parameters have changed"):
        resume(folder, 3, **{**given, "model": network(seed=4)})
    with pytest.raises(ValueError, match="device_steps.: 3"):
        resume(folder, 3, algorithm=FedAvg(device_steps=3), **given)
    with pytest.raises(ValueError, match="has completed 2 rounds; rounds must be at least as large"):
        resume(folder, 1, **given)
    with pytest.raises(TypeError, match="did you mean 'loss'"):
        resume(folder, 3, los=doubled)


def test_a_result_of_an_earlier_round_is_refused(federation):
    with polytier.make_loop(FedAvg(device_steps=2), federation, "mclr") as loop:
        early = loop.run(1)
        loop.run(2)
    assert early.rounds == 1
    with pytest.raises(ValueError, match="gone on to round 2"):
        resume(early, 3)


def test_code_of_the_current_folder_is_not_imported_without_trust(federation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_resumed.py").write_text(
        "from torch import nn\ndef make(inputs, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    run = ["run", "fedavg", "--devices", "6", "--teams", "2", "--model", "own_resumed:make"]
    call(*run, "--rounds", "1", "--out", "run")
    monkeypatch.delitem(sys.modules, "own_resumed")  # a module that is imported already is trusted
    with pytest.raises(ValueError, match="trust=True"):
        resume("run", rounds=2)
    assert resume("run", rounds=2, trust=True).rounds == 2
