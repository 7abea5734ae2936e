#!/usr/bin/env python3
"""Draws the figures of docs/how-it-works.md.

usage: python scripts/site_figures.py [FOLDER]

FOLDER is docs/images unless another one is named. The numbers are computed here, in float64.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import numpy
from matplotlib import pyplot
from matplotlib.patches import Ellipse, FancyBboxPatch

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
BLUE, ORANGE, GREY = "#2a6f97", "#d1603d", "#777777"

# A loss of the weights that one input channel has in a branch with two outputs: half a quadratic form
# around TARGET.
CURVATURE = numpy.array([[3.0, 0.0], [0.0, 0.4]])
TARGET = numpy.array([1.6, 1.2])
START = numpy.array([0.25, 1.8])
TIME, STEPS = 4.0, 4000
MARKS = (0.0, 0.1, 0.3, 1.0)


def gradient(effective: numpy.ndarray) -> numpy.ndarray:
    """Of the loss with respect to the effective weight."""
    return CURVATURE @ (effective - TARGET)


def preconditioner(gamma: float, weight: numpy.ndarray) -> numpy.ndarray:
    """P = γ² I + w wᵀ: what gradient flow on γ and w makes of the effective weight's gradient."""
    return gamma**2 * numpy.eye(len(weight)) + numpy.outer(weight, weight)


def flow(learns_gamma: bool) -> list[tuple[float, float, numpy.ndarray]]:
    """Time, γ and w along gradient flow from γ = 1, by Euler steps."""
    gamma, weight = 1.0, START.copy()
    step = TIME / STEPS
    path = [(0.0, gamma, weight.copy())]
    for number in range(1, STEPS + 1):
        slope = gradient(gamma * weight)
        change = step * float(slope @ weight)
        weight = weight - step * gamma * slope
        gamma -= change if learns_gamma else 0.0
        path.append((number * step, gamma, weight.copy()))
    return path


def draw_preconditioning() -> pyplot.Figure:
    """Paths of the effective weight, and the preconditioner on the way."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8))
    x, y = numpy.meshgrid(numpy.linspace(-0.4, 2.6, 90), numpy.linspace(0.4, 2.6, 90))
    offset = numpy.stack([x - TARGET[0], y - TARGET[1]])
    loss = 0.5 * numpy.einsum("iab,ij,jab->ab", offset, CURVATURE, offset)
    left.contour(x, y, loss, levels=[0.02, 0.1, 0.3, 0.8, 1.8, 3.5], colors=GREY, linewidths=0.5)
    for learns, color, name in ((False, GREY, "γ fixed at 1"), (True, ORANGE, "γ and w both learn")):
        path = flow(learns)
        points = numpy.array([gamma * weight for _, gamma, weight in path])
        left.plot(*points.T, color=color, label=name, linewidth=2)
        times = [time for time, _, _ in path]
        right.plot(times, [_loss(point) for point in points], color=color, label=name, linewidth=2)
    learned = flow(True)
    for mark in MARKS:
        _, gamma, weight = learned[round(mark / TIME * STEPS)]
        values, vectors = numpy.linalg.eigh(preconditioner(gamma, weight))
        angle = numpy.degrees(numpy.arctan2(vectors[1, 1], vectors[0, 1]))
        width, height = 0.12 * values[1], 0.12 * values[0]
        left.add_patch(
            Ellipse(gamma * weight, width, height, angle=angle, fill=False, edgecolor=BLUE, linewidth=1.2)
        )
    left.plot(*TARGET, "k+", markersize=9)
    left.set(
        title="effective weight γ w, two outputs",
        xlabel="first output",
        ylabel="second output",
        aspect="equal",
    )
    right.set(title="loss", xlabel="time of the flow", yscale="log", ylim=(1e-3, 4))
    right.legend(frameon=False)
    figure.tight_layout()
    return figure


def _loss(effective: numpy.ndarray) -> float:
    offset = effective - TARGET
    return 0.5 * float(offset @ CURVATURE @ offset)


PLACES = (
    ("stock", ["Norm", "γ", "W (q, k, v)"]),
    ("hg: input", ["Norm", "γ_q | γ_k | γ_v", "W"]),
    ("post-qkv: output", ["Norm", "W", "γ_q | γ_k | γ_v"]),
    ("dp: dual", ["Norm", "γ_in per branch", "W", "γ_out per branch"]),
    ("dnp: dual-norm", ["Norm", "γ_in per branch", "W", "Norm per head", "γ_out per branch"]),
)


def draw_places() -> pyplot.Figure:
    """Where the vectors stand in an attention layer."""
    figure, axes = pyplot.subplots(figsize=(9, 3.4))
    for row, (name, boxes) in enumerate(PLACES):
        height = len(PLACES) - row
        axes.text(0, height, name, va="center", fontsize=10)
        for column, label in enumerate(boxes):
            left = 2.0 + 1.75 * column
            color = ORANGE if "γ" in label else BLUE if label.startswith("W") else GREY
            axes.add_patch(
                FancyBboxPatch(
                    (left, height - 0.27), 1.4, 0.54, "round,pad=0.04", facecolor="none", edgecolor=color
                )
            )
            axes.text(left + 0.7, height, label, ha="center", va="center", fontsize=8.5)
            if column:
                axes.annotate(
                    "",
                    (left - 0.05, height),
                    (left - 0.3, height),
                    arrowprops={"arrowstyle": "->", "color": GREY},
                )
    axes.set(xlim=(-0.1, 10.6), ylim=(0.4, len(PLACES) + 0.6))
    axes.axis("off")
    figure.tight_layout()
    return figure


DECAY = 1e-3 * 0.1
"""Learning rate times weight decay."""


def decayed(steps: numpy.ndarray, factors: int) -> numpy.ndarray:
    """What decay alone leaves of γ = 1, stored as a product of decaying factors."""
    return (1 - DECAY) ** (factors * steps)


def draw_decay() -> pyplot.Figure:
    """What decay alone does to γ and to W_eff."""
    steps = numpy.arange(0, 20001, 200)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.3), sharey=True)
    left.plot(steps, decayed(steps, 0), color=GREY, label="stock: no decay on γ")
    left.plot(steps, decayed(steps, 1), color=BLUE, label="none, and the g of unit")
    left.plot(steps, decayed(steps, 2), color=ORANGE, label="product: β and α both decay")
    left.set(title="γ", xlabel="steps without a gradient", ylim=(0, 1.05))
    right.plot(steps, decayed(steps, 1), color=GREY, label="stock: W alone")
    right.plot(steps, decayed(steps, 2), color=BLUE, label="W and γ_in")
    right.plot(steps, decayed(steps, 3), color=ORANGE, label="W, γ_in and γ_out")
    right.set(title="W_eff", xlabel="steps without a gradient")
    for axes in (left, right):
        axes.legend(frameon=False)
    figure.tight_layout()
    return figure


FIGURES = {
    "preconditioning.svg": draw_preconditioning,
    "places.svg": draw_places,
    "decay.svg": draw_decay,
}


def main(argv: list[str]) -> int:
    """Write the figures; the same every time."""
    folder = Path(argv[0]) if argv else IMAGES
    matplotlib.rcParams.update({"svg.hashsalt": "scalevec", "svg.fonttype": "path", "font.size": 9})
    for name, draw in FIGURES.items():
        figure = draw()
        figure.savefig(folder / name, metadata={"Date": None, "Creator": None}, facecolor="white")
        pyplot.close(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
