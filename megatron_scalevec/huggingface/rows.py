"""Rows of Megatron's fused weights, taken apart into Hugging Face's separate ones and put together again.

All functions act on whole tensors (a torch_dist checkpoint has no tensor-parallel shards in its global
shapes), on weights [rows, columns] and biases [rows] alike, and move numbers without changing any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["cut_rows", "join_halves", "join_qkv", "pad_rows", "split_halves", "split_qkv"]


def split_qkv(fused: torch.Tensor, groups: int, head_dim: int) -> list[torch.Tensor]:
    """q, k and v of a fused tensor.

    The fused rows hold, for each query group, the rows of its query heads, then its key, then its value
    (``SelfAttention.get_query_key_value_tensors`` in Megatron); Hugging Face keeps the heads of each kind
    together, in the same order.
    """
    per_group = fused.shape[0] // groups
    grouped = fused.view(groups, per_group, *fused.shape[1:])
    parts = grouped.split([per_group - 2 * head_dim, head_dim, head_dim], dim=1)
    return [part.flatten(0, 1) for part in parts]


def join_qkv(parts: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
    """The inverse of :func:`split_qkv`."""
    grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def split_halves(fused: torch.Tensor) -> list[torch.Tensor]:
    """gate and up: the two halves of the rows."""
    return list(fused.chunk(2))


def join_halves(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The inverse of :func:`split_halves`."""
    return torch.cat(list(parts))


def cut_rows(padded: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """The first rows: a vocabulary without its padding."""
    return [padded[:rows]]


def pad_rows(parts: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
    """The vocabulary with rows of zeros up to the padded size."""
    (table,) = parts
    padding = table.new_zeros(rows - table.shape[0], *table.shape[1:])
    return torch.cat([table, padding]) if padding.shape[0] else table
