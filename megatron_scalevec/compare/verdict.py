"""Saying in words what an interval says, and no more."""

from __future__ import annotations

from megatron_scalevec.compare.statistics import Interval

__all__ = ["chance_note", "percent", "verdict"]


# The smallest that four decimals show.
_SMALLEST = 1e-4


def verdict(
    label: str, baseline: str, gap: Interval | None, *, missing: int = 0, diverged: int = 0, wanted: int = 0
) -> str:
    """One sentence or two on ``label`` against ``baseline``.

    Args:
        label: What is judged.
        baseline: What it is compared with.
        gap: Its terminal loss minus the baseline's; None where no runs can be compared.
        missing: Runs of either that have no result yet.
        diverged: Runs of either whose loss was no number any more; they are not part of the gap.
        wanted: Runs that either was to have, for the sentence on missing ones.
    """
    said = _judged(label, baseline, gap, diverged)
    if diverged:
        said += f" Runs of {label} or {baseline} that diverged: {diverged}."
    if missing:
        said += f" Not complete: {missing} of the {wanted} runs that this compares are missing."
    return said


def _judged(label: str, baseline: str, gap: Interval | None, diverged: int) -> str:
    if gap is None:
        return f"{label}: nothing can be said, as no two finished runs can be compared."
    if not gap.known:
        return (
            f"{label} ended {_apart(gap.mean, baseline)} {_one_seed(gap)}, which says nothing about chance."
        )
    sure = f"({_seeds(gap)}, {percent(gap.level)} interval)"
    if gap.low == 0.0 == gap.high:
        return f"{label}: no difference from {baseline} is shown; all ended at the same loss {sure}."
    if gap.low <= 0.0 <= gap.high:
        bounds = ((-gap.low, "lower"), (gap.high, "higher"))
        # A bound is rounded up where it would vanish.
        said = " or ".join(f"{max(bound, _SMALLEST):.4f} {how}" for bound, how in bounds if bound > 0)
        return f"{label}: no difference from {baseline} is shown; the loss may be up to {said} {sure}."
    where = "below" if gap.high < 0 else "above"
    sizes = map(_size, sorted((abs(gap.low), abs(gap.high))))
    left_out = " among the runs that did not diverge" if diverged else ""
    return f"{label} ended {where} {baseline}{left_out}, by {' to '.join(dict.fromkeys(sizes))} {sure}."


def _apart(gap: float, baseline: str) -> str:
    if gap == 0.0:
        return f"at the same loss as {baseline}"
    return f"{_size(abs(gap))} {'below' if gap < 0 else 'above'} {baseline}"


def _size(size: float) -> str:
    return f"{size:.4f}" if round(size, 4) > 0 else f"less than {_SMALLEST:.4f}"


def _one_seed(gap: Interval) -> str:
    if gap.against is None or gap.count == gap.against:
        return "with one seed"
    return f"with {gap.count} seed{'s' * (gap.count > 1)} against {gap.against}, one of them alone"


def _seeds(gap: Interval) -> str:
    if gap.against is None:
        return f"{gap.count} seeds"
    return f"{gap.count} seeds against {gap.against}, not paired"


def percent(share: float) -> str:
    """A share in percent, with the decimals that it has."""
    return f"{100 * share:.10g}%"


def chance_note(comparisons: int, level: float) -> str:
    """What several intervals at one level mean together."""
    if comparisons < 2:
        return ""
    return (
        f"Each of the {comparisons} intervals misses the truth in {percent(1 - level)} of such studies, so "
        f"that at least one of them does in up to {percent(min(1.0, comparisons * (1 - level)))}."
    )
