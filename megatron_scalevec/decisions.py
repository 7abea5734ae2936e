"""What a strategy comes to at one linear or norm, from configurations alone.

The same for a model that is converted and for a checkpoint that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_scalevec.config import ScaleVecConfig

__all__ = ["SHARED", "LinearPlan", "norm_keeps_scale", "plan_expert_map", "plan_linear"]

SHARED = "shared"
"""Branch name of an input scale that all branches of a linear have in common."""


@dataclass(frozen=True)
class LinearPlan:
    """Branches by what they get. ``retires_norm``: γ of the norm before the linear is fixed at one."""

    retires_norm: bool
    in_branches: tuple[str, ...]
    out_branches: tuple[str, ...]
    normalized: tuple[str, ...]

    @property
    def has_vectors(self) -> bool:
        """Whether the linear itself carries scale vectors."""
        return bool(self.in_branches or self.out_branches)


def plan_linear(
    config: ScaleVecConfig,
    branches: Sequence[str],
    *,
    fed_by_norm: bool,
    zero_centered: bool,
    has_heads: bool,
) -> LinearPlan:
    """The plan for a linear at a site that was asked for.

    Args:
        config: An active strategy.
        branches: All branches of the linear.
        fed_by_norm: Whether a norm feeds it.
        zero_centered: Whether the model's norms store γ − 1.
        has_heads: Whether q, k and v can be normalized per head behind it.
    """
    on = tuple(branch for branch in branches if branch not in config.branches_off)
    retires, inputs = False, ()
    if not fed_by_norm:
        inputs = on if config.has_input_scales else ()
    elif config.removes_norm_scale:
        retires = True
        if config.has_input_scales:
            inputs = (SHARED,) if config.branches == "shared" else on
    elif zero_centered:
        # Stored as γ − 1 it would decay toward one; on the linear it is γ itself.
        retires, inputs = True, (SHARED,)
    outputs = on if config.has_output_scales else ()
    normalized = ()
    if config.placement == "dual-norm" and has_heads:
        normalized = tuple(branch for branch in ("q", "k", "v") if branch in on)
        outputs = tuple(branch for branch in outputs if branch not in normalized)
    return LinearPlan(retires, inputs, outputs, normalized)


def plan_expert_map(config: ScaleVecConfig, branches: Sequence[str], *, fed_by_norm: bool) -> LinearPlan:
    """The plan for one of the maps of a mixture of experts, all of which one norm feeds.

    An input scale that they share stays at the norm, in whatever form: no single map could take it over.
    Arguments as of :func:`plan_linear`.
    """
    on = tuple(branch for branch in branches if branch not in config.branches_off)
    at_norm = fed_by_norm and config.has_input_scales and config.branches == "shared"
    return LinearPlan(
        retires_norm=fed_by_norm and not at_norm,
        in_branches=on if config.has_input_scales and not at_norm else (),
        out_branches=on if config.has_output_scales else (),
        normalized=(),
    )


def norm_keeps_scale(config: ScaleVecConfig, *, role: str, zero_centered: bool, needs_sum: bool) -> bool:
    """Whether a norm's own parameter is the scale vector as it stands.

    It is not where the vector is stored in another form or dtype, where Megatron stores γ − 1 and decay
    would pull γ toward one, or where its gradient needs a sum that Megatron does not make.
    """
    decays_off_centre = zero_centered and role == "input"
    return config.plain and not decays_off_centre and not needs_sum
