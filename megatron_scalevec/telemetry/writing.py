"""Where telemetry goes: a file of JSON lines, and Megatron's TensorBoard and W&B writers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.files import write_file
from megatron_scalevec.telemetry.statistics import STATISTICS

__all__ = ["JsonLines", "require_telemetry", "scalars", "write"]


# How every line begins, so that an unfinished one is told from somebody else's text.
_BEGINNING = '{"step": '


class JsonLines:
    """A file with one JSON object a line, which a resumed run continues.

    Args:
        path: The file; folders on the way to it are made.
        resumed_at: The last step that counts. Later ones in the file will be taken again and leave it, as
            does a line that a killed run has not finished. A run that starts from the beginning (0) puts an
            earlier file aside, under its name with a number.

    Attributes:
        notes: Sentences on what was done to a file that was there.

    Raises:
        ScaleVecError: The file cannot be written, or is none of ours.
    """

    def __init__(self, path: str | os.PathLike[str], resumed_at: int) -> None:
        self._path = Path(path)
        self.notes: list[str] = []
        with _speaking_of_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size:
                self._continue(resumed_at)

    def _continue(self, resumed_at: int) -> None:
        lines, steps = _read(self._path)
        if resumed_at == 0:
            names = (Path(f"{self._path}.{number}") for number in itertools.count(1))
            aside = next(name for name in names if not name.exists())
            os.rename(self._path, aside)
            self.notes.append(f"{self._path} is of an earlier run and was put aside as {aside}")
            return
        kept = [line for line, step in zip(lines, steps) if step is not None and step <= resumed_at]
        if len(kept) == len(lines):
            return
        write_file(self._path, "".join(kept))
        self.notes.append(
            f"{self._path}: {len(lines) - len(kept)} lines after step {resumed_at}, from which the run goes "
            "on, were taken out"
        )

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, and hand it to the operating system.

        Args:
            record: What JSON can hold, its ``step`` first: a whole number of 0 or more.

        Raises:
            ScaleVecError: It is something else, or cannot be written.
        """
        try:
            line = json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"
            line.encode()
        except (TypeError, ValueError) as error:
            raise ScaleVecError(
                f"telemetry of step {record.get('step')} cannot be a line of JSON: {error}; give plain "
                "texts, finite numbers and None."
            ) from None
        if not line.startswith(_BEGINNING) or not _is_step(record["step"]):
            raise ScaleVecError(
                f"telemetry of step {record.get('step')!r}: a line begins with its step, a whole number of 0 "
                "or more, by which a resumed run finds its place."
            )
        with _speaking_of_errors(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(line)


def require_telemetry(path: str | os.PathLike[str]) -> None:
    """Check, before a run begins, that it can continue a file or put it aside: that there is none, or ours.

    Raises:
        ScaleVecError: It is none of ours, or cannot be read.
    """
    with _speaking_of_errors(path):
        if os.path.exists(path) and os.path.getsize(path):
            _read(path)


def _read(path: str | os.PathLike[str]) -> tuple[list[str], list[int | None]]:
    """The lines of a file, and their steps: None for an unfinished one."""
    # A text in a line may hold what Python takes for the end of one; ours end with \n alone.
    with open(path, encoding="utf-8", newline="\n") as file:
        lines = file.readlines()
    return lines, [_step(path, number, line) for number, line in enumerate(lines, 1)]


def _step(path: str | os.PathLike[str], number: int, line: str) -> int | None:
    if not line.endswith("\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
        return None
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        step = None
    if not _is_step(step):
        raise ScaleVecError(
            f"{path}:{number} is no line of telemetry, with a step of 0 or more, so the file is left alone: "
            "give another name with --scalevec-log."
        )
    return step


def _is_step(value: Any) -> bool:
    # True is an int to Python, and JSON has Infinity and 1e400.
    return type(value) is int and value >= 0


@contextlib.contextmanager
def _speaking_of_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ScaleVecError(
            f"telemetry cannot be written to {path}: {reason}; give another file with --scalevec-log."
        ) from error


def scalars(found: Mapping[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Every figure under the name that it has in TensorBoard and W&B: what it is comes first, which is how
    both put curves together."""
    result = {}
    for entry in found["vectors"]:
        for name in STATISTICS:
            if entry[name] is not None:
                result[f"scalevec {name}/{_place(entry)}"] = entry[name]
    for entry in found["branches"]:
        if entry["cosine"] is not None:
            result[f"scalevec cosine/{_place(entry)}"] = entry["cosine"]
    return result


def _place(entry: Mapping[str, Any]) -> str:
    what = f"{entry['site']} {entry['branch']} {entry['side']}"
    return what if entry["layer"] is None else f"{what} layer {entry['layer']}"


def write(
    step: int,
    found: Mapping[str, list[dict[str, Any]]],
    *,
    file: JsonLines | None = None,
    tensorboard: Any = None,
    wandb: Any = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write what :meth:`.recorder.Telemetry.after_step` has found.

    Args:
        step: Steps taken so far.
        found: The figures.
        file: The JSON lines.
        tensorboard: A ``SummaryWriter``.
        wandb: The module, after its ``init``.
        more: What else goes into the JSON line.

    Raises:
        ScaleVecError: As from :meth:`JsonLines.append`.
    """
    if file is not None:
        file.append({"step": step, **(more or {}), **found})
    if tensorboard is None and wandb is None:
        return
    values = scalars(found)
    if tensorboard is not None:
        for name, value in values.items():
            tensorboard.add_scalar(name, value, step)
    if wandb is not None:
        wandb.log(values, step)
