"""W_eff = diag(γ_out) · W · diag(γ_in): the weight that a linear with scale vectors multiplies by.

Wherever no norm stands between, all scale vectors around a linear map amount to an element-wise factor
on its weight (arXiv 2605.26895; the branches of a fused weight are blocks of its rows). So one matrix
product serves any number of branches, and nothing is done to activations.

Shapes: ``weight`` [rows, hidden] is one tensor-parallel rank's block of rows, ``gamma_in``
[branches, hidden] and ``gamma_out`` [all rows of the unsharded weight] are complete on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

__all__ = [
    "RowMap",
    "alternating_fc1_row_map",
    "fc1_row_map",
    "fold_weight",
    "interleaved_row_map",
    "joined_row_map",
    "qkv_row_map",
    "whole_row_map",
]


@dataclass(frozen=True)
class RowMap:
    """Which branch and which entry of γ_out each local row of a fused weight belongs to.

    ``branches``: names in the order of ``gamma_in``'s rows. ``sizes``: output channels per branch of
    the unsharded weight; γ_out is the branches' vectors concatenated in that order. ``branch_of_row``
    and ``slot_of_row``: int64 [local rows]; slots are unique.
    """

    branches: tuple[str, ...]
    sizes: tuple[int, ...]
    branch_of_row: torch.Tensor
    slot_of_row: torch.Tensor


def qkv_row_map(
    *,
    num_query_groups: int,
    query_heads_per_group: int,
    head_dim: int,
    tp_rank: int,
    tp_size: int,
    output_gate: bool = False,
) -> RowMap:
    """Rows of Megatron's fused ``linear_qkv.weight``.

    The unsharded weight holds, for each query group, the rows of its query heads, (with an attention
    output gate) as many gate rows, then its key, then its value; tensor-parallel ranks hold equal
    contiguous chunks of that flat axis. The map is therefore made for the global rows and cut afterwards,
    which also serves more ranks than query groups, where a chunk ends in the middle of a group.
    """
    queries = query_heads_per_group * head_dim
    blocks = {"q": queries, "k": head_dim, "v": head_dim}
    if output_gate:
        blocks = {"q": queries, "output_gate": queries, "k": head_dim, "v": head_dim}
    return interleaved_row_map(num_query_groups, blocks, tp_rank=tp_rank, tp_size=tp_size)


def interleaved_row_map(groups: int, blocks: dict[str, int], *, tp_rank: int, tp_size: int) -> RowMap:
    """Rows that repeat a sequence of blocks ``groups`` times, in equal contiguous chunks on the ranks.

    Args:
        groups: Heads, or query groups; one for blocks that stand one after the other.
        blocks: Branch to its rows in one group, in their order.
    """
    sizes = tuple(size * groups for size in blocks.values())
    group = [torch.full((rows,), index, device="cpu") for index, rows in enumerate(blocks.values())]
    branch = torch.cat(group).repeat(groups)
    slot = torch.empty_like(branch)
    start = 0
    for i, size in enumerate(sizes):
        slot[branch == i] = start + _range(size)
        start += size
    return RowMap(tuple(blocks), sizes, *_cut(branch, slot, tp_rank, tp_size))


def joined_row_map(maps: Sequence[RowMap]) -> RowMap:
    """Rows of several maps, each rank holding its share of the first, then its share of the second."""
    branch, slot, branches, channels = [], [], 0, 0
    for rows in maps:
        branch.append(rows.branch_of_row + branches)
        slot.append(rows.slot_of_row + channels)
        branches += len(rows.branches)
        channels += sum(rows.sizes)
    return RowMap(
        tuple(name for rows in maps for name in rows.branches),
        tuple(size for rows in maps for size in rows.sizes),
        torch.cat(branch),
        torch.cat(slot),
    )


def _range(size: int) -> torch.Tensor:
    """Indices with values even where models are being built on the meta device."""
    return torch.arange(size, device="cpu")


def whole_row_map(branch: str, rows: int) -> RowMap:
    """One branch whose rows every rank holds: a row-parallel linear."""
    slot = _range(rows)
    return RowMap((branch,), (rows,), torch.zeros_like(slot), slot)


def fc1_row_map(*, ffn_hidden_size: int, gated: bool, tp_rank: int, tp_size: int) -> RowMap:
    """Rows of Megatron's ``linear_fc1.weight``.

    A gated MLP keeps, on every tensor-parallel rank, that rank's share of the gate rows followed by its
    share of the up rows. A plain MLP has the one branch ``up``.
    """
    return joined_row_map(
        [
            interleaved_row_map(1, {branch: ffn_hidden_size}, tp_rank=tp_rank, tp_size=tp_size)
            for branch in (("gate", "up") if gated else ("up",))
        ]
    )


def alternating_fc1_row_map(*, ffn_hidden_size: int, block: int, tp_rank: int, tp_size: int) -> RowMap:
    """Rows of a gated ``linear_fc1.weight`` in which ``block`` gate rows and ``block`` up rows take turns."""
    turns = {"gate": block, "up": block}
    return interleaved_row_map(ffn_hidden_size // block, turns, tp_rank=tp_rank, tp_size=tp_size)


def _cut(
    branch: torch.Tensor, slot: torch.Tensor, tp_rank: int, tp_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = branch.numel() // tp_size
    own = slice(tp_rank * rows, (tp_rank + 1) * rows)
    return branch[own].clone(), slot[own].clone()


def fold_weight(
    weight: torch.Tensor,
    gamma_in: torch.Tensor | None,
    gamma_out: torch.Tensor | None,
    branch_of_row: torch.Tensor,
    slot_of_row: torch.Tensor,
) -> torch.Tensor:
    """Return W_eff [rows, hidden] in the weight's dtype, differentiable in all three tensors.

    Products and the sums of the gradient are formed in float32 (float64 for float64 weights) and rounded
    once. The gradients of ``gamma_in`` and ``gamma_out`` cover the local rows only: over tensor-parallel
    ranks they are partial sums.
    """
    return _Fold.apply(weight, gamma_in, gamma_out, branch_of_row, slot_of_row)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Fold(torch.autograd.Function):
    """Keeps only the weight and the vectors for backward; plain autograd would keep a second weight."""

    @staticmethod
    def forward(ctx, weight, gamma_in, gamma_out, branch_of_row, slot_of_row):
        ctx.save_for_backward(weight, gamma_in, gamma_out, branch_of_row, slot_of_row)
        return _scaled(weight, gamma_in, gamma_out, branch_of_row, slot_of_row).to(weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, gamma_in, gamma_out, branch_of_row, slot_of_row = ctx.saved_tensors
        d_weight = d_in = d_out = None
        if ctx.needs_input_grad[0]:
            d_weight = _scaled(grad, gamma_in, gamma_out, branch_of_row, slot_of_row).to(weight.dtype)
        dtype = _compute_dtype(weight.dtype)
        by_weight = grad.to(dtype) * weight.to(dtype)
        if gamma_in is not None and ctx.needs_input_grad[1]:
            scaled = by_weight
            if gamma_out is not None:
                scaled = by_weight * gamma_out.to(dtype)[slot_of_row][:, None]
            # One sum per branch: index_add_ would be a single call, but its order of addition, and with
            # it the last bits, varies from run to run on CUDA.
            d_in = torch.stack([scaled[branch_of_row == b].sum(dim=0) for b in range(gamma_in.shape[0])]).to(
                gamma_in.dtype
            )
        if gamma_out is not None and ctx.needs_input_grad[2]:
            scaled = by_weight
            if gamma_in is not None:
                scaled = by_weight * gamma_in.to(dtype)[branch_of_row]
            d_out = torch.zeros(gamma_out.shape, dtype=dtype, device=grad.device)
            d_out.index_copy_(0, slot_of_row, scaled.sum(dim=1))
            d_out = d_out.to(gamma_out.dtype)
        return d_weight, d_in, d_out, None, None


def _scaled(matrix, gamma_in, gamma_out, branch_of_row, slot_of_row):
    dtype = _compute_dtype(matrix.dtype)
    result = matrix.to(dtype)
    if gamma_in is not None:
        result = result * gamma_in.to(dtype)[branch_of_row]
    if gamma_out is not None:
        result = result * gamma_out.to(dtype)[slot_of_row][:, None]
    return result
