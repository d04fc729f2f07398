"""Settings of the process that make results the same on every machine, and fast."""

from __future__ import annotations

import contextlib
import ctypes
import time

import torch

TRIM, MMAP = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
TIDY = 10  # seconds

tidied = time.monotonic()


def settle() -> None:
    """One thread, because more would change the order of sums; freed memory is kept for the next rows.

    Otherwise each step gives some megabytes back to the system, which must clear them before it lends them again.
    """
    torch.set_num_threads(1)
    with contextlib.suppress(OSError, TypeError, AttributeError):  # there is no such setting on other systems
        library = ctypes.CDLL(None)
        library.mallopt(MMAP, 32 << 20)
        library.mallopt(TRIM, 1 << 30)


def tidy() -> None:
    """Now and then give back what is free: rows of ever other sizes leave gaps between them, and memory would grow."""
    global tidied
    if time.monotonic() - tidied > TIDY:
        tidied = time.monotonic()
        with contextlib.suppress(OSError, TypeError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
