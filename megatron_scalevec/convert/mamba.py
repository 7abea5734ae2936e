"""Sites of Mamba layers.

The norm before the mixer feeds the in-projection: the gate z, the input x, the state's input and output
maps B and C, the time step dt. Behind the scan the gated norm feeds the out-projection. Both are
Input-Norms. A_log, D, the time step's bias and the convolution are no scales and stay as Megatron has them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert.site import LinearSite, norm_handle, require_linear
from megatron_scalevec.convert.unknown import unknown_class
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.fold import RowMap, interleaved_row_map, joined_row_map, whole_row_map
from megatron_scalevec.layers.common import is_exactly
from megatron_scalevec.layers.linear import sharding_of, unsharded_sizes

__all__ = ["is_mamba_layer", "is_mamba_mixer", "mamba_sites"]


def is_mamba_layer(module: torch.nn.Module) -> bool:
    """Whether a module is Megatron's Mamba layer."""
    return is_exactly(module, "megatron.core.ssm.mamba_layer", "MambaLayer")


def is_mamba_mixer(module: torch.nn.Module) -> bool:
    """Whether a module is the mixer whose rows are known."""
    return is_exactly(module, "megatron.core.ssm.mamba_mixer", "MambaMixer")


def mamba_sites(
    path: str, layer: torch.nn.Module, number: int, config: ScaleVecConfig
) -> Iterator[LinearSite]:
    """Sites of a layer.

    Raises:
        ScaleVecError: Its mixer is of an unknown kind, has no gated norm, or the model stores γ − 1.
    """
    mixer = layer.mixer
    if not is_mamba_mixer(mixer):
        raise unknown_class(f"{path}.mixer", mixer, "megatron.core's MambaMixer")
    if not mixer.rmsnorm:
        raise unknown_class(f"{path}.mixer", mixer, "a mixer with its gated norm (rmsnorm)")
    if getattr(layer.config, "layernorm_zero_centered_gamma", False):
        raise ScaleVecError(
            f"{path} is a Mamba layer in a model that stores γ − 1 (--apply-layernorm-1p), which its gated "
            "norm does not; drop that flag, or run without --scalevec-strategy."
        )
    require_linear(f"{path}.mixer.in_proj", mixer.in_proj, "column")
    require_linear(f"{path}.mixer.out_proj", mixer.out_proj, "row")

    def in_rows() -> RowMap:
        tp_rank, tp_size = sharding_of(mixer.in_proj)
        of_groups = mixer.ngroups * mixer.d_state
        blocks = {"z": mixer.d_inner, "x": mixer.d_inner, "B": of_groups, "C": of_groups, "dt": mixer.nheads}
        return joined_row_map(
            [
                interleaved_row_map(1, {branch: rows}, tp_rank=tp_rank, tp_size=tp_size)
                for branch, rows in blocks.items()
            ]
        )

    asked_for = "mamba" in config.sites
    rows, columns = unsharded_sizes(mixer.in_proj)
    norm = norm_handle(f"{path}.norm", layer.norm, mixer.in_proj)
    yield LinearSite(
        "mamba", f"{path}.mixer.in_proj", number, norm, mixer.in_proj, columns, in_rows, asked_for
    )
    rows, columns = unsharded_sizes(mixer.out_proj)
    yield LinearSite(
        "mamba",
        f"{path}.mixer.out_proj",
        number,
        norm_handle(f"{path}.mixer.norm", mixer.norm),
        mixer.out_proj,
        columns,
        lambda: whole_row_map("out", rows),
        asked_for,
    )
