"""Scale vectors as parameters: how they are made, what marks them, and the roles of 1-D parameters.

Every stored tensor is one-dimensional (two-dimensional parameters would be taken by Muon and would escape
Megatron's rule for 1-D parameters), owned directly by the module that it scales (under
``overlap_param_gather`` Megatron waits for parameters in the pre-hook of the owner's forward), and held
at full size on every tensor-parallel rank (so no sharding rule and nothing to reshard).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from megatron_scalevec.reparam import get_reparameterization

__all__ = [
    "ROLES",
    "Role",
    "VectorInfo",
    "add_vector",
    "compose_vector",
    "has_vector",
    "keep_dtype",
    "mark_added",
    "role_of",
    "set_role",
    "set_vector",
    "vector_info",
    "vector_names",
    "vector_parts",
    "was_added",
]

Role = Literal["input", "output", "direction", "bias", "stock"]
"""What a one-dimensional trainable parameter is.

``input``: a scale that the next or the own weight can absorb: γ of an Input-Norm, γ_in, γ_out.
``output``: γ of a norm whose output no linear map follows: q and k norms.
``direction``: a part of a scale vector whose length does not matter, so that it never decays.
``bias``: an additive parameter.
``stock``: known, and outside of the strategy (a site that was not asked for, softmax offsets).
"""
ROLES: tuple[str, ...] = get_args(Role)

_ROLE_ATTRIBUTE = "scalevec_role"
_INFO_ATTRIBUTE = "scalevec_info"
_ADDED_ATTRIBUTE = "scalevec_added"
_KEPT_ATTRIBUTE = "scalevec_keeps_dtype"
_KINDS_ATTRIBUTE = "scalevec_reparameterizations"


@dataclass(frozen=True)
class VectorInfo:
    """What a scale vector scales, and which stored part of it a parameter is."""

    site: str  # a key of config.SITES
    branch: str  # a name of config.BRANCH_NAMES; logits; "shared" where all branches have it in common
    side: Literal["in", "out"]
    layer: int | None  # Megatron's layer number, from 1, over the whole pipeline; None for the head
    holder: Literal["linear", "replicated", "norm"]
    reparam: str = "none"
    part: str = ""  # suffix of the stored part; empty for γ itself


def add_vector(
    owner: torch.nn.Module,
    name: str,
    initial: torch.Tensor,
    info: VectorInfo,
    role: Role,
    *,
    like: torch.nn.Parameter,
    dtype: torch.dtype | None = None,
) -> None:
    """Register the stored parts of a scale vector on ``owner``.

    Args:
        owner: The module whose forward composes the vector.
        name: Base name of the parameters; parts append their suffix.
        initial: 1-D start values of γ at full (not sharded) size.
        info: What the vector scales; ``reparam`` names how it is stored.
        role: Its weight-decay role; a direction part gets ``direction`` instead.
        like: The parameter whose device, dtype and data-parallel group the vector shares.
        dtype: Storage dtype that stays whatever the model is cast to; None for ``like``'s, now and later.

    The attributes are those Megatron reads: not sharded over tensor-parallel ranks, hence counted once
    in the gradient norm and saved as replicated; reduced over the same data-parallel group as ``like``.
    """
    kind = get_reparameterization(info.reparam)
    values = kind.decompose(initial.detach().to(device=like.device, dtype=dtype or like.dtype))
    kinds = owner.__dict__.setdefault(_KINDS_ATTRIBUTE, {})
    kinds[name] = info.reparam
    for part in kind.parts:
        full_name = _part_name(name, part.suffix)
        if hasattr(owner, full_name):
            raise AttributeError(f"{type(owner).__name__} already has {full_name!r}")
        parameter = torch.nn.Parameter(values[part.suffix].contiguous())
        parameter.tensor_model_parallel = False
        parameter.partition_dim = -1
        parameter.partition_stride = 1
        parameter.allreduce = getattr(like, "allreduce", True)
        own = replace(info, part=part.suffix)
        set_role(parameter, "direction" if part.direction else role, own)
        mark_added(parameter)
        if dtype is not None:
            setattr(parameter, _KEPT_ATTRIBUTE, True)
        owner.register_parameter(full_name, parameter)


def has_vector(owner: torch.nn.Module, name: str) -> bool:
    """Whether :func:`add_vector` made a vector of this name on the module."""
    return name in owner.__dict__.get(_KINDS_ATTRIBUTE, {})


def vector_names(owner: torch.nn.Module) -> list[str]:
    """Base names of the vectors that :func:`add_vector` made on the module."""
    return list(owner.__dict__.get(_KINDS_ATTRIBUTE, {}))


def set_vector(owner: torch.nn.Module, name: str, gamma: torch.Tensor) -> None:
    """Give a vector that :func:`add_vector` made another value.

    Args:
        owner: The module that owns it.
        name: Its base name.
        gamma: [n] in any dtype; the stored parts are computed at least in float32.
    """
    kind = get_reparameterization(owner.__dict__[_KINDS_ATTRIBUTE][name])
    parts = kind.decompose(gamma.to(torch.promote_types(gamma.dtype, torch.float32)))
    with torch.no_grad():
        for part in kind.parts:
            getattr(owner, _part_name(name, part.suffix)).copy_(parts[part.suffix])


def compose_vector(owner: torch.nn.Module, name: str) -> torch.Tensor:
    """γ [n], at least in float32, differentiable in the stored parts."""
    kind, parts = vector_parts(owner, name)
    wide = {
        suffix: tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        for suffix, tensor in parts.items()
    }
    return get_reparameterization(kind).compose(wide)


def vector_parts(owner: torch.nn.Module, name: str) -> tuple[str, dict[str, torch.nn.Parameter]]:
    """Name of a vector's reparameterization, and its stored parts by suffix."""
    kind = owner.__dict__[_KINDS_ATTRIBUTE][name]
    parts = get_reparameterization(kind).parts
    return kind, {part.suffix: getattr(owner, _part_name(name, part.suffix)) for part in parts}


