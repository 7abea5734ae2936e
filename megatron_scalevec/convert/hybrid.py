"""Hybrid models: layers of several kinds, in an order that a string of symbols gives.

``HybridModel`` (0.18 and later) and the ``MambaModel`` of earlier versions. Their layers are halves of a
GPT's layer (attention or MLP alone) and Mamba layers.
"""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_scalevec.convert.maps import HYBRID_LAYERS

try:
    from megatron.core.models.hybrid.hybrid_model import HybridModel
except ModuleNotFoundError:  # up to 0.17
    from megatron.core.models.mamba.mamba_model import MambaModel as HybridModel

__all__ = ["MODELS", "HybridModel", "remember_layers"]

MODELS = (GPTModel, HybridModel)
"""The models that scale vectors are built on."""


def remember_layers(model: torch.nn.Module) -> None:
    """Write what the model's layers are to be into its configuration, for the audit."""
    if isinstance(model, HybridModel):
        setattr(model.config, HYBRID_LAYERS, _symbols(model))


def _symbols(model: torch.nn.Module) -> tuple[str, str]:
    """Symbols of all layers of the decoder, and of those of one step of multi-token prediction."""
    pattern = getattr(model, "hybrid_layer_pattern", None)
    if pattern is None:  # 0.16: a pattern without separators, or ratios
        from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

        layers = allocate_layers(
            model.config.num_layers,
            model.hybrid_attention_ratio,
            model.hybrid_mlp_ratio,
            model.hybrid_override_pattern,
        )
        return "".join(layers), ""
    decoder, *mtp = pattern.split("/")
    return decoder.replace("|", ""), mtp[0] if mtp else ""
