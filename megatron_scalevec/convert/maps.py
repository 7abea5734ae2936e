"""Which linear maps the layers of a model have, by its configuration alone.

The conversion looks at built modules; this is the other side, against which the audit holds what was built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_scalevec.hybrid_layers import HYBRID_PARTS

__all__ = ["HYBRID_LAYERS", "Map", "layer_parts", "maps_of", "parts_of_mtp"]

HYBRID_LAYERS = "scalevec_hybrid_layers"
"""Attribute of the configuration of a hybrid model: one symbol for each of the decoder's layers."""


@dataclass(frozen=True)
class Map:
    """One linear with its branches.

    ``norm``: the Input-Norm of the layer that feeds it, None where none does. ``normalized``: branches with
    a norm over each head under dual-norm placement. ``keeps_scale``: whether the norm's own parameter can be
    the scale of all branches. ``at_norm``: whether the scale is a vector at the norm, and nothing is on the
    linear. ``experts``: of a map that every routed expert has, their number over all expert-parallel ranks;
    each has vectors of its own, unless they are shared.
    """

    site: str
    branches: tuple[str, ...]
    norm: str | None = None
    normalized: tuple[str, ...] = ()
    keeps_scale: bool = True
    at_norm: bool = False
    experts: int = 1


def layer_parts(model_config: Any) -> list[tuple[str, ...]]:
    """The parts (keys of :func:`maps_of`) of every layer of the decoder."""
    hybrid = getattr(model_config, HYBRID_LAYERS, None)
    if hybrid is not None:
        return [HYBRID_PARTS[symbol] for symbol in hybrid]
    blocks = getattr(model_config, "per_block_parameters", None)
    if blocks is not None:  # heterogeneous layers
        return [
            tuple(part for part, of in (("attention", block.attention), ("mlp", block.mlp)) if not of.no_op)
            for block in blocks
        ]
    attention = "latent attention" if getattr(model_config, "multi_latent_attention", False) else "attention"
    return [
        (attention, "experts" if _has_experts(model_config, layer) else "mlp")
        for layer in range(1, model_config.num_layers + 1)
    ]


def _has_experts(model_config: Any, layer: int) -> bool:
    """Whether a decoder layer, counted from 1 over the whole pipeline, is a mixture of experts.

    As Megatron's ``get_gpt_decoder_layer_specs`` reads ``moe_layer_freq``: a number N makes every N-th
    layer one, starting with the first; a list says it layer by layer.
    """
    if not getattr(model_config, "num_moe_experts", None):
        return False
    pattern = model_config.moe_layer_freq
    return layer % pattern == 1 % pattern if isinstance(pattern, int) else bool(pattern[layer - 1])


def parts_of_mtp(model_config: Any) -> tuple[str, ...]:
    """The parts of a layer inside multi-token prediction, which is as the decoder's last one."""
    return layer_parts(model_config)[-1]


def maps_of(part: str, model_config: Any) -> Sequence[Map]:
    """The linears of one part of a layer."""
    of_parts = {
        "attention": _attention,
        "latent attention": _latent_attention,
        "mlp": _mlp,
        "experts": _experts,
        "mamba": _mamba,
        "delta net": _delta_net,
    }
    return of_parts[part](model_config)


def _attention(c: Any) -> Sequence[Map]:
    gate = ("output_gate",) if getattr(c, "attention_output_gate", False) else ()
    return (
        Map("attention", ("q", *gate, "k", "v"), "input", normalized=("q", "k", "v")),
        Map("projections", ("o",)),
    )


def _latent_attention(c: Any) -> Sequence[Map]:
    keys = ("kv_down", "k_rope")
    query = ("q_down",) if c.q_lora_rank else ("q",)
    down = [(*query, *keys)] if getattr(c, "mla_down_proj_fusion", False) and c.q_lora_rank else [query, keys]
    maps = [Map("attention", branches, "input") for branches in down]
    if c.qk_layernorm:
        if c.q_lora_rank:
            maps.append(Map("latent", ("q_up",), "q latent", keeps_scale=False))
        maps.append(Map("latent", ("k_up", "v_up"), "kv latent", keeps_scale=False))
    return (*maps, Map("projections", ("o",)))


def _mlp(c: Any) -> Sequence[Map]:
    return Map("mlp", _fc1(c), "pre-mlp"), Map("projections", ("down",))


def _fc1(c: Any, prefix: str = "") -> tuple[str, ...]:
    return tuple(f"{prefix}{branch}" for branch in (("gate", "up") if c.gated_linear_unit else ("up",)))


def _experts(c: Any) -> Sequence[Map]:
    number = c.num_moe_experts
    maps = [Map("mlp", ("router",), "pre-mlp"), Map("projections", ("expert_down",), experts=number)]
    if getattr(c, "moe_latent_size", None):
        # The norm feeds the projection to the latents; what the experts multiply comes out of that.
        maps.append(Map("mlp", ("latent_down",), "pre-mlp"))
        maps.append(Map("projections", _fc1(c, "expert_"), experts=number))
        maps.append(Map("projections", ("latent_up",)))
    else:
        maps.append(Map("mlp", _fc1(c, "expert_"), "pre-mlp", experts=number))
    if c.moe_shared_expert_intermediate_size is not None:
        maps.append(Map("mlp", _fc1(c, "shared_"), "pre-mlp"))
        maps.append(Map("projections", ("shared_down",)))
        if c.moe_shared_expert_gate:
            maps.append(Map("mlp", ("shared_expert_gate",), "pre-mlp"))
    return tuple(maps)


def _mamba(c: Any) -> Sequence[Map]:
    return Map("mamba", ("z", "x", "B", "C", "dt"), "pre-mixer"), Map("mamba", ("out",), "gated")


def _delta_net(c: Any) -> Sequence[Map]:
    rows = tuple(f"delta_{name}" for name in ("q", "k", "v", "z", "b", "a"))
    return Map("delta", rows, "pre-mixer"), Map("delta", ("delta_out",), "per head", at_norm=True)
