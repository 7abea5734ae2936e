"""The picture of a comparison: the curves, and their difference to the baseline."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from megatron_scalevec.compare.run import Run, along, visible
from megatron_scalevec.compare.statistics import pairs, smooth

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
# Places that are apart by no more than this share of them count as one.
_NEAR = 0.01
# In characters.
_LONGEST_LABEL, _LONGEST_TITLE, _LEGEND_WIDTH = 40, 140, 80
# A curve, and those of several seeds: places [n] and losses [seeds, n].
_Curves = tuple[numpy.ndarray, numpy.ndarray]


def draw(
    groups: Mapping[str, Sequence[Run]],
    baseline: str,
    *,
    title: str,
    token: str = "token",
    with_time: bool = False,
) -> bytes:
    """Draw training curves (smoothed), validation points, and the differences to the baseline.

    Args:
        groups: Runs by label; those of a label differ in their seed.
        baseline: The label that the others are compared with.
        title: What stands above.
        token: What a token is called on the axes.
        with_time: Add the curves against time, where all runs say their times.

    Returns:
        A PNG.
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
        named = _written(baseline, _LONGEST_LABEL)
        bottom.set_ylabel(f"difference to {named}\n(below 0 is better)", parse_math=False)
    bottom.set_xlabel(axis_name)
    if with_time:
        longest = max(run.seconds[-1] for run in runs)
        unit, name = next((u, n) for u, n in _TIMES if longest > 2 * u or u == 1.0)
        _draw_losses(
            axes["time"],
            groups,
            colours,
            lambda run, steps: _along(run, run.seconds, steps) / unit,
        )
        axes["time"].set_xlabel(f"time in training steps ({name})")
    top.set_ylabel(f"loss (nats per {token})")
    _name_curves(top, groups, validation)
    top.set_title(_written(title, _LONGEST_TITLE), fontsize=10, loc="left", parse_math=False)
    for axis in axes.values():
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels([top, bottom])
    written = io.BytesIO()
    figure.savefig(written, format="png", metadata={"Software": None})
    return written.getvalue()


def _written(text: str, most: int) -> str:
    """A text that has room in a picture."""
    seen = visible(text)
    return seen if len(seen) <= most else f"{seen[: most // 2 - 1]}…{seen[-most // 2 :]}"


def _name_curves(axis: Any, groups: Any, validation: Any) -> None:
    """The legend. Names go in afterwards: matplotlib leaves out curves whose name begins with ``_``."""
    kinds = {name: ["training", *(["validation"] if name in validation else [])] for name in groups}
    names = [f"{_written(name, _LONGEST_LABEL)}, {kind}" for name in groups for kind in kinds[name]]
    room = _LEGEND_WIDTH // (max(map(len, names)) + 5)  # 5 for the line or mark
    legend = axis.legend(frameon=False, ncols=max(1, min(room, 2 if len(groups) < 4 else 3)))
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(name)


def _along(run: Run, counts: numpy.ndarray, steps: Sequence[float]) -> numpy.ndarray:
    found = along(steps, dict(zip(run.steps.tolist(), counts.tolist())))
    return numpy.zeros(len(steps)) if found is None else found


def _places(runs: Sequence[Run], token: str) -> tuple[Any, str]:
    """Where on the first axis a run's steps are, and what that axis is called."""
    if any(run.tokens is None for run in runs):
        return (lambda run, steps: numpy.asarray(steps, dtype=float)), "steps"
    most = max(run.tokens[-1] for run in runs)
    units = ((1e9, "billion"), (1e6, "million"), (1e3, "thousand"))
    unit, name = next((one for one in units if most >= one[0] / 10), (1.0, ""))
    what = f"training text read ({' '.join(filter(None, (name, token)))}s)"
    return (lambda run, steps: _along(run, run.tokens, steps) / unit), what


def _draw_losses(axis: Any, groups: Any, colours: Any, places: Any) -> tuple[Any, Any]:
    """Draw training curves and validation points; returns both by label."""
    training = {name: _together([_training(run, places) for run in runs]) for name, runs in groups.items()}
    validation = {
        name: _together([_validation(run, places) for run in runs])
        for name, runs in groups.items()
        if all(_validation_points(run) for run in runs)
    }
    for name, colour in colours.items():
        _draw(axis, training[name], "training", colour, 1.4)
        if name in validation:
            where, losses = validation[name]
            axis.plot(where, losses.mean(0), color=colour, label="validation", **_MARKS)
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
    """Curves of several seeds on the places of the one that ends first, from where all have begun."""
    where = min((where for where, _ in curves), key=lambda where: where[-1])
    begun = where >= max(where[0] for where, _ in curves) * (1 - _NEAR)
    where = where[begun] if begun.any() else where[-1:]
    return where, numpy.stack([numpy.interp(where, x, y) for x, y in curves])


def _difference(groups: Any, curves: Mapping[str, _Curves], name: str, baseline: str) -> _Curves:
    """A group minus the baseline where both have curves: pair by pair, or from its mean, as :func:`pairs`
    says."""
    where, losses = curves[name]
    there, theirs = curves[baseline]
    shared = (where >= there[0] * (1 - _NEAR)) & (where <= there[-1] * (1 + _NEAR))
    where, losses = where[shared], losses[:, shared]
    moved = numpy.stack([numpy.interp(where, there, row) for row in theirs])
    paired = pairs(groups[baseline], groups[name])
    if paired is None:
        return where, losses - moved.mean(0)
    rows = {**dict(zip(groups[baseline], moved)), **dict(zip(groups[name], losses))}
    return where, numpy.stack([rows[mine] - rows[theirs] for theirs, mine in paired])


def _shown(curves: _Curves, start: float) -> numpy.ndarray:
    where, losses = curves
    return losses[:, where >= start * where.max(initial=0.0)]


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
