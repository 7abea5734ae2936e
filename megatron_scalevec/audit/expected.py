"""What a strategy must come to on a model, from the two configurations alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_scalevec.audit.chunks import unwrap
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert import branches_at
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

    layers: int
    mtp_layers: int
    final_norm: bool

    @classmethod
    def whole(cls, model_config: Any) -> Share:
        """All pipeline stages, by the configuration alone."""
        mtp = int(getattr(model_config, "mtp_num_layers", None) or 0)
        # A repeated MTP layer is one layer, used several times.
        if mtp and getattr(model_config, "mtp_use_repeated_layer", False):
            mtp = 1
        return cls(model_config.num_layers, mtp, True)

    @classmethod
    def held_by(cls, chunks: Iterable[torch.nn.Module]) -> Share:
        """What Megatron has placed on one rank."""
        decoders = [unwrap(chunk).decoder for chunk in chunks]
        mtp = [getattr(unwrap(chunk), "mtp", None) for chunk in chunks]
        return cls(
            sum(len(decoder.layers) for decoder in decoders),
            sum(len(block.layers) for block in mtp if block is not None),
            any(getattr(decoder, "final_layernorm", None) is not None for decoder in decoders),
        )


def expectation(config: ScaleVecConfig, model_config: Any, share: Share | None = None) -> Expectation:
    """Counts of what a strategy must come to.

    Args:
        config: The strategy.
        model_config: Megatron's ``TransformerConfig``.
        share: The part of the model; by default all of it, MTP layers included.
    """
    share = share or Share.whole(model_config)
    mtp = share.mtp_layers
    layers = share.layers + mtp
    zero_centered = bool(getattr(model_config, "layernorm_zero_centered_gamma", False))
    branches_of = branches_at(config, model_config)
    shared = config.branches == "shared"
    vectors: dict[str, int] = {}

    def count(site: str, branch: str, side: str, number: int) -> None:
        for part in get_reparameterization(config.reparam).parts if number else ():
            vectors[f"{site} {branch} {side} {part.suffix}".rstrip()] = number

    moves = config.removes_norm_scale or zero_centered
    linears = 0
    for site, all_branches in branches_of.items():
        if site == "projections" or config.placement is None:
            continue
        branches = [branch for branch in all_branches if branch not in config.branches_off]
        if config.has_input_scales:
            for branch in ["shared"] if shared else branches:
                count(site, branch, "in", layers)
        if config.has_output_scales:
            for branch in branches:
                count(site, branch, "out", layers)
        behind_norms = config.placement == "dual-norm" and site == "attention"
        out_on_linear = [b for b in branches if not (behind_norms and b in ("q", "k", "v"))]
        in_on_linear = config.has_input_scales and (moves if shared else bool(branches))
        if in_on_linear or (config.has_output_scales and out_on_linear):
            linears += layers
    if config.placement is not None:
        for branch in branches_of.get("projections", ()):
            if branch in config.branches_off:
                continue
            linears += layers
            if config.has_input_scales:
                count("projections", branch, "in", layers)
            if config.has_output_scales:
                count("projections", branch, "out", layers)
    retired = 0
    if config.active:
        sites = len({"attention", "mlp"} & set(config.sites))
        retired += layers * sites * moves
    # The head's norm keeps its scale unless it is removed, or moves into another form.
    leaves = config.placement is None or not config.plain or zero_centered
    for site, branches, number in (
        ("mtp", ("enorm", "hnorm", "final_layernorm"), mtp),
        ("head", ("logits",), int(share.final_norm)),
    ):
        if site in config.sites and number:
            retired += number * len(branches) * leaves
            if config.placement is not None:
                for branch in branches:
                    count(site, branch, "in", number)
    return Expectation(vectors, linears, retired)
