"""Hybrid models: layers of several kinds, in an order that a string of symbols gives.

``HybridModel`` and its subclass ``MambaModel``, from 0.18 on. Their layers are halves of a GPT's layer
(attention or MLP alone), Mamba layers and gated delta nets.
"""

from __future__ import annotations

import sys

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_scalevec.convert.maps import HYBRID_LAYERS
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.hybrid_layers import HYBRID_PARTS

__all__ = ["is_supported", "remember_layers"]


def _is_hybrid(model: torch.nn.Module) -> bool:
    # Not imported here: not every version has it.
    home = sys.modules.get("megatron.core.models.hybrid.hybrid_model")
    return home is not None and isinstance(model, home.HybridModel)


def is_supported(model: torch.nn.Module) -> bool:
    """Whether scale vectors are built on models of this class."""
    return isinstance(model, GPTModel) or _is_hybrid(model)


def remember_layers(model: torch.nn.Module) -> None:
    """Write what a hybrid model's layers are to be into its configuration, for the audit.

    Raises:
        ScaleVecError: The model has layers of a kind without scale vectors, or multi-token prediction.
    """
    if not _is_hybrid(model):
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
    return model.hybrid_layer_pattern.split("/")[0].replace("|", "")
