"""Runs bad inputs in this process and judges what Polytier does with them: `make fuzz` runs all.

Good is exit code 2 with a line of advice and nothing written. Everything else is a failure: a traceback, an input that
is taken, another exit code, no advice, files that are left, more than 20 seconds, more than 2 GB.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from typer.main import get_command

from faults.bad_files import prepare
from faults.bad_inputs import FILE, Bad, bad_inputs
from polytier.cli.main import app

SECONDS = 20
MEMORY = 2 << 30
REFUSED = "refused with advice"
COMMAND: Any = get_command(app)  # made once, because that takes longer than to refuse an input


class Hang(BaseException):
    """An input took too long; no `except Exception` catches it."""


@dataclass(frozen=True)
class Outcome:
    """What happened, in two words and in full."""

    what: str
    text: str = ""


@contextmanager
def guarded() -> Iterator[None]:
    """Raise Hang after `SECONDS`, and let allocations beyond `MEMORY` fail."""

    def ring(*_: object) -> None:
        raise Hang

    before, limits = signal.signal(signal.SIGALRM, ring), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def listing() -> dict[str, tuple[int, int]]:
    """The files in the current folder and below, with their size and time."""
    found, places = {}, ["."]
    while places:
        for entry in os.scandir(places.pop()):
            about = entry.stat(follow_symlinks=False)
            folder = entry.is_dir(follow_symlinks=False)
            found[entry.path] = (0, 0) if folder else (about.st_mtime_ns, about.st_size)
            if folder:
                places.append(entry.path)
    return found


def judge_all(inputs: Iterable[Bad]) -> Iterator[tuple[Bad, Outcome]]:
    """Run inputs in the current folder, which `prepare` filled; what they write is removed."""
    before = listing()
    for bad in inputs:
        if bad.content is not None:
            Path(FILE).write_bytes(bad.content)
        outcome = judge(bad.args)
        Path(FILE).unlink(missing_ok=True)
        after = listing()
        if after != before:
            changed = sorted(set(after) ^ set(before)) or [key for key in after if after[key] != before[key]]
            outcome = Outcome(f"{outcome.what}, wrote files", f"{changed[:3]}: {outcome.text}")
            for path in (Path(name) for name in sorted(set(after) - set(before))):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            before = listing()
        yield bad, outcome


def judge(args: Sequence[str]) -> Outcome:
    """Run a command line."""
    try:
        with guarded():
            result = CliRunner().invoke(COMMAND, list(args))
    except Hang:
        return Outcome("hang", "".join(traceback.format_exc(limit=-3)))
    return judge_result(result)


def judge_result(result: Any) -> Outcome:
    """What the command printed and returned."""
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        return Outcome("traceback", "".join(traceback.format_exception(error, limit=-4)))
    if result.exit_code == 0:
        return Outcome("taken", result.output[-300:])
    if result.exit_code != 2:
        return Outcome(f"exit code {result.exit_code}", result.stderr[-500:])
    *_, last = result.stderr.strip("\n").split("\n")
    usage = "Usage:" in result.stderr or "─ Error ─" in result.stderr
    if "Traceback" in result.stderr or not (usage or last.startswith("polytier: ")) or len(last) > 2000:
        return Outcome("no advice", result.stderr[-500:])
    return Outcome(REFUSED, last)


def main() -> int:
    """Run all inputs, or those whose name contains a word that is given; print counts and every failure."""
    inputs = [bad for bad in bad_inputs() if all(word in f"{bad.kind}: {bad.name}" for word in sys.argv[1:])]
    warnings.simplefilter("error")
    counts, kinds, failed, started = Counter(), Counter(), [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["POLYTIER_DATA"] = str(Path(folder, "cache"))
        prepare(Path(folder))
        began = time.monotonic()
        for bad, outcome in judge_all(inputs):
            counts[outcome.what] += 1
            if outcome.what != REFUSED:
                failed.append(bad.name)
                kinds[bad.kind] += 1
                print(f"{outcome.what}: [{bad.kind}] {bad.name}\n    {outcome.text.strip()}", flush=True)
            elif len(sys.argv) > 1:
                print(f"{time.monotonic() - began:5.2f} s  {bad.name}\n         {outcome.text}")
            began = time.monotonic()
        os.chdir("/")
    print(f"{len(inputs)} bad inputs in {time.monotonic() - started:.0f} s")
    for what, count in counts.most_common():
        print(f"{count:6}  {what}")
    for kind, count in kinds.most_common():
        print(f"{count:6}  failures: {kind}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
