"""The passes of :mod:`megatron_scalevec.execution.shard` as Triton kernels, over all shards in one launch.

``split_parts`` reads every gradient and master once and writes the gradient once; ``fold_parts`` reads the
master once and writes the live weight once. A program takes a block of rows of one branch across all columns,
so γ_out's sums are its own; γ_in's are left as one partial sum per block, which a second kernel adds in a
fixed order. Sums over more than a tile are in float64, and there is no atomic operation: a step can be
repeated bit by bit. Partial sums take at most :data:`TEMPORARY_BYTES`; where all blocks would need more,
there are several launches.

Where a shard lies, its size and its vectors' places in the flat tensors of
:class:`~megatron_scalevec.execution.table.VectorTable` come from small tables in the device's memory: a step
of any model starts a handful of kernels.

Imported on CUDA devices and by tests (``TRITON_INTERPRET=1`` runs the kernels without a GPU).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megatron_scalevec.execution.shard import Part

__all__ = ["TEMPORARY_BYTES", "fold_kernel", "fold_parts", "reduce_kernel", "split_kernel", "split_parts"]

ROWS = 32
COLUMNS = 128
TEMPORARY_BYTES = 32 << 20
"""Of partial sums at once."""

_ALIGNMENT = 16


@triton.jit
def _place(shards, blocks, block, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """What a block works on: two tensors, elements [start, stop) and columns of the weight; rows
    [row0, row1), and where γ_in and the block's γ_out begin, below zero for ones."""
    own = blocks + 5 * block
    shard = shards + 5 * tl.load(own)
    target = tl.load(shard).to(tl.pointer_type(ELEMENT))
    master = tl.load(shard + 1).to(tl.pointer_type(tl.float32))
    start, stop, columns = tl.load(shard + 2), tl.load(shard + 3), tl.load(shard + 4)
    if ALIGNED:
        target, master = tl.multiple_of(target, 16), tl.multiple_of(master, 16)
        start, stop = tl.multiple_of(start, 16), tl.multiple_of(stop, 16)
        columns = tl.multiple_of(columns, 16)
    return target, master, start, stop, columns, own


