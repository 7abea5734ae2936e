"""Which runs a study still wants, as a function of the results that are there.

Nothing else is remembered, so a study that was killed goes on as if it had not been.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_scalevec.study.arms import Arm
from megatron_scalevec.study.options import Options, rounded

__all__ = ["Cell", "Job", "Losses", "Tuning", "cells", "tuning_of", "unplanned_runs", "wanted"]

Losses = Mapping[str, float]
"""Name of a finished run to its final validation loss, NaN where it diverged."""


@dataclass(frozen=True)
class Cell:
    """What gets a mean and an interval: an arm under an optimizer."""

    optimizer: str
    arm: Arm


@dataclass(frozen=True)
class Job:
    """One run."""

    stage: str
    """``tune`` or ``final``."""
    cell: Cell
    rate: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """Its name in the study's folder; what else it depends on is fixed for the folder."""
        cell = self.cell
        return f"{self.stage}-{cell.optimizer}-{cell.arm.label}-lr{self.rate:g}-seed{self.seed}".replace(
            "/", "."
        )


@dataclass(frozen=True)
class Tuning:
    """How far the choice of a cell's learning rate is."""

    losses: tuple[tuple[float, float | None], ...]
    """Learning rates, rising, and the losses there: None if not known yet, NaN if diverged."""
    chosen: float | None
    """None until all losses are known, and where every run diverged."""
    at_edge: bool
    """Whether the chosen rate is the lowest or highest that was tried, of more than one."""
    failed: bool
    """Whether every run diverged and no further rate may be tried."""


def cells(options: Options) -> list[Cell]:
    """All cells, those that are compared with each other together."""
    return [Cell(optimizer, arm) for optimizer in options.optimizers for arm in options.arms]


def tuning_of(cell: Cell, options: Options, finished: Losses) -> Tuning:
    """The state of a cell's tuning.

    The next rate beyond the lowest or highest is tried where that one is the best, ``options.widen`` times
    at most.
    """
    rates = options.rates[cell.optimizer]
    if len(rates) == 1:
        return Tuning(((rates[0], None),), rates[0], at_edge=False, failed=False)
    left = options.widen
    while True:
        losses = tuple((rate, finished.get(_tuning(cell, rate, options).name)) for rate in rates)
        if any(loss is None for _, loss in losses):
            return Tuning(losses, None, at_edge=False, failed=False)
        good = [(loss, rate) for rate, loss in losses if not math.isnan(loss)]
        best = min(good)[1] if good else rates[0]
        at_edge = best in (rates[0], rates[-1])
        if not at_edge or left == 0:
            return Tuning(losses, best if good else None, at_edge=at_edge, failed=not good)
        left -= 1
        if best == rates[0]:
            rates = (rounded(rates[0] * (rates[0] / rates[1])), *rates)
        else:
            rates = (*rates, rounded(rates[-1] * (rates[-1] / rates[-2])))


def _tuning(cell: Cell, rate: float, options: Options) -> Job:
    return Job("tune", cell, rate, options.tuning_seed, options.tuning_steps)


def wanted(options: Options, finished: Losses) -> list[Job]:
    """Runs that can be started now and have no result: those that tune, then all cells seed by seed."""
    tuning, final = [], []
    for cell in cells(options):
        state = tuning_of(cell, options, finished)
        if state.chosen is None:
            jobs = [_tuning(cell, rate, options) for rate, loss in state.losses if loss is None]
            tuning += jobs
            continue
        jobs = [Job("final", cell, state.chosen, seed, options.steps) for seed in options.seeds]
        final += [job for job in jobs if job.name not in finished]
    order = {seed: index for index, seed in enumerate(options.seeds)}
    return tuning + sorted(final, key=lambda job: order[job.seed])


def unplanned_runs(options: Options, finished: Losses) -> int:
    """Runs at the chosen rate of those cells whose rate is not chosen yet."""
    states = [tuning_of(cell, options, finished) for cell in cells(options)]
    return sum(state.chosen is None and not state.failed for state in states) * len(options.seeds)
