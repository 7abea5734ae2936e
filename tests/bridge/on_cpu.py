"""What Megatron-Bridge's own start needs beside CPU mode."""

from __future__ import annotations

import functools

import torch

from megatron_scalevec.patching import PatchSet

__all__ = ["patch_bridge"]


def patch_bridge(patches: PatchSet) -> None:
    """Let Bridge initialize without CUDA."""
    from megatron.bridge.training import initialize, setup

    def without_devices(original):
        @functools.wraps(original)
        def barrier(group=None, async_op=False, device_ids=None, **kwargs):
            return original(group, async_op, **kwargs)

        return barrier

    def without_cuda(original):
        @functools.wraps(original)
        def initialize_megatron(*args, **kwargs):
            return original(*args, **{**kwargs, "allow_no_cuda": True})

        return initialize_megatron

    patches.wrap(torch.distributed, "barrier", without_devices)
    patches.wrap(setup, "initialize_megatron", without_cuda)
    # The warm-up compiles fused functions, and draws from the random generator that CPU and "GPU" share.
    patches.set(setup, "set_jit_fusion_options", lambda *args, **kwargs: None)
    patches.set(initialize, "set_jit_fusion_options", lambda *args, **kwargs: None, create=True)
