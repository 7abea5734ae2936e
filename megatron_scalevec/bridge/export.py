"""From a trained model with scale vectors to a stock one, for Hugging Face through ``AutoBridge``.

``AutoBridge`` finds weights by their names, and a linear with scale vectors keeps its raw weight under the
stock name. So Bridge's own export refuses a model that carries vectors (see
:mod:`megatron_scalevec.bridge.hooks`), and :func:`export_ckpt` folds it first.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from megatron_scalevec.errors import ScaleVecError

__all__ = ["export_ckpt", "fold_in_place"]


def export_ckpt(bridge: Any, megatron_path: str | os.PathLike, hf_path: str | os.PathLike) -> None:
    """As ``AutoBridge.export_ckpt``, for a checkpoint with scale vectors.

    Args:
        bridge: An ``AutoBridge`` for the model's architecture.
        megatron_path: A checkpoint that Bridge has written.
        hf_path: The folder to write.

    Raises:
        ScaleVecError: The model has a norm without a stock counterpart. Nothing is written.
    """
    from megatron.bridge.training.model_load_save import temporary_distributed_context

    with temporary_distributed_context(backend="gloo"):
        model = bridge.load_megatron_model(megatron_path, wrap_with_ddp=False)
        fold_in_place(model)
        bridge.save_hf_pretrained(model, hf_path, show_progress=False)


def fold_in_place(model: Any) -> None:
    """Turn a model with scale vectors into the stock model of the same function.

    Every weight becomes W ⊙ (γ_out γ_inᵀ) in its own dtype, every scale that had moved into a vector of ours
    goes back into its norm, and the vectors are gone. Every tensor-parallel rank does this to its own part.

    Args:
        model: A model, or a list of model chunks; wrapped or not. A stock model stays as it is.

    Raises:
        ScaleVecError: The model has a norm without a stock counterpart; it is unchanged.
    """
    from megatron_scalevec.audit.chunks import unwrap

    chunks = [unwrap(chunk) for chunk in (model if isinstance(model, (list, tuple)) else [model])]
    for chunk in chunks:
        _require_foldable(chunk)
    for chunk in chunks:
        _fold(chunk)


def _require_foldable(model: torch.nn.Module) -> None:
    from megatron_scalevec.layers.linear import FoldedLinear
    from megatron_scalevec.layers.norm import ScaledNorm
    from megatron_scalevec.vectors import was_added

    for path, module in model.named_modules():
        branch = path.rpartition(".")[2].removesuffix("_layernorm")
        weight = getattr(module, "weight", None)
        if branch in ("q", "k", "v") and weight is not None and was_added(weight):
            raise ScaleVecError(
                f"{path} normalizes the heads of {branch} (dual-norm placement), which the stock model does "
                "not, so no stock checkpoint computes the same; train with unified-foldable for one, or with "
                "branches_off v where the model has q/k norms of its own. Nothing was changed."
            )
        # Grouped linears hold one weight per expert.
        if isinstance(module, FoldedLinear | ScaledNorm) and isinstance(weight, torch.nn.Parameter):
            continue
        for name, param in module.named_parameters(recurse=False):
            if was_added(param):
                raise ScaleVecError(
                    f"{path}.{name} is a scale vector on a {type(module).__name__}, which cannot be folded "
                    "in memory; fold the checkpoint instead. Nothing was changed."
                )


@torch.no_grad()
def _fold(model: torch.nn.Module) -> None:
    from megatron_scalevec.convert import forget
    from megatron_scalevec.layers.linear import FoldedLinear
    from megatron_scalevec.layers.norm import ScaledNorm
    from megatron_scalevec.vectors import compose_vector

    zero_centered = bool(getattr(model.config, "layernorm_zero_centered_gamma", False))
    for module in model.modules():
        if isinstance(module, FoldedLinear):
            module.weight.copy_(module.folded_weight())
            _strip(module, FoldedLinear)
        elif isinstance(module, ScaledNorm):
            gamma = compose_vector(module, "gamma")
            module.weight.copy_(gamma - 1 if zero_centered else gamma)
            if getattr(module, "bias", None) is not None:
                module.bias.mul_(gamma)
            _strip(module, ScaledNorm)
    for param in model.parameters():
        param.requires_grad_(True)
    forget(model)


def _strip(module: torch.nn.Module, mixin: type) -> None:
    """Take the vectors off, and give the module the class it had."""
    from megatron_scalevec.vectors import was_added

    for name, param in list(module.named_parameters(recurse=False)):
        if was_added(param):
            delattr(module, name)
    for name, _ in list(module.named_buffers(recurse=False)):
        if name.startswith("scalevec_"):
            delattr(module, name)
    # The first class behind the mixin that is none of ours.
    module.__class__ = next(
        kind
        for kind in type(module).__mro__
        if not issubclass(kind, mixin) and not kind.__module__.startswith("megatron_scalevec.")
    )
