"""What the README, CONTRIBUTING and the guide show is run as it stands there."""

import re
import runpy
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import polytier
from commands import call

ROOT = Path(__file__).parent.parent


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


def test_public_names_exist():
    for name in polytier.__all__:
        assert getattr(polytier, name) is not None


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


def similar(text: str) -> str:
    """Numbers that differ from machine to machine, and where the folder is, left out."""
    return re.sub(r"\s+", " ", re.sub(r"[\d.,]*\d", "0", text))


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
            for line in text.splitlines():
                assert similar(line) in similar(said), line
        else:
            assert language in ("toml", "console")
