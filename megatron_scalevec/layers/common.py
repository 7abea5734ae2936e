"""What the leaf modules share: changing a built module's class, and the sum over tensor-parallel ranks."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
)

from megatron_scalevec.vectors import vector_info

__all__ = [
    "Folded",
    "is_exactly",
    "is_transformer_engine",
    "class_below",
    "mixed_class",
    "sharded_vectors",
    "sum_gradient_over_tensor_parallel",
]


class Folded:
    """Mark of the modules that multiply by W_eff."""

    def scaled_weights(self) -> list[torch.nn.Parameter]:
        """The raw weights, one for each map; W_eff has their shapes and dtypes."""
        return [self.weight]

    def folded_weights(self) -> list[torch.Tensor]:
        """W_eff of each of them, differentiable."""
        return [self.folded_weight()]


def sum_gradient_over_tensor_parallel(vectors: torch.Tensor, group) -> torch.Tensor:
    """Identity whose backward sums the gradient over the tensor-parallel group.

    Each rank applies a complete vector to its own rows or heads, so each rank's gradient is a partial
    sum, with sequence parallelism and without. None of the attributes that Megatron offers for norms
    covers the case without.
    """
    if group is not None and group.size() == 1:
        return vectors  # a call per norm and microbatch that would do nothing
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


def sharded_vectors(
    module: torch.nn.Module, prefix: str, sharded_offsets: tuple, metadata: dict | None, tp_group: Any
) -> dict[str, Any]:
    """Checkpoint entries of the vectors that a module owns, for modules whose ``sharded_state_dict`` lists
    its entries one by one: replicated over ``tp_group`` and the data-parallel ranks."""
    own = {n: p for n, p in module.named_parameters(recurse=False) if vector_info(p) is not None}
    # Here and not above: megatron-core 0.15, which nemo-toolkit 2.7 uses, does not have it.
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    group = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
    return make_sharded_tensors_for_checkpoint(
        own, prefix, {}, sharded_offsets, tp_group=tp_group, dp_cp_group=group
    )


@functools.cache
def class_below(kind: type, ours: type) -> type:
    """The class of modules that a mixin of ours was put in front of, other mixins passed over."""
    below = (cls for cls in kind.__mro__ if not issubclass(cls, ours))
    return next(cls for cls in below if issubclass(cls, torch.nn.Module))


@functools.cache
def mixed_class(mixin: type, base: type) -> type:
    """The subclass of ``base`` with ``mixin`` in front, one per pair, importable by name for pickling."""
    # torch and TransformerEngine have norms of the same names.
    prefix = getattr(mixin, "class_prefix", "ScaleVec")
    own = base.__name__.removeprefix("TE")
    name = f"{prefix}{'TE' if is_transformer_engine(base) else ''}{own}"
    made = type(name, (mixin, base), {"__module__": mixin.__module__, "__qualname__": name})
    # Pickle and copy.deepcopy look classes up where they say they live.
    setattr(sys.modules[mixin.__module__], name, made)
    return made
