"""Processes that end with the one that started them, on Linux; elsewhere these functions do nothing."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from megatron_scalevec.lifetime import die_with_parent, prctl

__all__ = ["adopt_orphans", "children", "die_with_parent", "end_children"]

# <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent has ended, so that none gets lost."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """This process's children, those that have ended and were not waited for included."""
    me = os.getpid()
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The second field, a name in parentheses, may hold anything.
            if int(path.read_text().rpartition(")")[2].split()[1]) == me:
                found.append(int(path.parent.name))
    return found


def end_children() -> None:
    """Kill this process's children and, where it adopts orphans, their children in turn."""
    while left := children():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
