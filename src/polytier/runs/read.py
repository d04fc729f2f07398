"""Reading a run folder; needs no torch."""

from __future__ import annotations

import csv
import json
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

FORMAT = 2  # of a run folder; folders without state.json are of format 1 (version 0.1)
STATE = "state.json"
STATES = RUNNING, DONE, STOPPED, DIVERGED = "running", "done", "stopped", "diverged"
KINDS = ("personal", "team", "global")  # whose models a run may hold


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a run, with its versions."""
    path = folder / "config.toml"
    if not folder.is_dir():
        raise ValueError(f"there is no run folder {folder}; `polytier run` makes one, by default below runs/")
    if not path.is_file():
        raise ValueError(f"{folder} is no run folder: it has no config.toml")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_state(folder: Path) -> dict[str, Any]:
    """How a run stands: `state` (one of `STATES`), `reason`, `round`, `format`."""
    if (folder / STATE).exists():
        return read_json(folder / STATE)
    summary = read_summary(folder)
    known = {"state": STOPPED, "round": 0} if summary is None else {"state": DONE, "round": summary["rounds"]}
    return {"format": 1, "reason": "", **known}


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary, or None if the run has not come to its end."""
    path = folder / "summary.json"
    return read_json(path) if path.exists() else None


def read_history(folder: Path) -> list[dict[str, Any]]:
    """A dict a round. A last line that a kill cut short is left out."""
    return read_rounds(folder)[0]


def read_rounds(folder: Path) -> tuple[list[dict[str, Any]], bool]:
    """A dict a round, as far as lines can be read, and whether that is all there is."""
    path, history = folder / "metrics.jsonl", []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            return history, False
        if not isinstance(record, dict) or "round" not in record or "bytes" not in record:
            return history, False
        history.append(record)
    return history, True


def read_devices(folder: Path) -> dict[str, list[str]]:
    """The columns of devices.csv; to be left as they are."""
    path = folder / "devices.csv"
    try:
        stat = path.stat()
        return read_columns(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


@lru_cache(64)
def read_columns(path: Path, *version: int) -> dict[str, list[str]]:
    """A table that has not changed is read once."""
    with path.open(newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    if any(len(row) != len(names) for row in rows) or "id" not in names:
        raise ValueError("a line has too few or too many fields, or there is no column id")
    columns = map(list, zip(*rows, strict=True)) if rows else ([] for _ in names)
    return dict(zip(names, columns, strict=True))


def bytes_until(
    history: list[dict[str, Any]], accuracy: float, model: str = "personal", link: str | None = None
) -> tuple[int, int] | None:
    """The first evaluated round in which the model's test accuracy (a fraction) is reached, and the bytes until then.

    On all links or one, both directions; None if it is never reached.
    """
    if not 0 <= accuracy <= 1:
        raise ValueError(f"accuracy is a fraction such as 0.9; got {accuracy}")
    figures = [
        {k: v["test"]["accuracy"] for k, v in record.items() if isinstance(v, dict) and "accuracy" in v.get("test", ())}
        for record in history
    ]
    models, links = sorted(set().union(*figures)), sorted(set().union(*(record["bytes"] for record in history)))
    for what, name, there in (("model", model, models), ("link", link, links)):
        if there and name is not None and name not in there:
            raise ValueError(f"the history has no {what} {name!r}; there are {', '.join(there)}")
    sent = 0
    for record, found in zip(history, figures, strict=True):
        sent += sum(sum(ways.values()) for name, ways in record["bytes"].items() if link in (None, name))
        if found.get(model) is not None and found[model] >= accuracy:
            return record["round"], sent
    return None


def score(figures: dict[str, Any] | None, what: str = "") -> str:
    """Accuracy in percent; the loss where there is no accuracy. `what` is a suffix such as _worst_decile."""
    if figures and figures.get(f"accuracy{what}") is not None:
        return f"{100 * figures[f'accuracy{what}']:.2f} %"
    if figures and not what and figures.get("loss") is not None:
        return f"loss {figures['loss']:.4g}"
    return "-"
