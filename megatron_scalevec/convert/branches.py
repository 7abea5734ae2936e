"""Which branches a model has, by its configuration alone."""

from __future__ import annotations

from megatron_scalevec.config import BRANCH_NAMES, ScaleVecConfig
from megatron_scalevec.convert.maps import layer_parts, maps_of
from megatron_scalevec.errors import ScaleVecError

__all__ = ["branches_at", "refuse_unknown_branches"]


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
    """Branches of a model's linears at the sites of a strategy, in the order of config.BRANCH_NAMES."""
    parts = {part for layer in layer_parts(model_config) for part in layer}
    maps = [one for part in parts for one in maps_of(part, model_config)]
    return {
        site: [name for name in names if any(one.site == site and name in one.branches for one in maps)]
        for site, names in BRANCH_NAMES.items()
        if site in config.sites
    }
