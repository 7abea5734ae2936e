"""Reading Megatron's log while it grows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

from megatron_scalevec.demo.series import Series

__all__ = ["LogReader", "diverged", "failure_excerpt"]

# Launchers may put the rank, and machines the time, before each line: nothing is asked of a line's start.
_ITERATION = re.compile(r"\biteration\s+(\d{1,15})\s*/\s*\d+\s*\|(.*)")
_FIELD = re.compile(r"\s*([^|:]+?)\s*:\s*([^|]*?)\s*\|")
_VALIDATION = re.compile(
    r"\bvalidation loss at iteration\s+(\d{1,15})(?:\s+on\s+(\w+)\s+set)?\s*\|"
    r".*?lm loss value:\s*([^\s|]+)\s*\|"
)
_PARAMETERS = re.compile(r"number of parameters on .*rank \([\d, ]+\):\s*(\d{1,18})\b")
_MEMORY = re.compile(r"memory \(MB\) \|.*?max allocated:\s*([\d.]+)")
# Megatron prints its arguments, dots between the name and the value.
_ARGUMENT = re.compile(r"(?<![\w.-])(seq_length|seed|scalevec_strategy) \.{3,} (\S+)\s*$")
# "3: " of srun --label, "[default3]:" and "[rank3]: " of torchrun, "[1,3]<stdout>: " of mpirun.
_RANK = re.compile(r"\s*(?:\d+: |\[[A-Za-z_]*\d+\]:|\[\d+,\d+\]<\w+>:)")

# torchrun follows a rank's own words with a report of its own, which says less.
_TORCHRUN = re.compile(r"torch[./]distributed[./]elastic|torch[./]distributed[./]run|ChildFailedError")
# These say the cause by themselves; what Megatron does afterwards may fail in a way of its own.
_CAUSE = re.compile(r"scalevec: error|ERROR:.*Unexpected result")
_UNEXPECTED = "Unexpected result"


class LogReader:
    """What one run's log says so far.

    Lines that do not match are skipped, and so are values that are no numbers: several ranks may
    write into the same file, each line with its rank before it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._series = Series()
        self.training = self._series.of("training")
        """Training loss of each step; NaN where Megatron left it out because it was no number."""
        self.step_times = self._series.of("step_times")
        """Milliseconds of each step."""
        self.validation = self._series.of("validation")
        """Validation loss at the steps where it was measured during training."""
        self.final_validation: float | None = None
        """Validation loss after training; None again once training went on after it."""
        self.parameters: int | None = None
        """Trainable parameters of the first rank that names them."""
        self.samples = self._series.of("samples")
        """Sequences consumed at each step."""
        self.memory_megabytes: float | None = None
        """Largest memory allocated on a GPU, of the first ranks of the stages that report theirs."""
        self.arguments: dict[str, str] = {}
        """``seq_length``, ``seed`` and ``scalevec_strategy`` as Megatron prints them."""
        self.starts: list[dict[str, str]] = []
        """The same, as each start printed them; one that took no step is one with the next."""
        self.failed_at: int | None = None
        """The step at which Megatron gave up because the loss was no finite number, if nothing followed."""
        self._starting = False
        self._first: tuple[int, float] | None = None
        self._offset = 0
        self._rest = b""

    @property
    def step(self) -> int:
        """The last step that was taken."""
        return self._series.last or 0

    @property
    def abandoned(self) -> int | None:
        """See :class:`Series`."""
        return self._series.abandoned

    def poll(self, ended: bool = False) -> bool:
        """Read what was added; whether anything was.

        Args:
            ended: Nobody writes any more: a last line counts without its end.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return False
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if ended:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._line(line.decode("utf-8", errors="replace"))
        return bool(data)

    def _line(self, line: str) -> None:
        if match := _ITERATION.search(line):
            self._iteration(int(match[1]), dict(_FIELD.findall(match[2])))
        elif match := _VALIDATION.search(line):
            loss = _number(match[3])
            if loss is None or match[2] not in (None, "validation"):
                return
            if match[2] is None:
                self._series.add("validation", int(match[1]), loss)
            else:
                self.final_validation = loss
        elif match := _ARGUMENT.search(line):
            if not self._starting:
                self.starts.append({})
                self._starting = True
            self.arguments[match[1]] = self.starts[-1][match[1]] = match[2]
        elif match := _MEMORY.search(line):
            # CPU mode reports none.
            self.memory_megabytes = max(self.memory_megabytes or 0.0, _finite(match[1]) or 0.0) or None
        elif _UNEXPECTED in line:
            self.failed_at = self.step + 1
        elif self.parameters is None and (match := _PARAMETERS.search(line)):
            self.parameters = int(match[1])

    def _iteration(self, step: int, fields: dict[str, str]) -> None:
        # It went on from a checkpoint, or for more steps: what was the end is none.
        self.failed_at = self.final_validation = None
        self._series.trained(step, self._starting)
        skipped = _number(fields.get("number of skipped iterations"))
        loss = self._own(step, self._loss(fields, skipped), skipped)
        if loss is not None:
            self._series.add("training", step, loss)
        if (samples := _finite(fields.get("consumed samples"))) is not None:
            self._series.add("samples", step, samples)
        if (time := _finite(fields.get("elapsed time per iteration (ms)"))) is not None:
            self._series.add("step_times", step, time)

    def _loss(self, fields: dict[str, str], skipped: float | None) -> float | None:
        """The loss as Megatron prints it: not at all if it is NaN, and as 0 where every step was skipped."""
        loss = _number(fields.get("lm loss"))
        if "lm loss" not in fields and skipped == 0 and self.training:
            return math.nan
        return None if loss == 0.0 and skipped else loss

    def _own(self, step: int, loss: float | None, skipped: float | None) -> float | None:
        """The loss of this step alone.

        Megatron does not start its sums anew after a process's first step, so that what it prints at the
        second is the mean of both: of a run that went on as of one that starts. Its count of skipped steps
        is that of both as well, and a step that was skipped is not in the mean.
        """
        first, self._first = self._first, None
        if self._starting:
            self._starting = False
            self._first = None if loss is None else (step, loss)
        elif first is not None and step == first[0] + 1 and loss is not None:
            return None if skipped else round(2 * loss - first[1], 6)
        return loss


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _finite(text: str | None) -> float | None:
    number = _number(text)
    return number if number is not None and math.isfinite(number) else None


def diverged(excerpt: Iterable[str]) -> bool:
    """Whether a :func:`failure_excerpt` says that the loss was no finite number any more."""
    return any(_UNEXPECTED in line for line in excerpt)


def failure_excerpt(path: Path, lines: int = 15, start: int = 0) -> list[str]:
    """The last lines of a failed run's log, from byte ``start`` on, that tell a person something."""
    try:
        text = path.read_bytes()[start:].decode("utf-8", errors="replace")
    except OSError:
        return []
    found = [line.rstrip() for line in text.splitlines() if line.strip()]
    causes = [line for line in found if _CAUSE.search(line)]
    if causes:
        return causes[:1]
    tracebacks = [i for i, line in enumerate(found) if "Traceback (most recent call last)" in line]
    if tracebacks:
        # The first is the cause; a rank's traceback ends before torchrun's report starts.
        found = found[tracebacks[0] :]
        if rank := _RANK.match(found[0]):
            found = [line for line in found if line.startswith(rank[0])]  # others write in between
        noise = [i for i, line in enumerate(found) if i and _TORCHRUN.search(line)]
        found = found[: noise[0]] if noise else found
    return found[-lines:]
