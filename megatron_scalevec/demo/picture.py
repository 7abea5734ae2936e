"""loss.png: the curves, and their difference to stock."""

from __future__ import annotations

from typing import Any

from megatron_scalevec.compare.picture import draw as draw_runs
from megatron_scalevec.compare.reading import demo_runs
from megatron_scalevec.demo.options import BASELINE

__all__ = ["draw"]


def draw(report: dict[str, Any]) -> bytes:
    """The training curves (smoothed), the validation points and the differences to stock, as a PNG."""
    runs = demo_runs(report, "the report")
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
    return draw_runs(groups, BASELINE, title=title, token="byte")
