"""Scale vectors as parameters: how they are made, what marks them, and the roles of 1-D parameters.

Every vector is one-dimensional (two-dimensional parameters would be taken by Muon and would escape
Megatron's rule for 1-D parameters), owned directly by the linear that it scales (under
``overlap_param_gather`` Megatron waits for parameters in the pre-hook of the owner's forward), and held
at full size on every tensor-parallel rank (so no sharding rule and nothing to reshard).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

__all__ = ["ROLES", "Role", "VectorInfo", "add_vector", "role_of", "set_role", "vector_info"]

Role = Literal["input", "output", "bias", "stock"]
"""What a one-dimensional trainable parameter is.

``input``: a scale that the next or the own weight can absorb: γ of an Input-Norm, γ_in, γ_out.
``output``: γ of a norm whose output no linear map follows: q and k norms.
``bias``: an additive parameter.
``stock``: known, and outside of the strategy (a site that was not asked for, softmax offsets).
"""
ROLES: tuple[str, ...] = get_args(Role)

_ROLE_ATTRIBUTE = "scalevec_role"
_INFO_ATTRIBUTE = "scalevec_info"


@dataclass(frozen=True)
class VectorInfo:
    """What a scale vector scales."""

    site: str  # a key of config.SITES
    branch: str  # q, k, v, gate, up; head; "shared" where all branches have it in common
    side: Literal["in", "out"]
    layer: int | None  # Megatron's layer number, from 1, over the whole pipeline; None for the head
    holder: Literal["linear", "norm"]


def add_vector(
    linear: torch.nn.Module, name: str, initial: torch.Tensor, info: VectorInfo, role: Role
) -> torch.nn.Parameter:
    """Register a scale vector on ``linear``.

    Args:
        linear: A column-parallel linear with a ``weight``.
        name: Parameter name, unused so far.
        initial: 1-D start values at full (not sharded) size; cast to the weight's dtype and device.
        info: What the vector scales.
        role: Its weight-decay role.

    The attributes are those Megatron reads: not sharded over tensor-parallel ranks, hence counted once
    in the gradient norm and saved as replicated; reduced over the same data-parallel group as the
    weight.
    """
    if hasattr(linear, name):
        raise AttributeError(f"{type(linear).__name__} already has {name!r}")
    weight = linear.weight
    value = initial.detach().to(device=weight.device, dtype=weight.dtype, copy=True)
    vector = torch.nn.Parameter(value)
    vector.tensor_model_parallel = False
    vector.partition_dim = -1
    vector.partition_stride = 1
    vector.allreduce = getattr(weight, "allreduce", True)
    set_role(vector, role, info)
    linear.register_parameter(name, vector)
    return vector


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
