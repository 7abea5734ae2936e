"""Collectives that NCCL offers and gloo does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_scalevec.patching import PatchSet

__all__ = ["patch_collectives"]


class _WorkList:
    """Several pending collectives behind the handle of one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, *args: Any) -> bool:
        for work in self._works:
            work.wait(*args)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def patch_collectives(patches: PatchSet) -> None:
    """Let ``torch.distributed.all_gather`` take tensors of different sizes.

    The layer-wise optimizer gives every rank whole layers, so the pieces it gathers differ in size.
    Every rank passes the same list of sizes, so all of them decide alike which way to go.
    """
    if torch.distributed.is_available():
        patches.wrap(torch.distributed, "all_gather", _make_all_gather)


def _make_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({piece.numel() for piece in tensor_list}) <= 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        group = torch.distributed.group.WORLD if group is None else group
        own = torch.distributed.get_rank()
        works = []
        ranks = torch.distributed.get_process_group_ranks(group)
        for piece, source in zip(tensor_list, ranks, strict=True):
            if source == own and piece.data_ptr() != tensor.data_ptr():
                piece.copy_(tensor)
            if piece.numel():
                works.append(torch.distributed.broadcast(piece, source, group=group, async_op=True))
        handle = _WorkList(works)
        if async_op:
            return handle
        handle.wait()
        return None

    return all_gather
