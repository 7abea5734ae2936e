"""Finding the maps of a mixture-of-experts layer, and giving them their scale vectors.

Everything that consumes the pre-MLP norm's output is a branch: the router, gate and up of every routed
expert and of the shared experts, and the shared experts' gate. Vectors act on weights, never on tokens:
tokens are dispatched once, and each expert would want them scaled in another way.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert.unknown import unknown_class
from megatron_scalevec.fold import RowMap, fc1_row_map, whole_row_map
from megatron_scalevec.layers import common
from megatron_scalevec.layers.experts import share_vectors
from megatron_scalevec.layers.linear import FoldedLinear, add_vectors, leaf_class, unsharded_sizes
from megatron_scalevec.layers.norm import NormHandle
from megatron_scalevec.layers.router import FoldedReplicated, ScaleVecSharedExpertMLP, ScaleVecTopKRouter
from megatron_scalevec.vectors import vector_info

__all__ = ["ExpertsSite", "find_experts", "grouped_leaf_class"]


class Map(Protocol):
    """A fused map, or as many of one kind as there are experts."""

    path: str
    channels: int

    def branches(self) -> tuple[str, ...]:
        """In the order of the weight's rows."""

    def check(self) -> None:
        """Raise ScaleVecError where this very map cannot carry vectors."""

    def convert(self, **what: Any) -> None:
        """Arguments as of :meth:`megatron_scalevec.layers.linear.FoldedLinear.convert`."""

    def remember_norm(self, norm: NormHandle) -> None:
        """Note the norm whose scale was taken over, or lost where the map has no input scales."""


@dataclass
class ExpertsSite:
    """The maps of a mixture-of-experts layer at one site, and the Input-Norm that feeds them all (None:
    none does)."""

    name: str
    path: str
    layer: int
    norm: NormHandle | None
    maps: list[Map]
    asked_for: bool

    def branches(self) -> list[str]:
        """Of all maps."""
        return [branch for each in self.maps for branch in each.branches()]


@dataclass
class ReplicatedMap:
    """The router, or the gate of shared experts."""

    path: str
    module: torch.nn.Module
    leaf: type[FoldedReplicated]
    branch: str

    @property
    def channels(self) -> int:
        return getattr(self.module, self.leaf.scaled).shape[1]

    def branches(self) -> tuple[str, ...]:
        return (self.branch,)

    def check(self) -> None:
        pass

    def convert(self, **what: Any) -> None:
        self.leaf.convert(self.module, self.branch, **what)

    def remember_norm(self, norm: NormHandle) -> None:
        self.module.scalevec_fed_by = norm


@dataclass
class SharedExpertMap:
    """fc1 or fc2 of the shared experts: one linear."""

    path: str
    linear: torch.nn.Module
    row_map: RowMap

    @property
    def channels(self) -> int:
        return unsharded_sizes(self.linear)[1]

    def branches(self) -> tuple[str, ...]:
        return self.row_map.branches

    def check(self) -> None:
        leaf_class(self.linear).require_convertible(self.path, self.linear)

    def convert(self, **what: Any) -> None:
        leaf_class(self.linear).convert(self.linear, self.row_map, **what)

    def remember_norm(self, norm: NormHandle) -> None:
        self.linear.scalevec_fed_by = norm


@dataclass
class RoutedMap:
    """fc1 or fc2 of all local routed experts: a linear for each, or a grouped one for all."""

    path: str
    experts: torch.nn.Module
    linears: list[torch.nn.Module]
    channels: int
    row_map: RowMap
    share: bool
    router: torch.nn.Module

    def branches(self) -> tuple[str, ...]:
        return self.row_map.branches

    def check(self) -> None:
        for linear in self.linears:
            _leaf(linear).require_convertible(self.path, linear)

    def convert(self, **what: Any) -> None:
        for linear in self.linears:
            _leaf(linear).convert(linear, self.row_map, borrows=self.share, **what)
        if self.share:
            share_vectors(self.experts, self.linears, self.router.tp_group)
            # Like the router's weight: a parameter of the dense part, which all data-parallel ranks reduce.
            add_vectors(self.experts, self.row_map, like=self.router.weight, **what)
        else:
            _count_in_gradient_norm(self.linears)

    def remember_norm(self, norm: NormHandle) -> None:
        lend = self.share and isinstance(self.linears[0], FoldedLinear)
        if lend:
            self.experts.scalevec_fed = tuple(self.linears[0].input_vectors())
        for owner in [self.experts] if lend else self.linears:
            owner.scalevec_fed_by = norm


def _count_in_gradient_norm(linears: list[FoldedLinear]) -> None:
    """Up to 0.18, Megatron takes an unsharded parameter for the same on all tensor-parallel ranks and counts
    it on the first. With one expert-tensor-parallel rank these hold other experts, and all count.

    Other splits are refused (``experts-tensor-parallel`` in :mod:`megatron_scalevec.support`).
    """
    asks_for_experts = inspect.signature(
        tensor_parallel_layers.param_is_not_tensor_parallel_duplicate
    ).parameters
    if "expert_tp_group" in asks_for_experts:
        return
    for linear in linears:
        if type(linear).group_of(linear).size() > 1:
            continue
        for parameter in linear.parameters(recurse=False):
            if vector_info(parameter) is not None and not parameter.allreduce:
                parameter.tensor_model_parallel = True


