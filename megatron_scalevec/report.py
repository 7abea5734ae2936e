"""How a :class:`ScaleVecError` ends a process: one sentence, exit code 2, no traceback."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable

from megatron_scalevec.errors import USAGE_EXIT_CODE, ScaleVecError

__all__ = ["leave_with", "speak_for_this_process", "tolerate_any_encoding"]

_FIRST_RANK_SPEAKS_WITHIN = 20.0  # seconds; imports on a busy node differ by several


def tolerate_any_encoding() -> None:
    """Tables and formulas hold characters that a terminal may not have; a run must not die of one."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def leave_with(error: ScaleVecError) -> int:
    """Say the error once per node and return the exit code.

    Mostly every rank meets the same error, and torchrun ends all ranks as soon as one has left; so the
    others leave the first word to the node's first rank, and speak up only if it stays silent. A rank of a
    running process group ends at once: its peers may wait in a collective that never comes.
    """
    rank = os.environ.get("RANK", "0")
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_FIRST_RANK_SPEAKS_WITHIN)
    where = "" if rank == "0" else f" (rank {rank})"
    sys.stdout.flush()
    print(f"scalevec: error{where}: {error}", file=sys.stderr, flush=True)
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        os._exit(USAGE_EXIT_CODE)
    return USAGE_EXIT_CODE


def speak_for_this_process(check_at_end: Callable[[], None]) -> None:
    """From now on, end the process as the launcher would, in a script that somebody else has started.

    Args:
        check_at_end: Called when the script has ended without an error; a ScaleVecError that it raises is
            the end of the process.
    """
    previous = sys.excepthook
    failed = False

    def end(kind, error, traceback):
        nonlocal failed
        failed = True
        if issubclass(kind, ScaleVecError):
            os._exit(leave_with(error))
        previous(kind, error, traceback)

    def at_end():
        # The exit code cannot be changed any more in the ordinary way.
        if not failed:
            try:
                check_at_end()
            except ScaleVecError as error:
                os._exit(leave_with(error))

    sys.excepthook = end
    atexit.register(at_end)
