"""Ends of processes: in good order at a signal, and, on Linux, with the process that started them."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["Stopped", "die_with_parent", "prctl", "stopped_by_signals"]

# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
# Looked up here, so that a process between fork and exec only calls it.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Stopped(KeyboardInterrupt):
    """A signal asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Turn the first signal into :class:`Stopped`; later ones do not disturb cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    stopped = False

    def stop(number: int, _frame: Any) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise Stopped(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP"):
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that comes about.

    A fork starts without that wish, an exec keeps it. Elsewhere than on Linux this does nothing.
    """
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def prctl(option: int, value: int) -> None:
    """Linux's prctl(2) with one argument; elsewhere nothing.

    Raises:
        OSError: The kernel refused.
    """
    if _LIBC is not None and _LIBC.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
