"""What a new user meets on the command line: help, the first line, a method with a file of settings."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tomllib

import numpy as np
import pytest
import torch

from commands import QUICK, call
from polytier import CoBo, Federation, Run, build_federation
from polytier._terminal import loading_torch

SHORT = ("--devices", 4, "--teams", 2, "--rounds", 1, "--quiet")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# -- help and completion ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [(), ("run",), ("compare",), ("data",), ("data", "pack"), ("list",)])
def test_h_is_help_of_every_command(command):
    assert call(*command, "-h").stdout == call(*command, "--help").stdout


@pytest.mark.parametrize("command", ["compare", "tune"])
def test_help_of_studies_lists_the_shared_settings_in_their_panels(command):
    text = call(command, "--help").stdout
    assert "Data: what each device holds" in text
    assert "--batch-size" in text
    assert text.count("FILE.toml") >= 2  # in the usage line and as an argument


def test_python_m_polytier_calls_itself_polytier_and_completes_words():
    def polytier(*args: str, **variables: str) -> str:
        command = [sys.executable, "-m", "polytier", *args]
        return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True).stdout

    assert "Usage: polytier [OPTIONS]" in polytier("-h")
    typed = {"COMP_WORDS": "polytier ru", "COMP_CWORD": "1"}
    assert polytier(_POLYTIER_COMPLETE="complete_bash", **typed).split() == ["run"]
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # as typer's own tests name the shell
    assert "_POLYTIER_COMPLETE" in polytier("--show-completion", "bash", **named)


# -- the first line -----------------------------------------------------------------------------------


def test_a_terminal_shows_that_torch_is_loading(monkeypatch):
    def shown(quiet: bool, terminal: bool) -> str:
        reader, writer = pty.openpty() if terminal else os.pipe()
        with open(writer, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            patch.delitem(sys.modules, "torch", raising=False)
            loading_torch(quiet)
            stream.write("end\n")
        text = os.read(reader, 1000).decode()
        os.close(reader)
        return text

    assert "loading torch" in shown(quiet=False, terminal=True)
    assert "loading torch" not in shown(quiet=True, terminal=True)
    assert "loading torch" not in shown(quiet=False, terminal=False)


# -- METHOD and FILE.toml -----------------------------------------------------------------------------


def test_a_method_before_a_file_replaces_its_method_and_leaves_out_its_fields(tmp_path):
    (tmp_path / "mine.toml").write_text('algorithm = "permfl"\nseed = 3\n[set]\nteam_pull = 0.7\n')
    result = call("run", "fedavg", "mine.toml", *SHORT[:-1], "--set", "device_steps=2", "--out", "flat")
    assert "mine.toml: its fields (set) are those of permfl; fedavg does not use them" in result.stderr
    config = tomllib.loads((tmp_path / "flat/config.toml").read_text())
    assert (config["algorithm"], config["seed"], config["set"]["device_steps"]) == ("fedavg", 3, 2)
    call("run", "permfl", "mine.toml", *SHORT, *QUICK, "--out", "deep")
    assert tomllib.loads((tmp_path / "deep/config.toml").read_text())["set"]["team_pull"] == 0.7


def test_fields_of_a_file_without_a_method_belong_to_the_method_given(tmp_path):
    (tmp_path / "mine.toml").write_text("[set]\ndevice_steps = 2\n")
    call("run", "fedavg", "mine.toml", *SHORT, "--out", "one")
    assert tomllib.loads((tmp_path / "one/config.toml").read_text())["set"]["device_steps"] == 2


def test_tune_takes_a_method_and_a_file(tmp_path):
    (tmp_path / "mine.toml").write_text('algorithm = "permfl"\nsplit = "3:1:1"\n[set]\nteam_pull = 0.7\n')
    args = ("--over", "device_lr=0.1,0.2", "--set", "device_steps=2", "--trials", 1, "--out", "search")
    call("tune", "fedavg", "mine.toml", *SHORT, *args)
    assert tomllib.loads((tmp_path / "search/best.toml").read_text())["algorithm"] == "fedavg"


@pytest.mark.parametrize("words", [("a.toml", "b.toml"), ("a.toml", "fedavg"), ("fedavg", "permfl")])
def test_a_method_and_a_file_come_in_this_order(words):
    assert "give METHOD, FILE.toml, or both in this order" in call("run", *words, code=2).stderr


# -- one's own data -----------------------------------------------------------------------------------


def sensors(path, targets=1, **names):
    """Twelve devices in three wards whose targets are linear in their three inputs."""
    rng = np.random.default_rng(0)
    x, device = rng.normal(size=(240, 3)), np.arange(240) % 12
    y = x @ rng.normal(size=(3, targets))
    named = {"device": device, "ward": np.array(list("abc"))[device % 3]}
    np.savez(path, x=x, y=y[:, 0] if targets == 1 else y, **{names.get(key, key): v for key, v in named.items()})


@pytest.mark.parametrize("targets", [1, 2])
def test_numbers_are_learned_by_linear_without_any_setting(tmp_path, targets):
    sensors("mine.npz", targets)
    lr = ("--set", "device_lr=0.1", "--set", "device_steps=20")
    result = call("run", "fedavg", "--data", "mine.npz", "--rounds", 20, *lr, "--out", "run")
    assert "with linear" in result.stdout
    assert "test loss" in result.stdout
    assert "worst decile" not in result.stdout  # of the devices' values, which are those of metrics
    assert "accuracy" not in result.stdout + call("show", "run").stdout
    last = next(line for line in result.stdout.splitlines() if line.startswith("global")).split()
    assert float(last[1]) < 1e-3
    call("predict", "run", "--global", "--data", "mine.npz", "--out", "out.npz")  # the run folder knows the targets
    found, true = np.load("out.npz")["y"], np.load("mine.npz")["y"]
    assert np.abs(found.reshape(true.shape) - true).max() < 0.2
    call("run", "run/config.toml", "--quiet", "--out", "again")
    assert Run.load("again").global_.equal(Run.load("run").global_)  # type: ignore[union-attr]


def test_a_comparison_of_regressions_does_not_speak_of_accuracy():
    sensors("mine.npz")
    result = call("compare", "fedavg,local", "--data", "mine.npz", "--rounds", 1, "--seeds", 1, "--out", "both")
    assert "accuracy" not in result.stdout
    assert "test loss of the last round" in result.stdout
    assert "accuracy" not in call("show", "both").stdout


def test_columns_of_other_names(tmp_path):
    sensors("mine.npz", device="subject")
    result = call("run", "--data", "mine.npz", code=2)
    assert "it has x, y, subject, ward but no device" in result.stderr
    assert "--device-column" in result.stderr
    columns = ("--device-column", "subject", "--team-column", "ward")
    call("run", "--data", "mine.npz", *columns, "--rounds", 1, *QUICK, "--quiet", "--out", "run")
    tree = Run.load("run").context.topology
    assert sorted(tree.names[1].tolist()) == ["a", "b", "c"]
    config = tomllib.loads((tmp_path / "run/config.toml").read_text())
    assert (config["device_column"], config["team_column"]) == ("subject", "ward")
    assert "no wards" in call("run", "--data", "mine.npz", *columns[:3], "wards", code=2).stderr
    assert "leave it out" in call("run", "--device-column", "subject", code=2).stderr


def test_names_of_classes_are_refused_with_a_way_to_number_them():
    np.savez("mine.npz", x=np.zeros((4, 2)), y=list("abab"), device=[0, 0, 1, 1])
    assert "np.unique(names, return_inverse=True)[1]" in call("run", "--data", "mine.npz", code=2).stderr
    for y in (list("abab"), np.array(list("abab"))):
        with pytest.raises(ValueError, match="y must hold numbers.*return_inverse=True"):
            Federation.from_arrays(np.zeros((4, 2)), y, device=[0, 0, 1, 1])


def test_teams_that_nobody_named_are_not_said_to_be_ignored():
    sensors("alone.npz")
    sensors("wards.npz", ward="team")
    one = ("--rounds", 1, "--set", "device_lr=0.1", "--set", "device_steps=1")
    note = "FedAvg is a flat method: the teams are ignored"
    assert note not in call("run", "fedavg", "--devices", 4, *one).stderr
    assert note not in call("run", "fedavg", "--data", "alone.npz", *one).stderr
    assert note in call("run", "fedavg", "--devices", 4, "--teams", 2, *one).stderr
    assert note in call("run", "fedavg", "--data", "wards.npz", *one).stderr


# -- models in use ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    call("run", "--devices", 4, "--teams", 2, "--rounds", 1, *QUICK, "--quiet", "--out", folder)
    return folder


def test_images_without_their_channel_are_taken_and_other_shapes_are_refused(digits):
    x, _ = build_federation("digits", devices=4, teams=2).device(0, "test")
    shapes = {"whole": (1, 8, 8), "flat": (8, 8), "other": (64,)}
    for name, shape in shapes.items():
        np.savez(f"{name}.npz", x=x.reshape(-1, *shape).numpy())
    for name in ("whole", "flat"):
        call("predict", digits, "--device", 0, "--data", f"{name}.npz", "--out", f"{name}-out.npz")
    np.testing.assert_array_equal(np.load("whole-out.npz")["scores"], np.load("flat-out.npz")["scores"])
    refused = call("predict", digits, "--device", 0, "--data", "other.npz", "--out", "o.npz", code=2).stderr
    assert "(64,)" in refused
    assert "(1, 8, 8)" in refused


def test_an_onnx_file_gives_the_outputs_of_the_model(digits, monkeypatch):
    runtime = pytest.importorskip("onnxruntime", reason="the extra onnx and onnxruntime are not installed")
    call("export", digits, "--device", 2, "-o", "model.onnx")
    session = runtime.InferenceSession("model.onnx")
    x = torch.rand(5, 1, 8, 8)
    (found,) = session.run(None, {"x": x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), Run.load(digits).model(device=2)(x))
    monkeypatch.setattr("polytier.runs.export.find_spec", lambda name: None)
    assert 'pip install "polytier[onnx]"' in call("export", digits, "--global", "-o", "other.onnx", code=2).stderr


# -- what tables say ----------------------------------------------------------------------------------


def test_a_table_has_no_rows_of_models_that_the_method_does_not_have():
    result = call(
        "run", "local", "--devices", 2, "--teams", 1, "--rounds", 1, "--set", "device_steps=1", "--out", "one"
    )
    rows = [line.split()[0] for line in result.stdout.splitlines() if line]
    assert "personal" in rows
    assert not {"team", "global"} & set(rows)
    assert "1 round\n" in result.stdout


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        (("weight_lr=0",), "weight_lr ten times as large or sampling=all"),
        (("weight_lr=0", "sampling=all"), "ten times as large or more rounds"),
    ],
)
def test_cobo_that_divides_nothing_says_what_to_try(fields, advice):
    flags = [word for field in fields for word in ("--set", field)]
    clusters = ("--devices", 6, "--partition", "clusters-permuted:2", "--rounds", 2)
    text = call("run", "cobo", *clusters, *flags, "--out", "groups").stdout
    assert "1 group learned of 6 clients" in text
    assert advice in text
    assert text == call("show", "groups").stdout


def test_a_cobo_with_all_clients_apart_is_told_to_move_less():
    assert "a tenth as large" in CoBo().advice_on_groups(6, 6)
    assert not CoBo().advice_on_groups(2, 6)
    assert not CoBo().advice_on_groups(1, 1)


def test_the_sparse_codec_shows_nonzeros_and_what_is_saved(tmp_path):
    sparse = ("--set", "threshold=1e9", "--set", "device_steps=1", "--set", "team_rounds=1")
    result = call("run", "sfedhp", "--codec", "sparse", *SHORT[:-1], *sparse, "--out", "run")
    row = next(line for line in result.stdout.splitlines() if line.startswith("personal") and " B " in line)
    assert row.split() == ["personal", "0.0", "%", "1", "B", "2.6", "kB", "100.0", "%"]
    assert "not zero" not in call("run", "sfedhp", *SHORT[:-1], *sparse, "--out", "dense").stdout


# -- names of files and modules that do not exist -----------------------------------------------------


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (("run", "machine.toml"), ["there is no file machine.toml; did you mean machines.toml?"]),
        (("tune", "permfl", "machine.toml"), ["did you mean machines.toml?"]),
        (("run", "other/machines.toml"), ["there is no file other/machines.toml: the folder other does not exist"]),
        (("run", "--data", "machine.npz"), ["machine.npz; did you mean", "machines.npz?"]),
        (("run", "--data", "mnist", "--data-dir", "nowhere"), ["nowhere", "polytier data get mnist"]),
        (("run", "--model", "nosuch.module:f"), ["No module named 'nosuch'", "importable from", "mclr, linear, dnn"]),
        (("run", "nosuch.module:Method"), ["No module named 'nosuch'", "importable from", "permfl, pfedmt"]),
        (("run", "machines.npz"), ["machines.npz holds data", "--data machines.npz"]),
        (("run", "--data", "machines.toml"), ["machines.toml is no .npz file", "x, y and device"]),
    ],
)
def test_what_does_not_exist_is_named_with_advice(tmp_path, args, texts):
    (tmp_path / "machines.toml").write_text("rounds = 1\n")
    (tmp_path / "machines.npz").write_bytes(b"")
    said = call(*args, code=2).stderr
    for text in texts:
        assert text in said
    assert not (tmp_path / "runs").exists()
