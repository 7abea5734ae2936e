"""Ranks that leave processes behind."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

__all__ = ["leave_processes"]


def leave_processes(folder: str, then_sleep: bool = False) -> None:
    """Start a forked process, one in a session of its own, and a spawned one; wait for none of them.

    Args:
        folder: Each process, the rank included, leaves an empty file there with its number as its name.
        then_sleep: Do not end, either.
    """
    _stay(folder, 0)
    for work in (lambda: None, os.setsid):
        if os.fork() == 0:
            work()
            _stay(folder)
    # Code as text: a function from here would have the process import all that this package imports.
    code = f"import os, time; open(os.path.join({folder!r}, str(os.getpid())), 'w'); time.sleep(600)"
    multiprocessing.get_context("spawn").Process(target=exec, args=(code,)).start()
    while len(os.listdir(folder)) < 4 * int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if then_sleep:
        time.sleep(600)
    os._exit(1)  # without multiprocessing's own clean-up, as after a crash


def _stay(folder: str, seconds: float = 600) -> None:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(seconds)
