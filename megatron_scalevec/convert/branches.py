"""Which maps and branches a model has, by its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError

__all__ = ["MapKind", "branches_at", "has_experts", "maps_of_layer", "refuse_unknown_branches"]


@dataclass(frozen=True)
class MapKind:
    """Maps of one kind in a layer.

    ``branches``: in the order of the fused weight's rows. ``weights``: how many such weights the layer has,
    over all expert-parallel ranks. ``vectors``: how many sets of vectors, one for each weight unless they
    are shared.
    """

    branches: tuple[str, ...]
    weights: int = 1
    vectors: int = 1


def has_experts(model_config, layer: int) -> bool:
    """Whether a decoder layer, counted from 1 over the whole pipeline, is a mixture of experts.

    As Megatron's ``get_gpt_decoder_layer_specs`` reads ``moe_layer_freq``: a number N makes every N-th
    layer one, starting with the first; a list says it layer by layer.
    """
    if not model_config.num_moe_experts:
        return False
    pattern = model_config.moe_layer_freq
    return layer % pattern == 1 % pattern if isinstance(pattern, int) else bool(pattern[layer - 1])


def maps_of_layer(config: ScaleVecConfig, model_config, *, experts: bool) -> dict[str, list[MapKind]]:
    """The maps of one layer at the sites of a strategy that have linears.

    Args:
        config: The strategy.
        model_config: Megatron's ``TransformerConfig``.
        experts: Whether the layer is a mixture of experts.
    """
    attention = ["q", "k", "v"]
    if getattr(model_config, "attention_output_gate", False):
        attention.insert(1, "output_gate")
    gated = ("gate", "up") if model_config.gated_linear_unit else ("up",)
    maps = {
        "attention": [MapKind(tuple(attention))],
        "mlp": [MapKind(gated)],
        "projections": [MapKind(("o",)), MapKind(("down",))],
    }
    if experts:
        number = model_config.num_moe_experts
        sets = 1 if config.experts == "shared" else number
        maps["mlp"] = [
            MapKind(("router",)),
            MapKind(tuple(f"expert_{branch}" for branch in gated), number, sets),
        ]
        maps["projections"] = [MapKind(("o",)), MapKind(("expert_down",), number, sets)]
        if model_config.moe_shared_expert_intermediate_size is not None:
            maps["mlp"].append(MapKind(tuple(f"shared_{branch}" for branch in gated)))
            maps["projections"].append(MapKind(("shared_down",)))
            if model_config.moe_shared_expert_gate:
                maps["mlp"].append(MapKind(("shared_expert_gate",)))
    return {site: kinds for site, kinds in maps.items() if site in config.sites}


def refuse_unknown_branches(config: ScaleVecConfig, model_config) -> None:
    """Refuse to leave out branches that the model does not have at the sites that were asked for.

    Raises:
        ScaleVecError: One of ``branches_off`` is none of the model's.
    """
    known = [name for names in branches_at(config, model_config).values() for name in names]
    unknown = [name for name in config.branches_off if name not in known]
    if unknown:
        raise ScaleVecError(
            f"--scalevec-branches-off {','.join(unknown)}: this model has no such branch at the sites "
            f"{', '.join(config.sites)}; its branches there are {', '.join(known)}."
        )


def branches_at(config: ScaleVecConfig, model_config) -> dict[str, list[str]]:
    """Branches of a model's layers of all kinds, at the sites of a strategy."""
    kinds = {has_experts(model_config, layer) for layer in range(1, model_config.num_layers + 1)}
    found: dict[str, list[str]] = {}
    for experts in sorted(kinds):
        for site, maps in maps_of_layer(config, model_config, experts=experts).items():
            names = found.setdefault(site, [])
            names.extend(name for kind in maps for name in kind.branches if name not in names)
    return found
