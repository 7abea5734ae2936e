"""Hybrid models: layers of several kinds, in an order that a string of symbols gives.

``HybridModel`` and its subclass ``MambaModel``, from 0.18 on. Their layers are halves of a GPT's layer
(attention or MLP alone), Mamba layers and gated delta nets.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityOp

from megatron_scalevec.convert.maps import HYBRID_LAYERS, LATENT_NORMS
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.hybrid_layers import HYBRID_PARTS, arguments_tell_latent_norms
from megatron_scalevec.layers import common

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
    norms = _latent_norms(model) if "+" in symbols else None
    if norms is not None:
        setattr(model.config, LATENT_NORMS, norms)


def _symbols(model: torch.nn.Module) -> str:
    """One symbol for each layer of the decoder, over all pipeline stages."""
    return model.hybrid_layer_pattern.split("/")[0].replace("|", "")


def _latent_norms(model: torch.nn.Module) -> tuple[str, ...] | None:
    """The latents that the layers of latent attention have norms on, by the spec of the stack; None where
    ``qk_layernorm`` says it, or the spec is of an unknown form.

    The spec, and not the modules: the audit holds these against it, and a pipeline stage may have none of
    these layers.
    """
    if arguments_tell_latent_norms():
        return None
    found = model.hybrid_stack_spec
    for name in (None, "mla_layer", "self_attention"):
        part = found if name is None else getattr(found, name, None)
        found = getattr(part, "submodules", None) or getattr(part, "keywords", {}).get("submodules")
    names = [(latent, f"{latent}_layernorm", f"linear_{latent}_up_proj") for latent in ("q", "kv")]
    if not all(hasattr(found, name) for row in names for name in row[1:]):
        return None
    return tuple(
        latent
        for latent, norm, linear in names
        if _class_of(getattr(found, norm)) not in (None, IdentityOp)
        or _has_fused_norm(_class_of(getattr(found, linear)))
    )


def _class_of(part: Any) -> Any:
    """What a part of a spec is made of: a class, or a module spec that names one."""
    return getattr(part, "module", part)


def _has_fused_norm(linear: Any) -> bool:
    if not (isinstance(linear, type) and common.is_transformer_engine(linear)):
        return False
    # Here and not above: TransformerEngine is there only where a model is made of it.
    from megatron_scalevec.layers import te

    return linear in te.LEAVES and bool(te.LEAVES[linear].fused_norm)
