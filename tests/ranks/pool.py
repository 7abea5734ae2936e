"""The test process's side of the pool."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["RankFailure", "RankPool", "pool_with_jobs_beside"]

TESTS = Path(__file__).resolve().parent.parent


class RankFailure(AssertionError):
    """A rank raised; the message holds its traceback and the end of its output."""


class RankPool:
    """Runs functions of a module, by default ``tests/ranks/jobs``, on groups of forked gloo ranks.

    A module with a function ``prepare`` has it called once, before CPU mode is turned on.
    """

    def __init__(self, jobs: str = "ranks.jobs") -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
        }
        self._output = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ranks.parent", str(theirs.fileno()), jobs],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        theirs.close()
        self._connection = multiprocessing.connection.Connection(ours.detach())

    def run(self, job: str, world_size: int = 1, timeout: float = 240, **arguments: Any) -> list[Any]:
        """Call ``<job>(**arguments)`` of the jobs' module on ``world_size`` ranks; results by rank.

        Raises:
            RankFailure: A rank raised or exited, or the time ran out.
        """
        self._connection.send((job, world_size, timeout, arguments))
        # The pool enforces the limit itself and says where the ranks stand; this is the safety net.
        if not self._connection.poll(timeout + 60):
            self.close()
            raise RankFailure(f"{job} on {world_size} ranks: no answer in {timeout + 60:.0f} s")
        try:
            failures, results = self._connection.recv()
        except EOFError:
            raise RankFailure(f"the rank pool died:\n{self._tail()}") from None
        if failures:
            raise RankFailure("\n".join(failures))
        return results

    def _tail(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")[-4000:]

    def close(self) -> None:
        """End the pool and whatever ranks are left."""
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


@contextlib.contextmanager
def pool_with_jobs_beside(file: str, jobs: str) -> Iterator[RankPool]:
    """A pool whose jobs are a module in the folder of ``file``: tests with an environment of their own."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(file).resolve().parent), before]))
    try:
        pool = RankPool(jobs)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    yield pool
    pool.close()
