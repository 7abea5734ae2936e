"""What runs say about a difference, and how sure of it they are."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy

from megatron_scalevec.compare.run import Run
from megatron_scalevec.demo.report import tail_mean
from megatron_scalevec.errors import ScaleVecError

__all__ = [
    "LEVEL",
    "LEVELS",
    "Interval",
    "bootstrap_interval",
    "decreasing",
    "pairs",
    "smooth",
    "terminal_gap",
    "terminal_loss",
    "token_ratio",
]

LEVEL = 0.95
LEVELS = (0.5, 0.999)
"""Lowest and highest: beyond, too few of the resamples are left to tell where an interval ends."""
_DRAWS = 100_000
_MOST_HALF_WIDTH = 25
# Losses that are nearer, as a share, may be one that was written as text and as float32.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Interval:
    """A mean, and what it may be."""

    mean: float
    low: float | None
    """None where there is one value: it says nothing about chance."""
    high: float | None
    count: int
    """Values that it rests on: pairs of runs, or runs of the group."""
    paired: bool = False
    """Whether runs of the same seed were compared with each other."""
    level: float = LEVEL
    against: int | None = None
    """Runs of the baseline, where its mean and the group's were compared."""

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return self.low is not None


def smooth(losses: numpy.ndarray) -> numpy.ndarray:
    """Centred moving average along the last axis; at both ends over what there is.

    The window is a fortieth of the values to each side, 25 at most.
    """
    count = losses.shape[-1]
    half = min(_MOST_HALF_WIDTH, count // 40)
    if half == 0:
        return losses
    sums = numpy.cumsum(losses, axis=-1)
    sums = numpy.concatenate([numpy.zeros_like(sums[..., :1]), sums], axis=-1)
    at = numpy.arange(count)
    low, high = numpy.maximum(at - half, 0), numpy.minimum(at + half + 1, count)
    return (sums[..., high] - sums[..., low]) / (high - low)


def decreasing(losses: numpy.ndarray) -> numpy.ndarray:
    """The nearest curve (least squares) that never rises: pool adjacent violators. float64 [n] to [n]."""
    values: list[float] = []
    weights: list[int] = []
    for loss in losses:
        value, weight = float(loss), 1
        while values and values[-1] < value:
            value = (value * weight + values[-1] * weights[-1]) / (weight + weights[-1])
            weight += weights.pop()
            values.pop()
        values.append(value)
        weights.append(weight)
    return numpy.repeat(values, weights)


def bootstrap_interval(
    values: Sequence[float],
    other: Sequence[float] | None = None,
    *,
    level: float = LEVEL,
    draws: int = _DRAWS,
) -> Interval:
    """Studentized bootstrap interval of a mean, or of the difference ``values`` - ``other`` of two means.

    Resamples are drawn from the normal distribution fitted to the values, not from the values: drawn from
    three seeds themselves, no resample lies beyond the lowest and highest, and the interval would hold the
    truth three times in four instead of nineteen in twenty. For one mean that is Student's t interval. The
    draws start from a fixed state, so the same values give the same interval.

    Args:
        values: One value for each seed.
        other: Values to subtract, not paired with the first; None for one mean.
        level: Share of intervals that are to hold the truth, within :data:`LEVELS`.
        draws: Resamples.

    Raises:
        ScaleVecError: The level is beyond them.
    """
    if not LEVELS[0] <= round(level, 9) <= LEVELS[1]:
        raise ScaleVecError(
            f"the level {level:g} of an interval must be from {LEVELS[0]:g} to {LEVELS[1]:g}."
        )
    first = numpy.asarray(values, dtype=float)
    second = None if other is None else numpy.asarray(other, dtype=float)
    groups = [first] if second is None else [first, second]
    mean = float(first.mean() - (0.0 if second is None else second.mean()))
    count, against = len(first), None if second is None else len(second)
    if min(map(len, groups)) < 2:
        return Interval(mean, None, None, count, level=level, against=against)
    spreads = [float(group.var(ddof=1) / len(group)) for group in groups]
    total = sum(spreads)
    if total == 0.0:
        return Interval(mean, mean, mean, count, level=level, against=against)
    # Only the shares matter, so that one mean needs the draws once for each number of seeds.
    shares = tuple(spread / total for spread in spreads)
    reach = _reach(tuple(map(len, groups)), shares, level, draws) * math.sqrt(total)
    return Interval(mean, mean - reach, mean + reach, count, level=level, against=against)


@functools.lru_cache(maxsize=256)
def _reach(sizes: tuple[int, ...], shares: tuple[float, ...], level: float, draws: int) -> float:
    """Quantile of the studentized resamples: half an interval's width in standard errors.

    Args:
        sizes: Values of each group.
        shares: Squared standard error of each group's mean, together one.
        level: Of the quantile, both sides together.
        draws: Resamples.
    """
    generator = numpy.random.default_rng(0)
    shift, variance = numpy.zeros(draws), numpy.zeros(draws)
    for size, share in zip(sizes, shares):
        # Mean and variance of normal samples are independent: no need to draw the samples.
        shift += generator.standard_normal(draws) * math.sqrt(share)
        variance += share * generator.chisquare(size - 1, draws) / (size - 1)
    return float(numpy.quantile(numpy.abs(shift) / numpy.sqrt(variance), level))


def terminal_loss(run: Run, by: str) -> float:
    """The loss that a run ended with: ``validation``, or of ``training`` the mean of those that it has within
    the last twentieth of its steps."""
    if by == "validation":
        return run.final_validation
    return tail_mean(dict(zip(run.steps.tolist(), run.losses.tolist())))


def pairs(baseline: Sequence[Run], other: Sequence[Run]) -> list[tuple[Run, Run]] | None:
    """Runs of the same seed; None unless every run of the smaller group has a partner."""
    seeds = {run.seed: run for run in baseline}
    found = [(seeds[run.seed], run) for run in other if run.seed is not None and run.seed in seeds]
    return found if len(found) == min(len(baseline), len(other)) else None


def terminal_gap(
    baseline: Sequence[Run], other: Sequence[Run], *, by: str = "training", level: float = LEVEL
) -> Interval:
    """How much higher than the baseline's the terminal loss of ``other`` is, in nats per token.

    Runs of the same seed are compared with each other where they are there: text and order are theirs in
    common, and drop out.

    Args:
        baseline: Runs that differ in their seed.
        other: Likewise.
        by: ``validation`` or ``training``, see :func:`terminal_loss`.
        level: Share of intervals that are to hold the truth.
    """
    paired = pairs(baseline, other)
    if paired is None:
        mine, theirs = ([terminal_loss(run, by) for run in group] for group in (other, baseline))
        return bootstrap_interval(mine, theirs, level=level)
    differences = [terminal_loss(mine, by) - terminal_loss(theirs, by) for theirs, mine in paired]
    found = bootstrap_interval(differences, level=level)
    return replace(found, paired=True)


def token_ratio(baseline: Run, other: Run) -> float:
    """Tokens that the baseline needs, over those that ``other`` needs, to come to the same loss.

    The loss is the higher of the two runs' last, smoothed; above one, ``other`` needs fewer. The lower run
    is read off the nearest curve that never rises, so that noise does not reach a loss early. Of runs that
    end at one loss, both needed all that they had. Where tokens are not known, steps stand for them. NaN
    where a run has that loss at step 0, before any.
    """
    by_steps = baseline.tokens is None or other.tokens is None
    (tokens, losses), (other_tokens, other_losses) = (_curve(run, by_steps) for run in (baseline, other))
    if math.isclose(losses[-1], other_losses[-1], rel_tol=_ROUNDING):
        mine, theirs = float(tokens[-1]), float(other_tokens[-1])
    elif losses[-1] > other_losses[-1]:
        mine, theirs = float(tokens[-1]), _first_at(losses[-1], other_tokens, other_losses)
    else:
        mine, theirs = _first_at(other_losses[-1], tokens, losses), float(other_tokens[-1])
    return mine / theirs if min(mine, theirs) > 0 else math.nan


def _curve(run: Run, by_steps: bool) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Tokens and losses, both smoothed: at the end of a run a mean stands for the middle of its window."""
    return smooth(run.steps.astype(float) if by_steps else run.tokens), smooth(run.losses)


def _first_at(level: float, tokens: numpy.ndarray, losses: numpy.ndarray) -> float:
    losses = decreasing(losses)
    reached = losses <= level
    if not reached.any():  # the last of the smoothed curve is lower than what is left of it without noise
        return float(tokens[-1])
    index = int(numpy.argmax(reached))
    if index == 0:
        return float(tokens[0])
    share = (losses[index - 1] - level) / (losses[index - 1] - losses[index])
    return float(tokens[index - 1] + share * (tokens[index] - tokens[index - 1]))
