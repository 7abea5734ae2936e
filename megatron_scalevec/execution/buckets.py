"""Vectors take no part in the backward pass, so nothing tells Megatron that their gradients are complete.

With ``overlap_grad_reduce`` a group of buckets is reduced when every parameter in it has reported its
gradient. A vector's comes from its weight's, after the reduction, so it reports when its weight does; what
is reduced for it is zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron_scalevec.execution.folds import folds_of

__all__ = ["link_ready_signals"]

_LINKED = "scalevec_linked"


def link_ready_signals(chunks: Iterable[torch.nn.Module]) -> None:
    """Have the vectors of folded weights report to Megatron's bucket groups together with their weights.

    Args:
        chunks: Wrapped in Megatron's ``DistributedDataParallel``; others are passed over.
    """
    for chunk in chunks:
        groups = getattr(chunk, "param_to_bucket_group", None)
        if groups is None:
            continue
        followers: dict[torch.nn.Parameter, list[torch.nn.Parameter]] = {}
        reported: set[torch.nn.Parameter] = set()
        for fold in folds_of(chunk):
            own = [p for p in fold.parameters if p not in reported]
            reported.update(own)
            followers.setdefault(fold.weight, []).extend(own)
        for group in dict.fromkeys(groups[weight] for weight in followers):
            _link(group, followers, groups)


def _link(group: Any, followers: dict, groups: dict) -> None:
    original = group.register_grad_ready
    if hasattr(original, _LINKED):  # for an optimizer before this one
        return

    def register_grad_ready(param, *args, **kwargs):
        original(param, *args, **kwargs)
        for vector in followers.get(param, ()):
            # A group that holds a weight reports its own vectors through this very function.
            type(groups[vector]).register_grad_ready(groups[vector], vector, *args, **kwargs)

    setattr(register_grad_ready, _LINKED, True)
    group.register_grad_ready = register_grad_ready
