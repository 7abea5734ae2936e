"""Latent attention with one down-projection (``--mla-down-proj-fusion``) in checkpoints.

Megatron stores it as the two down-projections that it stands for, so that runs with and without the flag
read each other's checkpoints, and leaves out whatever else the one linear has. Its scale vectors are
therefore stored here, under the keys of those two. A scale that all three branches share has no place there
and keeps the key of the one.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from megatron_scalevec.layers.common import mixed_class
from megatron_scalevec.vectors import was_added

__all__ = ["JOINED", "JoinedDownProjection", "parts_of_joined", "store_joined"]

JOINED = "linear_qkv_down_proj"
"""Megatron's name of the one linear."""

_HALVES = {"q_down": "linear_q_down_proj", "kv_down": "linear_kv_down_proj", "k_rope": "linear_kv_down_proj"}


class JoinedDownProjection:
    """Mixin over ``FusedMLASelfAttention``: adds the vectors to what is saved and loaded."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None):
        """As the class's, with the vectors: their names the parameters', their keys those of the halves."""
        result = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = f"{prefix}{JOINED}."
        for name, entry in getattr(self, JOINED).sharded_state_dict(own, sharded_offsets, metadata).items():
            vector = re.search(r"\.gamma_(?:in|out)_(q_down|kv_down|k_rope|shared)(?:_[a-z]+)?$", name)
            if vector:
                entry.key = entry.key.replace(f".{JOINED}.", f".{_HALVES.get(vector[1], JOINED)}.")
                result[name] = entry
        return result


def store_joined(model: torch.nn.Module) -> None:
    """Have the vectors of every joined down-projection stored."""
    for module in model.modules():
        linear = getattr(module, JOINED, None)
        if linear is not None and any(was_added(param) for param in linear.parameters(recurse=False)):
            module.__class__ = mixed_class(JoinedDownProjection, type(module))


def parts_of_joined(name: str) -> list[str]:
    """Names of the two weights that a joined one is stored as; any other name by itself."""
    if f".{JOINED}." not in name:
        return [name]
    return [name.replace(f".{JOINED}.", f".{half}.") for half in dict.fromkeys(_HALVES.values())]
