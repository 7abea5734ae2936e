"""From values to figures: sums that ranks can add up, largest values, and what both come to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_scalevec.telemetry.vectors import Batch, Found

__all__ = ["NEAR_ZERO", "STATISTICS", "extremes_of", "figures", "sums_of"]

NEAR_ZERO = 0.01
"""An entry of γ counts as near zero below this absolute value. Every scale starts at one."""

STATISTICS = (
    "rms",
    "min",
    "max",
    "magnitude",
    "drift",
    "near_zero",
    "gradient_rms",
    "magnitude_gradient",
    "update_ratio",
    "lambda_min",
    "lambda_max",
    "condition",
)
"""What is told of the vectors of a kind and layer; see ``docs/telemetry.md``."""


def sums_of(batch: Batch) -> torch.Tensor:
    """float64 [vectors, 10], additive over vectors; the order is :func:`figures`'s."""
    gamma, rows = batch.after, len(batch.vectors)
    square = gamma.square().sum(1)
    length = (square * batch.size).sqrt()
    cosine = torch.where(length > 0, gamma.sum(1) / length, torch.zeros_like(length))
    none = torch.full_like(square, float("nan"))
    return torch.stack(
        [
            torch.ones_like(square),
            torch.full_like(square, float(batch.size)),
            square,
            1 - cosine,
            (gamma.abs() < NEAR_ZERO).sum(1).to(square.dtype),
            batch.gradient.square().sum(1),
            (gamma - batch.before).square().sum(1),
            batch.before.square().sum(1),
            none if batch.magnitude is None else batch.magnitude,
            none if batch.magnitude_gradient is None else batch.magnitude_gradient.square(),
        ],
        dim=1,
    ).view(rows, -1)


def extremes_of(batch: Batch, columns: Mapping[Found, torch.Tensor]) -> torch.Tensor:
    """float64 [vectors, 5] whose maxima count: −min and max of γ, −λ_min, λ_max and condition number of
    γ_j² I + w_j w_jᵀ; −inf where no w_j belongs to the vector."""
    gamma = batch.after
    absent = torch.full_like(gamma[0], float("nan"))
    lengths = torch.stack([columns.get(vector, absent) for vector in batch.vectors])
    square = gamma.square()
    known = ~lengths.isnan().any(1, keepdim=True)
    of_preconditioner = [-square, square + lengths, 1 + lengths / square]
    found = [-gamma, gamma, *(torch.where(known, value, -math.inf) for value in of_preconditioner)]
    return torch.stack([value.amax(1) for value in found], dim=1)


def figures(sums: Sequence[float], extremes: Sequence[float], skipped: bool) -> dict[str, Any]:
    """:data:`STATISTICS` by name, and ``vectors`` and ``size``; None where there is no such figure.

    Args:
        sums: [10] of the vectors of a kind and layer together.
        extremes: [5] of them.
        skipped: The optimizer took no step, so there was no gradient that it took.
    """
    vectors, entries, square, drift, near, gradient, change, before, magnitude, of_magnitude = sums
    low, high, smallest, largest, condition = extremes
    found = {
        "rms": _root(square / entries),
        "min": -low,
        "max": high,
        "magnitude": magnitude / vectors,
        "drift": drift / vectors,
        "near_zero": near / entries,
        "gradient_rms": None if skipped else _root(gradient / entries),
        "magnitude_gradient": None if skipped else _root(of_magnitude / vectors),
        "update_ratio": _root(change / before) if before else None,
        "lambda_min": -smallest,
        "lambda_max": largest,
        "condition": condition,
    }
    finite = {
        name: value if value is not None and math.isfinite(value) else None for name, value in found.items()
    }
    return {"vectors": round(vectors), "size": round(entries / vectors), **finite}


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan
