"""Bad input gets advice and exit code 2, and nothing is written."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from commands import SMALL, call, own_file

BAD = {
    ("premfl",): "did you mean 'permfl'",
    ("--data", "digit"): "did you mean 'digits'",
    ("--model", "mcrl"): "did you mean 'mclr'",
    ("--model", "no.such:thing"): "package.module:factory",
    ("--partition", "label:2"): "did you mean 'labels'",
    ("--team-formation", "worts"): "did you mean 'worst'",
    ("--devices", "3", "--teams", "5"): "1 to 3 teams",
    ("--devices", "0"): "devices = 0",
    ("--partition", "labels:11"): "1 to 10",
    ("--team-participation", "0"): "(0, 1]",
    ("--device-participation", "1.5"): "(0, 1]",
    ("--device-participation", "some"): "count:4",
    ("--device-participation", "table:none.csv"): "none.csv",
    ("--set", "device_lr=fast"): "not a number",
    ("--set", "device_lr=-1"): "> 0",
    ("--set", "device_steps=1.5"): "whole number",
    ("--set", "devce_lr=0.1"): "did you mean 'device_lr'",
    ("--set", "device_lr"): "FIELD=VALUE",
    ("--set", "team_lr.teem=0.1"): "did you mean 'team'",
    ("--set", "team_lr=1", "--set", "team_lr.team=1"): "choose one",
    ("--set", "device_lr=0.1,0.2"): "device_lr has 2 numbers; give 40",
    ("--set", "weights=heavy"): "uniform | samples",
    ("--codec", "zip"): "float32, float16",
    ("--dtype", "float8"): "'float32' or 'float64'",
    ("--on", "tpu"): "available: cpu",
    ("--engine", "roy"): "stacked, ray",
    ("--engine", "ray:"): "ray:HOST:PORT",
    ("--absent", "maybe"): "'skip' or 'stale'",
    ("--batching", "all"): "stacked, single, eager",
    ("--teams", "many"): "2x4",
    ("--split", "3:1"): "3:0:1",
    ("--split", "0:0:1"): "train above 0",
    ("--per-class", "20"): "20:5",
    ("--seed", "-1"): "seed = -1",
    ("--rounds", "0"): "rounds = 0",
    ("--rounds", "ten"): "--rounds",
    ("--round", "10"): "--rounds",
    ("--data", "mnist", "--data-dir", "."): "polytier data get mnist",
    ("--data", "none.npz"): "none.npz",
    ("none.toml",): "none.toml",
    ("permfl", "--models", "2"): "mfa-rr or mfa-rand",
    ("mfa-rr", "--models", "9", "--devices", "8"): "9 models need at least as many devices",
    ("mfa-rr", "--models", "0"): "at least one model",
    ("mfa-rr", "--set", "device_lrs=1"): "did you mean 'device_lr'",
    ("mfa-rr", "--batch-size", "grow:some"): "A/(B+t)",
    ("fedavg", "--set", "device_lr=1/(t)"): "A/(B+t)",
    ("cobo", "--set", "domain=simplex", "--devices", "1", "--teams", "0"): "2 clients or more",
    ("cobo", "--device-participation", "schedule:none.csv"): "none.csv",
    ("permfl", "--team-formation", "learned:none"): "none",
    ("local", "--data", "text:nowhere"): "write --data text:FOLDER",
    ("local", "--data", "sentences:tokenizer=nothing"): "there is no tokenizer 'nothing'",
    ("local", "--data", "sentences", "--model", "gpt:context=8"): "the model takes at most 8",
    ("local", "--data", "sentences", "--model", "dnn"): "try gpt or lstm",
    ("local", "--model", "gpt"): "model gpt takes token ids",
    ("sfedhp", "--codec", "spars"): "sparse",
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # models of one's own add the current folder


@pytest.mark.parametrize("args", BAD, ids=" ".join)
def test_bad_input_gets_advice_and_writes_nothing(args, tmp_path):
    result = call("run", *args, code=2)
    assert BAD[args] in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("device = 3", "did you mean 'devices'"),
        ("[set]\ndevice_lrs = 3", "did you mean 'device_lr'"),
        ("rounds = 'ten'", "rounds = 'ten'"),
        ("rounds = ", "TOML"),
        ("data = 'python'", "made in Python"),
        ("algorithm = 'mfa-rr'\n[models.a]\nround = 3", "setting of the model a"),
        ("algorithm = 'mfa-rr'\n[models.a]\nalgorithm = 'mfa-rr'", "a method of one model"),
        ("algorithm = 'mfa-rr'\n[models.a]\nset = { device_lr = 0 }", "> 0"),
        ("algorithm = 'mfa-rr'\n[models.'a b']", "letters, digits"),
    ],
)
def test_a_bad_file_gets_advice(text, advice, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    assert advice in call("run", "run.toml", code=2).stderr
    assert [p.name for p in tmp_path.iterdir()] == ["run.toml"]


def test_a_run_folder_that_exists_is_left_alone(tmp_path):
    call("run", *SMALL, "--rounds", 1, "--out", "mine", "--quiet")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert "not empty" in call("run", "--out", "mine", code=2).stderr
    assert "config.toml" in call("run", "mine", code=2).stderr
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_broken_data_are_named(tmp_path):
    own_file(tmp_path / "mine.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "mine.npz").read_bytes()[:5000])
    x = np.ones((8, 3), np.float32)
    x[5, 1] = np.nan
    np.savez(tmp_path / "nan.npz", x=x, y=np.zeros(8, int), device=np.arange(8) // 4)
    assert "cut.npz cannot be read" in call("run", "--data", "cut.npz", code=2).stderr
    assert "row 5" in call("run", "--data", "nan.npz", code=2).stderr
    assert not (tmp_path / "runs").exists()
