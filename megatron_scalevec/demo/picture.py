"""loss.png: the curves, and their difference to stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from megatron_scalevec.demo.options import BASELINE

__all__ = ["draw"]

# Okabe and Ito's palette, told apart by colour-blind readers too; stock is grey.
_STOCK = "#4d4d4d"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
# The first part of a curve falls from ln 256; shown whole it would flatten the rest.
_SHOWN_FROM = 0.06


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the training curves (smoothed), the validation points and the differences to stock."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [entry["strategy"] for entry in report["summary"]]
    others = [name for name in names if name != BASELINE]
    colours = {
        BASELINE: _STOCK,
        **{n: _COLOURS[i % len(_COLOURS)] for i, n in enumerate(others)},
    }
    figure = Figure(figsize=(8, 6.4 if others else 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    ratios = {"height_ratios": [2.4, 1]} if others else None
    axes = figure.subplots(2 if others else 1, 1, sharex=True, squeeze=False, gridspec_kw=ratios)
    top, bottom = axes[0, 0], axes[-1, 0]

    unit, unit_name = (1e6, "million") if _most_tokens(report) >= 1e5 else (1e3, "thousand")
    training = {name: _matrix(report, name, "training", unit) for name in names}
    validation = {name: _matrix(report, name, "validation", unit) for name in names}
    for name in names:
        colour = colours[name]
        tokens, losses = training[name]
        smooth = _smooth(losses)
        top.plot(tokens, smooth.mean(0), color=colour, linewidth=1.4, label=f"{name}, training")
        if len(smooth) > 1:
            top.fill_between(tokens, smooth.min(0), smooth.max(0), color=colour, alpha=0.15, linewidth=0)
        tokens, losses = validation[name]
        top.plot(
            tokens,
            losses.mean(0),
            color=colour,
            linestyle="none",
            marker="o",
            markersize=5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            label=f"{name}, validation",
        )
    top.set_ylabel("loss (nats per byte)")
    top.set_ylim(*_limits(training, validation))
    top.legend(frameon=False, ncols=2 if len(names) < 4 else 3)
    size = report["summary"][0]["parameters"]["stock"]
    title = "Megatron-LM on bytes of text" if size is None else f"GPT with {size / 1e6:.2f} M parameters"
    seeds = report["summary"][0]["seeds"]
    top.set_title(
        f"{title}, {report['arguments']['steps']} steps"
        + (f", mean of {seeds} seeds (band: lowest to highest)" if seeds > 1 else ""),
        fontsize=10,
        loc="left",
    )
    if others:
        bottom.axhline(0.0, color=_STOCK, linewidth=1)
        for name in others:
            _draw_difference(bottom, training, validation, name, colours[name])
        bottom.set_ylabel("difference to stock\n(below 0 is better)")
        _limit_differences(bottom, training, validation, others)
    bottom.set_xlabel(f"training text read ({unit_name} bytes)")
    for axis in axes[:, 0]:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    figure.savefig(path, metadata={"Software": None})


def _most_tokens(report: dict[str, Any]) -> int:
    return max((run["training"][-1]["tokens"] for run in report["runs"] if run["training"]), default=0)


def _matrix(report: dict[str, Any], name: str, kind: str, unit: float) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Tokens in the unit, and losses with one row per seed, at the steps that all seeds have."""
    curves = [
        {point["tokens"]: point["loss"] for point in run[kind]}
        for run in report["runs"]
        if run["strategy"] == name
    ]
    if kind == "validation":
        # The last point stands at the end of training, whatever the interval.
        finals = [r["final_validation_loss"] for r in report["runs"] if r["strategy"] == name]
        for curve, final in zip(curves, finals, strict=True):
            curve[_most_tokens(report)] = final
    shared = sorted(set.intersection(*map(set, curves)))
    losses = [[_value(curve[tokens]) for tokens in shared] for curve in curves]
    return numpy.array(shared) / unit, numpy.array(losses, dtype=float).reshape(len(curves), -1)


def _value(loss: float | None) -> float:
    return float("nan") if loss is None else loss


def _smooth(losses: numpy.ndarray) -> numpy.ndarray:
    """Centred moving average; at both ends over what there is."""
    steps = losses.shape[1]
    half = min(25, steps // 40)
    if half == 0:
        return losses
    sums = numpy.cumsum(numpy.pad(losses, ((0, 0), (1, 0))), axis=1)
    at = numpy.arange(steps)
    low, high = numpy.maximum(at - half, 0), numpy.minimum(at + half + 1, steps)
    return (sums[:, high] - sums[:, low]) / (high - low)


def _draw_difference(axis: Any, training: Any, validation: Any, name: str, colour: str) -> None:
    tokens, difference = _difference(training, name, smooth=True)
    axis.plot(tokens, difference.mean(0), color=colour, linewidth=1.2)
    if len(difference) > 1:
        axis.fill_between(tokens, difference.min(0), difference.max(0), color=colour, alpha=0.15, linewidth=0)
    tokens, difference = _difference(validation, name, smooth=False)
    axis.plot(
        tokens,
        difference.mean(0),
        color=colour,
        linestyle="none",
        marker="o",
        markersize=5,
        markeredgecolor="white",
        markeredgewidth=0.6,
    )


def _difference(curves: Any, name: str, *, smooth: bool) -> tuple[numpy.ndarray, numpy.ndarray]:
    """A strategy minus stock, seed by seed, where both have a value."""
    tokens, losses = curves[name]
    stock_tokens, stock = curves[BASELINE]
    shared, mine, theirs = numpy.intersect1d(tokens, stock_tokens, return_indices=True)
    difference = losses[:, mine] - stock[:, theirs]
    return shared, _smooth(difference) if smooth else difference


def _limits(training: Any, validation: Any) -> tuple[float, float]:
    low, high = [], []
    for tokens, losses in training.values():
        shown = _smooth(losses)[:, int(_SHOWN_FROM * len(tokens)) :]
        low.append(numpy.nanmin(shown))
        high.append(numpy.nanmax(shown))
    for _, losses in validation.values():
        low.append(numpy.nanmin(losses))
        high.append(numpy.nanmax(losses))
    margin = 0.04 * (max(high) - min(low)) or 0.1
    return min(low) - margin, max(high) + margin


def _limit_differences(axis: Any, training: Any, validation: Any, names: list[str]) -> None:
    """As large as the differences are once the first steps are over."""
    largest = 0.0
    for name in names:
        tokens, difference = _difference(training, name, smooth=True)
        shown = numpy.abs(difference[:, int(2 * _SHOWN_FROM * len(tokens)) :])
        _, points = _difference(validation, name, smooth=False)
        largest = max(largest, numpy.nanmax(shown), numpy.nanmax(numpy.abs(points)))
    if largest > 0:
        axis.set_ylim(-1.15 * largest, 1.15 * largest)
