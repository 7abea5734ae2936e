"""Runs put into groups and compared with one of them."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy

from megatron_scalevec.compare.run import Run, usable
from megatron_scalevec.compare.statistics import (
    LEVEL,
    Interval,
    bootstrap_interval,
    pairs,
    terminal_gap,
    terminal_loss,
    token_ratio,
)
from megatron_scalevec.compare.verdict import chance_note, verdict
from megatron_scalevec.demo.report import tail, tail_steps
from megatron_scalevec.errors import ScaleVecError

__all__ = ["Comparison", "Row", "compare", "token_ratio_of"]

# Runs whose ends differ by more have not had the same training.
_SAME_END = 0.01


@dataclass(frozen=True)
class Row:
    """A group of runs, and what it is like against the baseline."""

    label: str
    seeds: int
    terminal: Interval
    """Loss at the end, in nats per token."""
    gap: Interval | None
    """The same minus the baseline's; None for the baseline."""
    token_ratio: Interval | None
    """Tokens of the baseline over those of this group to the same loss."""
    step_time_ms: float | None
    step_ratio: float | None
    memory_bytes: float | None
    memory_ratio: float | None
    verdict: str | None


@dataclass(frozen=True)
class Comparison:
    """What ``scalevec compare`` shows."""

    groups: dict[str, list[Run]]
    baseline: str
    by: str
    """``validation`` or ``training``: which loss is taken at the end."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """The rows and notes as JSON can hold them."""
        return {
            "kind": "scalevec comparison",
            "baseline": self.baseline,
            "terminal_loss": self.by,
            "rows": [asdict(row) for row in self.rows],
            "runs": [
                {
                    "label": run.label,
                    "source": run.source,
                    "seed": run.seed,
                    "loss": terminal_loss(run, self.by),
                }
                for group in self.groups.values()
                for run in group
            ],
            "notes": list(self.notes),
        }


def compare(
    runs: Sequence[Run], baseline: str | None = None, *, by: str | None = None, level: float = LEVEL
) -> Comparison:
    """Compare runs, grouped by their label.

    Args:
        runs: Two at least; those of one label are seeds of the same thing.
        baseline: The label to compare with; None takes ``stock`` if it is there, else the first.
        by: ``validation`` or ``training``; None takes validation losses where all runs have one.
        level: Share of intervals that are to hold the truth, from 0.5 to 0.999.

    Raises:
        ScaleVecError: There is nothing to compare, or runs of one label cannot be told apart.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    if len(groups) < 2:
        named = f"all runs are called {next(iter(groups))!r}" if groups else "no runs were named"
        raise ScaleVecError(f"{named}, and a comparison needs two labels: name runs as LABEL=PATH.")
    for run in runs:
        _require_finite(run)
    for label, group in groups.items():
        _require_distinct(label, group)
    if baseline is None:
        baseline = "stock" if "stock" in groups else next(iter(groups))
    if baseline not in groups:
        raise ScaleVecError(f"no run is called {baseline!r}: choose among {', '.join(groups)}.")
    groups = {baseline: groups.pop(baseline), **groups}
    validated = all(run.final_validation is not None for run in runs)
    if by == "validation" and not validated:
        without = next(run.source for run in runs if run.final_validation is None)
        raise ScaleVecError(f"{without} has no validation loss after training; compare by training.")
    by = by or ("validation" if validated else "training")
    rows = tuple(_row(label, groups, baseline, by, level) for label in groups)
    return Comparison(groups, baseline, by, rows, tuple(_notes(groups, rows, by, level)))


def _require_finite(run: Run) -> None:
    at = run.diverged_at
    if at is None:
        at = next(
            (step for step, loss in zip(run.steps.tolist(), run.losses.tolist()) if not usable(loss)), None
        )
    if at is None and run.final_validation is not None and not usable(run.final_validation):
        at = int(run.steps[-1])
    if at is not None:
        raise ScaleVecError(
            f"{run.source} diverged at step {at}: its loss is no number there that anything can be computed "
            "from; leave it out, and say beside the comparison that it diverged."
        )


def _require_distinct(label: str, group: Sequence[Run]) -> None:
    seeds = [run.seed for run in group if run.seed is not None]
    for seed in seeds:
        if seeds.count(seed) > 1:
            sources = ", ".join(run.source for run in group if run.seed == seed)
            raise ScaleVecError(
                f"{sources}: these runs are all called {label!r} and have the seed {seed}, so they are no "
                "repetitions of one another; give them labels of their own, LABEL=PATH."
            )
    for first, second in itertools.combinations(group, 2):
        if _same(first, second):
            raise ScaleVecError(
                f"{first.source}, {second.source}: these runs, both called {label!r}, are the same run, and "
                "would count as two seeds; name it once."
            )
        if first.steps[-1] < second.steps[0] or second.steps[-1] < first.steps[0]:
            raise ScaleVecError(
                f"{first.source}, {second.source}: these runs, both called {label!r}, share no step, "
                "and parts of one run are no seeds: put them into one file, or give them labels, LABEL=PATH."
            )


