"""A run and a federation as people see them: texts, notebooks, frames, plots, predictions."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

import numpy as np
import pytest
from torch import nn

from commands import call
from polytier import MFARR, FedAvg, Federation, LocalTraining, PerMFL, Run, build_federation, train

pandas: Any = pytest.importorskip("pandas")
QUICK: Any = {"device_steps": 2, "team_rounds": 2}


@pytest.fixture(scope="module")
def federation():
    return build_federation(devices=6, teams=2)


@pytest.fixture(scope="module")
def run(federation):
    return train(PerMFL(**QUICK), federation, "mclr", rounds=3, eval_every=2)


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "saved"
    run.save(place)
    return place


@pytest.fixture(params=["trained", "loaded"])
def either(request, run, folder):
    return run if request.param == "trained" else Run.load(folder)


def test_a_run_is_one_line(either):
    accuracy = [100 * either.history[-1][tier]["test"]["accuracy"] for tier in ("personal", "team", "global")]
    shown = ", ".join(f"{t} {v:.2f} %" for t, v in zip(("personal", "team", "global"), accuracy, strict=True))
    assert repr(either) == f"<Run: permfl with mclr, 3 rounds, 6 devices in 2 teams; test accuracy: {shown}>"


def test_a_loaded_run_is_shown_when_its_folder_is_gone(run, tmp_path):
    run.save(tmp_path / "run")
    loaded = Run.load(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert repr(loaded) == repr(run)
    assert loaded._repr_html_() == run._repr_html_()


def test_a_notebook_gets_a_table_without_markup_of_its_content(either, federation):
    assert "<td>personal</td>" in either._repr_html_()
    assert "(1, 8, 8), 10 classes</p>" in federation._repr_html_()

    class Script(FedAvg):
        pass

    Script.__qualname__ = "<script>"
    made = train(Script(device_steps=1), federation, "mclr", rounds=1)
    assert "&lt;script&gt;" in made._repr_html_()
    assert "<script>" not in made._repr_html_()


def test_a_federation_is_one_line(federation):
    assert repr(federation) == "<Federation: 6 devices in 2 teams, 1,264 samples of shape (1, 8, 8), 10 classes>"
    numbers = Federation.from_arrays(np.zeros((4, 3)), np.zeros(4), device=[0, 0, 1, 1])
    assert repr(numbers) == "<Federation: 2 devices, 4 samples of shape (3,), no classes>"


def test_the_summary_is_that_of_the_file(either, run, folder):
    written = json.loads((folder / "summary.json").read_text())
    assert either.summary() == {k: v for k, v in written.items() if k not in ("format", "run", "files", "sha256")}
    assert json.loads(json.dumps(run.summary())) == Run.load(folder).summary()


def test_rounds_are_a_frame(either):
    frame = either.to_frame()
    assert frame["round"].tolist() == [1, 2, 3]
    assert frame["personal/test/accuracy"].isna().tolist() == [True, False, False]
    last = either.history[-1]
    assert frame["team/train/loss"].iloc[-1] == last["team"]["train"]["loss"]
    assert frame["bytes/team-device/up"].iloc[0] == last["bytes"]["team-device"]["up"]


def test_devices_are_a_frame(either, federation):
    frame = either.devices()
    tiers = ["personal_accuracy", "team_accuracy", "global_accuracy"]
    assert list(frame) == ["device", "team", "samples", *tiers]
    assert frame["device"].tolist() == federation.ids.tolist()
    assert frame["team"].tolist() == federation.team.tolist()
    assert frame["samples"].tolist() == federation.population.counts.sum(1).tolist()
    means = [either.history[-1][tier]["test"]["accuracy"] for tier in ("personal", "team", "global")]
    assert frame[tiers].mean().tolist() == pytest.approx(means)


def test_devices_of_a_regression_have_their_loss():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3))
    federation = Federation.from_arrays(x, x.sum(1).astype(np.float32), device=np.arange(40) % 4)
    run = train(LocalTraining(), federation, linear(), rounds=1)
    frame = run.devices()
    assert list(frame) == ["device", "team", "samples", "personal_loss"]
    assert np.mean(frame["personal_loss"].tolist()) == pytest.approx(run.history[-1]["personal"]["test"]["loss"])


def linear():
    return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))


def test_frames_and_summaries_of_several_models(federation, tmp_path):
    run = train(MFARR({"a": PerMFL(**QUICK), "b": FedAvg(device_steps=2)}), federation, "mclr", rounds=2)
    run.save(tmp_path / "run")
    loaded = Run.load(tmp_path / "run")
    for one, other in ((run, loaded), (run.models["b"], loaded.models["b"])):
        pandas.testing.assert_frame_equal(one.devices(), other.devices())
        pandas.testing.assert_frame_equal(one.to_frame(), other.to_frame())
        assert json.loads(json.dumps(one.summary())) == other.summary()
        assert repr(one) == repr(other)
    assert "b_global_accuracy" in run.devices()
    assert list(run.models["b"].devices()) == ["device", "team", "b_samples", "b_global_accuracy"]


def test_the_plot_has_a_line_per_tier_and_names_on_its_axes(either):
    pyplot: Any = pytest.importorskip("matplotlib.pyplot")
    axes = either.plot()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "test accuracy, %")
    assert [line.get_label() for line in axes.lines] == ["personal", "team", "global"]
    assert axes.lines[0].get_xdata().tolist() == [2, 3]
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(100 * either.history[-1]["personal"]["test"]["accuracy"])
    _, own = pyplot.subplots()
    assert either.plot("loss", ax=own) is own
    assert own.get_ylabel() == "test loss"
    with pytest.raises(ValueError, match="did you mean 'accuracy'"):
        either.plot("acuracy")
    pyplot.close("all")


@pytest.mark.parametrize("extra", ["pandas", "plots"])
def test_a_missing_extra_is_named(extra, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=rf'pip install "polytier\[{extra}\]"'):
        run.devices() if extra == "pandas" else run.plot()


# -- predict ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [{"device": 3}, {"team": 1}, {}])
def test_predictions_are_those_of_the_command(who, either, folder, federation, tmp_path):
    x = federation.device(3, "test")[0].numpy()
    np.savez(tmp_path / "x.npz", x=x)
    flags = [part for name, value in who.items() for part in (f"--{name}", value)] or ["--global"]
    call("predict", folder, *flags, "--data", tmp_path / "x.npz", "--out", tmp_path / "y.npz")
    assert either.predict(x, **who).tolist() == np.load(tmp_path / "y.npz")["y"].tolist()
    assert either.predict(x.astype(np.float64), **who).tolist() == either.predict(x.tolist(), **who).tolist()


def test_predict_says_which_models_there_are(run, federation):
    x = federation.x[:2]
    with pytest.raises(ValueError, match="give one of them"):
        run.predict(x, device=0, team=0)
    with pytest.raises(ValueError, match=r"the model was trained on \(1, 8, 8\)"):
        run.predict(x[:, :, :4])
    alone = train(LocalTraining(), federation, "mclr", rounds=1)
    with pytest.raises(ValueError, match="has no global model; give device=ID"):
        alone.predict(x)
