"""What is seen while a study runs: a line for each run that ends, and one a minute for those under way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megatron_scalevec.demo.display import Display

if TYPE_CHECKING:
    from megatron_scalevec.demo.runs import Run
    from megatron_scalevec.study.plan import Job
    from megatron_scalevec.study.running import JobQueue

__all__ = ["StudyDisplay", "clock", "remaining_steps", "seconds_left"]

_SECONDS_BETWEEN_LINES = 60.0


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: ``1:02:03``."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def seconds_left(done: float, elapsed: float, left: float) -> float | None:
    """Seconds for ``left`` steps at the pace at which ``done`` took ``elapsed``; None without a pace."""
    return left * elapsed / done if done > 0 else None


def remaining_steps(queue: JobQueue) -> tuple[int, int]:
    """Runs and steps that are left, those under way and those still unplanned included."""
    from megatron_scalevec.study.plan import unplanned_runs, wanted

    jobs, unplanned = wanted(queue.options, queue.losses), unplanned_runs(queue.options, queue.losses)
    steps = sum(job.steps for job in jobs) + unplanned * queue.options.steps
    steps -= sum(min(run.reader.step, job.steps) for job, run in queue.active.values())
    return len(jobs) + unplanned, steps


class StudyDisplay(Display):
    """Lines, on a terminal and elsewhere: a study outlives the terminal it was started from."""

    def __init__(self, console: Console, queue: JobQueue) -> None:
        self._console = console
        self._queue = queue
        self._ended = len(queue.losses)
        self._began = time.monotonic()
        self._last = self._began
        self._last_started: dict[str, int] = {}
        self._done_here = 0

    def _say(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        self._console.print(f"{stamp} {text}", highlight=False, markup=False, soft_wrap=True)

    def started(self, run: Run) -> None:
        run.reader.poll()
        self._last_started[run.name] = run.reader.step
        if run.reader.step:
            self._say(f"{run.name}: goes on; it had come to step {run.reader.step}")

    def progress(self, run: Run) -> None:
        if time.monotonic() - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = time.monotonic()
        under_way = ", ".join(
            f"{name} step {run.reader.step}/{job.steps}" for name, (job, run) in self._queue.active.items()
        )
        self._say(f"{self._overall()} {under_way}")

    def result(self, job: Job, result: dict[str, Any]) -> None:
        """A run has ended with this result."""
        self._ended += 1
        self._done_here += max(0, job.steps - self._last_started.pop(job.name, 0))
        loss = result["final_validation_loss"]
        said = "diverged" if loss is None else f"validation loss {loss:.4f}"
        self._say(f"{self._overall()} {job.name}: {said}")

    def _overall(self) -> str:
        runs, steps = remaining_steps(self._queue)
        under_way = sum(
            max(0, run.reader.step - self._last_started.get(name, 0))
            for name, (_, run) in self._queue.active.items()
        )
        left = seconds_left(self._done_here + under_way, time.monotonic() - self._began, steps)
        time_left = "" if left is None else f", {clock(left)} left"
        return f"[{self._ended} of {self._ended + runs} runs{time_left}]"
