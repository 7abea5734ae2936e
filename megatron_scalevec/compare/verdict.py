"""Saying in words what an interval says, and no more."""

from __future__ import annotations

from megatron_scalevec.compare.statistics import Interval

__all__ = ["chance_note", "verdict"]


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
        where = "below" if gap.mean < 0 else "above"
        return (
            f"{label} ended {abs(gap.mean):.4f} {where} {baseline} with one seed, which says nothing about "
            "chance."
        )
    seeds = f"{gap.count} seeds, {gap.level:.0%} interval"
    if gap.low <= 0.0 <= gap.high:
        return (
            f"{label}: no difference from {baseline} is shown; the loss may be up to "
            f"{max(0.0, -gap.low):.4f} lower or {max(0.0, gap.high):.4f} higher ({seeds})."
        )
    where = "below" if gap.high < 0 else "above"
    near, far = sorted((abs(gap.low), abs(gap.high)))
    left_out = " among the runs that did not diverge" if diverged else ""
    return f"{label} ended {where} {baseline}{left_out}, by {near:.4f} to {far:.4f} ({seeds})."


def chance_note(comparisons: int, level: float) -> str:
    """What several intervals at one level mean together."""
    if comparisons < 2:
        return ""
    return (
        f"Each of the {comparisons} intervals misses the truth in {1 - level:.0%} of such studies, so that "
        f"at least one of them does in up to {min(1.0, comparisons * (1 - level)):.0%}."
    )
