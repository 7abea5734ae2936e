"""``--finetune`` from a stock checkpoint: its weights are loaded into a model with scale vectors.

The model asks for what a stock model asks for. Once that is in place, γ of each norm moves into the vectors
that stand for it, as when a stock model is converted.
"""

from __future__ import annotations

import torch

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.execution.folds import fold_live_weights, own_folds
from megatron_scalevec.execution.live_gamma import renew_from_parts
from megatron_scalevec.layers.linear import scale_of_all_channels
from megatron_scalevec.layers.norm import GAMMA, NormHandle, ScaledNorm, retire
from megatron_scalevec.vectors import compose_vector, set_vector

__all__ = ["absorb_norms"]


def absorb_norms(model: torch.nn.Module) -> None:
    """Move the scales of a converted model's norms into its vectors; what is at one stays so. Where the
    optimizer folds, the weights become W_eff.

    Raises:
        ScaleVecError: A trained scale has nowhere to go.
    """
    zero_centered = bool(getattr(model.config, "layernorm_zero_centered_gamma", False))
    fed: dict[int, tuple[NormHandle, list[tuple[str, torch.nn.Module]]]] = {}
    for path, module in model.named_modules():
        norm = getattr(module, "scalevec_fed_by", None)
        if norm is not None:
            fed.setdefault(id(norm), (norm, []))[1].append((path, module))
        elif isinstance(module, ScaledNorm):
            fed[id(module)] = NormHandle(module), [(path, module)]
    for norm, owners in fed.values():
        _absorb(norm, owners, zero_centered)
    fold_live_weights(model)
    for module in model.modules():
        if isinstance(module, ScaledNorm):
            renew_from_parts(module, GAMMA)


def _input_vectors(owner: torch.nn.Module) -> list[tuple[torch.nn.Module, str] | None]:
    """Module and name of every input scale, None for a branch that has none."""
    if isinstance(owner, ScaledNorm):
        return [(owner, GAMMA)]
    folds = own_folds(owner)
    if folds:
        return [v and (v.owner, v.name) for v in dict.fromkeys(v for fold in folds for v in fold.inner)]
    # A map without any vectors is still of Megatron's own class.
    names = owner.input_vectors() if hasattr(owner, "input_vectors") else [None]
    return [name and (owner, name) for name in names]


def _absorb(norm: NormHandle, owners: list[tuple[str, torch.nn.Module]], zero_centered: bool) -> None:
    """Give γ of one norm to all maps behind it."""
    gamma = norm.weight.detach() + 1 if zero_centered else norm.weight.detach().clone()
    for path, owner in owners:
        for vector in _input_vectors(owner):
            if vector is not None:
                channels = compose_vector(*vector).numel()
                set_vector(*vector, scale_of_all_channels(owner, gamma, channels))
            elif not bool((gamma == 1).all()):
                raise ScaleVecError(
                    f"the norm before {path} has a trained scale in this checkpoint, which the strategy "
                    "leaves no place for on every branch: use one with input scales on all of them."
                )
    if norm.bias is not None and bool(((gamma == 0) & (norm.bias.detach() != 0)).any()):
        raise ScaleVecError(
            f"the norm before {owners[0][0]} has a trained bias on a channel whose scale is zero, which "
            "cannot be kept: scalevec unfold and --finetune need norms without such channels."
        )
    retire(norm, zero_centered)
