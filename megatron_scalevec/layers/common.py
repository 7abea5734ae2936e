"""What the leaf modules share: changing a built module's class, and the sum over tensor-parallel ranks."""

from __future__ import annotations

import functools
import sys

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

__all__ = ["is_exactly", "is_transformer_engine", "mixed_class", "sum_gradient_over_tensor_parallel"]


def sum_gradient_over_tensor_parallel(vectors: torch.Tensor, group) -> torch.Tensor:
    """Identity whose backward sums the gradient over the tensor-parallel group.

    Each rank applies a complete vector to its own rows or heads, so each rank's gradient is a partial
    sum, with sequence parallelism and without. None of the attributes that Megatron offers for norms
    covers the case without.
    """
    return copy_to_tensor_model_parallel_region(vectors, group=group)


def is_transformer_engine(module: torch.nn.Module | type) -> bool:
    """Whether a module is TransformerEngine's, or Megatron's subclass of one. Imports nothing."""
    cls = module if isinstance(module, type) else type(module)
    return any(base.__module__.startswith("transformer_engine.") for base in cls.__mro__)


def is_exactly(module: torch.nn.Module, home: str, name: str) -> bool:
    """Whether a module's class is ``name`` of Megatron's module ``home``. Imports nothing.

    Some of Megatron's modules cannot be imported without Triton. Where one of their classes is at hand, they
    have been.
    """
    return type(module) is getattr(sys.modules.get(home), name, None)


@functools.cache
def mixed_class(mixin: type, base: type) -> type:
    """The subclass of ``base`` with ``mixin`` in front, one per pair, importable by name for pickling."""
    # torch and TransformerEngine have norms of the same names.
    name = f"ScaleVec{'TE' if is_transformer_engine(base) else ''}{base.__name__}"
    made = type(name, (mixin, base), {"__module__": mixin.__module__, "__qualname__": name})
    # Pickle and copy.deepcopy look classes up where they say they live.
    setattr(sys.modules[mixin.__module__], name, made)
    return made
