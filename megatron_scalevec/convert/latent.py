"""Sites of multi-latent attention.

The pre-attention norm feeds the query projection, or the down-projection of the queries, and the
down-projection of keys and values, whose rows are the latent and the rotary part of the key that all heads
have in common. Norms on the compressed latents (``--qk-layernorm``) feed the up-projections, so they are
Input-Norms, whatever Megatron calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert.site import (
    LinearSite,
    norm_handle,
    projection_site,
    require_linear,
)
from megatron_scalevec.convert.unknown import unknown_class
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.fold import RowMap, interleaved_row_map, joined_row_map
from megatron_scalevec.layers.latent import complete_rope_key_gradient
from megatron_scalevec.layers.linear import leaf_class, sharding_of, unsharded_sizes

__all__ = ["complete_rope_keys", "is_latent_attention", "latent_attention_sites"]

# 0.17 and later have a form with one down-projection for queries, keys and values.
_FUSED = getattr(multi_latent_attention, "FusedMLASelfAttention", None)


def is_latent_attention(module: torch.nn.Module) -> bool:
    """Whether a module is multi-latent attention of any kind."""
    return isinstance(module, MultiLatentAttention)


def latent_attention_sites(
    path: str, layer: TransformerLayer, number: int, config: ScaleVecConfig
) -> Iterator[LinearSite]:
    """Sites of a layer's attention.

    Raises:
        ScaleVecError: The attention is of an unknown kind, or of one that cannot be right with vectors.
    """
    attention = layer.self_attention
    path, layer_path = f"{path}.self_attention", path
    if type(attention) not in (MLASelfAttention, _FUSED):
        raise unknown_class(path, attention, "megatron.core's SelfAttention or MLASelfAttention")
    if getattr(attention.config, "cache_mla_latents", False):
        raise ScaleVecError(
            f"{path} caches latents for inference (cache_mla_latents), which takes the raw up-projection "
            "apart where scale vectors do not reach; fold the model to a stock one first, or leave that off."
        )
    queries = getattr(attention, "linear_q_proj", None)
    if queries is not None and getattr(leaf_class(queries), "fused_norm", ""):
        raise ScaleVecError(
            f"{path}.linear_q_proj has a norm of its own behind the pre-attention norm, as Megatron 0.19 "
            "builds it with --qk-layernorm and without --q-lora-rank: the pre-attention norm feeds one "
            "linear and one norm then, and no linear can take its scale. Nothing was changed; add "
            "--q-lora-rank, drop --qk-layernorm, or run without --scalevec-strategy."
        )
    down = list(_down_projections(path, attention))
    _, first, _ = down[0]
    norm = norm_handle(f"{layer_path}.input_layernorm", layer.input_layernorm, first)
    for name, linear, rows in down:
        yield LinearSite(
            "attention",
            f"{path}.{name}",
            number,
            norm,
            linear,
            unsharded_sizes(linear)[1],
            rows,
            "attention" in config.sites,
            norm_feeds_others=len(down) > 1,
        )
    for latent, rows in _up_projections(attention).items():
        name = f"linear_{latent}_up_proj"
        linear, norm = getattr(attention, name), getattr(attention, f"{latent}_layernorm")
        require_linear(f"{path}.{name}", linear, "column")
        if isinstance(norm, IdentityOp) and not leaf_class(linear).fused_norm:
            continue  # no norm on this latent
        yield LinearSite(
            "latent",
            f"{path}.{name}",
            number,
            norm_handle(f"{path}.{latent}_layernorm", norm, linear),
            linear,
            unsharded_sizes(linear)[1],
            rows,
            "latent" in config.sites,
            # Megatron sums the gradient of whatever is named q_layernorm over tensor-parallel ranks; each
            # of them holds the whole latent, so without sequence parallelism the sum is too large.
            norm_keeps_scale=False,
        )
    require_linear(f"{path}.linear_proj", attention.linear_proj, "row")
    yield projection_site("o", f"{layer_path}.o", number, attention.linear_proj, config)


_Rows = Callable[[], RowMap]


def _down_projections(path: str, attention: MLASelfAttention) -> Iterator[tuple[str, torch.nn.Module, _Rows]]:
    """Name, linear and rows of what the pre-attention norm feeds."""
    c = attention.config
    queries = {"q_down": c.q_lora_rank} if c.q_lora_rank else {"q": _query_rows(c)}
    keys = {"kv_down": c.kv_lora_rank, "k_rope": c.qk_pos_emb_head_dim}
    if _FUSED is not None and isinstance(attention, _FUSED):
        linear = attention.linear_qkv_down_proj
        require_linear(f"{path}.linear_qkv_down_proj", linear, "column")
        if sharding_of(linear)[1] > 1:
            raise ScaleVecError(
                f"{path} has one down-projection for queries, keys and values (--mla-down-proj-fusion), "
                "where Megatron gives the rows of the rotary key the gradient of one tensor-parallel rank's "
                "heads alone; drop that flag, or use one tensor-parallel rank."
            )
        yield "linear_qkv_down_proj", linear, _rows(linear, queries, keys)
        return
    of_queries = "linear_q_down_proj" if c.q_lora_rank else "linear_q_proj"
    for name, blocks in ((of_queries, queries), ("linear_kv_down_proj", keys)):
        linear = getattr(attention, name)
        require_linear(f"{path}.{name}", linear, "replicated", "column")
        yield name, linear, _rows(linear, blocks)


def _up_projections(attention: MLASelfAttention) -> dict[str, _Rows]:
    """Latent to the rows of its up-projection: head after head, with the branches inside of each."""
    c = attention.config
    rows = {}
    if c.q_lora_rank:
        rows["q"] = _rows(attention.linear_q_up_proj, {"q_up": _query_rows(c)})
    heads = {"k_up": c.qk_head_dim, "v_up": c.v_head_dim}
    rows["kv"] = _rows(attention.linear_kv_up_proj, heads, groups=c.num_attention_heads)
    return rows


def _query_rows(config) -> int:
    """Channels of all query heads, their rotary parts included."""
    return config.num_attention_heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)


def _rows(linear: torch.nn.Module, *shares: dict[str, int], groups: int = 1) -> _Rows:
    """Each rank's share of the first blocks, then its share of the next."""

    def row_map() -> RowMap:
        tp_rank, tp_size = sharding_of(linear)
        maps = [interleaved_row_map(groups, blocks, tp_rank=tp_rank, tp_size=tp_size) for blocks in shares]
        return joined_row_map(maps)

    return row_map


def complete_rope_keys(model: torch.nn.Module) -> None:
    """Have the rotary key's rows of every latent attention get their whole gradient; see
    :func:`megatron_scalevec.layers.latent.complete_rope_key_gradient`."""
    for module in model.modules():
        if type(module) is MLASelfAttention:
            complete_rope_key_gradient(module)
