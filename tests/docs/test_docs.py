"""Programs of the README, CONTRIBUTING and extending.md are run as they stand there; the site is built."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

import polytier
from doc_pages import ROOT, blocks


def python_block(name: str) -> str:
    return next(text for language, text in blocks(name) if language == "python")


def test_readme_code_runs(capsys):
    exec(python_block("README.md"), {})
    assert "tensor(" in capsys.readouterr().out


def test_method_of_contributing_keeps_the_contract():
    names = {"dataclass": dataclass, **{name: getattr(polytier, name) for name in ("Algorithm", "Step", "parameter")}}
    # a class needs a module to be pickled by, so its home is this one
    names["__name__"] = __name__
    exec(python_block("CONTRIBUTING.md"), names)
    globals()["MyMethod"] = names["MyMethod"]
    polytier.check_algorithm(names["MyMethod"]())


def test_extensions_of_the_docs_run(tmp_path, monkeypatch, capsys):
    """All blocks in order, in one namespace; `python no-test` marks a block that is not run."""
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": __name__}
    runs = []
    for language, text in blocks("docs/extending.md"):
        assert language == "python"
        exec(text, names)
        runs.append(names["run"])
    engine, transform, codec, rule, metric, loss, chart = runs
    assert all(run.history[-1]["round"] == 2 for run in (engine, transform, codec, rule, loss))
    assert "recall_of_zero" in metric.history[-1]["global"]["test"]
    assert chart is loss  # the chart reads a run folder
    assert "Spread of accuracy" in (tmp_path / "spread.html").read_text()
    said = capsys.readouterr().out
    assert "(2, 'solve')" in said  # the engine's times by tier and program
    up, down = (codec.ledger.read(direction=way) for way in ("up", "down"))
    assert 20 < down / up < 32


def test_public_names_exist():
    for name in polytier.__all__:
        assert getattr(polytier, name) is not None


@pytest.mark.parametrize(("old", "new"), [("Local", "LocalProblem"), ("Training", "make_loop")])
def test_names_of_version_0_1_work_with_a_warning(old, new):
    with pytest.warns(DeprecationWarning, match=f"polytier.{old} is now polytier.{new}"):
        assert getattr(polytier, old) is getattr(polytier, new)


def test_the_site_has_no_broken_link(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    assert result.returncode == 0, result.stderr
    reference = (tmp_path / "api/index.html").read_text()
    assert all(f'id="polytier.{name}"' in reference for name in polytier.__all__)
