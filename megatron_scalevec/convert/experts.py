"""Finding the maps of a mixture-of-experts layer, and giving them their scale vectors.

Everything that consumes the pre-MLP norm's output is a branch: the router, gate and up of every routed
expert and of the shared experts, and the shared experts' gate. Vectors act on weights, never on tokens:
tokens are dispatched once, and each expert would want them scaled in another way.

Experts on latents (``moe_latent_size``) get their tokens through a projection that every rank holds whole.
That projection is the norm's branch then; what it makes is fed to the experts' gate and up by no norm, so
these are projections like the maps behind them, and so is the one that leads back from the latents.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert.site import LinearSite, require_linear
from megatron_scalevec.convert.unknown import unknown_class
from megatron_scalevec.fold import RowMap, alternating_fc1_row_map, fc1_row_map, whole_row_map
from megatron_scalevec.layers import common
from megatron_scalevec.layers.experts import hold_vectors, share_vectors
from megatron_scalevec.layers.linear import FoldedLinear, add_vectors, leaf_class
from megatron_scalevec.layers.norm import NormHandle
from megatron_scalevec.layers.router import FoldedReplicated, ScaleVecSharedExpertMLP, ScaleVecTopKRouter
from megatron_scalevec.vectors import vector_info

__all__ = ["expert_sites", "grouped_leaf_class"]


@dataclass
class ReplicatedSite(LinearSite):
    """A weight that a module holds as a plain parameter: the router's, or the gate of shared experts."""

    leaf: type[FoldedReplicated] = field(kw_only=True)

    def check(self) -> None:
        """Nothing about the module stands in the way once its class is known."""

    def convert(self, **what: Any) -> None:
        """As the base class's."""
        [branch] = self.branches()
        self.leaf.convert(self.linear, branch, site=self.name, layer=self.layer, **what)


@dataclass
class RoutedSite(LinearSite):
    """fc1 or fc2 of all local routed experts: a linear for each, or a grouped one for all.

    ``linear`` is the first of ``linears``. ``share``: whether the experts have their vectors in common.
    ``ep_group``: of the ranks that hold the layer's other experts.
    """

    linears: list[torch.nn.Module] = field(kw_only=True)
    experts: torch.nn.Module = field(kw_only=True)
    router: torch.nn.Module = field(kw_only=True)
    ep_group: Any = field(kw_only=True)
    share: bool = field(kw_only=True)

    def check(self) -> None:
        """As the base class's, for every linear."""
        for linear in self.linears:
            _leaf(linear).require_convertible(self.path, linear)

    def convert(self, **what: Any) -> None:
        """As the base class's."""
        in_optimizer = what.pop("in_optimizer")
        what, rows = {"site": self.name, "layer": self.layer, **what}, self.row_map()
        # Like the router's weight: a parameter of the dense part, which all data-parallel ranks reduce.
        own = {"row_map": rows, "like": self.router.weight, **what}
        how: dict[str, Any] = {}
        if in_optimizer:
            how = {"in_optimizer": True}
            if self.share:
                hold_vectors(self.experts, self.router.tp_group)
                add_vectors(self.experts, **own)
                how.update(lender=self.experts, groups=(self.ep_group,))
        for linear in self.linears:
            _leaf(linear).convert(linear, rows, borrows=self.share, **how, **what)
        if self.share:
            if not in_optimizer:
                share_vectors(self.experts, self.linears, self.router.tp_group)
                add_vectors(self.experts, **own)
        else:
            _count_in_gradient_norm(self.linears)

    def remember_norm(self) -> None:
        """As the base class's, on what owns the vectors."""
        lend = self.share and isinstance(self.linear, FoldedLinear)
        if lend:
            self.experts.scalevec_fed = tuple(self.linear.input_vectors())
        for owner in [self.experts] if lend else self.linears:
            owner.scalevec_fed_by = self.norm


def _count_in_gradient_norm(linears: list[torch.nn.Module]) -> None:
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
        if _leaf(linear).group_of(linear).size() > 1:
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

    return te_experts.grouped_leaf(linear)


def _leaf(linear: torch.nn.Module) -> type[FoldedLinear] | None:
    return grouped_leaf_class(linear) or leaf_class(linear)


