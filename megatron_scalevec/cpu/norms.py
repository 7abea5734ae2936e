"""torch's own norms under sequence parallelism."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_scalevec.patching import PatchSet

__all__ = ["patch_norms"]


def patch_norms(patches: PatchSet) -> None:
    """Let ``WrappedTorchNorm`` be built with ``config.sequence_parallel``.

    Upstream refuses the combination because nothing marks the weights. Under sequence parallelism
    each rank normalizes its own tokens, so a norm weight's gradient must be summed over the
    tensor-parallel group; ``finalize_model_grads`` does that for parameters with the attribute
    ``sequence_parallel``, which is all that is missing.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    patches.wrap(WrappedTorchNorm, "__new__", _make_new)


def _make_new(original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    @functools.wraps(original)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        unmarked = copy.copy(config)
        unmarked.sequence_parallel = False
        norm = original(cls, unmarked, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return new
