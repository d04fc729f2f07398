"""Reads and checks the files of a run folder, one function per file. Does not import torch."""

from __future__ import annotations

import csv
import io
import logging
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

from polytier.files import lock
from polytier.files.read import CHECKED_LINE, Damaged, digest_of, read_bytes, read_json, read_line
from polytier.runs.csv_cells import from_cell
from polytier.runs.spec import check_spec, identity

log = logging.getLogger("polytier")

# The format of a run folder. 1: version 0.1, without state.json; 2: without digests; 3: every file can be checked
FORMAT = 3
STATE, SUMMARY = "state.json", "summary.json"
PRESENT, ABSENCES = "present.json", "absences.csv"  # of a run over a network
CHECKPOINTS, STORE = "checkpoints", "store"  # folders: checkpoints, and rows that are too large for them
STATES = RUNNING, DONE, STOPPED, DIVERGED = "running", "done", "stopped", "diverged"
KINDS = ("personal", "team", "global")  # kinds of models that a run may have

Record = dict[str, Any]

# settings that readers use, with the types they need
CONFIG = {"algorithm": str, "data": str, "model": str, "rounds": int, "seed": int, "set": dict}


def check_exists(folder: Path) -> None:
    """Raise an error if there is no such folder."""
    if not folder.is_dir():
        raise ValueError(f"the run folder {folder} does not exist; `polytier run` makes one, by default in runs/")


def read_config(folder: Path) -> Record:
    """The configuration of a run, with its versions."""
    path = folder / "config.toml"
    check_exists(folder)
    if not path.is_file():
        ours = (folder / lock.FILE).exists() or not any(folder.iterdir())
        started = ours and not any((folder / CHECKPOINTS).glob("round-*"))
        nothing = ": nothing was saved before the run stopped; start it again" if started else ""
        raise ValueError(f"{folder} is not a run folder: it has no config.toml{nothing}")
    try:
        values = tomllib.loads(read_bytes(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} cannot be read: {error}; restore it, or repeat the run") from None
    if "algorithm" not in values:
        raise Damaged(f"{path} is not what a run writes: it names no algorithm; restore it, or repeat the run")
    for name, kind in CONFIG.items():
        if not isinstance(values.get(name, kind()), kind):
            raise Damaged(f"{path}: {name} = {values[name]!r} is not what a run writes; restore it, or repeat the run")
    return values


def repair(folder: Path) -> str:
    """Advice for a damaged file that a run can write again."""
    return f"`polytier resume {folder}` writes it again from the last checkpoint"


def read_own(folder: Path, name: str) -> Record:
    """The content of a JSON file that the run can write again."""
    try:
        return read_json(folder / name)
    except Damaged as error:
        raise Damaged(f"{error}; {repair(folder)}") from None


def check_result(folder: Path, name: str) -> Path:
    """The path of a result, after its content was compared with the digest in summary.json.

    Raises:
        Damaged: The file is missing or does not have the content that was written.
    """
    digest, path = ((read_summary(folder) or {}).get("files") or {}).get(name), folder / name
    try:
        if digest is None or digest_of(path) == digest:
            return path
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}; {repair(folder)}") from None
    raise Damaged(f"{path} is damaged: its content does not match its digest; {repair(folder)}")


def read_state(folder: Path) -> Record:
    """The state of a run: `state` (one of `STATES`), `reason`, `round`, `format`."""
    if (folder / STATE).exists():
        found = read_own(folder, STATE)
        if found.get("state") not in STATES:
            raise Damaged(f"{folder / STATE} is damaged: it names no state; {repair(folder)}")
        return found
    summary = read_summary(folder)
    known = {"state": STOPPED, "round": 0} if summary is None else {"state": DONE, "round": summary.get("rounds", 0)}
    return {"format": 1, "reason": "", **known}