def grouped_leaf_class(linear: torch.nn.Module) -> type[FoldedLinear] | None:
    """Our class for one of TransformerEngine's grouped linears, None where there is none."""
    if not common.is_transformer_engine(linear):
        return None
    from megatron.core.extensions import transformer_engine

    if getattr(transformer_engine, "TEGroupedLinear", None) is None:
        return None
    from megatron_scalevec.layers import te_experts

    return te_experts.GROUPED_LEAVES.get(type(linear))


def _leaf(linear: torch.nn.Module) -> type[FoldedLinear] | None:
    return grouped_leaf_class(linear) or leaf_class(linear)


def find_experts(
    path: str, moe: MoELayer, number: int, norm: NormHandle, config: ScaleVecConfig
) -> Iterator[ExpertsSite]:
    """The sites of one layer.

    Args:
        path: Name of ``moe`` in the model.
        moe: The layer.
        number: Megatron's layer number.
        norm: The norm before it.
        config: The strategy.

    Raises:
        ScaleVecError: A part of it is of a class this version does not know.
    """
    c = moe.config
    if type(moe) is not MoELayer:
        raise unknown_class(path, moe, "megatron.core's MoELayer")
    if type(moe.router) is not TopKRouter:
        raise unknown_class(f"{path}.router", moe.router, "megatron.core's TopKRouter")
    ffn = c.moe_ffn_hidden_size
    routed = {
        name: _routed_linears(f"{path}.experts", moe.experts, name, parallel)
        for name, parallel in (("linear_fc1", "column"), ("linear_fc2", "row"))
    }

    def routed_map(name: str, channels: int, row_map: RowMap) -> RoutedMap:
        share = config.experts == "shared"
        place = f"{path}.experts.{name}"
        return RoutedMap(place, moe.experts, routed[name], channels, row_map, share, moe.router)

    mlp: list[Map] = [
        ReplicatedMap(f"{path}.router", moe.router, ScaleVecTopKRouter, "router"),
        routed_map("linear_fc1", c.hidden_size, _fc1_rows("expert", ffn, routed["linear_fc1"][0], c)),
    ]
    projections: list[Map] = [routed_map("linear_fc2", ffn, whole_row_map("expert_down", c.hidden_size))]
    shared = moe.shared_experts
    if shared is not None:
        where = f"{path}.shared_experts"
        if type(shared) is not SharedExpertMLP:
            raise unknown_class(where, shared, "megatron.core's SharedExpertMLP")
        for name, parallel in (("linear_fc1", "column"), ("linear_fc2", "row")):
            _require_linear(f"{where}.{name}", getattr(shared, name), parallel)
        rows = _fc1_rows("shared", c.moe_shared_expert_intermediate_size, shared.linear_fc1, c)
        mlp.append(SharedExpertMap(f"{where}.linear_fc1", shared.linear_fc1, rows))
        down = whole_row_map("shared_down", c.hidden_size)
        projections.append(SharedExpertMap(f"{where}.linear_fc2", shared.linear_fc2, down))
        if shared.gate_weight is not None:
            mlp.append(ReplicatedMap(where, shared, ScaleVecSharedExpertMLP, "shared_expert_gate"))
    yield ExpertsSite("mlp", path, number, norm, mlp, "mlp" in config.sites)
    yield ExpertsSite("projections", path, number, None, projections, "projections" in config.sites)


def _fc1_rows(prefix: str, ffn_hidden_size: int, linear: torch.nn.Module, model_config) -> RowMap:
    group = _leaf(linear).group_of(linear)
    rows = fc1_row_map(
        ffn_hidden_size=ffn_hidden_size,
        gated=model_config.gated_linear_unit,
        tp_rank=group.rank(),
        tp_size=group.size(),
    )
    return dataclasses.replace(rows, branches=tuple(f"{prefix}_{branch}" for branch in rows.branches))


def _routed_linears(path: str, experts: torch.nn.Module, name: str, parallel: str) -> list[torch.nn.Module]:
    if type(experts) is SequentialMLP:
        for index, expert in enumerate(experts.local_experts):
            if type(expert) is not MLP:
                raise unknown_class(f"{path}.local_experts.{index}", expert, "megatron.core's MLP")
        linears = [getattr(expert, name) for expert in experts.local_experts]
    elif type(experts) is TEGroupedMLP:
        linears = [getattr(experts, name)]
    else:
        raise unknown_class(path, experts, "megatron.core's SequentialMLP and TEGroupedMLP")
    for linear in linears:
        _require_linear(f"{path}.{name}", linear, parallel)
    return linears


def _require_linear(path: str, linear: torch.nn.Module, parallel: str) -> None:
    leaf = _leaf(linear)
    if leaf is None or leaf.parallel != parallel or leaf.fused_norm:
        raise unknown_class(
            path, linear, f"megatron.core's {parallel}-parallel linears, grouped or not, without a norm"
        )