def _part_name(name: str, suffix: str) -> str:
    return f"{name}_{suffix}" if suffix else name


def keep_dtype(owner: torch.nn.Module, convert) -> None:
    """Run ``convert`` (a ``Module._apply``), and give vectors that were made with a dtype of their own on the
    module their values back.

    Megatron casts whole models to bf16 or fp16 after they are built.
    """
    kept = {
        name: parameter.detach().clone()
        for name, parameter in owner.named_parameters(recurse=False)
        if getattr(parameter, _KEPT_ATTRIBUTE, False)
    }
    convert()
    for name, value in kept.items():
        parameter = getattr(owner, name)
        parameter.data = value.to(parameter.device)


def set_role(param: torch.nn.Parameter, role: Role, info: VectorInfo | None = None) -> None:
    """Mark a parameter. A parameter has one role; a second, different one is a bug."""
    if role not in ROLES:
        raise ValueError(f"{role!r} is not one of {ROLES}")
    known = role_of(param)
    if known is not None and known != role:
        raise ValueError(f"parameter already has the role {known!r}, not {role!r}")
    setattr(param, _ROLE_ATTRIBUTE, role)
    if info is not None:
        setattr(param, _INFO_ATTRIBUTE, info)


def role_of(param: torch.nn.Parameter) -> Role | None:
    """The parameter's role, None where it has none."""
    return getattr(param, _ROLE_ATTRIBUTE, None)


def vector_info(param: torch.nn.Parameter) -> VectorInfo | None:
    """What the parameter scales, None where it is no scale vector."""
    return getattr(param, _INFO_ATTRIBUTE, None)


def mark_added(param: torch.nn.Parameter) -> None:
    """Mark a parameter that the stock model does not have."""
    setattr(param, _ADDED_ATTRIBUTE, True)


def was_added(param: torch.nn.Parameter) -> bool:
    """Whether the stock model lacks this parameter."""
    return getattr(param, _ADDED_ATTRIBUTE, False)
