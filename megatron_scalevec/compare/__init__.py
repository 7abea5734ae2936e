"""``scalevec compare``: runs that have been trained, against each other, in figures and in words."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_scalevec.compare.comparison import Comparison, Row, compare
from megatron_scalevec.compare.picture import draw
from megatron_scalevec.compare.reading import read_run, read_runs
from megatron_scalevec.compare.rendering import render, table
from megatron_scalevec.compare.run import Run
from megatron_scalevec.compare.statistics import (
    Interval,
    bootstrap_interval,
    smooth,
    terminal_gap,
    terminal_loss,
    token_ratio,
)
from megatron_scalevec.compare.verdict import verdict

__all__ = [
    "Comparison",
    "Interval",
    "Row",
    "Run",
    "bootstrap_interval",
    "compare",
    "draw",
    "main",
    "read_run",
    "read_runs",
    "render",
    "smooth",
    "table",
    "terminal_gap",
    "terminal_loss",
    "token_ratio",
    "verdict",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the runs on the command line; returns the exit code.

    Raises:
        ScaleVecError: Something cannot be done as asked; nothing was written.
    """
    from megatron_scalevec.compare.command import run

    return run(sys.argv[1:] if argv is None else argv)
