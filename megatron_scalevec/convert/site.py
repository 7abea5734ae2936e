"""What a site is: an Input-Norm, the linears that it feeds, and their branches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert.unknown import unknown_class
from megatron_scalevec.fold import RowMap, whole_row_map
from megatron_scalevec.layers.linear import leaf_class, unsharded_sizes
from megatron_scalevec.layers.norm import NormHandle

__all__ = [
    "LinearSite",
    "NormSite",
    "final_norm_of",
    "norm_handle",
    "projection_site",
    "require_linear",
]


@dataclass
class NormSite:
    """An Input-Norm that feeds one map, which keeps its scale: the final norm, the norms of MTP."""

    name: str
    branch: str
    layer: int | None
    path: str
    norm: NormHandle
    asked_for: bool
    tp_group: Any = None
    """Sum the scale's gradient over this group, where ranks see different heads and Megatron does not."""


@dataclass
class LinearSite:
    """A linear with its branches, and the Input-Norm that feeds it (None: none does).

    Subclasses (:mod:`megatron_scalevec.convert.experts`) stand for what multiplies without being one linear.
    """

    name: str
    path: str
    layer: int
    norm: NormHandle | None
    linear: torch.nn.Module
    channels: int
    row_map: Callable[[], RowMap]
    asked_for: bool
    attention: SelfAttention | None = None  # set where heads can be normalized
    norm_feeds_others: bool = False
    """Whether the norm feeds further linears, so that a scale they share cannot be in one of them."""
    norm_keeps_scale: bool = True
    """Whether the norm's own parameter, as Megatron treats it, can be the scale of all branches."""

    def branches(self) -> tuple[str, ...]:
        """In the order of the weight's rows."""
        return self.row_map().branches

    def check(self) -> None:
        """Raise ScaleVecError where this very linear cannot carry vectors."""
        leaf_class(self.linear).require_convertible(self.path, self.linear)

    def convert(self, **what: Any) -> None:
        """Give it its vectors; arguments as of
        :meth:`megatron_scalevec.layers.linear.FoldedLinear.convert`."""
        leaf_class(self.linear).convert(self.linear, self.row_map(), site=self.name, layer=self.layer, **what)

    def remember_norm(self) -> None:
        """Note the norm whose scale was taken over, or lost where the linear has no input scales."""
        self.linear.scalevec_fed_by = self.norm


_LINEARS = {
    parallel: f"megatron.core's {' or '.join(names)} (--transformer-impl local or transformer_engine)"
    for parallel, names in {
        "column": ("ColumnParallelLinear", "TELayerNormColumnParallelLinear", "TEColumnParallelLinear"),
        "row": ("RowParallelLinear", "TERowParallelLinear"),
        "replicated": ("ColumnParallelLinear", "TELinear"),
    }.items()
}


def final_norm_of(decoder: torch.nn.Module) -> tuple[str, torch.nn.Module | None]:
    """Name of the slot and norm before the output head; None on a pipeline stage without it."""
    name = "final_norm" if hasattr(decoder, "final_norm") else "final_layernorm"
    return name, getattr(decoder, name, None)


def norm_handle(path: str, norm: torch.nn.Module, linear: torch.nn.Module | None = None) -> NormHandle:
    """The norm in Megatron's slot for it, or the one fused into the linear that it feeds."""
    prefix = leaf_class(linear).fused_norm if linear is not None else ""
    if prefix and not isinstance(norm, IdentityOp):
        raise unknown_class(path, norm, "no norm before a linear that has one of its own")
    handle = NormHandle(linear, prefix) if prefix else NormHandle(norm)
    weight = getattr(handle.owner, f"{prefix}weight", None)
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1:
        raise unknown_class(path, handle.owner, "a norm with a one-dimensional weight")
    return handle


def projection_site(
    branch: str, path: str, layer: int, linear: torch.nn.Module, config: ScaleVecConfig
) -> LinearSite:
    """A row-parallel linear that no norm feeds."""
    rows, columns = unsharded_sizes(linear)
    return LinearSite(
        "projections",
        path,
        layer,
        None,
        linear,
        columns,
        lambda: whole_row_map(branch, rows),
        "projections" in config.sites,
    )


def require_linear(path: str, linear: torch.nn.Module, *parallel: str) -> None:
    """Refuse a linear that is not of a class we know with one of these ways of sharing its weight.

    Raises:
        ScaleVecError: It is something else.
    """
    leaf = leaf_class(linear)
    if leaf is None or leaf.parallel not in parallel:
        raise unknown_class(path, linear, _LINEARS[parallel[0]])
