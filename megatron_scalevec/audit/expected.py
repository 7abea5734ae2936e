"""What a strategy must come to on a model, from the two configurations alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_scalevec.audit.chunks import unwrap
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert.branches import has_experts, maps_of_layer
from megatron_scalevec.reparam import get_reparameterization

__all__ = ["Expectation", "Share", "expectation"]


@dataclass(frozen=True)
class Expectation:
    """What a strategy must come to on a model, from the two configurations alone."""

    vectors: dict[str, int]
    linears: int
    norm_scales_retired: int


@dataclass(frozen=True)
class Share:
    """The part of a model that is looked at.

    ``layers``: numbers of decoder layers, counted from 1 over the whole pipeline.
    """

    layers: tuple[int, ...]
    mtp_layers: int
    final_norm: bool

    @classmethod
    def whole(cls, model_config: Any) -> Share:
        """All pipeline stages, by the configuration alone."""
        mtp = int(getattr(model_config, "mtp_num_layers", None) or 0)
        # A repeated MTP layer is one layer, used several times.
        if mtp and getattr(model_config, "mtp_use_repeated_layer", False):
            mtp = 1
        return cls(tuple(range(1, model_config.num_layers + 1)), mtp, True)

    @classmethod
    def held_by(cls, chunks: Iterable[torch.nn.Module]) -> Share:
        """What Megatron has placed on one rank."""
        decoders = [unwrap(chunk).decoder for chunk in chunks]
        mtp = [getattr(unwrap(chunk), "mtp", None) for chunk in chunks]
        return cls(
            tuple(layer.layer_number for decoder in decoders for layer in decoder.layers),
            sum(len(block.layers) for block in mtp if block is not None),
            any(getattr(decoder, "final_layernorm", None) is not None for decoder in decoders),
        )


def expectation(config: ScaleVecConfig, model_config: Any, share: Share | None = None) -> Expectation:
    """Counts of what a strategy must come to.

    Args:
        config: The strategy.
        model_config: Megatron's ``TransformerConfig``.
        share: The part of the model; by default all of it, MTP layers included. Experts of other
            expert-parallel ranks belong to it.
    """
    share = share or Share.whole(model_config)
    kinds = Counter(has_experts(model_config, layer) for layer in share.layers)
    # Layers of multi-token prediction are of the kind of the last decoder layer.
    kinds[has_experts(model_config, model_config.num_layers)] += share.mtp_layers
    vectors: Counter[str] = Counter()
    linears = retired = 0
    zero_centered = bool(getattr(model_config, "layernorm_zero_centered_gamma", False))
    moves = config.removes_norm_scale or zero_centered

    def count(site: str, branch: str, side: str, number: int) -> None:
        for part in get_reparameterization(config.reparam).parts if number else ():
            vectors[f"{site} {branch} {side} {part.suffix}".rstrip()] += number

    for experts, layers in sorted(kinds.items()):
        for site, maps in maps_of_layer(config, model_config, experts=experts).items():
            fed = site != "projections"
            shared = fed and config.branches == "shared" and config.has_input_scales
            if shared:
                count(site, "shared", "in", layers)
            retired += layers * bool(fed and config.active and moves)
            for kind in maps if config.placement is not None else ():
                branches = [branch for branch in kind.branches if branch not in config.branches_off]
                for branch in branches:
                    if config.has_input_scales and not shared:
                        count(site, branch, "in", layers * kind.vectors)
                    if config.has_output_scales:
                        count(site, branch, "out", layers * kind.vectors)
                normalized = config.placement == "dual-norm" and site == "attention"
                out_on_linear = [b for b in branches if not (normalized and b in ("q", "k", "v"))]
                # Where several maps are fed by one norm, a scale they share stays there.
                in_on_linear = moves and not (experts and site == "mlp") if shared else bool(branches)
                on_linear = (config.has_input_scales and in_on_linear) or (
                    config.has_output_scales and out_on_linear
                )
                linears += layers * kind.weights * bool(on_linear)
    # The head's norm keeps its scale unless it is removed, or moves into another form.
    leaves = config.placement is None or not config.plain or zero_centered
    for site, branches, number in (
        ("mtp", ("enorm", "hnorm", "final_layernorm"), share.mtp_layers),
        ("head", ("logits",), int(share.final_norm)),
    ):
        if site in config.sites and number:
            retired += number * len(branches) * leaves
            if config.placement is not None:
                for branch in branches:
                    count(site, branch, "in", number)
    return Expectation(dict(vectors), linears, retired)
