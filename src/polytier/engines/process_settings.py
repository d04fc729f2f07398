"""Settings of a process: one torch thread, so that results are the same everywhere, and fast memory."""

from __future__ import annotations

import contextlib
import ctypes
import time

import torch

# parameters of mallopt in glibc: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
RELEASE_SECONDS = 10  # time between two releases of free memory

_released = time.monotonic()


def configure_process() -> None:
    """Use one torch thread, and keep freed memory for the next rows.

    More threads would change the order of sums. Without the settings of the allocator each step would return some
    megabytes to the operating system, which has to clear them before it hands them out again.
    """
    torch.set_num_threads(1)
    with contextlib.suppress(OSError, TypeError, AttributeError):  # only glibc has mallopt
        library = ctypes.CDLL(None)
        library.mallopt(MMAP_THRESHOLD, 32 << 20)
        library.mallopt(TRIM_THRESHOLD, 1 << 30)


def release_memory() -> None:
    """Return free memory to the operating system, at most once in `RELEASE_SECONDS`.

    Rows of many sizes leave gaps between them; without this the memory of a long run would grow.
    """
    global _released
    if time.monotonic() - _released > RELEASE_SECONDS:
        _released = time.monotonic()
        with contextlib.suppress(OSError, TypeError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
