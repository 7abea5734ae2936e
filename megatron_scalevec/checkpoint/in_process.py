"""Fold a built model in place, for inference and evaluation."""

from __future__ import annotations

import re

import torch

from megatron_scalevec.checkpoint.guard import Guarded
from megatron_scalevec.checkpoint.joined import JoinedDownProjection
from megatron_scalevec.convert import applied_config
from megatron_scalevec.convert.hybrid import is_supported
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.execution.folds import forget_folds, own_folds, release
from megatron_scalevec.execution.live_gamma import drop_live_gamma
from megatron_scalevec.layers.attention import ScaleVecSelfAttention
from megatron_scalevec.layers.common import Folded, class_below
from megatron_scalevec.layers.experts import ScaleVecExperts
from megatron_scalevec.layers.linear import FoldedLinear
from megatron_scalevec.layers.norm import NormHandle, ScaledNorm
from megatron_scalevec.layers.router import FoldedReplicated
from megatron_scalevec.vectors import compose_vector, vector_info, was_added

__all__ = ["fold"]


def fold(model: torch.nn.Module) -> None:
    """Write W_eff into the weights and take the scale vectors away, so that no forward pass forms it.

    The model is Megatron's own then, class by class, and computes what it computed. Where it normalizes
    values (dual-norm), that norm stays, with its class; q and k norms are Megatron's.

    Args:
        model: A ``GPTModel`` or hybrid model with scale vectors, wrapped or not, on which no optimizer works.

    Raises:
        ScaleVecError: It has none, or it is set up for training: an optimizer would go on with parameters
            that are gone.
    """
    while not is_supported(model) and isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    config = applied_config(model)
    if config is None or not config.active:
        raise ScaleVecError("the model carries no scale vectors, so there is nothing to fold.")
    if any(getattr(param, "main_grad", None) is not None for param in model.parameters()):
        raise ScaleVecError(
            "the model is set up for training (its parameters have gradient buffers), and folding would take "
            "parameters from under the optimizer; fold a model that was built for inference, or use scalevec "
            "fold on the checkpoint."
        )
    zero_centered = bool(getattr(model.config, "layernorm_zero_centered_gamma", False))
    stays = {id(m.v_layernorm) for m in model.modules() if isinstance(m, ScaleVecSelfAttention)}
    with torch.no_grad():
        for module in list(model.modules()):
            module.__dict__.pop("scalevec_fed_by", None)
            if isinstance(module, JoinedDownProjection):
                _restore_class(module, JoinedDownProjection)
            if isinstance(module, ScaleVecExperts):
                with module.lending():
                    for linear in module.scalevec_borrowers:
                        _write_weights(linear)
                for linear in module.scalevec_borrowers:
                    _take_away(linear, FoldedLinear)
                _take_away(module, ScaleVecExperts)
            elif isinstance(module, Folded):
                _write_weights(module)
                _take_away(module, FoldedLinear if isinstance(module, FoldedLinear) else FoldedReplicated)
            elif isinstance(module, ScaledNorm) and id(module) not in stays:
                _fold_norm(module, zero_centered)
            elif own_folds(module):  # its weight is W_eff
                for owner in {vector.owner for fold in own_folds(module) for vector in fold.vectors}:
                    _remove_vectors(owner)
                forget_folds(module)
        release(model)
        for name, param in model.named_parameters():
            if re.fullmatch(r"(.*\.)?[a-z_]*weight\d*", name):
                param.requires_grad_(True)
    if not any(isinstance(module, ScaleVecSelfAttention) for module in model.modules()):
        _restore_class(model, Guarded)
        del model.scalevec_config


def _write_weights(module: Folded) -> None:
    for weight, folded in zip(module.scaled_weights(), module.folded_weights()):
        weight.copy_(folded)


def _take_away(module: torch.nn.Module, ours: type) -> None:
    """Vectors, notes and the class."""
    for name in ("scalevec_branch_of_row", "scalevec_slot_of_row"):
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)
    _remove_vectors(module)
    for name in [name for name in module.__dict__ if name.startswith(("scalevec_", "_scalevec_"))]:
        del module.__dict__[name]
    _restore_class(module, ours)


def _fold_norm(norm: torch.nn.Module, zero_centered: bool) -> None:
    gamma, own = compose_vector(norm, "gamma"), NormHandle(norm)
    own.weight.copy_(gamma - 1 if zero_centered else gamma)
    if own.bias is not None:
        own.bias.mul_(gamma)
    _remove_vectors(norm)
    drop_live_gamma(norm)
    norm.__dict__.pop("scalevec_tp_group", None)
    _restore_class(norm, ScaledNorm)


def _remove_vectors(owner: torch.nn.Module) -> None:
    for name, param in list(owner.named_parameters(recurse=False)):
        if vector_info(param) is not None and was_added(param):
            delattr(owner, name)
    owner.__dict__.pop("scalevec_reparameterizations", None)


def _restore_class(module: torch.nn.Module, ours: type) -> None:
    """The class below those of ours."""
    module.__class__ = class_below(type(module), ours)
