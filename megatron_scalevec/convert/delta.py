"""Sites of gated delta nets, as in Qwen3-Next.

The norm before the mixer feeds the in-projection: q, k, v, the output gate z, and per head the writing
strength b and the decay a. Behind the delta rule a norm over each head's channels, times the activated gate,
feeds the out-projection. The gate acts channel by channel, so the out-projection can absorb that norm's scale
all the same: an Input-Norm, with one scale for all heads, which therefore stays at the norm.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert.site import LinearSite, NormSite, norm_handle, require_linear
from megatron_scalevec.fold import RowMap, interleaved_row_map, joined_row_map
from megatron_scalevec.layers.common import is_exactly
from megatron_scalevec.layers.linear import leaf_class, sharding_of, unsharded_sizes

__all__ = ["delta_sites", "is_delta_net"]


def is_delta_net(module: torch.nn.Module) -> bool:
    """Whether a module is a gated delta net of the kind whose rows are known."""
    return is_exactly(module, "megatron.core.ssm.gated_delta_net", "GatedDeltaNet")


def delta_sites(
    path: str, layer: TransformerLayer, number: int, config: ScaleVecConfig
) -> Iterator[LinearSite | NormSite]:
    """Sites of a layer whose attention is a gated delta net.

    Raises:
        ScaleVecError: Its linears or norms are of an unknown kind.
    """
    mixer = layer.self_attention
    require_linear(f"{path}.self_attention.in_proj", mixer.in_proj, "column")
    require_linear(f"{path}.self_attention.out_proj", mixer.out_proj, "row")

    def rows() -> RowMap:
        tp_rank, tp_size = sharding_of(mixer.in_proj)
        heads = mixer.num_value_heads
        blocks = {
            "delta_q": mixer.qk_dim,
            "delta_k": mixer.qk_dim,
            "delta_v": mixer.v_dim,
            "delta_z": mixer.v_dim,
            "delta_b": heads,
            "delta_a": heads,
        }
        return joined_row_map(
            [
                interleaved_row_map(1, {branch: size}, tp_rank=tp_rank, tp_size=tp_size)
                for branch, size in blocks.items()
            ]
        )

    asked_for = "delta" in config.sites
    yield LinearSite(
        "delta",
        f"{path}.self_attention.in_proj",
        number,
        norm_handle(f"{path}.input_layernorm", layer.input_layernorm, mixer.in_proj),
        mixer.in_proj,
        unsharded_sizes(mixer.in_proj)[1],
        rows,
        asked_for,
    )
    name = f"{path}.self_attention.out_norm"
    yield NormSite(
        "delta",
        "delta_out",
        number,
        name,
        norm_handle(name, mixer.out_norm),
        asked_for,
        # Each rank normalizes its own heads, and nobody sums without sequence parallelism.
        tp_group=leaf_class(mixer.out_proj).group_of(mixer.out_proj),
    )
