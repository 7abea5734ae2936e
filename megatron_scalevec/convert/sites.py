"""Finding the places of a model where scale vectors act: norms, linears and their branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert.experts import ExpertsSite, find_experts
from megatron_scalevec.convert.unknown import unknown_class
from megatron_scalevec.fold import RowMap, fc1_row_map, qkv_row_map, whole_row_map
from megatron_scalevec.layers.linear import leaf_class, unsharded_sizes
from megatron_scalevec.layers.norm import NormHandle

__all__ = ["LinearSite", "NormSite", "find_sites"]


@dataclass
class NormSite:
    """An Input-Norm that feeds one map, which keeps its scale: the final norm, the norms of MTP."""

    name: str
    branch: str
    layer: int | None
    path: str
    norm: NormHandle
    asked_for: bool


@dataclass
class LinearSite:
    """A linear with its branches, and the Input-Norm that feeds it (None: none does)."""

    name: str
    path: str
    layer: int
    norm: NormHandle | None
    linear: torch.nn.Module
    channels: int
    row_map: Callable[[], RowMap]
    asked_for: bool
    attention: SelfAttention | None = None  # set where heads can be normalized

    def branches(self) -> tuple[str, ...]:
        """In the order of the weight's rows."""
        return self.row_map().branches


def find_sites(model: GPTModel, config: ScaleVecConfig) -> Iterator[NormSite | LinearSite | ExpertsSite]:
    of_mtp: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, MultiTokenPredictionLayer):
            of_mtp.update(id(inner) for inner in module.modules())
            for name in ("enorm", "hnorm", "final_layernorm"):
                norm = getattr(module, name, None)
                if norm is not None and not isinstance(norm, IdentityOp):
                    number = model.config.num_layers + module.layer_number
                    handle = _norm_handle(f"{path}.{name}", norm)
                    yield NormSite("mtp", name, number, f"{path}.{name}", handle, "mtp" in config.sites)
        elif isinstance(module, TransformerLayer):
            # Layers inside the MTP block count from 1 again; here they follow the decoder's.
            offset = model.config.num_layers if id(module) in of_mtp else 0
            number = module.layer_number
            if offset and number > offset:  # some versions have added the offset themselves
                offset = 0
            yield from _layer_sites(path, module, number + offset, config)
    norm = getattr(model.decoder, "final_layernorm", None)
    if norm is not None and not isinstance(norm, IdentityOp):
        path = "decoder.final_layernorm"
        handle = _norm_handle(path, norm)
        yield NormSite("head", "logits", None, path, handle, "head" in config.sites)


def _layer_sites(
    path: str, layer: TransformerLayer, number: int, config: ScaleVecConfig
) -> Iterator[LinearSite | ExpertsSite]:
    if not isinstance(layer.cross_attention, IdentityOp):
        raise unknown_class(f"{path}.cross_attention", layer.cross_attention, "no cross-attention")
    attention, mlp = layer.self_attention, layer.mlp
    # Subclasses compute something else from the same weights (latent attention): only the
    # classes whose row layout is known are converted.
    if type(attention) is not SelfAttention:
        raise unknown_class(f"{path}.self_attention", attention, "megatron.core's SelfAttention")
    experts = isinstance(mlp, BaseMoELayer)
    if type(mlp) is not MLP and not experts:
        raise unknown_class(f"{path}.mlp", mlp, "megatron.core's dense MLP and its mixture of experts")
    for name, linear, parallel in (
        ("self_attention.linear_qkv", attention.linear_qkv, "column"),
        ("self_attention.linear_proj", attention.linear_proj, "row"),
        *(() if experts else (("mlp.linear_fc1", mlp.linear_fc1, "column"),)),
        *(() if experts else (("mlp.linear_fc2", mlp.linear_fc2, "row"),)),
    ):
        leaf = leaf_class(linear)
        if leaf is None or leaf.parallel != parallel:
            raise unknown_class(f"{path}.{name}", linear, _LINEARS[parallel])
    attention_norm = _norm_handle(f"{path}.input_layernorm", layer.input_layernorm, attention.linear_qkv)
    fed = None if experts else mlp.linear_fc1
    mlp_norm = _norm_handle(f"{path}.pre_mlp_layernorm", layer.pre_mlp_layernorm, fed)
    c = layer.config

    def group_of(linear):
        return leaf_class(linear).group_of(linear)

    def qkv() -> RowMap:
        group = group_of(attention.linear_qkv)
        return qkv_row_map(
            num_query_groups=c.num_query_groups,
            query_heads_per_group=c.num_attention_heads // c.num_query_groups,
            head_dim=c.kv_channels,
            tp_rank=group.rank(),
            tp_size=group.size(),
            output_gate=bool(getattr(c, "attention_output_gate", False)),
        )

    def fc1() -> RowMap:
        group = group_of(mlp.linear_fc1)
        gated = c.gated_linear_unit
        return fc1_row_map(
            ffn_hidden_size=unsharded_sizes(mlp.linear_fc1)[0] // (2 if gated else 1),
            gated=gated,
            tp_rank=group.rank(),
            tp_size=group.size(),
        )

    yield LinearSite(
        "attention",
        f"{path}.self_attention",
        number,
        attention_norm,
        attention.linear_qkv,
        unsharded_sizes(attention.linear_qkv)[1],
        qkv,
        "attention" in config.sites,
        attention,
    )
    projections = [("o", attention.linear_proj)]
    if experts:
        yield from find_experts(f"{path}.mlp", mlp, number, mlp_norm, config)
    else:
        projections.append(("down", mlp.linear_fc2))
        yield LinearSite(
            "mlp",
            f"{path}.mlp",
            number,
            mlp_norm,
            mlp.linear_fc1,
            unsharded_sizes(mlp.linear_fc1)[1],
            fc1,
            "mlp" in config.sites,
        )
    for branch, linear in projections:
        rows, columns = unsharded_sizes(linear)
        yield LinearSite(
            "projections",
            f"{path}.{branch}",
            number,
            None,
            linear,
            columns,
            lambda branch=branch, rows=rows: whole_row_map(branch, rows),
            "projections" in config.sites,
        )


_LINEARS = {
    parallel: f"megatron.core's {' or '.join(names)} (--transformer-impl local or transformer_engine)"
    for parallel, names in {
        "column": ("ColumnParallelLinear", "TELayerNormColumnParallelLinear", "TEColumnParallelLinear"),
        "row": ("RowParallelLinear", "TERowParallelLinear"),
    }.items()
}


def _norm_handle(path: str, norm: torch.nn.Module, linear: torch.nn.Module | None = None) -> NormHandle:
    """The norm in Megatron's slot for it, or the one fused into the linear that it feeds."""
    prefix = leaf_class(linear).fused_norm if linear is not None else ""
    if prefix and not isinstance(norm, IdentityOp):
        raise unknown_class(path, norm, "no norm before a linear that has one of its own")
    handle = NormHandle(linear, prefix) if prefix else NormHandle(norm)
    weight = getattr(handle.owner, f"{prefix}weight", None)
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1:
        raise unknown_class(path, handle.owner, "a norm with a one-dimensional weight")
    return handle
