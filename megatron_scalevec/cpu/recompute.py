"""Random state and activation recomputation in ``megatron.core.tensor_parallel.random``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from megatron_scalevec.cpu.devices import set_generator_state
from megatron_scalevec.patching import PatchSet

__all__ = ["patch_recompute"]


def patch_recompute(patches: PatchSet) -> None:
    from megatron.core.tensor_parallel import random

    # Upstream queues the change until CUDA is initialized, which never happens here.
    def set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        set_generator_state(new_state)

    patches.set(random, "_set_cuda_rng_state", set_rng_state)

    # The CPU's generator and the "GPU's" are one, so drawing from it inside `fork` is what should
    # happen, and not worth upstream's warning at every dropout.
    logger = logging.getLogger(random.__name__)
    patches.set(logger, "filters", [*logger.filters, _is_not_shared_generator_warning])

    patches.wrap(random.CheckpointWithoutOutput, "__init__", _make_init)
    if hasattr(random, "_get_share_storage"):  # from 0.17 on
        patches.set(random, "_get_share_storage", lambda: _share_storage)


def _is_not_shared_generator_warning(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


def _make_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Callers pass `config.fp8`, or nothing, which upstream takes for "maybe": it then asks
        # TransformerEngine, which CPU mode does not have.
        self.fp8 = False

    return init


def _share_storage(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Give the emptied storage of ``destination`` the bytes of ``source``.

    Upstream shares the memory through a small C++ extension that it compiles when first needed. A
    copy serves as well, needs no compiler, and like it leaves the tensor's version untouched.
    """
    target, given = destination.untyped_storage(), source.untyped_storage()
    target.resize_(given.nbytes())
    target.copy_(given)
