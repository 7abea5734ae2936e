"""What is seen while the runs train: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from megatron_scalevec.demo.runs import Run

__all__ = ["Display", "make_display"]

_LINES_PER_RUN = 10


class Display:
    """A context that is told about the runs; shows nothing by itself."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def started(self, run: Run) -> None:
        """Its process was started."""

    def progress(self, run: Run) -> None:
        """Its log has grown."""

    def finished(self, run: Run) -> None:
        """It has a result."""


def make_display(console: Console, steps: int) -> Display:
    """Bars on a terminal that can move its cursor; else lines."""
    if console.is_terminal and not console.is_dumb_terminal:
        return _Bars(console, steps)
    return _Lines(console, steps)


def _loss(run: Run) -> str:
    loss = run.reader.training.get(run.reader.step)
    return "" if loss is None else f"loss {loss:.3f}"


class _Bars(Display):
    def __init__(self, console: Console, steps: int) -> None:
        self._steps = steps
        self._tasks: dict[str, int] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def started(self, run: Run) -> None:
        # Not "started" for rich until the first step: the bar pulses while Megatron is imported.
        self._tasks[run.name] = self._progress.add_task(
            run.name, total=self._steps, start=False, note="starting"
        )

    def progress(self, run: Run) -> None:
        if run.reader.step == 0:
            return
        task = self._tasks[run.name]
        if not self._progress.tasks[self._progress.task_ids.index(task)].started:
            self._progress.start_task(task)
        done = run.reader.step >= self._steps
        note = f"{_loss(run)}, evaluating" if done else _loss(run)
        self._progress.update(task, completed=run.reader.step, note=note)

    def finished(self, run: Run) -> None:
        note = f"validation {run.reader.final_validation:.3f}"
        self._progress.update(self._tasks[run.name], completed=self._steps, note=note)


class _Lines(Display):
    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._first: dict[str, tuple[int, float]] = {}
        self._shown: dict[str, int] = {}

    def _say(self, run: Run, text: str) -> None:
        self._console.print(f"{run.name}: {text}", highlight=False, markup=False, soft_wrap=True)

    def started(self, run: Run) -> None:
        self._say(run, "starting")

    def progress(self, run: Run) -> None:
        step, now = run.reader.step, time.monotonic()
        if step == 0:
            return
        first, since = self._first.setdefault(run.name, (step, now))
        part = step * _LINES_PER_RUN // self._steps
        if part <= self._shown.get(run.name, 0):
            return
        self._shown[run.name] = part
        left = ""
        if step > first:
            seconds = round((now - since) / (step - first) * (self._steps - step))
            left = f", {seconds // 60}:{seconds % 60:02} left"
        self._say(run, f"step {step}/{self._steps}, {_loss(run)}{left}")

    def finished(self, run: Run) -> None:
        seconds = run.seconds or 0.0
        self._say(run, f"done in {seconds:.0f} s, validation loss {run.reader.final_validation:.4f}")
