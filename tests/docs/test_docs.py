"""What the README, CONTRIBUTING and the guide show is run as it stands there."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import polytier
from commands import call

ROOT = Path(__file__).parents[2]


def blocks(name: str) -> Iterator[tuple[str, str]]:
    """The language and the text of every block of code."""
    for found in re.finditer(r"^( *)```(\w+)\n(.*?)^\1```$", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE):
        yield found[2], textwrap.dedent(found[3])


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


# -- the guide ----------------------------------------------------------------------------------------


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """A folder as a newcomer has it; modules that are imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [path.stem for path in tmp_path.glob("*.py")]:
        sys.modules.pop(name, None)


def run_line(line: str) -> str:
    """A command of the guide; its exit code is 0 unless a comment says another one."""
    command, _, comment = line.partition("  # exit code ")
    program, *args = shlex.split(command)
    assert program == "polytier", line
    result = call(*args, code=int(comment or 0))
    return result.stdout + result.stderr


NUMBER = r"\d+(?:[.,]\d+)*"


def assert_shown(expected: str, said: str) -> None:
    """Word by word, numbers about the same; ... stands for anything."""
    loose = (r"\s+".join(map(re.escape, re.split(r"\s+", text))) for text in re.split(NUMBER, expected.strip()))
    found = re.search(f"({NUMBER})".join(loose).replace(r"\.\.\.", ".*"), said)
    assert found is not None, f"{expected}\nis not in\n{said}"
    for one, other in zip(re.findall(NUMBER, expected), found.groups(), strict=True):
        value, shown = (float(text.replace(",", "")) for text in (one, other))
        assert shown == pytest.approx(value, rel=0.1, abs=3), expected


def test_the_guide_from_end_to_end(empty_folder, capsys):
    said = ""
    for language, text in blocks("docs/guide.md"):
        name = text.partition("\n")[0].removeprefix("# ")
        if language in ("python", "toml"):
            (empty_folder / name).write_text(text)
        if language == "python":
            runpy.run_path(name, run_name="__main__")
            said = capsys.readouterr().out
        elif language == "sh":
            said = "\n".join(run_line(line) for line in text.splitlines())
        elif language == "text":
            assert_shown(text, said)
        else:
            assert language in ("toml", "console")
