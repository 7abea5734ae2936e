"""The passes of :mod:`megatron_scalevec.execution.shard` as Triton kernels: each element is read once.

``split_gradient`` reads gradient and master once, writes the gradient once, and leaves two small arrays of
partial sums; ``fold_into`` reads the master once and writes the live weight once. Partial sums are added in
a fixed order, by torch and in float64: no atomic operation, so that a step can be repeated bit by bit.

Imported on CUDA devices and by tests (``TRITON_INTERPRET=1`` runs the kernels without a GPU).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megatron_scalevec.execution.shard import Run, Scales

__all__ = ["fold_into", "fold_kernel", "split_gradient", "split_kernel"]

ROWS = 32
COLUMNS = 128


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
    block, across = tl.program_id(0), tl.program_id(1)
    row0 = tl.load(blocks + 3 * block)
    row1 = tl.load(blocks + 3 * block + 1)
    own = tl.load(blocks + 3 * block + 2)
    row = row0 + tl.arange(0, ROWS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    inside_row, inside_column = row < row1, column < columns
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = inside_row[:, None] & inside_column[None, :] & (at >= start) & (at < stop)
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
    block, across = tl.program_id(0), tl.program_id(1)
    row0 = tl.load(blocks + 3 * block)
    row1 = tl.load(blocks + 3 * block + 1)
    own = tl.load(blocks + 3 * block + 2)
    row = row0 + tl.arange(0, ROWS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    inside_row, inside_column = row < row1, column < columns
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = inside_row[:, None] & inside_column[None, :] & (at >= start) & (at < stop)
    w = tl.load(master + (at - start), mask=inside, other=0.0)
    s_in = tl.load(inner + own + column, mask=inside_column, other=0.0)
    s_out = tl.load(outer + (row - first_row), mask=inside_row, other=0.0)
    folded = w * s_in[None, :] * s_out[:, None]
    tl.store(live + (at - start), folded.to(live.dtype.element_ty), mask=inside)


@functools.lru_cache(maxsize=4096)
def _blocks(
    start: int, stop: int, columns: int, runs: tuple[Run, ...], device: torch.device
) -> tuple[torch.Tensor, int, int, tuple[tuple[int, int, int], ...]]:
    """Blocks of rows of a shard [blocks, 3], its first row and number of rows, and per run its branch and
    its blocks."""
    first_row, end_row = start // columns, -(-stop // columns)
    rows, spans = [], []
    for run in runs:
        low, high = max(first_row, run.start), min(end_row, run.stop)
        if low < high:
            before = len(rows)
            rows += [(row, min(row + ROWS, high), run.branch * columns) for row in range(low, high, ROWS)]
            spans.append((run.branch, before, len(rows)))
    table = torch.tensor(rows, dtype=torch.int32).to(device)
    return table, first_row, end_row - first_row, tuple(spans)


def _vectors(
    scales: Scales, runs: Sequence[Run], columns: int, first_row: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """γ_in [branches · columns] and γ_out per row of the shard, ones where there is none."""
    some = next(v for v in (*scales.inner, *scales.outer) if v is not None)
    inner = torch.cat([some.new_ones(columns) if v is None else v for v in scales.inner])
    pieces = []
    for run in runs:
        low, high = max(first_row, run.start), min(first_row + rows, run.stop)
        if low < high:
            vector = scales.outer[run.branch]
            channel = run.channel + low - run.start
            pieces.append(
                some.new_ones(high - low) if vector is None else vector[channel : channel + high - low]
            )
    return inner, torch.cat(pieces)


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
    blocks, first_row, rows, spans = _blocks(start, stop, columns, tuple(runs), grad.device)
    inner, outer = _vectors(scales, runs, columns, first_row, rows)
    across = triton.cdiv(columns, COLUMNS)
    over_columns = grad.new_empty(across, rows)
    over_rows = grad.new_empty(len(blocks), columns)
    split_kernel[(len(blocks), across)](
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
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    per_row = over_columns.sum(0, dtype=torch.float64)
    for run in runs:
        low, high = max(first_row, run.start), min(first_row + rows, run.stop)
        total = sums.outer[run.branch]
        if total is not None and low < high:
            channel = run.channel + low - run.start
            total[channel : channel + high - low] += per_row[low - first_row : high - first_row]
    for branch, before, after in spans:
        total = sums.inner[branch]
        if total is not None:
            total += over_rows[before:after].sum(0, dtype=torch.float64)


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
    blocks, first_row, rows, _ = _blocks(start, stop, columns, tuple(runs), master.device)
    inner, outer = _vectors(scales, runs, columns, first_row, rows)
    fold_kernel[(len(blocks), triton.cdiv(columns, COLUMNS))](
        live,
        master,
        inner,
        outer,
        blocks,
        start,
        stop,
        columns,
        first_row,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
