"""A run as it is compared, whatever it was read from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from megatron_scalevec.demo.report import median_step_time
from megatron_scalevec.errors import ScaleVecError

__all__ = ["LAST_STEP", "Run", "along", "make_run", "require_sound", "usable", "visible"]

# Steps stay whole numbers in a float.
LAST_STEP = 2**53
# Means of larger ones may not be numbers any more.
_LARGEST_LOSS = 1e30
# A count that ends with less than this share of the steps to go needs no remark.
_NEARLY_ALL = 0.01


@dataclass(frozen=True, eq=False)
class Run:
    """What is known of one run. Arrays have one entry for each step with a training loss, rising."""

    label: str
    """What it is an example of; runs that share it differ in their seed."""
    source: str
    steps: numpy.ndarray
    """int64 [n]."""
    losses: numpy.ndarray
    """Training loss, float64 [n], in nats per token."""
    tokens: numpy.ndarray | None = None
    """Tokens consumed since step 0, float64 [n], rising; None if the run does not say. See :func:`along`."""
    seconds: numpy.ndarray | None = None
    """Time spent in steps since step 0, float64 [n]; None if the run does not say."""
    validation: tuple[tuple[int, float], ...] = ()
    """Steps, and the validation losses there, those that training paused for."""
    final_validation: float | None = None
    """Validation loss after training."""
    step_time_ms: float | None = None
    """Median time of a step without the first ones."""
    memory_bytes: float | None = None
    """Largest memory allocated on a GPU."""
    seed: int | None = None
    diverged_at: int | None = None
    """The first step whose loss was no finite number; the losses hold the others."""
    remarks: tuple[str, ...] = ()
    """What is to be said of how it was read."""

    def __post_init__(self) -> None:
        if not len(self.steps) and self.diverged_at is None:
            raise ScaleVecError(f"{self.source} holds no training loss; name a run that has taken steps.")


def visible(text: str) -> str:
    """A name on one line, of characters that can be seen and written anywhere.

    Names of files and what stands in logs may hold others: line ends, terminal codes, bytes that are no text.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def along(
    steps: Sequence[float], counts: Mapping[int, float], rate: float | None = None
) -> numpy.ndarray | None:
    """What has been counted from step 0 on, at any steps.

    Between steps with a count, and from nothing at step 0 to the first of them, it is a line. Beyond the
    last it goes on as from the one before it.

    Args:
        steps: Where it is wanted.
        counts: By step.
        rate: What is added with each step beyond the last one; None for the last that is known.

    Returns:
        float64, one value for each of ``steps``; None where nothing is known of how the count grows.
    """
    known = dict(sorted({0: 0.0, **counts}.items()))
    places, values = (numpy.array(list(part), dtype=float) for part in (known, known.values()))
    if len(places) < 2 or not values[-1] > 0:
        return None
    if rate is None:
        rate = (values[-1] - values[-2]) / (places[-1] - places[-2])
    wanted = numpy.asarray(steps, dtype=float)
    return numpy.interp(wanted, places, values) + rate * numpy.maximum(0.0, wanted - places[-1])


def require_sound(source: str, what: str, values: Mapping[int, float], rises: bool = False) -> None:
    """Values must be finite and not negative; a count must rise from step to step."""
    last = None
    for step in sorted(values):
        value = values[step]
        if not (math.isfinite(value) and value >= 0):
            raise ScaleVecError(
                f"{source} has the {what} {value:g} at step {step}; it must be a finite number, not below 0. "
                "Take it out, or put it right."
            )
        if rises and last is not None and value <= values[last]:
            raise ScaleVecError(
                f"{source} counts {values[last]:,.0f} {what} at step {last} and {value:,.0f} at step {step}; "
                "they must be counted from the start of the run, and rise. Take them out, or put them right."
            )
        last = step


def usable(loss: float | None) -> bool:
    """Whether a loss is a number to compute with; None stands for one that is none."""
    return loss is not None and abs(loss) < _LARGEST_LOSS


def _since_start(times: Mapping[int, float], median: float) -> tuple[list[int], numpy.ndarray]:
    """Steps with a time, and the sum of all steps' times up to each of them, in the unit of the times.

    A value stands for the steps since the last one, as logs may leave steps out. But where these are more
    than lie between the values beside it, the run began there, or went on: then the value is that of a
    first step, which is slow, and must not be taken for those that are not known.
    """
    known = sorted(times)
    values = numpy.array([times[step] for step in known], dtype=float)
    spans = numpy.diff(known, prepend=min(0, known[0] - 1))
    if len(known) == 1:
        return known, values * spans
    before, after = numpy.append(0, spans[:-1]), numpy.append(spans[1:], 0)
    # The first value has none before it: its own span is from step 0, wherever the run began.
    before[1] = 0 if len(known) > 2 else before[1]
    own = numpy.minimum(spans, numpy.maximum(before, after))
    return known, numpy.cumsum(values * own + numpy.minimum(values, median) * (spans - own))


def make_run(
    source: str,
    label: str,
    losses: Mapping[int, float | None],
    *,
    tokens: Mapping[int, float] | None = None,
    milliseconds: Mapping[int, float] | None = None,
    validation: Sequence[tuple[int, float | None]] = (),
    failed_at: int | None = None,
    abandoned: int | None = None,
    **more: Any,
) -> Run:
    """A run of what was read; losses that are None were no numbers, and ``abandoned`` is the last step that
    was given up when steps were taken again."""
    for step in (*losses, *(step for step, _ in validation)):
        if not 0 <= step <= LAST_STEP:
            raise ScaleVecError(f"{source} has the step {step:g}; steps go from 0 to {LAST_STEP:.0e}.")
    measured = [*losses.items(), *validation]
    unusable = [step for step, loss in measured if not usable(loss)]
    if failed_at is not None:
        unusable.append(failed_at)
    steps = sorted(losses.keys() - set(unusable))
    remarks = []
    if steps and abandoned is not None and abandoned > steps[-1]:
        remarks.append(
            f"{source} had come to step {abandoned}, went back, and has come to step {steps[-1]} since: what "
            "lay beyond is left out."
        )
    if tokens:
        require_sound(source, "tokens", tokens, rises=True)
        if steps and max(tokens) < steps[-1] * (1 - _NEARLY_ALL):
            remarks.append(
                f"{source} counts its tokens up to step {max(tokens)} of {steps[-1]} only; beyond, they are "
                "taken to grow as they did last."
            )
    seconds = None
    median = None
    if milliseconds:
        require_sound(source, "step time", milliseconds)
        median, _ = median_step_time(dict(milliseconds))
        known, total = _since_start(milliseconds, median)
        seconds = along(steps, dict(zip(known, total / 1e3)), rate=median / 1e3)
    return Run(
        label=visible(label),
        source=visible(source),
        steps=numpy.array(steps, dtype=numpy.int64),
        losses=numpy.array([losses[step] for step in steps], dtype=float),
        tokens=along(steps, tokens) if tokens else None,
        seconds=seconds,
        validation=tuple((step, loss) for step, loss in validation if step not in unusable),
        step_time_ms=median,
        diverged_at=min(unusable, default=None),
        remarks=tuple(remarks),
        **more,
    )
