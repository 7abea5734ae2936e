"""Token dispatch between experts with tensors that were on the host from the start."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_scalevec.patching import PatchSet

__all__ = ["patch_moe"]


def patch_moe(patches: PatchSet) -> None:
    """Turn split sizes into numpy arrays although they need no copy from a device.

    Upstream converts only what it copies from a GPU; left as tensors, ``all_to_all_single`` does
    not take them.
    """
    from megatron.core.transformer.moe import token_dispatcher

    patches.wrap(token_dispatcher, "maybe_move_tensor_to_cpu", _make_move)


def _make_move(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            return tensor.numpy()
        return original(tensor, as_numpy=as_numpy, record_stream=record_stream)

    return move
