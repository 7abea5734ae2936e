"""Hybrid models: layers of several kinds, in an order that a string of symbols gives.

``HybridModel`` (0.18 and later) and the ``MambaModel`` of earlier versions. Their layers are halves of a
GPT's layer (attention or MLP alone) and Mamba layers.
"""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_scalevec.convert.maps import HYBRID_LAYERS, HYBRID_PARTS
from megatron_scalevec.errors import ScaleVecError

try:
    from megatron.core.models.hybrid.hybrid_model import HybridModel
except ModuleNotFoundError:  # up to 0.17
    from megatron.core.models.mamba.mamba_model import MambaModel as HybridModel

__all__ = ["MODELS", "HybridModel", "remember_layers"]

MODELS = (GPTModel, HybridModel)
"""The models that scale vectors are built on."""


def remember_layers(model: torch.nn.Module) -> None:
    """Write what a hybrid model's layers are to be into its configuration, for the audit.

    Raises:
        ScaleVecError: The model has layers of a kind without scale vectors, or multi-token prediction.
    """
    if not isinstance(model, HybridModel):
        return
    symbols = _symbols(model)
    unknown = sorted(set(symbols) - set(HYBRID_PARTS))
    if unknown:
        raise ScaleVecError(
            f"the hybrid pattern {symbols} has layers of kind {', '.join(unknown)}, and this version builds "
            f"scale vectors on {', '.join(HYBRID_PARTS)} alone; nothing was changed. Run without "
            "--scalevec-strategy, or with a pattern of those."
        )
    if getattr(model, "mtp", None) is not None:
        raise ScaleVecError(
            "multi-token prediction in a hybrid model is not proven with scale vectors; nothing was changed. "
            "Drop it from the pattern (what follows the first /), or run without --scalevec-strategy."
        )
    setattr(model.config, HYBRID_LAYERS, symbols)


def _symbols(model: torch.nn.Module) -> str:
    """One symbol for each layer of the decoder, over all pipeline stages."""
    pattern = getattr(model, "hybrid_layer_pattern", None)
    if pattern is not None:
        return pattern.split("/")[0].replace("|", "")
    # 0.16: a pattern without separators, or ratios.
    from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

    layers = allocate_layers(
        model.config.num_layers,
        model.hybrid_attention_ratio,
        model.hybrid_mlp_ratio,
        model.hybrid_override_pattern,
    )
    return "".join(layers)
