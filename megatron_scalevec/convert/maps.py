"""Which linear maps the layers of a model have, by its configuration alone.

The conversion looks at built modules; this is the other side, against which the audit holds what was built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Map", "layer_parts", "maps_of", "parts_of_mtp"]


@dataclass(frozen=True)
class Map:
    """One linear with its branches.

    ``norm``: the Input-Norm of the layer that feeds it, None where none does. ``normalized``: branches with
    a norm over each head under dual-norm placement. ``keeps_scale``: whether the norm's own parameter can be
    the scale of all branches.
    """

    site: str
    branches: tuple[str, ...]
    norm: str | None = None
    normalized: tuple[str, ...] = ()
    keeps_scale: bool = True


def layer_parts(model_config: Any) -> list[tuple[str, ...]]:
    """The parts (keys of :func:`maps_of`) of every layer of the decoder."""
    attention = "latent attention" if _is_latent(model_config) else "attention"
    return [(attention, "mlp")] * model_config.num_layers


def parts_of_mtp(model_config: Any) -> tuple[str, ...]:
    """The parts of the layer inside multi-token prediction, which is as the decoder's last one."""
    return layer_parts(model_config)[-1]


def maps_of(part: str, model_config: Any) -> Sequence[Map]:
    """The linears of one part of a layer."""
    return {"attention": _attention, "latent attention": _latent_attention, "mlp": _mlp}[part](model_config)


def _is_latent(model_config: Any) -> bool:
    return bool(getattr(model_config, "multi_latent_attention", False))


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
    branches = ("gate", "up") if c.gated_linear_unit else ("up",)
    return Map("mlp", branches, "pre-mlp"), Map("projections", ("down",))
