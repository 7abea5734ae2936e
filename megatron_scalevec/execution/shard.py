"""Arithmetic on one shard of a folded weight: split of the gradient, fold, and the way back.

A shard is a range [start, stop) of the elements of a row-major weight [rows, columns]; the distributed
optimizer cuts anywhere, in the middle of a row too. All functions walk over it in rectangles that stay
inside one run of rows, so that a branch's vector applies to a whole rectangle and temporaries are bounded.

Plain torch, no Megatron; :mod:`megatron_scalevec.execution.kernels` has the same for CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_scalevec.fold import RowMap

__all__ = [
    "Part",
    "Run",
    "Scales",
    "column_squares",
    "fold_into",
    "fold_parts",
    "rectangles",
    "runs_of",
    "split_gradient",
    "split_parts",
    "unfold_into",
]

# Elements of the one temporary. On the CPU it is to stay in a cache between the passes over it, and to be so
# large that the calls themselves do not count.
_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 22}
# A column sum over this many rows loses no more than about 2e-6 in float32; the sums of such sums are
# kept in float64.
_ROWS = 1024


@dataclass(frozen=True)
class Run:
    """Local rows [start, stop) of one branch, whose output channels follow one another from ``channel``."""

    start: int
    stop: int
    branch: int
    channel: int


def runs_of(row_map: RowMap) -> tuple[Run, ...]:
    """The runs of a row map, in the order of the rows."""
    branches, slots = row_map.branch_of_row.tolist(), row_map.slot_of_row.tolist()
    first = [sum(row_map.sizes[:index]) for index in range(len(row_map.sizes))]
    runs: list[Run] = []
    start = 0
    for row in range(1, len(branches) + 1):
        goes_on = (
            row < len(branches) and branches[row] == branches[start] and slots[row] == slots[row - 1] + 1
        )
        if not goes_on:
            branch = branches[start]
            runs.append(Run(start, row, branch, slots[start] - first[branch]))
            start = row
    return tuple(runs)


@dataclass(frozen=True)
class Scales:
    """One entry per branch: γ_in [columns of the shard's weight] and γ_out [channels of the branch]; None
    for ones."""

    inner: Sequence[torch.Tensor | None]
    outer: Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class _Rectangle:
    shape: tuple[int, int]
    branch: int
    channels: slice
    columns: slice
    flat: slice  # within the shard


def rectangles(
    start: int, stop: int, columns: int, runs: Sequence[Run], elements: int = 1 << 16
) -> Iterator[_Rectangle]:
    """Cover elements [start, stop) of a weight with rectangles of at most ``elements`` (or one row)."""
    most = max(1, min(_ROWS, elements // columns))
    for run in runs:
        position, end = max(start, run.start * columns), min(stop, run.stop * columns)
        while position < end:
            row, column = divmod(position, columns)
            if column or end - position < columns:
                rows, width = 1, min(columns - column, end - position)
            else:
                rows, width = min((end - position) // columns, most), columns
            channel = run.channel + row - run.start
            yield _Rectangle(
                (rows, width),
                run.branch,
                slice(channel, channel + rows),
                slice(column, column + width),
                slice(position - start, position - start + rows * width),
            )
            position += rows * width


def _pieces(tensor: torch.Tensor, start: int, columns: int, runs: Sequence[Run]) -> Iterator[_Rectangle]:
    elements = _ELEMENTS.get(tensor.device.type, _ELEMENTS["cuda"])
    return rectangles(start, start + tensor.numel(), columns, runs, elements)


def _scratch(like: torch.Tensor, columns: int) -> torch.Tensor:
    """Room for any of the pieces: one allocation for all of them."""
    most = max(columns, _ELEMENTS.get(like.device.type, _ELEMENTS["cuda"]))
    return like.new_empty(min(like.numel(), most))


def _factors(scales: Scales, piece: _Rectangle) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    inner, outer = scales.inner[piece.branch], scales.outer[piece.branch]
    return (
        None if inner is None else inner[piece.columns],
        None if outer is None else outer[piece.channels],
    )


@dataclass(frozen=True, eq=False)
class Part:
    """A shard, and where its vectors lie in flat tensors that hold those of many weights.

    Attributes:
        start, stop: Elements of the weight.
        columns: Of the weight.
        runs: Of its rows.
        inner: One entry per branch: where γ_in [columns] begins, None for ones.
        outer: Where γ_out [channels of the branch] begins.
    """

    start: int
    stop: int
    columns: int
    runs: tuple[Run, ...]
    inner: tuple[int | None, ...]
    outer: tuple[int | None, ...]

    @functools.cached_property
    def _channels(self) -> tuple[int, ...]:
        """Of each branch, as many as the rows reach to."""
        found = [0] * len(self.outer)
        for run in self.runs:
            found[run.branch] = max(found[run.branch], run.channel + run.stop - run.start)
        return tuple(found)

    def scales(self, flat: torch.Tensor) -> Scales:
        """The branches' vectors as views of a flat tensor."""
        return Scales(
            [None if at is None else flat[at : at + self.columns] for at in self.inner],
            [None if at is None else flat[at : at + size] for at, size in zip(self.outer, self._channels)],
        )


def split_parts(
    parts: Sequence[Part],
    gradients: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    gamma: torch.Tensor,
    totals: torch.Tensor,
) -> None:
    """:func:`split_gradient` of several shards.

    Args:
        parts: The shards.
        gradients: float32 [shard] of each, G on entry and dW on return.
        masters: float32 [shard] of each.
        gamma: float32 [all vectors].
        totals: float64, of the same layout; the vectors' gradients are added to it.
    """
    for part, gradient, master in zip(parts, gradients, masters):
        split_gradient(
            gradient, master, part.start, part.columns, part.runs, part.scales(gamma), part.scales(totals)
        )


def fold_parts(
    parts: Sequence[Part],
    lives: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    gamma: torch.Tensor,
) -> None:
    """:func:`fold_into` of several shards; arguments as of :func:`split_parts`, and their live weights."""
    for part, live, master in zip(parts, lives, masters):
        fold_into(live, master, part.start, part.columns, part.runs, part.scales(gamma))


def split_gradient(
    grad: torch.Tensor,
    master: torch.Tensor,
    start: int,
    columns: int,
    runs: Sequence[Run],
    scales: Scales,
    sums: Scales,
) -> None:
    """Turn the gradient of W_eff into that of W, and add the shard's share of the vectors' gradients.

        dW = G ⊙ (γ_out γ_inᵀ)    dγ_in = Σ_rows G ⊙ W ⊙ γ_out    dγ_out = Σ_columns G ⊙ W ⊙ γ_in

    Args:
        grad: float32 [shard], G on entry and dW on return.
        master: float32 [shard], W.
        start: The shard's first element in the weight.
        columns: Of the weight.
        runs: Of the weight's rows.
        scales: The vectors.
        sums: float64, shaped as ``scales``, None in the same places; added to.
    """
    scratch = _scratch(master, columns)
    for piece in _pieces(grad, start, columns, runs):
        g, w = grad[piece.flat].view(piece.shape), master[piece.flat].view(piece.shape)
        inner, outer = _factors(scales, piece)
        by_weight = torch.mul(g, w, out=scratch[: g.numel()].view(piece.shape))
        if outer is not None:
            over_columns = by_weight.sum(1) if inner is None else torch.mv(by_weight, inner)
            sums.outer[piece.branch][piece.channels] += over_columns
        if inner is not None:
            over_rows = by_weight.sum(0) if outer is None else torch.mv(by_weight.t(), outer)
            sums.inner[piece.branch][piece.columns] += over_rows
            g.mul_(inner)
        if outer is not None:
            g.mul_(outer[:, None])


def column_squares(
    master: torch.Tensor,
    start: int,
    columns: int,
    runs: Sequence[Run],
    sums: Sequence[torch.Tensor | None],
) -> None:
    """Add the shard's share of Σ_rows W² of each branch to ``sums``.

    ``sums``: float64 [columns] for each branch, None for one that is left out; the other arguments are those
    of :func:`split_gradient`.
    """
    for piece in _pieces(master, start, columns, runs):
        if sums[piece.branch] is not None:
            own = master[piece.flat].view(piece.shape)
            sums[piece.branch][piece.columns] += (own * own).sum(0)


def fold_into(
    live: torch.Tensor,
    master: torch.Tensor,
    start: int,
    columns: int,
    runs: Sequence[Run],
    scales: Scales,
) -> None:
    """live := cast((W ⊙ γ_in) ⊙ γ_out), products in the master's dtype and one rounding.

    ``live`` and ``master``: [shard]; the rest as for :func:`split_gradient`.
    """
    scratch = _scratch(master, columns)
    for piece in _pieces(master, start, columns, runs):
        w = master[piece.flat].view(piece.shape)
        folded = scratch[: w.numel()].view(piece.shape)
        inner, outer = _factors(scales, piece)
        if inner is not None:
            w = torch.mul(w, inner, out=folded)
        if outer is not None:
            w = torch.mul(w, outer[:, None], out=folded)
        live[piece.flat].view(piece.shape).copy_(w)


def unfold_into(master: torch.Tensor, start: int, columns: int, runs: Sequence[Run], scales: Scales) -> None:
    """master := W_eff ⊘ (γ_out γ_inᵀ), in place. No entry of the vectors may be zero.

    The arguments are those of :func:`fold_into`.
    """
    for piece in _pieces(master, start, columns, runs):
        w = master[piece.flat].view(piece.shape)
        inner, outer = _factors(scales, piece)
        if outer is not None:
            w.div_(outer[:, None] if inner is None else outer[:, None] * inner)
        elif inner is not None:
            w.div_(inner)
