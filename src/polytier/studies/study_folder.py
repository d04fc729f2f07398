"""The folder of a study, which is a command that makes several runs. One command at a time may write to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polytier._errors import FAULT, Stopped, outcome
from polytier.files import lock
from polytier.files.lock import FolderLock
from polytier.files.read import refuse_links
from polytier.files.write import PARTIAL, make_folder, remove_partials
from polytier.runs.folder import claim_next, discard
from polytier.runs.spec import RunSpec


@contextmanager
def study_folder(out: Path | None, stem: str, marker: str, what: str) -> Iterator[Path]:
    """Hold the folder of a study. If the input turns out to be invalid before `marker` is written, it is removed.

    Args:
        out: The folder: new, empty, or that of an interrupted command; None: a new one, runs/STEM-N.
        stem: The name of a new folder.
        marker: The file that such a study writes first.
        what: What the study is called in errors.

    Raises:
        ValueError: The folder has other content, or another process uses it.
        Stopped: The disk is full or broken. The message says how to continue.
    """
    if out is None:
        held = claim_next(Path("runs"), stem)
    else:
        check_folder(out, marker, what)
        made = make_folder(out)
        refuse_links(out)
        held = FolderLock(out, made)
    try:
        if out is not None:
            check_folder(out, marker, what)
        remove_partials(held.folder)
        yield held.folder
    except ValueError:
        if not (held.folder / marker).exists():
            discard(held)
        raise
    except OSError as error:
        code, text = outcome(error)
        raise Stopped(f"{text}; continue with the same command and --out {held.folder}", code or FAULT) from None
    finally:
        held.release()


def check_folder(out: Path, marker: str, what: str) -> None:
    """Raise an error if the folder has content that is not from such a study."""
    if not out.exists() or (out / marker).exists():
        return
    if not out.is_dir() or any(path.name != lock.FILE and path.suffix != PARTIAL for path in out.iterdir()):
        raise ValueError(f"{out} exists and is not {what} (it has no {marker}); give another --out")


def slug(text: str) -> str:
    """A text as the name of a folder."""
    return re.sub(r"[^\w.-]+", "-", text)


def stem(what: str, spec: RunSpec) -> str:
    """WHAT-DATA as the name of a folder."""
    return slug(f"{what}-{Path(spec.data).name.removesuffix('.npz')}")
