"""Processes that end with the one that started them, on Linux; elsewhere these functions do nothing."""

from __future__ import annotations

import ctypes
import signal
import sys

__all__ = ["die_with_parent", "prctl"]

# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
# Looked up here, so that a process between fork and exec only calls it.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that comes about.

    A fork starts without that wish, an exec keeps it.
    """
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def prctl(option: int, value: int) -> None:
    """Linux's prctl(2) with one argument.

    Raises:
        OSError: The kernel refused.
    """
    if _LIBC is not None and _LIBC.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
