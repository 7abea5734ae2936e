"""The passes of :mod:`megatron_scalevec.execution.shard` as Triton kernels: each element is read once.

``split_gradient`` reads gradient and master once, writes the gradient once, and leaves two small arrays of
partial sums; ``fold_into`` reads the master once and writes the live weight once. Partial sums are added in
a fixed order, by torch and in float64: no atomic operation, so that a step can be repeated bit by bit.

Imported on CUDA devices and by tests (``TRITON_INTERPRET=1`` runs the kernels without a GPU).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megatron_scalevec.execution.shard import Run, Scales

__all__ = ["fold_into", "fold_kernel", "split_gradient", "split_kernel"]

ROWS = 32
COLUMNS = 128


@triton.jit
def _tile(blocks, start, stop, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where this program's tile lies: rows, columns, offset of its branch's γ_in, elements, and what of each
    is inside."""
    block, across = tl.program_id(0), tl.program_id(1)
    row0 = tl.load(blocks + 3 * block)
    row1 = tl.load(blocks + 3 * block + 1)
    own = tl.load(blocks + 3 * block + 2)
    row = row0 + tl.arange(0, ROWS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    inside_row, inside_column = row < row1, column < columns
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = inside_row[:, None] & inside_column[None, :] & (at >= start) & (at < stop)
    return row, column, own, at, inside_row, inside_column, inside


@triton.jit
def split_kernel(
    grad,
    master,
    inner,
    outer,
    blocks,
    over_columns,
    over_rows,
    start,
    stop,
    columns,
    first_row,
    rows,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile: a block of rows of one branch, by a block of columns.

    grad, master: float32, elements [start, stop) of the weight. inner: float32, all γ_in, and outer: float32
    per row of the shard. blocks: int32 [blocks, 3]: first row, end, offset of the branch's γ_in.
    over_columns: float32 [column blocks, rows of the shard]; over_rows: float32 [row blocks, columns].
    """
    row, column, own, at, inside_row, inside_column, inside = _tile(
        blocks, start, stop, columns, ROWS, COLUMNS
    )
    block, across = tl.program_id(0), tl.program_id(1)
    g = tl.load(grad + (at - start), mask=inside, other=0.0)
    w = tl.load(master + (at - start), mask=inside, other=0.0)
    s_in = tl.load(inner + own + column, mask=inside_column, other=0.0)
    s_out = tl.load(outer + (row - first_row), mask=inside_row, other=0.0)
    by_weight = g * w
    tl.store(
        over_columns + across * rows + (row - first_row),
        tl.sum(by_weight * s_in[None, :], axis=1),
        mask=inside_row,
    )
    tl.store(
        over_rows + block.to(tl.int64) * columns + column,
        tl.sum(by_weight * s_out[:, None], axis=0),
        mask=inside_column,
    )
    tl.store(grad + (at - start), g * s_in[None, :] * s_out[:, None], mask=inside)


@triton.jit
def fold_kernel(
    live,
    master,
    inner,
    outer,
    blocks,
    start,
    stop,
    columns,
    first_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile of live := cast((W ⊙ γ_in) ⊙ γ_out); arguments as of :func:`split_kernel`."""
    row, column, own, at, inside_row, inside_column, inside = _tile(
        blocks, start, stop, columns, ROWS, COLUMNS
    )
    w = tl.load(master + (at - start), mask=inside, other=0.0)
    s_in = tl.load(inner + own + column, mask=inside_column, other=0.0)
    s_out = tl.load(outer + (row - first_row), mask=inside_row, other=0.0)
    folded = w * s_in[None, :] * s_out[:, None]
    tl.store(live + (at - start), folded.to(live.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class _Plan:
    """How a shard is cut into blocks of rows; the same in every step."""

    blocks: torch.Tensor  # int32 [blocks, 3]: first row, end, offset of the branch's γ_in; by branch
    spans: tuple[tuple[int, int], ...]  # blocks of each branch
    channels: torch.Tensor  # int64 [rows of the shard], in the branches' γ_out one after the other
    first_row: int
    rows: int


@functools.lru_cache(maxsize=4096)
def _plan(
    start: int, stop: int, columns: int, runs: tuple[Run, ...], sizes: tuple[int, ...], device: torch.device
) -> _Plan:
    first_row, end_row = start // columns, -(-stop // columns)
    blocks: list[list[tuple[int, int, int]]] = [[] for _ in sizes]
    channels = []
    for run in runs:
        low, high = max(first_row, run.start), min(end_row, run.stop)
        at = sum(sizes[: run.branch]) + run.channel - run.start
        channels += range(at + low, at + high)
        for row in range(low, high, ROWS):
            blocks[run.branch].append((row, min(row + ROWS, high), run.branch * columns))
    ends = [sum(map(len, blocks[: branch + 1])) for branch in range(len(sizes))]
    return _Plan(
        torch.tensor([block for own in blocks for block in own], dtype=torch.int32).to(device),
        tuple(zip([0, *ends], ends)),
        torch.tensor(channels).to(device),
        first_row,
        end_row - first_row,
    )


def _sizes(runs: Sequence[Run], branches: int) -> tuple[int, ...]:
    """Channels of each branch that the rows come from, as many as a vector must have."""
    ends = [0] * branches
    for run in runs:
        ends[run.branch] = max(ends[run.branch], run.channel + run.stop - run.start)
    return tuple(ends)


def _prepare(
    start: int, stop: int, columns: int, runs: Sequence[Run], scales: Scales, device: torch.device
) -> tuple[_Plan, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """The plan, γ_in [branches · columns], γ_out [rows of the shard], and sizes; ones where there is none."""
    sizes = _sizes(runs, len(scales.inner))
    plan = _plan(start, stop, columns, tuple(runs), sizes, device)
    some = next(v for v in (*scales.inner, *scales.outer) if v is not None)
    inner = torch.cat([some.new_ones(columns) if v is None else v for v in scales.inner])
    outer = torch.cat(
        [some.new_ones(n) if v is None else v[:n] for v, n in zip(scales.outer, sizes)]
    ).index_select(0, plan.channels)
    return plan, inner, outer, sizes


def split_gradient(
    grad: torch.Tensor,
    master: torch.Tensor,
    start: int,
    columns: int,
    runs: Sequence[Run],
    scales: Scales,
    sums: Scales,
) -> None:
    """As :func:`megatron_scalevec.execution.shard.split_gradient`."""
    stop = start + grad.numel()
    plan, inner, outer, sizes = _prepare(start, stop, columns, runs, scales, grad.device)
    across = triton.cdiv(columns, COLUMNS)
    over_columns = grad.new_empty(across, plan.rows)
    over_rows = grad.new_empty(len(plan.blocks), columns)
    split_kernel[(len(plan.blocks), across)](
        grad,
        master,
        inner,
        outer,
        plan.blocks,
        over_columns,
        over_rows,
        start,
        stop,
        columns,
        plan.first_row,
        plan.rows,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    totals = over_columns.new_zeros(sum(sizes), dtype=torch.float64)
    totals.index_copy_(0, plan.channels, over_columns.sum(0, dtype=torch.float64))
    for total, own in zip(sums.outer, totals.split(sizes)):
        if total is not None:
            total[: own.numel()] += own
    for total, (first, end) in zip(sums.inner, plan.spans):
        if total is not None and first < end:
            total += over_rows[first:end].sum(0, dtype=torch.float64)


def fold_into(
    live: torch.Tensor,
    master: torch.Tensor,
    start: int,
    columns: int,
    runs: Sequence[Run],
    scales: Scales,
) -> None:
    """As :func:`megatron_scalevec.execution.shard.fold_into`."""
    stop = start + master.numel()
    plan, inner, outer, _ = _prepare(start, stop, columns, runs, scales, master.device)
    fold_kernel[(len(plan.blocks), triton.cdiv(columns, COLUMNS))](
        live,
        master,
        inner,
        outer,
        plan.blocks,
        start,
        stop,
        columns,
        plan.first_row,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
