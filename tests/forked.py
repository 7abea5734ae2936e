"""A function in a forked child of the test process, which may be killed: no imports to wait for."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Child", "in_child"]


class Child:
    """Runs ``work(ready)`` at once; ``ready()`` lets :meth:`wait_ready` return."""

    def __init__(self, work: Callable[[Callable[[], None]], Any]) -> None:
        self._ready, ready = os.pipe()
        self._result, result = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)  # threads do not survive a fork
                signal.signal(signal.SIGINT, signal.default_int_handler)
                with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
                    value = work(lambda: os.write(ready, b"."))
                with os.fdopen(result, "wb") as file:
                    pickle.dump(value, file)
                code = 0
            except BaseException as error:
                os.write(2, repr(error).encode())
            finally:
                os._exit(code)
        os.close(ready)
        os.close(result)

    def wait_ready(self) -> None:
        """Until the child has said so, or has ended."""
        os.read(self._ready, 1)

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, timeout: float = 60) -> int:
        """Exit status as ``subprocess`` has it: negative for a signal."""
        end = time.monotonic() + timeout
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self._ready)
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                end += 10
            time.sleep(0.002)

    def result(self) -> Any:
        with os.fdopen(self._result, "rb") as file:
            readable, _, _ = select.select([file], [], [], 60)
            if not readable:
                self.send(signal.SIGKILL)
            payload = file.read()
        assert self.wait() == 0
        return pickle.loads(payload)


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work()`` returns in a forked child."""
    return Child(lambda ready: work()).result()