def _same(first: Run, second: Run) -> bool:
    if os.path.realpath(first.source) == os.path.realpath(second.source):
        return True
    return numpy.array_equal(first.steps, second.steps) and numpy.array_equal(first.losses, second.losses)


def _row(label: str, groups: dict[str, list[Run]], baseline: str, by: str, level: float) -> Row:
    mine, theirs = groups[label], groups[baseline]
    is_baseline = label == baseline
    gap = None if is_baseline else terminal_gap(theirs, mine, by=by, level=level)
    step, memory = _median(mine, "step_time_ms"), _median(mine, "memory_bytes")
    return Row(
        label=label,
        seeds=len(mine),
        terminal=bootstrap_interval([terminal_loss(run, by) for run in mine], level=level),
        gap=gap,
        token_ratio=None if is_baseline else token_ratio_of(theirs, mine, level),
        step_time_ms=step,
        step_ratio=_ratio(step, _median(theirs, "step_time_ms")),
        memory_bytes=memory,
        memory_ratio=_ratio(memory, _median(theirs, "memory_bytes")),
        verdict=None if is_baseline else verdict(label, baseline, gap),
    )


def token_ratio_of(baseline: Sequence[Run], other: Sequence[Run], level: float) -> Interval | None:
    """The geometric mean of :func:`token_ratio` over seeds: of the same seed where there are such runs,
    else of every run with every other, without an interval. None where a run was there at step 0."""
    paired = pairs(baseline, other)
    matched = paired or [(theirs, mine) for theirs in baseline for mine in other]
    ratios = [token_ratio(theirs, mine) for theirs, mine in matched]
    if not all(map(math.isfinite, ratios)):
        return None
    logs = [math.log(ratio) for ratio in ratios]
    if paired is None:
        mean = math.exp(statistics.fmean(logs))
        return Interval(mean, None, None, len(other), level=level, against=len(baseline))
    found = bootstrap_interval(logs, level=level)
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return replace(found, mean=math.exp(found.mean), low=low, high=high, paired=True)


def _median(runs: Sequence[Run], name: str) -> float | None:
    values = [getattr(run, name) for run in runs]
    return statistics.median(values) if None not in values else None


def _ratio(mine: float | None, theirs: float | None) -> float | None:
    return mine / theirs if mine and theirs else None


def _notes(groups: dict[str, list[Run]], rows: Sequence[Row], by: str, level: float) -> list[str]:
    runs = [run for group in groups.values() for run in group]
    silent = [run.source for run in runs if run.tokens is None]
    notes = list(dict.fromkeys(remark for run in runs for remark in run.remarks))
    if silent:
        notes.append(
            f"{silent[0]}{' and others do' if len(silent) > 1 else ' does'} not say how many tokens were "
            "read, so steps stand for tokens: that is right only with equal batches. --seq-length says it "
            "for runs that count sequences."
        )
    ends = [float(run.steps[-1] if silent else run.tokens[-1]) for run in runs]
    if max(ends) > min(ends) * (1 + _SAME_END):
        what = "steps" if silent else "tokens"
        notes.append(
            f"The runs end at different points ({min(ends):,.0f} to {max(ends):,.0f} {what}), and so the "
            "losses at the end, and all that is said of them, are of unequal training."
        )
    if by == "training":
        notes.append(_terminal_note(runs))
    notes += [note for label in groups if (note := _pairing_note(label, groups, rows[0].label))]
    if any(len(group) == 1 for group in groups.values()):
        notes.append("A single seed has no interval: how far another seed would end from it is not known.")
    if note := chance_note(sum(row.gap is not None and row.gap.known for row in rows), level):
        notes.append(note)
    return notes


def _terminal_note(runs: Sequence[Run]) -> str:
    """What the losses at the end are, and for a run that has few of them, of how many."""
    said = "Losses at the end are training losses: the mean of those in the last twentieth of a run's steps."
    found = []
    for run in runs:
        steps = tail_steps(int(run.steps[-1]))
        count = len(tail(dict(zip(run.steps.tolist(), run.losses.tolist()))))
        if count < steps:
            found.append(f"{run.source} has {count} there for {steps} steps")
    if found:
        said += f" {found[0]}{', and others have not one for each step either' if found[1:] else ''}."
    return said


def _pairing_note(label: str, groups: dict[str, list[Run]], baseline: str) -> str:
    """Which runs the difference of a group rests on, where that is not all of them seed by seed."""
    mine, theirs = groups[label], groups[baseline]
    if label == baseline:
        return ""
    paired = pairs(theirs, mine)
    if paired is None:
        silent = [run.source for run in (*mine, *theirs) if run.seed is None]
        why = f"{silent[0]} does not say its seed" if silent else "their seeds are not the same"
        return f"{label} and {baseline} are compared by their means, not seed by seed: {why}."
    larger, runs = max(((label, mine), (baseline, theirs)), key=lambda one: len(one[1]))
    if len(paired) == len(runs):
        return ""
    return (
        f"The difference of {label} to {baseline}, and its token ratio, rest on the {len(paired)} seeds that "
        f"both have, of {len(runs)} of {larger}."
    )
