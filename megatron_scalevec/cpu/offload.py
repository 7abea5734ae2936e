"""The optimizer of ``--optimizer-cpu-offload`` where parameters and "host" are the same memory.

Megatron's ``HybridDeviceOptimizer`` tells what to offload by ``Tensor.is_cuda``. In CPU mode that is false
for every parameter, so it would take all of them for offloaded already, without the copies that its step
looks for. Here the parameters count as on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_scalevec.patching import PatchSet

__all__ = ["patch_offload"]


def patch_offload(patches: PatchSet) -> None:
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    patches.wrap(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", _make_groups)


def _make_groups(_: Callable[..., Any]) -> Callable[..., Any]:
    def _get_sub_optimizer_param_groups(self: Any, offload_fraction: float) -> tuple[Any, ...]:
        """Groups of both optimizers, and the maps between parameters, host copies and fp32 copies."""
        total = sum(param.numel() for group in self.param_groups for param in group["params"])
        taken = 0
        groups: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        host_copy, original, masters = {}, {}, {}
        for group in self.param_groups:
            parts: dict[bool, list[torch.Tensor]] = {True: [], False: []}
            for param in group["params"]:
                offloaded = taken < total * offload_fraction
                as_float = self.param_update_in_fp32 and param.dtype != torch.float32
                taken += param.numel() if offloaded else 0
                inner = param.detach().clone() if offloaded or as_float else param
                if as_float:
                    inner = masters[param] = inner.float()
                if offloaded:
                    host_copy[param], original[inner] = inner, param
                parts[offloaded].append(inner)
            for offloaded, params in parts.items():
                if params:
                    groups[offloaded].append({**group, "params": params})
        return groups[True], groups[False], host_copy, original, masters

    return _get_sub_optimizer_param_groups
