"""One writer per folder: the second one is refused by name, and a lock ends with its process."""

import os
import signal
import subprocess
import sys

import pytest

from polytier.files.lock import FILE, FolderLock

HOLD = """
import sys, time
from pathlib import Path
from polytier.files.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_the_process_that_holds_the_lock_is_named_and_its_death_ends_it(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match=f"in use by process {process.pid} on .*; wait until it ends"):
            FolderLock(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
    FolderLock(tmp_path).release()  # the file of the dead process is still there


def test_a_lock_may_be_released_twice_and_taken_again(tmp_path):
    with FolderLock(tmp_path) as lock:
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):
            FolderLock(tmp_path)
        lock.release()
    FolderLock(tmp_path).release()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / FILE).symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic"):
        FolderLock(tmp_path / "folder")
    assert (tmp_path / "mine").read_text() == "mine"
