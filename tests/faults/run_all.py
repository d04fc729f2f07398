"""Fails at every place and counts what comes of it: `make faults`.

(a) kills    | the process is killed before every file operation of every command, then the command is repeated
(b) failures | every operation fails with ENOSPC and with EIO, the disk is full from every operation on, every write
               writes half of its bytes, every file cannot be opened for reading
(c) damage   | every file of run folders is damaged in many ways, for every command that reads it: damage.py
(e) losses   | the power fails before every operation, and what was not synced is lost

After (a), (b) and (e) the command is repeated, or the run resumed, without faults, and has to give the same bits as
without faults. `--sample N` takes about every N-th of these cases.
"""

from __future__ import annotations

import argparse
import errno
import json
import pickle
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.cases import Case, all_cases, is_saved, make_data, results, warm_up
from faults.damage import damage_all
from faults.inject import Ended, Image, Plan

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "faults.json"
ADVICE = re.compile(r"make room|resume|repeat|again|continue|give another")
NOTHING = re.compile(r"nothing was saved|does not exist")
STUDIES = ("compare", "tune")  # slower: here operations fail with ENOSPC and EIO in turn


@dataclass
class Tally:
    """Counts by command, and descriptions of what went wrong."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    problems: list[dict[str, str]] = field(default_factory=list)

    def count(self, case: str, what: str, number: int = 1) -> None:
        self.counts.setdefault(case, Counter())[what] += number

    def problem(self, case: str, kind: str, where: str, text: str) -> None:
        self.count(case, kind)
        self.problems.append({"command": case, "kind": kind, "where": where, "text": text[-600:]})
        print(f"{case}: {kind}, {where}:\n    {text[-600:]}", flush=True)


@dataclass
class Prover:
    """Proves one command.

    right    | the results without faults
    count    | the number of its operations
    selected | every how many of the cases
    """

    case: Case
    home: Path
    tally: Tally
    every: int = 1

    def __post_init__(self) -> None:
        plan = Plan(self.case.prepare(self.home))
        ended = self.case.run(plan.root, plan)
        assert ended.code == 0, ended.err
        self.right, self.count = results(plan.root), plan.count
        self.tally.count(self.case.name, "operations", self.count)

    def prove(self) -> None:
        for work in (self.kills, self.failures, self.losses):
            started = time.perf_counter()
            work()
            print(f"{self.case.name}: {work.__name__} {time.perf_counter() - started:.0f} s", flush=True)

    def numbers(self, count: int, shift: int = 0) -> Iterator[int]:
        """The numbers of the selected operations: different ones for different shifts."""
        return iter(range(1 + (shift * 7) % max(1, min(self.every, count)), count + 1, self.every))

    # -- (a) -------------------------------------------------------------------------------------------

    def kills(self) -> None:
        for at in self.numbers(self.count):
            plan = Plan(self.case.prepare(self.home), "kill", at, parents=at % 2 == 0)
            self.case.run(plan.root, plan)
            self.tally.count(self.case.name, "kills")
            self.recover(plan.root, f"killed before operation {at}")

    # -- (b) -------------------------------------------------------------------------------------------

    def failures(self) -> None:
        errors = (errno.ENOSPC, errno.EIO)
        for at in self.numbers(self.count, 1):
            for error in errors if self.case.name not in STUDIES and self.every == 1 else errors[at % 2 :][:1]:
                self.fail(Plan(self.case.prepare(self.home), "fail", at, error), "failures")
        for at in self.numbers(self.count, 2):
            if at % 2 or self.case.name not in STUDIES:
                self.fail(Plan(self.case.prepare(self.home), "full", at, errno.ENOSPC), "full disks")
        writes = Plan(self.case.prepare(self.home), "short")
        self.case.run(writes.root, writes)
        for at in self.numbers(writes.count, 3):
            self.short(at)
        reads = Plan(self.case.prepare(self.home), "read")
        self.case.run(reads.root, reads)
        for at in self.numbers(reads.count, 4):
            self.fail(Plan(self.case.prepare(self.home), "read", at), "failed reads")

    def short(self, at: int) -> None:
        """A write of half of its bytes simply works."""
        plan = Plan(self.case.prepare(self.home), "short", at)
        ended = self.case.run(plan.root, plan)
        self.tally.count(self.case.name, "short writes")
        if ended.code != 0 or results(plan.root) != self.right:
            self.tally.problem(self.case.name, "wrong results", f"short write {at}", ended.err)

    def fail(self, plan: Plan, what: str) -> None:
        """The command fails with advice, or does not need the operation."""
        where = f"{what}: operation {plan.at}, {errno.errorcode[plan.error]}"
        ended = self.case.run(plan.root, plan)
        self.tally.count(self.case.name, what)
        self.judge(ended, where, (2, 3) if plan.kind == "read" else (3,))
        if ended.code == 0 and results(plan.root) != self.right and "failed" not in ended.out + ended.err:
            self.tally.problem(self.case.name, "wrong results", where, ended.err)
        self.recover(plan.root, where)

    def judge(self, ended: Ended, where: str, codes: tuple[int, ...]) -> None:
        """Whether the end of a command is as it should be: one line with advice."""
        lines = [line for line in ended.err.splitlines() if line.startswith("polytier:")]
        if ended.traced:
            self.tally.problem(self.case.name, "tracebacks", where, ended.err)
        elif ended.code not in (0, *codes):
            self.tally.problem(self.case.name, "wrong exit codes", where, f"{ended.code}: {ended.err}")
        elif ended.code and (len(lines) != 1 or not ADVICE.search(lines[0])):
            self.tally.problem(self.case.name, "no advice", where, ended.err)

    # -- (e) -------------------------------------------------------------------------------------------

    def losses(self) -> None:
        with tempfile.NamedTemporaryFile(dir=self.home) as file:
            plan = Plan(self.case.prepare(self.home), "record", store=Path(file.name))
            self.case.run(plan.root, plan)
            images: list[Image] = pickle.load(file)
        for number in self.numbers(len(images), 5):
            image = images[number - 1]
            root = self.home / plan.root.name
            shutil.rmtree(root)
            root.mkdir()
            image.write(root)
            self.tally.count(self.case.name, "losses")
            self.recover(root, f"power lost {image.where}, {image.kind}")

    # -- afterwards ------------------------------------------------------------------------------------

    def recover(self, root: Path, where: str) -> None:
        """Repeat the command without faults: the same bits, or truthfully nothing."""
        kept = self.home / "before"
        shutil.rmtree(kept, ignore_errors=True)
        ended = self.case.repeat(root)
        if ended.code == 2 and self.case.name.startswith("run") and NOTHING.search(ended.err):
            if is_saved(root / self.case.out):
                self.tally.problem(self.case.name, "wrong results", where, f"not true: {ended.err}")
            self.tally.count(self.case.name, "nothing had been saved")
            ended = self.case.run(root)
        if ended.traced:
            self.tally.problem(self.case.name, "tracebacks", f"{where}, then", ended.err)
        elif ended.code != 0:
            self.tally.problem(self.case.name, "not recovered", where, f"{ended.code}: {ended.err}")
        elif (found := results(root)) != self.right:
            names = [name for name in {**found, **self.right} if found.get(name) != self.right.get(name)]
            self.tally.problem(self.case.name, "wrong results", where, f"different: {', '.join(names)}; {ended.err}")
        else:
            self.tally.count(self.case.name, "recovered")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=1, help="every how many of the cases")
    parser.add_argument("--only", action="append", help="a command, or damage")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the counts")
    asked = parser.parse_args(arguments)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as place:
        tally = prove(Path(place), asked.sample, asked.only)
    counts: dict[str, Any] = {name: dict(found) for name, found in tally.counts.items()}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(
        json.dumps({"every": asked.sample, "by command": counts, "problems": tally.problems}, indent=2) + "\n"
    )
    print(f"{len(tally.problems)} problems; the counts are in {asked.out}")
    return 1 if tally.problems else 0


def prove(home: Path, every: int, only: list[str] | None) -> Tally:
    """All proofs, or those that are selected."""
    tally = Tally()
    make_data(home)
    warm_up(home)
    for name, case in all_cases(home).items():
        if only is None or name in only:
            Prover(case, home, tally, every).prove()
    if only is None or "damage" in only:
        damage_all(home, tally, every)
    return tally


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
