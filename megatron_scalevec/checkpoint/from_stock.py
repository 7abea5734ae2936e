"""``--finetune`` from a stock checkpoint: its weights are loaded into a model with scale vectors.

The model asks for what a stock model asks for. Once that is in place, γ of each norm moves into the vectors
that stand for it, as when a stock model is converted.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_scalevec.decisions import SHARED
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.layers.linear import FoldedLinear, gamma_name
from megatron_scalevec.layers.norm import NormHandle, ScaledNorm, retire
from megatron_scalevec.vectors import has_vector, set_vector

__all__ = ["absorb_norms"]


def absorb_norms(model: torch.nn.Module) -> None:
    """Move the scales of a converted model's norms into its vectors; what is at one stays so.

    Raises:
        ScaleVecError: A trained scale has nowhere to go.
    """
    zero_centered = bool(getattr(model.config, "layernorm_zero_centered_gamma", False))
    for path, module in model.named_modules():
        if isinstance(module, FoldedLinear) and getattr(module, "scalevec_fed_by", None) is not None:
            names = _input_vectors(module)
            _absorb(path, module, names, module.scalevec_fed_by, zero_centered)
        elif isinstance(module, ScaledNorm):
            _absorb(path, module, ["gamma"], NormHandle(module), zero_centered)


def _input_vectors(linear: FoldedLinear) -> list[str | None]:
    shared = gamma_name("in", SHARED)
    return [shared] if has_vector(linear, shared) else [name for name, _ in linear.scalevec_in]


def _absorb(
    path: str, owner: torch.nn.Module, names: Iterable[str | None], norm: NormHandle, zero_centered: bool
) -> None:
    gamma = norm.weight.detach() + 1 if zero_centered else norm.weight.detach().clone()
    for name in names:
        if name is not None:
            set_vector(owner, name, gamma)
        elif not bool((gamma == 1).all()):
            raise ScaleVecError(
                f"the norm before {path} has a trained scale in this checkpoint, which the strategy leaves "
                "no place for on every branch: use one with input scales on all of them."
            )
    if norm.bias is not None and bool(((gamma == 0) & (norm.bias.detach() != 0)).any()):
        raise ScaleVecError(
            f"the norm before {path} has a trained bias on a channel whose scale is zero, which cannot be "
            "kept: scalevec unfold and --finetune need norms without such channels."
        )
    retire(norm, zero_centered)
