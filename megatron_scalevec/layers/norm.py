"""Norms whose scale is a vector of ours: γ ⊙ Norm(x), with the norm's own scale fixed at one.

Used where γ cannot be folded into a weight: behind the intermediate norms of dual-norm placement, and on
the final norm when its γ is stored in another form than the norm's own parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_scalevec.execution.live_gamma import (
    live_gamma,
    move_live_gamma,
    renew_from_parts,
    takes_live_gamma,
)
from megatron_scalevec.layers import common
from megatron_scalevec.layers.rms_norm import rms_norm
from megatron_scalevec.vectors import (
    Role,
    VectorInfo,
    add_vector,
    compose_vector,
    keep_dtype,
    mark_added,
    was_added,
)

__all__ = ["GAMMA", "NormHandle", "ScaledNorm", "head_norm", "retire", "scale_norm"]

GAMMA = "gamma"


class ScaledNorm:
    """Mixin over any norm class: its output times γ. A LayerNorm's bias belongs to the norm's output.

    torch's RMSNorm takes γ in place of its own scale, in the same pass, and so do TransformerEngine's norms
    (:class:`megatron_scalevec.layers.te.ScaledTENorm`). Others have kernels that read the scale from their
    parameter, and torch's LayerNorm sums the gradient of its scale in half precision on a CPU: after them the
    product is taken, in the activations' dtype.
    """

    scalevec_tp_group = None  # set where each rank sees only its own heads and nobody else sums

    def forward(self, *args, **kwargs):
        """As the norm's; the first of several outputs (fused residual norms) is scaled."""
        if takes_live_gamma(self, GAMMA):
            return self._scaled(live_gamma(self, GAMMA), *args, **kwargs)
        gamma = compose_vector(self, GAMMA)
        if self.scalevec_tp_group is not None:
            gamma = common.sum_gradient_over_tensor_parallel(gamma, self.scalevec_tp_group)
        return self._scaled(gamma, *args, **kwargs)

    def _scaled(self, gamma: torch.Tensor, *args, **kwargs):
        if getattr(super().forward, "__func__", None) is torch.nn.RMSNorm.forward:
            return self._rms_norm(gamma, *args, **kwargs)
        out = super().forward(*args, **kwargs)
        if isinstance(out, tuple):
            return (out[0] * gamma.to(out[0].dtype), *out[1:])
        return out * gamma.to(out.dtype)

    def _rms_norm(self, gamma: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        scale = gamma.to(x.dtype)
        if x.device.type == "cpu" and was_added(self.weight):
            # Norms that the model has anyway are carried out as they are without scale vectors.
            return rms_norm(x, scale, self.eps)
        return torch.nn.functional.rms_norm(x, self.normalized_shape, scale, self.eps)

    def _apply(self, fn, recurse=True):
        keep_dtype(self, lambda: super(ScaledNorm, self)._apply(fn, recurse))
        move_live_gamma(self, fn)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if any(name.startswith(f"{prefix}{GAMMA}") for name in state_dict):
            renew_from_parts(self, GAMMA)


@dataclass(frozen=True)
class NormHandle:
    """A norm's parameters, wherever they live: in a module of their own, or in a fused linear."""

    owner: torch.nn.Module
    prefix: str = ""  # "layer_norm_" where the norm is fused into its linear

    @property
    def weight(self) -> torch.nn.Parameter:
        """γ, or γ − 1 where Megatron stores it zero-centered."""
        return getattr(self.owner, f"{self.prefix}weight")

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """A LayerNorm's bias."""
        return getattr(self.owner, f"{self.prefix}bias", None)


def retire(norm: NormHandle, zero_centered: bool) -> None:
    """Freeze a norm's own scale at one (stored as 0 where Megatron stores γ − 1).

    It stays in place: kernels, checkpoints and exporters expect it. A LayerNorm's bias is from now on
    scaled with the rest of the norm's output, so a trained one is divided by the scale it was trained
    with: γ ⊙ (x̂ + β/γ) = γ ⊙ x̂ + β.
    """
    weight, bias = norm.weight, norm.bias
    if not weight.is_meta:
        with torch.no_grad():
            if bias is not None and bool(bias.any()):
                scale = weight + 1 if zero_centered else weight
                # A channel without scale has no bias either, which is checked before.
                bias.div_(torch.where(scale == 0, torch.ones_like(scale), scale))
            weight.fill_(0.0 if zero_centered else 1.0)
    weight.requires_grad_(False)


def scale_norm(
    norm: torch.nn.Module,
    info: VectorInfo,
    role: Role,
    *,
    zero_centered: bool,
    dtype: torch.dtype | None,
    tp_group=None,
) -> None:
    """Move a norm's scale into a vector of ours, value and function kept.

    Args:
        norm: A built norm with a 1-D ``weight``.
        info: What the vector scales, and how it is stored.
        role: Its weight-decay role.
        zero_centered: Whether the norm stores γ − 1.
        dtype: Storage dtype, None for the norm's.
        tp_group: Sum the gradient over this group in the backward pass. None where Megatron sums it: the
            q and k norms by their names, norms on sequence-parallel activations by the attribute that is
            copied from the norm's weight.
    """
    weight = norm.weight
    gamma = weight.detach() + 1 if zero_centered else weight.detach().clone()
    norm.__class__ = common.mixed_class(_mixin(norm), type(norm))
    norm.scalevec_tp_group = tp_group
    before = set(dict(norm.named_parameters(recurse=False)))
    add_vector(norm, GAMMA, gamma, info, role, like=weight, dtype=dtype)
    if tp_group is None:
        for name, parameter in norm.named_parameters(recurse=False):
            if name not in before:
                parameter.sequence_parallel = getattr(weight, "sequence_parallel", False)
    retire(NormHandle(norm), zero_centered)


def _mixin(norm: torch.nn.Module) -> type[ScaledNorm]:
    if common.is_transformer_engine(norm):
        from megatron_scalevec.layers import te

        return te.ScaledTENorm
    return ScaledNorm


def _build_norm(like: torch.nn.Module, config, size: int) -> torch.nn.Module:
    """A norm of the kind of ``like``: a norm, or a linear with a fused one."""
    eps = config.layernorm_epsilon
    if type(like) in (torch.nn.RMSNorm, torch.nn.LayerNorm):
        return type(like)(size, eps=eps)
    if common.is_transformer_engine(like):
        from megatron_scalevec.layers import te

        return te.build_norm(config, size, eps)
    # Megatron's own interface: apex's fused norms and whatever stands in for them.
    return type(like)(config=config, hidden_size=size, eps=eps)


def head_norm(like: NormHandle, config, *, bias: bool) -> torch.nn.Module:
    """A new norm over a head's channels, of the kind the model uses elsewhere.

    Args:
        like: One of the model's norms: decides the class, device and dtype.
        config: Megatron's model configuration: ``kv_channels``, epsilon.
        bias: Keep a LayerNorm's bias trainable; otherwise it stays at zero.
    """
    norm = _build_norm(like.owner, config, config.kv_channels)
    norm = norm.to(device=like.weight.device, dtype=like.weight.dtype)
    for parameter in norm.parameters():
        mark_added(parameter)
        parameter.sequence_parallel = bool(getattr(like.weight, "sequence_parallel", False))
    own_bias = getattr(norm, "bias", None)
    if own_bias is not None and not bias:
        own_bias.requires_grad_(False)
    return norm
