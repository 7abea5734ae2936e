"""Mixture of experts: what the router and the token dispatch take for granted."""

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
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # The router asks whether this is None, and 0.16 defines it only with TransformerEngine.
    if not hasattr(moe_utils, "te_general_gemm"):
        patches.set(moe_utils, "te_general_gemm", None, create=True)
    patches.wrap(token_dispatcher, "maybe_move_tensor_to_cpu", _make_move)


def _make_move(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            return tensor.numpy()
        return original(tensor, as_numpy=as_numpy, record_stream=record_stream)

    return move
