"""The layers of hybrid models: Megatron's symbols for those that carry scale vectors."""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from megatron_scalevec.versions import megatron_version

__all__ = ["HYBRID_PARTS", "arguments_tell_latent_norms", "hybrid_pattern"]

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


def arguments_tell_latent_norms() -> bool:
    """Whether latent attention in a hybrid has norms on its latents where ``--qk-layernorm`` asks for them.

    So it is from megatron-core 0.19 on. Before, it had what the spec of the stack names, and Megatron's own
    names none.
    """
    return Version(megatron_version().base_version) >= Version("0.19")