@triton.jit
def split_kernel(
    shards,
    blocks,
    gamma,
    totals,
    partials,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One block of rows of one branch: G becomes dW, γ_out's sums are added to ``totals``.

    shards: int64 [shards, 5]: addresses of gradient and master, float32; first element, end, columns.
    blocks: int64 [blocks, 5]: shard, first row, end, where γ_in begins in ``gamma``, where the block's γ_out.
    gamma: float32; totals: float64, of the same layout. partials: float32 [blocks, width], γ_in's sums.
    ALIGNED: whether addresses and sizes are multiples of 16.
    """
    block = tl.program_id(0).to(tl.int64)
    grad, master, start, stop, columns, own = _place(shards, blocks, block, tl.float32, ALIGNED)
    row0, row1 = tl.load(own + 1), tl.load(own + 2)
    at_in, at_out = tl.load(own + 3), tl.load(own + 4)
    within = tl.arange(0, ROWS)
    row = row0 + within
    inside_row = row < row1
    has_out = inside_row & (at_out >= 0)
    s_out = tl.load(gamma + at_out + within, mask=has_out, other=1.0)
    sums = tl.zeros([ROWS], tl.float64)
    for column0 in range(0, columns, COLUMNS):
        column = column0 + tl.arange(0, COLUMNS)
        inside_column = column < columns
        has_in = inside_column & (at_in >= 0)
        at = row[:, None] * columns + column[None, :]
        inside = inside_row[:, None] & inside_column[None, :] & (at >= start) & (at < stop)
        g = tl.load(grad + (at - start), mask=inside, other=0.0)
        w = tl.load(master + (at - start), mask=inside, other=0.0)
        s_in = tl.load(gamma + at_in + column, mask=has_in, other=1.0)
        by_weight = g * w
        sums += tl.sum(by_weight * s_in[None, :], axis=1).to(tl.float64)
        tl.store(partials + block * width + column, tl.sum(by_weight * s_out[:, None], axis=0), mask=has_in)
        tl.store(grad + (at - start), g * s_in[None, :] * s_out[:, None], mask=inside)
    total = totals + at_out + within
    tl.store(total, tl.load(total, mask=has_out, other=0.0) + sums, mask=has_out)


@triton.jit
def reduce_kernel(vectors, order, partials, totals, width, COLUMNS: tl.constexpr):
    """Some columns of one γ_in: the partial sums of its blocks, in their order, are added to ``totals``.

    vectors: int64 [vectors, 4]: where it begins, columns, first and end in ``order``. order: int64 blocks.
    """
    own = vectors + 4 * tl.program_id(0)
    begin, columns = tl.load(own), tl.load(own + 1)
    first, end = tl.load(own + 2), tl.load(own + 3)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    sums = tl.zeros([COLUMNS], tl.float64)
    for index in range(first, end):
        block = tl.load(order + index)
        sums += tl.load(partials + block * width + column, mask=inside, other=0.0).to(tl.float64)
    total = totals + begin + column
    tl.store(total, tl.load(total, mask=inside, other=0.0) + sums, mask=inside)


@triton.jit
def fold_kernel(
    shards,
    blocks,
    gamma,
    like,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One block of live := cast((W ⊙ γ_in) ⊙ γ_out). ``like``: any tensor of the live weights'
    dtype; the rest as for :func:`split_kernel`, with the live weight in the gradient's place."""
    block = tl.program_id(0).to(tl.int64)
    live, master, start, stop, columns, own = _place(shards, blocks, block, like.dtype.element_ty, ALIGNED)
    row0, row1 = tl.load(own + 1), tl.load(own + 2)
    at_in, at_out = tl.load(own + 3), tl.load(own + 4)
    within = tl.arange(0, ROWS)
    row = row0 + within
    inside_row = row < row1
    s_out = tl.load(gamma + at_out + within, mask=inside_row & (at_out >= 0), other=1.0)
    for column0 in range(0, columns, COLUMNS):
        column = column0 + tl.arange(0, COLUMNS)
        inside_column = column < columns
        at = row[:, None] * columns + column[None, :]
        inside = inside_row[:, None] & inside_column[None, :] & (at >= start) & (at < stop)
        w = tl.load(master + (at - start), mask=inside, other=0.0)
        s_in = tl.load(gamma + at_in + column, mask=inside_column & (at_in >= 0), other=1.0)
        folded = w * s_in[None, :] * s_out[:, None]
        tl.store(live + (at - start), folded.to(like.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class _Launch:
    """Blocks whose partial sums are there at once, and no two of which add to the same entry of γ_out."""

    blocks: torch.Tensor
    order: torch.Tensor
    vectors: torch.Tensor
    width: int


@dataclass(frozen=True)
class _Plan:
    """How some shards are cut into blocks of rows; the same in every step."""

    blocks: torch.Tensor
    launches: tuple[_Launch, ...]


Block = tuple[int, int, int, int, int]


@functools.lru_cache(maxsize=64)
def _plan(parts: tuple[Part, ...], device: torch.device) -> _Plan:
    waves: list[list[tuple[int, list[Block]]]] = []
    next_wave: dict[int, int] = {}
    every: list[Block] = []
    for index, part in enumerate(parts):
        own = _blocks(index, part)
        every += own
        outer = {at for at in part.outer if at is not None}
        wave = max((next_wave.get(at, 0) for at in outer), default=0)
        next_wave.update(dict.fromkeys(outer, wave + 1))
        waves += [[] for _ in range(wave + 1 - len(waves))]
        waves[wave].append((part.columns, own))
    launches = []
    for wave in waves:
        width = max(columns for columns, _ in wave)
        blocks = [(columns, block) for columns, own in wave for block in own]
        most = max(1, TEMPORARY_BYTES // (4 * width))
        launches += [
            _launch(blocks[first : first + most], width, device) for first in range(0, len(blocks), most)
        ]
    return _Plan(_table(every, 5, device), tuple(launches))


def _blocks(index: int, part: Part) -> list[Block]:
    low_row, high_row = part.start // part.columns, -(-part.stop // part.columns)
    found = []
    for run in part.runs:
        low, high = max(low_row, run.start), min(high_row, run.stop)
        inner, outer = part.inner[run.branch], part.outer[run.branch]
        for row in range(low, high, ROWS):
            at_out = -1 if outer is None else outer + run.channel + row - run.start
            found.append((index, row, min(row + ROWS, high), -1 if inner is None else inner, at_out))
    return found


def _launch(blocks: list[tuple[int, Block]], width: int, device: torch.device) -> _Launch:
    of_vector: dict[tuple[int, int], list[int]] = {}
    for place, (columns, block) in enumerate(blocks):
        if block[3] >= 0:
            of_vector.setdefault((block[3], columns), []).append(place)
    begins = sorted(of_vector)
    if any(begin + columns > other for (begin, columns), (other, _) in zip(begins, begins[1:])):
        # Two programs would add to the same entries at once.
        raise RuntimeError("two weights of one rank use parts of one scale vector that overlap")
    order: list[int] = []
    vectors = []
    for (begin, columns), places in of_vector.items():
        vectors.append((begin, columns, len(order), len(order) + len(places)))
        order += places
    return _Launch(
        _table([block for _, block in blocks], 5, device),
        torch.tensor(order, dtype=torch.int64).to(device),
        _table(vectors, 4, device),
        width,
    )


def _table(rows: Sequence[tuple[int, ...]], columns: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(-1, columns).to(device)


def _shards(
    parts: Sequence[Part], targets: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, bool]:
    """Addresses as they are now, and whether all of it is aligned."""
    rows = [
        (target.data_ptr(), master.data_ptr(), part.start, part.stop, part.columns)
        for part, target, master in zip(parts, targets, masters)
    ]
    aligned = all(number % _ALIGNMENT == 0 for row in rows for number in row)
    return _table(rows, 5, masters[0].device), aligned


def split_parts(
    parts: Sequence[Part],
    gradients: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    gamma: torch.Tensor,
    totals: torch.Tensor,
) -> None:
    """As :func:`megatron_scalevec.execution.shard.split_parts`."""
    if not parts:
        return
    plan = _plan(tuple(parts), gamma.device)
    shards, aligned = _shards(parts, gradients, masters)
    for launch in plan.launches:
        partials = gamma.new_empty(len(launch.blocks), launch.width)
        split_kernel[(len(launch.blocks),)](
            shards,
            launch.blocks,
            gamma,
            totals,
            partials,
            launch.width,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            ALIGNED=aligned,
        )
        if len(launch.vectors):
            reduce_kernel[(len(launch.vectors), triton.cdiv(launch.width, COLUMNS))](
                launch.vectors, launch.order, partials, totals, launch.width, COLUMNS=COLUMNS
            )


def fold_parts(
    parts: Sequence[Part],
    lives: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    gamma: torch.Tensor,
) -> None:
    """As :func:`megatron_scalevec.execution.shard.fold_parts`; all live weights are of one dtype.

    Raises:
        RuntimeError: They are not.
    """
    if not parts:
        return
    if len({live.dtype for live in lives}) > 1:
        raise RuntimeError("live weights of several dtypes are not folded together")
    plan = _plan(tuple(parts), gamma.device)
    shards, aligned = _shards(parts, lives, masters)
    fold_kernel[(len(plan.blocks),)](
        shards, plan.blocks, gamma, lives[0], ROWS=ROWS, COLUMNS=COLUMNS, ALIGNED=aligned
    )
