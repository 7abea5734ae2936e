"""What a strategy must come to on a model, from the two configurations alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_scalevec.audit.chunks import unwrap
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert.maps import layer_parts, maps_of, parts_of_mtp
from megatron_scalevec.convert.site import final_norm_of
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
    """The part of a model that is looked at."""

    parts: Mapping[str, int]
    """How often each part of a layer occurs (``convert.maps``), those of MTP layers included."""
    mtp_layers: int
    final_norm: bool

    @classmethod
    def whole(cls, model_config: Any) -> Share:
        """All pipeline stages, by the configuration alone."""
        mtp = int(getattr(model_config, "mtp_num_layers", None) or 0)
        # A repeated MTP layer is one layer, used several times.
        if mtp and getattr(model_config, "mtp_use_repeated_layer", False):
            mtp = 1
        return cls._of(layer_parts(model_config), mtp, True, model_config)

    @classmethod
    def held_by(cls, chunks: Iterable[torch.nn.Module]) -> Share:
        """What Megatron has placed on one rank."""
        models = [unwrap(chunk) for chunk in chunks]
        model_config = models[0].config
        every = layer_parts(model_config)
        decoders = [model.decoder for model in models]
        mtp = [getattr(model, "mtp", None) for model in models]
        return cls._of(
            [every[layer.layer_number - 1] for decoder in decoders for layer in decoder.layers],
            sum(len(block.layers) for block in mtp if block is not None),
            any(final_norm_of(decoder)[1] is not None for decoder in decoders),
            model_config,
        )

    @classmethod
    def _of(cls, layers: Iterable[tuple[str, ...]], mtp: int, final_norm: bool, model_config: Any) -> Share:
        parts = Counter(part for layer in layers for part in layer)
        for part in parts_of_mtp(model_config) if mtp else ():
            parts[part] += mtp
        return cls(parts, mtp, final_norm)


def expectation(config: ScaleVecConfig, model_config: Any, share: Share | None = None) -> Expectation:
    """Counts of what a strategy must come to.

    Args:
        config: The strategy.
        model_config: Megatron's ``TransformerConfig``.
        share: The part of the model; by default all of it, MTP layers included. Experts of other
            expert-parallel ranks belong to it.
    """
    share = share or Share.whole(model_config)
    zero_centered = bool(getattr(model_config, "layernorm_zero_centered_gamma", False))
    shared = config.branches == "shared" and config.has_input_scales
    vectors: Counter[str] = Counter()
    linears = retired = 0

    def count(site: str, branch: str, side: str, number: int) -> None:
        for part in get_reparameterization(config.reparam).parts if number else ():
            vectors[f"{site} {branch} {side} {part.suffix}".rstrip()] += number

    for part, number in share.parts.items():
        maps = [one for one in maps_of(part, model_config) if one.site in config.sites]
        for one in filter(lambda one: one.at_norm, maps):
            retired += number
            if config.placement is not None:
                count(one.site, one.branches[0], "in", number)
        maps = [one for one in maps if not one.at_norm]
        fed = Counter(one.norm for one in maps)
        for one in maps:
            branches = [branch for branch in one.branches if branch not in config.branches_off]
            normalized = one.normalized if config.placement == "dual-norm" else ()
            moves = config.removes_norm_scale or zero_centered or not one.keeps_scale
            sets = number * (1 if config.experts == "shared" else one.experts)
            on_linear = config.has_input_scales and bool(branches)
            if shared and one.norm is not None:
                on_linear = moves and fed[one.norm] == 1
            elif config.has_input_scales:
                for branch in branches:
                    count(one.site, branch, "in", sets)
            if config.has_output_scales:
                for branch in branches:
                    count(one.site, branch, "out", sets)
                on_linear = on_linear or any(branch not in normalized for branch in branches)
            linears += number * one.experts * on_linear
        for norm in fed.keys() - {None}:
            first = next(one for one in maps if one.norm == norm)
            retired += number * (config.removes_norm_scale or zero_centered or not first.keeps_scale)
            if shared:
                count(first.site, "shared", "in", number)
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
