"""Code that a file names is imported only with --trust; code named on the command line needs no flag."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from commands import call
from polytier import Run
from polytier.runs.spec import to_toml

PAYLOAD = """
from dataclasses import dataclass
from pathlib import Path
from torch import nn
from polytier import FedAvg

Path("imported").touch()


def factory(inputs, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


@dataclass(frozen=True)
class Own(FedAvg):
    "FedAvg."
"""
SMALL = {"algorithm": "fedavg", "devices": 4, "teams": "0", "rounds": 1, "set": {"device_steps": 1}}
numbers = itertools.count()


@pytest.fixture
def payload(tmp_path, monkeypatch) -> Iterator[str]:
    """The name of a module in the current folder that leaves a file when it is imported."""
    name = f"payload_{os.getpid()}_{next(numbers)}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / f"{name}.py").write_text(PAYLOAD)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def forget(payload, tmp_path) -> Callable[[], None]:
    """Make this process as new: the module was never imported."""

    def as_new() -> None:
        sys.modules.pop(payload, None)
        sys.path[:] = [entry for entry in sys.path if Path(entry) != tmp_path]
        (tmp_path / "imported").unlink(missing_ok=True)

    return as_new


def file_with(**values: Any) -> Path:
    path = Path("mine.toml")
    path.write_text(to_toml({**SMALL, **values}))
    return path


def refused(*args: object, names: str, file: str = "mine.toml") -> str:
    """The message of a command that must not import `names`."""
    text = " ".join(call(*args, code=2).stderr.split())
    assert names in text
    assert file in text
    assert "--trust" in text
    assert not Path("imported").exists()
    return text


@pytest.mark.parametrize(
    "command",
    [
        ("run", "mine.toml"),
        ("tune", "mine.toml", "--split", "3:1:1", "--trials", 1),
        ("check", "mine.toml"),
        ("compare", "fedavg,local", "mine.toml", "--seeds", 1),
    ],
)
@pytest.mark.parametrize("key", ["model", "algorithm"])
def test_a_file_cannot_name_code_of_the_current_folder(payload, command, key):
    own = f"{payload}:{'factory' if key == 'model' else 'Own'}"
    file_with(**{key: own})
    refused(*command, names=own)
    assert not Path("runs").exists()


def test_nor_can_the_table_of_one_of_several_models(payload):
    for own in ({"model": f"{payload}:factory"}, {"algorithm": f"{payload}:Own"}):
        file_with(algorithm="mfa-rr", set={}, models={"a": {}, "b": own})
        refused("run", "mine.toml", names=payload)
        refused("gain", "mine.toml", "--single-rounds", 1, names=payload)


def test_the_message_says_what_to_repeat(payload, monkeypatch):
    file_with(model=f"{payload}:factory")
    monkeypatch.setattr(sys, "argv", ["polytier", "run", "mine.toml", "--out", "a b"])
    text = refused("run", "mine.toml", "--out", "a b", names=f"{payload}.py")
    assert "polytier run mine.toml --out 'a b' --trust" in text


def test_trust_imports_it_and_is_no_setting(payload):
    file_with(model=f"{payload}:factory", algorithm=f"{payload}:Own")
    call("run", "mine.toml", "--trust", "--quiet", "--out", "run")
    assert Path("imported").exists()
    config = tomllib.loads(Path("run/config.toml").read_text())
    assert "trust" not in config
    assert (config["model"], config["algorithm"]) == (f"{payload}:factory", f"{payload}:Own")


def test_names_on_the_command_line_are_trusted(payload):
    file_with(model=f"{payload}:factory", algorithm=f"{payload}:Own")
    call("run", "mine.toml", "--model", f"{payload}:factory", "--quiet", "--out", "both")  # the same module
    assert Path("imported").exists()


def test_a_name_that_a_flag_replaces_is_not_imported(payload):
    file_with(model=f"{payload}:factory")
    call("run", "mine.toml", "--model", "mclr", "--quiet", "--out", "run")
    assert not Path("imported").exists()


def test_a_model_by_name_is_not_the_file_of_that_name(payload):
    Path("dnn.py").write_text(PAYLOAD)
    file_with(model="dnn:5")
    call("run", "mine.toml", "--quiet", "--out", "run")
    assert not Path("imported").exists()


def test_run_folders(payload, forget, tmp_path):
    typed = ("--model", f"{payload}:factory", "--devices", 4, "--teams", 0, "--set", "device_steps=1")
    call("run", f"{payload}:Own", *typed, "--rounds", 1, "--quiet", "--out", "run")
    np.savez("x.npz", x=np.zeros((2, 1, 8, 8), dtype=np.float32))
    commands = [
        ("resume", "run", "--rounds", 2, "--quiet"),
        ("predict", "run", "--global", "--data", "x.npz", "--out", "y.npz"),
        ("export", "run", "--global", "-o", "model.safetensors"),
        ("run", "run/config.toml", "--quiet", "--out", "again"),
    ]
    for command in commands:
        forget()
        refused(*command, names=payload, file="run/config.toml")
        call(*command, "--trust")
        assert Path("imported").exists()
    forget()
    with pytest.raises(ValueError, match=f"{payload}.*trust=True"):
        Run.load("run")
    assert not Path("imported").exists()
    assert Run.load("run", trust=True).rounds == 2


def test_a_given_module_replaces_the_named_one(payload, forget):
    file_with(model=f"{payload}:factory")
    call("run", "mine.toml", "--trust", "--quiet", "--out", "run")
    forget()
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert Run.load("run", model=module).rounds == 1
    file_with(algorithm="mfa-rr", set={}, models={"a": {}, "b": {"model": f"{payload}:factory"}})
    call("run", "mine.toml", "--trust", "--quiet", "--out", "two")
    forget()
    with pytest.raises(ValueError, match="trust=True"):
        Run.load("two", model={"a": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))})
    assert not Path("imported").exists()


def test_installed_modules_need_no_flag(payload, tmp_path, monkeypatch):
    file_with(model=f"{payload}:factory")
    (tmp_path / "packages").mkdir()
    shutil.move(f"{payload}.py", tmp_path / "packages")
    (tmp_path / "work").mkdir()
    shutil.move("mine.toml", tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    call("run", "mine.toml", "--quiet", "--out", "run")
    assert Path("imported").exists()


def test_trust_reaches_the_processes_of_a_comparison(payload):
    file_with(model=f"{payload}:factory")
    command = ("compare", f"fedavg,{payload}:Own", "mine.toml", "--seeds", 1, "--quiet")
    call(*command, "--trust", "--out", "both")
    assert all((folder / "summary.json").exists() for folder in Path("both").iterdir() if folder.is_dir())


def test_a_comparison_does_not_resume_what_names_other_code(payload):
    command = (
        "compare",
        "fedavg",
        "--devices",
        4,
        "--teams",
        0,
        "--rounds",
        1,
        "--seeds",
        1,
        "--quiet",
        "--out",
        "one",
    )
    call(*command)
    folder = Path("one/fedavg-0")
    (folder / "summary.json").unlink()  # interrupted, as it seems
    config = tomllib.loads((folder / "config.toml").read_text())
    (folder / "config.toml").write_text(to_toml({**config, "model": f"{payload}:factory"}))
    text = " ".join(call(*command, code=2).stderr.split())
    assert payload in text
    assert "another --out" in text
    assert not Path("imported").exists()


@pytest.mark.parametrize("start", ["module", "script"])
def test_as_a_process(payload, start):
    script = [str(Path(sys.executable).with_name("polytier"))]
    command = script if start == "script" else [sys.executable, "-m", "polytier"]
    file_with(model=f"{payload}:factory")
    Path("rich.py").write_text(PAYLOAD)  # in place of a package that every command imports
    found = subprocess.run([*command, "run", "mine.toml"], capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stderr
    assert f"{' '.join(command[1:] and ['python', *command[1:]]) or 'polytier'} run mine.toml --trust" in found.stderr
    assert not Path("imported").exists()


def test_worker_processes_do_not_search_the_current_folder_first(payload):
    Path("rich.py").write_text(PAYLOAD)
    flags = ["--devices", "4", "--teams", "0", "--rounds", "1", "--workers", "2", "--quiet", "--out", "run"]
    command = [sys.executable, "-m", "polytier", "run", "fedavg", "--set", "device_steps=1", *flags]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert not Path("imported").exists()


def test_a_cluster_that_a_file_names_is_not_joined(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(to_toml({**SMALL, "engine": "ray:10.0.0.1:6379"}))
    said = call("run", "job.toml", code=2).stderr
    assert "job.toml has engine = 'ray:10.0.0.1:6379'" in said
    assert "--trust" in said
    call("run", "job.toml", "--engine", "stacked", "--out", "run", "--quiet")
