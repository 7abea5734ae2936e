"""The picture of a comparison: the curves, and their difference to the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from megatron_scalevec.compare.reading import Run
from megatron_scalevec.compare.statistics import smooth

__all__ = ["draw"]

# Okabe and Ito's palette, told apart by colour-blind readers too; the baseline is grey.
_BASELINE = "#4d4d4d"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
_TIMES = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
# The first part of a curve falls from ln 256; shown whole it would flatten the rest.
_SHOWN_FROM = 0.06
_MARKS = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 5,
    "markeredgecolor": "white",
    "markeredgewidth": 0.6,
}
# A curve, and those of several seeds: places [n] and losses [seeds, n].
_Curves = tuple[numpy.ndarray, numpy.ndarray]


def draw(
    groups: Mapping[str, Sequence[Run]],
    baseline: str,
    path: Path | Any,
    *,
    title: str,
    token: str = "token",
    with_time: bool = False,
) -> None:
    """Draw training curves (smoothed), validation points, and the differences to the baseline.

    Args:
        groups: Runs by label; those of a label differ in their seed.
        baseline: The label that the others are compared with.
        path: Where to write a PNG; a path or a binary file.
        title: What stands above.
        token: What a token is called on the axes.
        with_time: Add the curves against time, where all runs say their times.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    others = [name for name in groups if name != baseline]
    colours = {baseline: _BASELINE, **{n: _COLOURS[i % len(_COLOURS)] for i, n in enumerate(others)}}
    runs = [run for group in groups.values() for run in group]
    with_time = with_time and all(run.seconds is not None for run in runs)
    figure = Figure(figsize=(13 if with_time else 8, 6.4 if others else 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left = ["tokens", "difference"] if others else ["tokens"]
    axes = figure.subplot_mosaic(
        [[name, "time"] if with_time else [name] for name in left],
        gridspec_kw={"height_ratios": [2.4, 1]} if others else None,
    )
    places, axis_name = _places(runs, token)
    top, bottom = axes["tokens"], axes.get("difference", axes["tokens"])
    if others:
        top.sharex(bottom)
        top.tick_params(labelbottom=False)
    training, validation = _draw_losses(top, groups, colours, places)
    if others:
        _draw_differences(bottom, groups, baseline, colours, training, validation)
        bottom.set_ylabel(f"difference to {baseline}\n(below 0 is better)")
    bottom.set_xlabel(axis_name)
    if with_time:
        longest = max(run.seconds[-1] for run in runs)
        unit, name = next((u, n) for u, n in _TIMES if longest > 2 * u or u == 1.0)
        _draw_losses(
            axes["time"],
            groups,
            colours,
            lambda run, steps: numpy.interp(steps, run.steps, run.seconds) / unit,
        )
        axes["time"].set_xlabel(f"time in training steps ({name})")
    top.set_ylabel(f"loss (nats per {token})")
    top.legend(frameon=False, ncols=2 if len(groups) < 4 else 3)
    top.set_title(title, fontsize=10, loc="left")
    for axis in axes.values():
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels([top, bottom])
    figure.savefig(path, format="png", metadata={"Software": None})


def _places(runs: Sequence[Run], token: str) -> tuple[Any, str]:
    """Where on the first axis a run's steps are, and what that axis is called."""
    if any(run.tokens is None for run in runs):
        return (lambda run, steps: numpy.asarray(steps, dtype=float)), "steps"
    most = max(run.tokens[-1] for run in runs)
    unit, name = next(
        (unit, name)
        for unit, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand"), (1, ""))
        if most >= unit / 10
    )
    what = f"training text read ({' '.join(filter(None, (name, token)))}s)"
    return (lambda run, steps: numpy.interp(steps, run.steps, run.tokens) / unit), what


def _draw_losses(axis: Any, groups: Any, colours: Any, places: Any) -> tuple[Any, Any]:
    """Draw training curves and validation points; returns both by label."""
    training = {name: _together([_training(run, places) for run in runs]) for name, runs in groups.items()}
    validation = {
        name: _together([_validation(run, places) for run in runs])
        for name, runs in groups.items()
        if all(_validation_points(run) for run in runs)
    }
    for name, colour in colours.items():
        _draw(axis, training[name], f"{name}, training", colour, 1.4)
        if name in validation:
            where, losses = validation[name]
            axis.plot(where, losses.mean(0), color=colour, label=f"{name}, validation", **_MARKS)
    axis.set_ylim(*_limits(training, validation))
    return training, validation


def _draw_differences(
    axis: Any, groups: Any, baseline: str, colours: Any, training: Any, validation: Any
) -> None:
    axis.axhline(0.0, color=_BASELINE, linewidth=1)
    others = [name for name in colours if name != baseline]
    differences = {name: _difference(groups, training, name, baseline) for name in others}
    points = {
        name: _difference(groups, validation, name, baseline)
        for name in others
        if name in validation and baseline in validation
    }
    for name in others:
        _draw(axis, differences[name], None, colours[name], 1.2)
        if name in points:
            where, values = points[name]
            axis.plot(where, values.mean(0), color=colours[name], **_MARKS)
    _limit_differences(axis, differences, points)


def _draw(axis: Any, curves: _Curves, label: str | None, colour: str, width: float) -> None:
    where, losses = curves
    axis.plot(where, losses.mean(0), color=colour, linewidth=width, label=label)
    if len(losses) > 1:
        axis.fill_between(where, losses.min(0), losses.max(0), color=colour, alpha=0.15, linewidth=0)


def _training(run: Run, places: Any) -> tuple[numpy.ndarray, numpy.ndarray]:
    return places(run, run.steps), smooth(run.losses)


def _validation_points(run: Run) -> list[tuple[float, float]]:
    points = list(run.validation)
    if run.final_validation is not None:
        # The last point stands at the end of training, whatever the interval.
        points.append((float(run.steps[-1]), run.final_validation))
    return points


def _validation(run: Run, places: Any) -> tuple[numpy.ndarray, numpy.ndarray]:
    steps, losses = zip(*_validation_points(run))
    return places(run, steps), numpy.array(losses, dtype=float)


def _together(curves: Sequence[tuple[numpy.ndarray, numpy.ndarray]]) -> _Curves:
    """Curves of several seeds on the places of the one that ends first."""
    where = min((where for where, _ in curves), key=lambda where: where[-1])
    return where, numpy.stack([numpy.interp(where, x, y) for x, y in curves])


def _difference(groups: Any, curves: Mapping[str, _Curves], name: str, baseline: str) -> _Curves:
    """A group minus the baseline, seed by seed where both have the same, else from its mean."""
    where, losses = curves[name]
    there, theirs = curves[baseline]
    shared = where <= there[-1] * (1 + 1e-9)
    where, losses = where[shared], losses[:, shared]
    moved = numpy.stack([numpy.interp(where, there, row) for row in theirs])
    rows = {run.seed: row for run, row in zip(groups[baseline], moved)}
    mine = [run.seed for run in groups[name]]
    if None in mine or not set(mine) <= set(rows):
        return where, losses - moved.mean(0)
    return where, losses - numpy.stack([rows[seed] for seed in mine])


def _shown(curves: _Curves, start: float) -> numpy.ndarray:
    where, losses = curves
    return losses[:, where >= start * where[-1]]


def _limits(training: Mapping[str, _Curves], validation: Mapping[str, _Curves]) -> tuple[float, float]:
    shown = [_shown(curves, _SHOWN_FROM) for curves in training.values()]
    shown += [losses for _, losses in validation.values()]
    low = min(float(numpy.nanmin(losses)) for losses in shown)
    high = max(float(numpy.nanmax(losses)) for losses in shown)
    margin = 0.04 * (high - low) or 0.1
    return low - margin, high + margin


def _limit_differences(axis: Any, differences: Any, points: Any) -> None:
    """As large as the differences are once the first steps are over."""
    shown = [_shown(curves, 2 * _SHOWN_FROM) for curves in differences.values()]
    shown += [values for _, values in points.values()]
    largest = max((float(numpy.nanmax(numpy.abs(values))) for values in shown if values.size), default=0.0)
    if largest > 0:
        axis.set_ylim(-1.15 * largest, 1.15 * largest)
