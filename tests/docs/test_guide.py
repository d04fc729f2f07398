"""The guide from its first line to its last, in an empty folder: every command, every program, what they print.

A block of text after commands or a program is what they print. A command without such a block has an outcome here.
"""

from __future__ import annotations

import re
import runpy
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from commands import call
from doc_pages import NOT_RUN, NUMBER, ROOT, Outcomes, blocks, lines_of, run_line, shown_in, words

PAGE = "docs/guide.md"
GUIDE = Outcomes(PAGE)
BLOCKS = list(blocks(PAGE))
COMMANDS = ("sh", "console")


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """A folder as a newcomer has it; modules that are imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [path.stem for path in tmp_path.glob("*.py")]:
        sys.modules.pop(name, None)


def assert_shown(expected: str, said: str) -> None:
    """Word by word, numbers about the same; docs/make_outputs.py writes those of now."""
    for one, other in zip(re.findall(NUMBER, expected), shown_in(expected, said).groups(), strict=True):
        value, shown = (float(text.replace(",", "")) for text in (one, other))
        assert shown == pytest.approx(value, rel=0.1, abs=3), expected


def is_printed(number: int) -> bool:
    """Whether what a block prints is in the block after it."""
    return number + 1 < len(BLOCKS) and BLOCKS[number + 1][0] == "text"


def test_the_guide_has_no_command_without_an_outcome():
    lines = [
        line
        for number, (language, text) in enumerate(BLOCKS)
        if language in COMMANDS and not is_printed(number)
        for line in lines_of(text)
    ]
    programs = [
        text.partition("\n")[0].removeprefix("# ")
        for number, (language, text) in enumerate(BLOCKS)
        if language == "python" and not is_printed(number)
    ]
    assert set(programs) == {"make_data.py", "my_models.py", "make_llama.py", *PRINTS}
    GUIDE.assert_all_used(lines)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_guide_from_end_to_end(empty_folder, capsys):
    said = ""
    for number, (language, text) in enumerate(BLOCKS):
        name = text.partition("\n")[0].removeprefix("# ")
        if language in ("python", "toml"):
            (empty_folder / name).write_text(text)
        if language == "python":
            runpy.run_path(name, run_name="__main__")
            said = capsys.readouterr().out
            assert PRINTS.get(name, "") in said
        elif language in COMMANDS and is_printed(number):
            said = "\n".join(run_line(line) for line in lines_of(text))
        elif language in COMMANDS:
            for line in lines_of(text):
                GUIDE.check(line)
        elif language == "text":
            assert_shown(text, said)
        else:
            assert language == "toml"


# programs that print something, which no block of the guide shows
PRINTS = {
    "same.py": "the same bits",
    "from_arrays.py": "0.",
    "my_methods.py": "TeamDitto keeps the contract",
}


@GUIDE.of("list algorithms", "list data", "list models", "list partitions")
def _lists(said):
    assert any(name in said for name in ("permfl", "digits-sites", "mclr", "dirichlet"))


@GUIDE.of("list algorithms permfl")
def _fields(said):
    assert re.search(r"device_lr +alpha", said)


@GUIDE.of("list settings")
def _settings(said):
    assert all(name in said for name in ("device_participation", "codec", "metric"))


@GUIDE.of("run --help")
def _help(said):
    assert "--device-participation" in said


@GUIDE.of("run runs/first/config.toml")
def _again(said):
    assert "run folder: runs/again" in said  # same.py, which follows, compares the bits


@GUIDE.of("show runs/first --until 0.9")
def _until(said):
    assert re.search(r"until 90 % test accuracy +reached in +bytes\npersonal +round \d+ +[\d.]+ .B", said)


@GUIDE.of("report runs/first", "watch runs/first")
def _page(said):
    pages = Path("report.html").read_text(), said
    assert any("The personal models of permfl lead" in page and "devices" in page for page in pages)
    assert said.startswith("the page is report.html") or "The personal models of permfl lead" in said


@GUIDE.of("run machines.toml --model my_models:small")
def _network(said):
    assert "with my_models:small" in said
    assert "387 parameters" in said  # 20 x 16 + 16 + 16 x 3 + 3


@GUIDE.of("export runs/network")
def _parameters(said):
    assert sorted(value.size for value in load_file("network.safetensors").values()) == [3, 16, 48, 320]


@GUIDE.of("run runs/network/config.toml")
def _network_again(said):
    one, other = (Path(f"runs/{name}/models/global.safetensors").read_bytes() for name in ("network", "network-again"))
    assert one == other


@GUIDE.of("export runs/lora")
def _adapter(said):
    assert "the adapter, 8,704 numbers, as PEFT loads it" in said
    assert {path.name for path in Path("adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


@GUIDE.of("list algorithms my_methods:TeamDitto")
def _own_fields(said):
    assert "pull of a device's model to its team's" in said


@GUIDE.of("run my_methods:TeamDitto")
def _own_method(said):
    assert all(re.search(rf"^{kind} +\d", said, re.MULTILINE) for kind in ("personal", "team", "global"))


@GUIDE.of("predict runs/machines")
def _predicted(said):
    found = np.load("predicted.npz")
    assert (found["y"].shape, found["scores"].shape) == ((230,), (230, 3))
    np.testing.assert_array_equal(found["y"], found["scores"].argmax(1))


@GUIDE.of("export runs/machines --device west-0")
def _program(said):
    assert Path("west-0.pt2").stat().st_size > 0  # take_away.py, which follows, runs it


@GUIDE.of("export runs/machines --global")
def _global(said):
    assert sorted(value.size for value in load_file("global.safetensors").values()) == [3, 60]


@GUIDE.of("resume runs/machines")
def _longer(said):
    assert "continuing after round 20 of 25" in said
    assert len(Path("runs/machines/metrics.jsonl").read_text().splitlines()) == 25


# -- commands within sentences ------------------------------------------------------------------------


def commands_in_text(page: str) -> list[str]:
    """Commands between backticks outside of blocks, in README, guide and all other pages."""
    text = re.sub(r"^( *)```.*?^\1```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(found.split()) for found in re.findall(r"`(polytier [^`]+)`", text)]


@cache
def help_of(*command: str) -> str:
    return call(*command, "--help").stdout


PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_commands_within_sentences_exist_with_their_flags(page):
    for line in [*commands_in_text(page), *(line for lang, b in blocks(page) if lang == "sh" for line in lines_of(b))]:
        program, *args = words(line.replace("'", ""))
        if program in NOT_RUN or not args:
            continue
        command = args[:2] if args[0] in ("data", "federation") else args[:1]
        if not command[0].startswith("-") and command[0].isalpha():
            said = help_of(*command)
            for flag in (arg.partition("=")[0] for arg in args if re.match(r"--?[a-z]", arg)):
                assert re.search(rf"(?<![\w-]){flag}(?![\w-])", said), f"{page}: {line} has no {flag}"
