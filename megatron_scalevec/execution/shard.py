"""Arithmetic on one shard of a folded weight: split of the gradient, fold, and the way back.

A shard is a range [start, stop) of the elements of a row-major weight [rows, columns]; the distributed
optimizer cuts anywhere, in the middle of a row too. :class:`Part` says which range, and where its vectors lie
in flat tensors that hold those of many weights. All functions walk over it in rectangles that stay inside one
run of rows, so that a branch's vector applies to a whole rectangle and temporaries are bounded.

Plain torch, no Megatron; :mod:`megatron_scalevec.execution.kernels` has the same for CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_scalevec.fold import RowMap

__all__ = [
    "Part",
    "Run",
    "column_squares",
    "fold_parts",
    "rectangles",
    "runs_of",
    "split_parts",
    "unfold_parts",
]

# Elements of the one temporary. On the CPU it is to stay in a cache between the passes over it, and to be so
# large that the calls themselves do not count.
_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 22}
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


@dataclass(frozen=True)
class _Rectangle:
    """``flat``: its elements in the shard. ``columns``, ``channels``: its entries of the branch's vectors."""

    shape: tuple[int, int]
    branch: int
    channels: slice
    columns: slice
    flat: slice

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its elements of a tensor [shard], as a view [rows, columns]."""
        return tensor[self.flat].view(self.shape)


def rectangles(part: Part, elements: int = 1 << 16) -> Iterator[_Rectangle]:
    """Cover a shard with rectangles of at most ``elements`` (or one row)."""
    start, stop, columns = part.start, part.stop, part.columns
    most = max(1, min(_ROWS, elements // columns))
    for run in part.runs:
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


def _elements(device: torch.device) -> int:
    return _ELEMENTS.get(device.type, _ELEMENTS["cuda"])


def _scratch(part: Part, like: torch.Tensor) -> torch.Tensor:
    """Room for any rectangle of a shard: one allocation for all of them."""
    return like.new_empty(min(like.numel(), max(part.columns, _elements(like.device))))


def _vectors(
    part: Part, piece: _Rectangle, flat: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A rectangle's entries of γ_in and γ_out, as views of a flat tensor; None for ones."""

    def entries(begin: int | None, own: slice) -> torch.Tensor | None:
        return None if begin is None else flat[begin + own.start : begin + own.stop]

    return entries(part.inner[piece.branch], piece.columns), entries(part.outer[piece.branch], piece.channels)


def split_parts(
    parts: Sequence[Part],
    gradients: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    gamma: torch.Tensor,
    totals: torch.Tensor,
) -> None:
    """Turn gradients of W_eff into those of W, and add the shards' share of the vectors' gradients.

        dW = G ⊙ (γ_out γ_inᵀ)    dγ_in = Σ_rows G ⊙ W ⊙ γ_out    dγ_out = Σ_columns G ⊙ W ⊙ γ_in

    Args:
        parts: The shards.
        gradients: float32 [shard] of each, G on entry and dW on return.
        masters: float32 [shard] of each, W.
        gamma: float32 [all vectors].
        totals: float64, of the same layout; the vectors' gradients are added to it.
    """
    for part, gradient, master in zip(parts, gradients, masters):
        scratch = _scratch(part, master)
        for piece in rectangles(part, _elements(master.device)):
            g, w = piece.of(gradient), piece.of(master)
            inner, outer = _vectors(part, piece, gamma)
            inner_sum, outer_sum = _vectors(part, piece, totals)
            by_weight = torch.mul(g, w, out=scratch[: g.numel()].view(piece.shape))
            if outer is not None:
                outer_sum += by_weight.sum(1) if inner is None else torch.mv(by_weight, inner)
            if inner is not None:
                inner_sum += by_weight.sum(0) if outer is None else torch.mv(by_weight.t(), outer)
                g.mul_(inner)
            if outer is not None:
                g.mul_(outer[:, None])


def fold_parts(
    parts: Sequence[Part],
    lives: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    gamma: torch.Tensor,
) -> None:
    """live := cast((W ⊙ γ_in) ⊙ γ_out), products in the master's dtype and one rounding.

    ``lives``: [shard] of each; the other arguments as of :func:`split_parts`.
    """
    for part, live, master in zip(parts, lives, masters):
        scratch = _scratch(part, master)
        for piece in rectangles(part, _elements(master.device)):
            w = piece.of(master)
            folded = scratch[: w.numel()].view(piece.shape)
            inner, outer = _vectors(part, piece, gamma)
            if inner is not None:
                w = torch.mul(w, inner, out=folded)
            if outer is not None:
                w = torch.mul(w, outer[:, None], out=folded)
            piece.of(live).copy_(w)


def unfold_parts(parts: Sequence[Part], masters: Sequence[torch.Tensor], gamma: torch.Tensor) -> None:
    """master := W_eff ⊘ (γ_out γ_inᵀ), in place. No entry of the vectors may be zero.

    Arguments as of :func:`split_parts`.
    """
    for part, master in zip(parts, masters):
        for piece in rectangles(part, _elements(master.device)):
            w = piece.of(master)
            inner, outer = _vectors(part, piece, gamma)
            if outer is not None:
                w.div_(outer[:, None] if inner is None else outer[:, None] * inner)
            elif inner is not None:
                w.div_(inner)


def column_squares(parts: Sequence[Part], masters: Sequence[torch.Tensor], totals: torch.Tensor) -> None:
    """Add the shards' share of Σ_rows W² of each branch to γ_in's place in ``totals``, float64.

    Arguments as of :func:`split_parts`; branches without γ_in are left out.
    """
    for part, master in zip(parts, masters):
        for piece in rectangles(part, _elements(master.device)):
            sums, _ = _vectors(part, piece, totals)
            if sums is not None:
                own = piece.of(master)
                sums += (own * own).sum(0)