def read_summary(folder: Path) -> Record | None:
    """The summary, or None if the run is not finished."""
    path, state = folder / SUMMARY, read_own(folder, STATE) if (folder / STATE).exists() else {}
    done = state.get("state") == DONE
    if not path.exists():
        if done:
            raise Damaged(f"{path} is missing, but by {folder / STATE} the run is done; {repair(folder)}")
        return None
    found = read_own(folder, SUMMARY)
    if not isinstance(found.get("rounds", 0), int):
        raise Damaged(f"{path} is damaged: rounds = {found['rounds']!r}; {repair(folder)}")
    if other_run(found, state) or (done and found.get("rounds") != state.get("round")):
        raise Damaged(f"{path} is not of the run that {folder / STATE} describes; {repair(folder)}")
    return found


def other_run(found: Record, state: Record) -> bool:
    """Whether the content of a file is not of the run that state.json describes."""
    return "run" in found and "run" in state and found["run"] != state["run"]


def finished_rounds(folder: Path, wanted: int) -> int | None:
    """The rounds of a run that has completed at least `wanted` rounds and whose files are whole; otherwise None."""
    try:
        summary = read_summary(folder)
        if summary is None or summary.get("rounds", 0) < wanted:
            return None
        state = read_state(folder)
        if state["state"] == RUNNING or (state["state"] == STOPPED and state["round"] <= summary["rounds"]):
            return None  # the last thing that a run writes is the state that it is done
        for name in summary.get("files") or ():
            check_result(folder, name)
        read_tiers(folder)
        read_history(folder)
        check_checkpoint(folder / CHECKPOINTS / f"round-{summary['rounds']:07d}")
        return None if settings_changed(folder, state) else summary["rounds"]
    except Damaged as error:
        log.warning("%s", error)
        return None


def settings_changed(folder: Path, state: Record) -> bool:
    """Whether config.toml has other settings than the run was started with; `resume` says which."""
    values = {name: value for name, value in read_config(folder).items() if name != "versions"}
    try:
        return "settings" in state and identity(check_spec(values).values()) != state["settings"]
    except ValueError:
        return True


def check_checkpoint(place: Path) -> None:
    """Raise `Damaged` if a checkpoint is there and does not have the content that was written."""
    if not place.exists():
        return
    facts = place / "facts.json"
    for name, digest in (read_json(facts).get("files") or {}).items():
        try:
            if digest_of(place / Path(name).name) != digest:
                raise Damaged(f"{place / name} is damaged: its content does not match its digest in {facts}")
        except OSError as error:
            raise Damaged(f"{place / name} cannot be read: {error.strerror}") from None


def read_tiers(folder: Path) -> list[Record]:
    """The tiers in topology.json, the server first."""
    whole = read_own(folder, "topology.json")
    if other_run(whole, read_state(folder)):
        path = folder / "topology.json"
        raise Damaged(f"{path} is not of the run that {folder / STATE} describes; {repair(folder)}")
    found = whole.get("tiers")
    if not isinstance(found, list) or not all(isinstance(tier, dict) and "ids" in tier for tier in found) or not found:
        raise Damaged(f"{folder / 'topology.json'} is damaged: it contains no tree; {repair(folder)}")
    return found


def read_history(folder: Path) -> list[Record]:
    """One record per round; see `read_rounds`."""
    return read_rounds(folder)[0]


def read_rounds(folder: Path) -> tuple[list[Record], bool]:
    """One record per round, and whether the last line is complete.

    Of a run whose process was killed: the rounds up to its newest checkpoint, from which `resume` continues. Lines of
    later rounds may be there, or be lost; no other file could tell.

    Raises:
        Damaged: A line does not have the content that was written, or lines are missing.
    """
    saved, least = saved_rounds(folder), least_lines(folder)  # before the lines: a run in progress adds some
    history, whole = read_lines(folder)
    if len(history) < least:
        path, there = folder / "metrics.jsonl", len(history)
        lost = f"round {least} is" if there + 1 == least else f"rounds {there + 1} to {least} are"
        raise Damaged(f"{path} is damaged: it ends after round {there}, {lost} missing; {repair(folder)}")
    if saved is not None and is_abandoned(folder):
        return history[:least], True
    return history, whole


