"""What a new user meets on the command line: help, the first line, a method with a file of settings."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tomllib

import pytest

from commands import QUICK, call
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
