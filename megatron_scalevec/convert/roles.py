"""Weight-decay roles of a model's one-dimensional parameters."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.moe.router import TopKRouter

from megatron_scalevec.convert.delta import is_delta_net
from megatron_scalevec.convert.experts import grouped_leaf_class
from megatron_scalevec.convert.mamba import is_mamba_mixer
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.layers.linear import leaf_class
from megatron_scalevec.vectors import role_of

__all__ = ["parameter_roles", "plan_roles"]


_STOCK_OF_MIXERS = ("conv1d_bias", "conv1d.bias", "dt_bias", "A_log", "D")


def plan_roles(model: torch.nn.Module, sites) -> list[tuple[torch.nn.Parameter, str]]:
    """Roles of every 1-D parameter that the conversion itself does not mark.

    Raises:
        ScaleVecError: A trainable 1-D parameter is of no known kind, so whether it should decay is
            unknown.
    """
    plan: dict[int, tuple[torch.nn.Parameter, str]] = {}

    def mark(param: torch.nn.Parameter | None, role: str) -> None:
        # TransformerEngine has an empty plain tensor where a linear has no bias.
        if isinstance(param, torch.nn.Parameter):
            plan[id(param)] = (param, role)

    converted: set[int] = set()
    for site in sites:
        if site.norm is not None:
            mark(site.norm.bias, "bias")
            if site.asked_for:
                converted.add(id(site.norm.weight))
            else:
                mark(site.norm.weight, "stock")
    for module in model.modules():
        if isinstance(module, Attention):
            mark(getattr(module.core_attention, "softmax_offset", None), "stock")
        if isinstance(module, SelfAttention):
            for norm in (module.q_layernorm, module.k_layernorm):
                mark(getattr(norm, "weight", None), "output")
                mark(getattr(norm, "bias", None), "bias")
        elif is_mamba_mixer(module) or is_delta_net(module):
            # What is no scale: the convolution's bias, the time step's, the state's decay, the skip.
            for name, param in module.named_parameters():
                if param.dim() == 1 and name in _STOCK_OF_MIXERS:
                    mark(param, "stock")
        elif isinstance(module, (ColumnParallelLinear, RowParallelLinear)) or leaf_class(module):
            mark(module.bias, "bias")
        elif isinstance(module, TopKRouter):
            mark(module.bias, "bias")
        elif grouped_leaf_class(module):
            for name, param in module.named_parameters(recurse=False):
                if name.startswith("bias"):
                    mark(param, "bias")
    for name, param in model.named_parameters():
        if param.dim() != 1 or not param.requires_grad:
            continue
        if id(param) not in plan and id(param) not in converted:
            raise ScaleVecError(
                f"{name} {tuple(param.shape)} is a one-dimensional parameter of a kind this version does "
                "not know, so it cannot say whether weight decay belongs on it; nothing was changed."
            )
    return list(plan.values())


def parameter_roles(model: torch.nn.Module) -> dict[str, str]:
    """Names and roles of the model's trainable 1-D parameters, for the audit and tests.

    Raises:
        ScaleVecError: One of them has no role.
    """
    roles = {}
    for name, param in model.named_parameters():
        if param.dim() == 1 and param.requires_grad:
            role = role_of(param)
            if role is None:
                raise ScaleVecError(
                    f"{name} {tuple(param.shape)} was added after the scale vectors were and has no "
                    "weight-decay role; apply scale vectors last."
                )
            roles[name] = role
    return roles
