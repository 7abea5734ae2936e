"""Finding the places of a model where scale vectors act: norms, linears and their branches."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert.delta import delta_sites, is_delta_net
from megatron_scalevec.convert.experts import expert_sites
from megatron_scalevec.convert.latent import is_latent_attention, latent_attention_sites
from megatron_scalevec.convert.mamba import is_mamba_layer, mamba_sites
from megatron_scalevec.convert.site import (
    LinearSite,
    NormSite,
    final_norm_of,
    norm_handle,
    projection_site,
    require_linear,
)
from megatron_scalevec.convert.unknown import unknown_class
from megatron_scalevec.fold import RowMap, fc1_row_map, qkv_row_map
from megatron_scalevec.layers.linear import sharding_of, unsharded_sizes

__all__ = ["LinearSite", "NormSite", "find_sites"]


def find_sites(model: LanguageModule, config: ScaleVecConfig) -> Iterator[NormSite | LinearSite]:
    of_mtp: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, MultiTokenPredictionLayer):
            of_mtp.update(id(inner) for inner in module.modules())
            for name in ("enorm", "hnorm", "final_layernorm"):
                norm = getattr(module, name, None)
                if norm is not None and not isinstance(norm, IdentityOp):
                    number = model.config.num_layers + module.layer_number
                    handle = norm_handle(f"{path}.{name}", norm)
                    yield NormSite("mtp", name, number, f"{path}.{name}", handle, "mtp" in config.sites)
        elif isinstance(module, TransformerLayer):
            # Layers inside the MTP block count from 1 again; here they follow the decoder's.
            offset = model.config.num_layers if id(module) in of_mtp else 0
            number = module.layer_number
            if offset and number > offset:  # some versions have added the offset themselves
                offset = 0
            yield from _layer_sites(path, module, number + offset, config)
        elif is_mamba_layer(module):
            offset = model.config.num_layers if id(module) in of_mtp else 0
            yield from mamba_sites(path, module, module.layer_number + offset, config)
    name, norm = final_norm_of(model.decoder)
    if norm is not None and not isinstance(norm, IdentityOp):
        path = f"decoder.{name}"
        handle = norm_handle(path, norm)
        yield NormSite("head", "logits", None, path, handle, "head" in config.sites)


def _layer_sites(
    path: str, layer: TransformerLayer, number: int, config: ScaleVecConfig
) -> Iterator[LinearSite | NormSite]:
    """Sites of one layer. Either half may be missing: in heterogeneous and in hybrid models."""
    if not isinstance(layer.cross_attention, IdentityOp):
        raise unknown_class(f"{path}.cross_attention", layer.cross_attention, "no cross-attention")
    if is_latent_attention(layer.self_attention):
        yield from latent_attention_sites(path, layer, number, config)
    elif is_delta_net(layer.self_attention):
        yield from delta_sites(path, layer, number, config)
    elif not isinstance(layer.self_attention, IdentityOp):
        yield from _attention_sites(path, layer, number, config)
    if not isinstance(layer.mlp, IdentityOp):
        yield from _mlp_sites(path, layer, number, config)


def _attention_sites(
    path: str, layer: TransformerLayer, number: int, config: ScaleVecConfig
) -> Iterator[LinearSite]:
    attention, c = layer.self_attention, layer.config
    # Subclasses compute something else from the same weights: only the classes whose row layout is known
    # are converted.
    if type(attention) is not SelfAttention:
        raise unknown_class(
            f"{path}.self_attention", attention, "megatron.core's SelfAttention or MLASelfAttention"
        )
    require_linear(f"{path}.self_attention.linear_qkv", attention.linear_qkv, "column")
    require_linear(f"{path}.self_attention.linear_proj", attention.linear_proj, "row")

    def qkv() -> RowMap:
        tp_rank, tp_size = sharding_of(attention.linear_qkv)
        return qkv_row_map(
            num_query_groups=c.num_query_groups,
            query_heads_per_group=c.num_attention_heads // c.num_query_groups,
            head_dim=c.kv_channels,
            tp_rank=tp_rank,
            tp_size=tp_size,
            output_gate=bool(getattr(c, "attention_output_gate", False)),
        )

    yield LinearSite(
        "attention",
        f"{path}.self_attention",
        number,
        norm_handle(f"{path}.input_layernorm", layer.input_layernorm, attention.linear_qkv),
        attention.linear_qkv,
        unsharded_sizes(attention.linear_qkv)[1],
        qkv,
        "attention" in config.sites,
        attention,
    )
    yield projection_site("o", f"{path}.o", number, attention.linear_proj, config)


def _mlp_sites(
    path: str, layer: TransformerLayer, number: int, config: ScaleVecConfig
) -> Iterator[LinearSite]:
    mlp = layer.mlp
    if isinstance(mlp, BaseMoELayer):
        norm = norm_handle(f"{path}.pre_mlp_layernorm", layer.pre_mlp_layernorm)
        yield from expert_sites(f"{path}.mlp", mlp, number, norm, config)
        return
    if type(mlp) is not MLP:
        raise unknown_class(f"{path}.mlp", mlp, "megatron.core's dense MLP and its mixture of experts")
    require_linear(f"{path}.mlp.linear_fc1", mlp.linear_fc1, "column")
    require_linear(f"{path}.mlp.linear_fc2", mlp.linear_fc2, "row")

    def fc1() -> RowMap:
        tp_rank, tp_size = sharding_of(mlp.linear_fc1)
        gated = layer.config.gated_linear_unit
        return fc1_row_map(
            ffn_hidden_size=unsharded_sizes(mlp.linear_fc1)[0] // (2 if gated else 1),
            gated=gated,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )

    yield LinearSite(
        "mlp",
        f"{path}.mlp",
        number,
        norm_handle(f"{path}.pre_mlp_layernorm", layer.pre_mlp_layernorm, mlp.linear_fc1),
        mlp.linear_fc1,
        unsharded_sizes(mlp.linear_fc1)[1],
        fc1,
        "mlp" in config.sites,
    )
    yield projection_site("down", f"{path}.down", number, mlp.linear_fc2, config)
