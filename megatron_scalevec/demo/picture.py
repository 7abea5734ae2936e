"""loss.png: the curves, and their difference to stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_scalevec.compare.picture import draw as draw_runs
from megatron_scalevec.compare.reading import demo_runs
from megatron_scalevec.demo.options import BASELINE

__all__ = ["draw"]


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the training curves (smoothed), the validation points and the differences to stock."""
    runs = demo_runs(report, str(path))
    groups = {
        entry["strategy"]: [run for run in runs if run.label == entry["strategy"]]
        for entry in report["summary"]
    }
    size = report["summary"][0]["parameters"]["stock"]
    title = "Megatron-LM on bytes of text" if size is None else f"GPT with {size / 1e6:.2f} M parameters"
    title += f", {report['arguments']['steps']} steps"
    seeds = report["summary"][0]["seeds"]
    if seeds > 1:
        title += f", mean of {seeds} seeds (band: lowest to highest)"
    draw_runs(groups, BASELINE, path, title=title, token="byte")
