"""The blocks of code of the documentation, and their commands run as a reader would type them."""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import signal
import textwrap
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch
from urllib.request import urlopen

from commands import call
from polytier.report import server

ROOT = Path(__file__).parents[1]
NOT_RUN = ("make", "git", "python", "pip")  # installing takes minutes; `check_install` reads these lines instead


def blocks(name: str) -> Iterator[tuple[str, str]]:
    """The language and the text of every block of code."""
    for found in re.finditer(r"^( *)```(\w+)\n(.*?)^\1```$", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE):
        yield found[2], textwrap.dedent(found[3])


def lines_of(block: str) -> list[str]:
    """The commands of a block, without prompts."""
    return [line.removeprefix("$ ") for line in block.splitlines()]


def words(line: str) -> list[str]:
    """The words of a command, without the comment."""
    return shlex.split(line, comments=True)


def run_line(line: str) -> str:
    """What a command prints. Its exit code is 0 unless a comment says another one."""
    program, *args = words(line)
    if program in NOT_RUN:
        check_install(line)
        return ""
    assert program == "polytier", line
    if args[0] == "watch":
        return watched(args)
    code = re.search(r"# exit code (\d)", line)
    file = Path(args.pop()) if ">" in args else None
    result = call(*[arg for arg in args if arg != ">"], code=int(code[1]) if code else 0)
    if file is not None:
        file.write_text(result.stdout)
    return result.stdout + result.stderr


def watched(args: list[str]) -> str:
    """The page that `watch` serves; the browser that it opens reads the page and then presses Ctrl-C."""
    pages: list[str] = []
    make_server = server.make_server

    def read(address: str) -> None:
        try:
            pages.append(urlopen(address, timeout=60).read().decode())
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    def browse(address: str) -> None:
        threading.Thread(target=read, args=[address]).start()

    def on_a_free_port(folder: Path, port: int):  # tests that run at the same time want the same port
        return make_server(folder, 0)

    with patch("webbrowser.open", browse), patch.object(server, "make_server", on_a_free_port):
        call(*args)
    return pages[0]


def check_install(line: str) -> None:
    """The files, extras and targets that a line about installing names exist."""
    program, *args = words(line)
    if program == "make":
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in args), line
    if "pip" in line:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = [extra for found in re.findall(r"\[([\w,]+)\]", line) for extra in found.split(",")]
        assert set(named) <= set(extras), line
        assert "constraints.txt" not in line or (ROOT / "constraints.txt").exists()


NUMBER = r"\d+(?:[.,]\d+)*"


def shown_in(expected: str, said: str) -> re.Match[str]:
    """Where a block of text occurs in what was printed: word by word, with any numbers; ... stands for anything."""
    loose = (r"\s+".join(map(re.escape, re.split(r"\s+", text))) for text in re.split(NUMBER, expected.strip()))
    found = re.search(f"({NUMBER})".join(loose).replace(r"\.\.\.", ".*"), said)
    assert found is not None, f"{expected}\nis not in\n{said}"
    return found


def refreshed(expected: str, said: str) -> str:
    """A block of text with the numbers that were printed; right-aligned where the old ones were.

    Examples:
        >>> refreshed("team  9.05 % of 3", "team 10.5 % of 4")
        'team  10.5 % of 4'
    """
    numbers = iter(shown_in(expected, said).groups())
    return re.sub(NUMBER, lambda old: next(numbers).rjust(len(old[0])), expected)


def outputs_of_the_guide() -> Iterator[tuple[str, str]]:
    """The blocks of text of the guide with what was printed; runs in the current folder, which sys.path has."""
    said = ""
    for language, text in blocks("docs/guide.md"):
        name = text.partition("\n")[0].removeprefix("# ")
        if language in ("python", "toml"):
            Path(name).write_text(text)
        if language == "python":
            with redirect_stdout(io.StringIO()) as out:
                runpy.run_path(name, run_name="__main__")
            said = out.getvalue()
        elif language in ("sh", "console"):
            said = "\n".join(run_line(line) for line in lines_of(text))
        elif language == "text":
            yield text, said


class Outcomes:
    """By the first words of a command of a page: a function that asserts what its line says."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.checks: dict[str, Callable[[str], None]] = {}

    def of(self, *starts: str) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
        def keep(check: Callable[[str], None]) -> Callable[[str], None]:
            self.checks.update(dict.fromkeys(starts, check))
            return check

        return keep

    def start_of(self, line: str) -> str:
        """The longest of the known beginnings, so that `list algorithms permfl` is not `list algorithms`."""
        text = " ".join(words(line)[1:]) + " "
        fitting = [start for start in self.checks if text.startswith(start + " ")]
        assert fitting, f"{self.page} has a command whose outcome no test asserts: {line}"
        return max(fitting, key=len)

    def check(self, line: str) -> None:
        """Run a command and assert its outcome."""
        said = run_line(line)
        if words(line)[0] not in NOT_RUN:
            self.checks[self.start_of(line)](said)

    def assert_all_used(self, lines: list[str]) -> None:
        used = {self.start_of(line) for line in lines if words(line)[0] not in NOT_RUN}
        assert used == set(self.checks), "outcomes of commands that the page no longer has"
