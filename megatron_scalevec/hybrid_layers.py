"""The layers of hybrid models: Megatron's symbols for those that carry scale vectors."""

from __future__ import annotations

from typing import Any

__all__ = ["HYBRID_PARTS", "hybrid_pattern"]

HYBRID_PARTS = {
    "*": ("attention",),
    "+": ("latent attention",),
    "-": ("mlp",),
    "E": ("experts",),
    "M": ("mamba",),
    "G": ("delta net",),
}
"""A layer's symbol to its parts, which are keys of :func:`megatron_scalevec.convert.maps.maps_of`."""


def hybrid_pattern(args: Any) -> str | None:
    """The symbols of a hybrid model's layers, from the arguments in a checkpoint; None for other models."""
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    patterns = [pattern for pattern in (getattr(args, name, None) for name in names) if pattern]
    return patterns[0] if patterns else "" if getattr(args, "is_hybrid_model", False) else None