def expert_sites(
    path: str, moe: MoELayer, number: int, norm: NormHandle, config: ScaleVecConfig
) -> Iterator[LinearSite]:
    """The sites of one layer.

    Args:
        path: Name of ``moe`` in the model.
        moe: The layer.
        number: Megatron's layer number.
        norm: The norm before it, which feeds several maps: a scale that they share stays there.
        config: The strategy.

    Raises:
        ScaleVecError: A part of it is of a class this version does not know.
    """
    c = moe.config
    if type(moe) is not MoELayer:
        raise unknown_class(path, moe, "megatron.core's MoELayer")
    if type(moe.router) is not TopKRouter:
        raise unknown_class(f"{path}.router", moe.router, "megatron.core's TopKRouter")
    hidden, ffn = c.hidden_size, c.moe_ffn_hidden_size
    fed = {"norm_feeds_others": True, "asked_for": "mlp" in config.sites}
    unfed = {"asked_for": "projections" in config.sites}
    latent = getattr(c, "moe_latent_size", None)
    width = latent or hidden  # of the tokens that experts see

    def replicated(where: str, module: torch.nn.Module, leaf: type[FoldedReplicated], branch: str):
        rows = getattr(module, leaf.scaled).shape[0]
        return ReplicatedSite(
            "mlp", where, number, norm, module, hidden, lambda: whole_row_map(branch, rows), leaf=leaf, **fed
        )

    def routed(name: str, parallel: str) -> dict[str, Any]:
        linears = _routed_linears(f"{path}.experts", moe.experts, name, parallel)
        share = config.experts == "shared"
        return {
            "linear": linears[0],
            "linears": linears,
            "experts": moe.experts,
            "router": moe.router,
            "ep_group": moe.ep_group,
            "share": share,
            "path": f"{path}.experts.{name}",
        }

    def whole(branch: str, rows: int = hidden) -> Callable[[], RowMap]:
        return lambda: whole_row_map(branch, rows)

    fc1 = routed("linear_fc1", "column")
    fc2 = routed("linear_fc2", "row")
    yield replicated(f"{path}.router", moe.router, ScaleVecTopKRouter, "router")
    block = c.moe_mlp_glu_interleave_size if _takes_turns(moe.experts) else None
    rows = _fc1_rows("expert", ffn, fc1["linear"], c, block)
    common_to_fc1 = {"layer": number, "channels": width, "row_map": rows, **fc1}
    if latent:
        yield from _latent_sites(path, moe, number, norm, fed, unfed)
        yield RoutedSite("projections", norm=None, **unfed, **common_to_fc1)
    else:
        yield RoutedSite("mlp", norm=norm, **fed, **common_to_fc1)
    rows = whole("expert_down", width)
    yield RoutedSite("projections", layer=number, norm=None, channels=ffn, row_map=rows, **unfed, **fc2)
    shared, where = moe.shared_experts, f"{path}.shared_experts"
    if shared is None:
        return
    if type(shared) is not SharedExpertMLP:
        raise unknown_class(where, shared, "megatron.core's SharedExpertMLP")
    for name, parallel in (("linear_fc1", "column"), ("linear_fc2", "row")):
        _require_linear(f"{where}.{name}", getattr(shared, name), parallel)
    ffn = c.moe_shared_expert_intermediate_size
    rows = _fc1_rows("shared", ffn, shared.linear_fc1, c)
    yield LinearSite("mlp", f"{where}.linear_fc1", number, norm, shared.linear_fc1, hidden, rows, **fed)
    yield LinearSite(
        "projections",
        f"{where}.linear_fc2",
        number,
        None,
        shared.linear_fc2,
        ffn,
        whole("shared_down"),
        **unfed,
    )
    if shared.gate_weight is not None:
        yield replicated(where, shared, ScaleVecSharedExpertMLP, "shared_expert_gate")


def _latent_sites(
    path: str, moe: MoELayer, number: int, norm: NormHandle, fed: dict[str, Any], unfed: dict[str, Any]
) -> Iterator[LinearSite]:
    """The projections to the latents and back, which every tensor-parallel rank holds whole."""
    for name, site, feeder, branch, asked in (
        ("fc1_latent_proj", "mlp", norm, "latent_down", fed),
        ("fc2_latent_proj", "projections", None, "latent_up", unfed),
    ):
        where, linear = f"{path}.{name}", getattr(moe, name)
        require_linear(where, linear, "replicated")
        rows, columns = linear.weight.shape

        def row_map(branch: str = branch, rows: int = rows) -> RowMap:
            return whole_row_map(branch, rows)

        yield LinearSite(site, where, number, feeder, linear, columns, row_map, **asked)


def _takes_turns(experts: torch.nn.Module) -> bool:
    """Whether gate and up rows of the experts take turns; only grouped linears heed the setting."""
    c = experts.config
    return (
        type(experts) is TEGroupedMLP
        and c.gated_linear_unit
        and bool(getattr(c, "moe_mlp_glu_interleave_size", None))
    )


def _fc1_rows(
    prefix: str, ffn_hidden_size: int, linear: torch.nn.Module, model_config, block: int | None = None
) -> Callable[[], RowMap]:
    """``block``: rows of gate and up that take turns; None where all of the gate's come first."""

    def row_map() -> RowMap:
        group = _leaf(linear).group_of(linear)
        part = {"ffn_hidden_size": ffn_hidden_size, "tp_rank": group.rank(), "tp_size": group.size()}
        if block:
            rows = alternating_fc1_row_map(block=block, **part)
        else:
            rows = fc1_row_map(gated=model_config.gated_linear_unit, **part)
        return dataclasses.replace(rows, branches=tuple(f"{prefix}_{branch}" for branch in rows.branches))

    return row_map


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
