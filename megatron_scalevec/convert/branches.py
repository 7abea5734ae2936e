"""Which branches a model has, by its configuration alone."""

from __future__ import annotations

from megatron_scalevec.config import BRANCH_NAMES, SITES, ScaleVecConfig
from megatron_scalevec.convert.maps import layer_parts, maps_of
from megatron_scalevec.errors import ScaleVecError

__all__ = ["branches_at", "refuse_without_effect"]


def refuse_without_effect(config: ScaleVecConfig, model_config) -> None:
    """Refuse a strategy that would change nothing on this model, or a part of it that would not.

    Raises:
        ScaleVecError: The model has none of the sites, one of ``branches_off`` is none of its branches there,
            or experts are to share vectors and it has none.
    """
    there = {one.site for part in _parts(model_config) for one in maps_of(part, model_config)} | {"head"}
    if getattr(model_config, "mtp_num_layers", None):
        there.add("mtp")
    if not there & set(config.sites):
        has = ", ".join(site for site in SITES if site in there)
        raise ScaleVecError(
            f"the model has nothing at the sites {', '.join(config.sites)}, so nothing would change: give "
            f"some of {has} to --scalevec-sites, or drop that flag."
        )
    if config.experts == "shared" and "experts" not in _parts(model_config):
        raise ScaleVecError(
            "--scalevec-experts shared has no effect on this model, which has no experts; drop the flag."
        )
    known = [name for names in branches_at(config, model_config).values() for name in names]
    unknown = [name for name in config.branches_off if name not in known]
    if unknown:
        raise ScaleVecError(
            f"--scalevec-branches-off {','.join(unknown)}: this model has no such branch at the sites "
            f"{', '.join(config.sites)}; its branches there are {', '.join(known)}."
        )


def _parts(model_config) -> set[str]:
    return {part for layer in layer_parts(model_config) for part in layer}


def branches_at(config: ScaleVecConfig, model_config) -> dict[str, list[str]]:
    """Branches of a model's linears at the sites of a strategy, in the order of config.BRANCH_NAMES."""
    maps = [one for part in _parts(model_config) for one in maps_of(part, model_config)]
    return {
        site: [name for name in names if any(one.site == site and name in one.branches for one in maps)]
        for site, names in BRANCH_NAMES.items()
        if site in config.sites
    }