def saved_rounds(folder: Path) -> int | None:
    """The round of the newest checkpoint; None without checkpoints, and before format 3."""
    if not (folder / STATE).exists() or (read_state(folder).get("format") or 0) < FORMAT:
        return None
    places = (path.name.removeprefix("round-") for path in (folder / CHECKPOINTS).glob("round-*"))
    return max((int(number) for number in places if number.isdigit()), default=None)


def least_lines(folder: Path) -> int:
    """The number of rounds that metrics.jsonl has at least, by the other files.

    The line of a round is written before its checkpoint and before summary.json. A run that ends with an error writes
    the number of its lines to state.json. A resumed run may have begun with fewer rounds than summary.json has.
    """
    summary, state = read_summary(folder) or {}, read_state(folder)
    done = summary["rounds"] if "files" in summary and state["state"] != RUNNING else 0
    return max(saved_rounds(folder) or 0, done, state.get("lines") or 0)


def is_abandoned(folder: Path) -> bool:
    """Whether the process of a run that is not finished no longer exists on this machine."""
    return read_state(folder)["state"] == RUNNING and not lock.is_locked(folder)


def read_lines(folder: Path) -> tuple[list[Record], bool]:
    """The lines of metrics.jsonl, and whether the last one is complete."""
    path, history = folder / "metrics.jsonl", []
    if not path.exists():
        return [], True
    state = read_state(folder)
    checked, owner = (state.get("format") or 0) >= FORMAT, state.get("run", "")
    try:
        lines = read_bytes(path).decode("utf-8", "surrogateescape").split("\n")
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}; {repair(folder)}") from None
    for number, line in enumerate(lines, 1):
        try:
            record = read_line(line, checked, owner)
            if not {"round", "bytes"} <= set(record) or (checked and record["round"] != number):
                raise Damaged("it is not the record of this round")
            history.append(record)
        except Damaged as error:
            begun = number == len(lines) and not CHECKED_LINE.match(line)
            if begun:  # nothing, or the beginning of a line, follows the last end of a line
                return history, not line
            text = f"line {number} of {path} is damaged: {error}, or {folder / STATE} is of another run"
            raise Damaged(f"{text}; {repair(folder)}") from None
    return history, True


def read_network(folder: Path) -> Record | None:
    """Who is there in a run over a network, and who was absent; None if it is not one.

    Returns:
        present: the addresses (TIER/NAME) of the nodes that are there; bytes: down and up by address, if known;
        absences: the lines of absences.csv.
    """
    if not (folder / PRESENT).is_file():
        return None
    about, path = read_json(folder / PRESENT), folder / ABSENCES
    try:
        lines = csv.DictReader(io.StringIO(read_bytes(path).decode(), newline="")) if path.exists() else ()
        absences = [{**line, "round": int(line["round"])} for line in lines]
        present = {str(name) for name in about.get("below", about["present"])}
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise Damaged(f"{path} or {PRESENT} cannot be read: {error}; {repair(folder)}") from None
    return {"present": present, "bytes": about.get("bytes", {}), "absences": absences}


def read_devices(folder: Path) -> dict[str, list[str]]:
    """The columns of devices.csv. They are cached, so callers must not change them."""
    path = folder / "devices.csv"
    try:
        stat = path.stat()
        return read_columns(folder, stat.st_mtime_ns, stat.st_size)
    except (OSError, csv.Error) as error:
        raise Damaged(f"{path} cannot be read: {error}; {repair(folder)}") from None


@lru_cache(64)
def read_columns(folder: Path, *version: int) -> dict[str, list[str]]:
    """The columns of devices.csv, cached until the file changes."""
    path = check_result(folder, "devices.csv")
    names, *rows = csv.reader(io.StringIO(read_bytes(path).decode(errors="replace"), newline=""))
    if any(len(row) != len(names) for row in rows) or "id" not in names:
        raise Damaged(f"{path} is damaged: a line has too few or too many fields, or there is no column id")
    columns = map(list, zip(*(map(from_cell, row) for row in rows), strict=True)) if rows else ([] for _ in names)
    return dict(zip(map(from_cell, names), columns, strict=True))
