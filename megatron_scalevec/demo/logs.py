"""Reading Megatron's log while it grows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["LogReader", "diverged", "failure_excerpt"]

_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)\s*\|(.*)")
_FIELD = re.compile(r"\s*([^|:]+?)\s*:\s*([^|]*?)\s*\|")
_VALIDATION = re.compile(
    r"validation loss at iteration\s+(\d+)(?:\s+on\s+(\w+)\s+set)?\s*\|"
    r".*?lm loss value:\s*([^\s|]+)"
)
_PARAMETERS = re.compile(r"number of parameters on .*rank \([\d, ]+\):\s*(\d+)")
_MEMORY = re.compile(r"memory \(MB\) \|.*?max allocated:\s*([\d.]+)")
# Megatron prints its arguments, dots between the name and the value.
_ARGUMENT = re.compile(r"^\s*(seq_length|seed|scalevec_strategy) \.+ (\S+)\s*$")

# torchrun follows a rank's own words with a report of its own, which says less.
_TORCHRUN = re.compile(r"torch[./]distributed[./]elastic|torch[./]distributed[./]run|ChildFailedError")
# These say the cause by themselves; what Megatron does afterwards may fail in a way of its own.
_CAUSE = re.compile(r"scalevec: error|ERROR:.*Unexpected result")
_UNEXPECTED = "Unexpected result"


class LogReader:
    """What one run's log says so far.

    Lines that do not match are skipped, and so are values that are no numbers: several ranks may
    write into the same file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.training: dict[int, float] = {}
        """Training loss of each step."""
        self.step_times: dict[int, float] = {}
        """Milliseconds of each step."""
        self.validation: dict[int, float] = {}
        """Validation loss at the steps where it was measured during training."""
        self.final_validation: float | None = None
        """Validation loss after training; None again once training went on after it."""
        self.parameters: int | None = None
        """Trainable parameters of the first rank that names them."""
        self.samples: dict[int, int] = {}
        """Sequences consumed at each step."""
        self.memory_megabytes: float | None = None
        """Largest memory allocated on a GPU, of the first ranks of the stages that report theirs."""
        self.arguments: dict[str, str] = {}
        """``seq_length``, ``seed`` and ``scalevec_strategy`` as Megatron prints them."""
        self.failed_at: int | None = None
        """The step at which Megatron gave up because the loss was no finite number, if nothing followed."""
        self.step = 0
        self._starting = False
        self._first: tuple[int, float] | None = None
        self._offset = 0
        self._rest = b""

    def poll(self) -> bool:
        """Read what was added; whether anything was."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return False
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line.decode("utf-8", errors="replace"))
        return bool(data)

    def _line(self, line: str) -> None:
        if match := _ITERATION.search(line):
            self._iteration(int(match[1]), dict(_FIELD.findall(match[3])))
        elif match := _VALIDATION.search(line):
            loss = _number(match[3])
            if loss is None or match[2] not in (None, "validation"):
                return
            if match[2] is None:
                self.validation[int(match[1])] = loss
            else:
                self.final_validation = loss
        elif match := _ARGUMENT.search(line):
            self.arguments[match[1]] = match[2]
            self._starting = True
        elif match := _MEMORY.search(line):
            # CPU mode reports none.
            self.memory_megabytes = max(self.memory_megabytes or 0.0, _number(match[1]) or 0.0) or None
        elif _UNEXPECTED in line:
            self.failed_at = self.step + 1
        elif self.parameters is None and (match := _PARAMETERS.search(line)):
            self.parameters = int(match[1])

    def _iteration(self, step: int, fields: dict[str, str]) -> None:
        # It went on from a checkpoint, or for more steps: what was the end is none.
        self.failed_at = self.final_validation = None
        loss = _number(fields.get("lm loss"))
        time = _number(fields.get("elapsed time per iteration (ms)"))
        if loss is not None:
            self.training[step] = self._own(step, loss)
        if (samples := _number(fields.get("consumed samples"))) is not None:
            self.samples[step] = int(samples)
        if time is not None:
            self.step_times[step] = time
        self.step = max(self.step, step)

    def _own(self, step: int, loss: float) -> float:
        """The loss of this step alone.

        Megatron does not start its sums anew after a process's first step, so that what it prints at the
        second is the mean of both: of a run that went on as of one that starts.
        """
        first, self._first = self._first, None
        if self._starting:
            self._starting, self._first = False, (step, loss)
        elif first is not None and step == first[0] + 1:
            return round(2 * loss - first[1], 6)
        return loss


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def diverged(excerpt: Iterable[str]) -> bool:
    """Whether a :func:`failure_excerpt` says that the loss was no finite number any more."""
    return any(_UNEXPECTED in line for line in excerpt)


def failure_excerpt(path: Path, lines: int = 15) -> list[str]:
    """The last lines of a failed run's log that tell a person something."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
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
        noise = [i for i, line in enumerate(found) if i and _TORCHRUN.search(line)]
        found = found[: noise[0]] if noise else found
    return found[-lines:]
