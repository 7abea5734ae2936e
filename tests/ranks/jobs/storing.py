"""Checkpoints of small models, saved and loaded by megatron.core alone."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from ranks.initial import fill_by_name

__all__ = ["load_model", "save_model"]


def arguments_of(config: Any, strategy: Any = None) -> argparse.Namespace:
    """What Megatron's own arguments would say of a model, as far as the tools look at them."""
    args = argparse.Namespace(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        group_query_attention=True,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        swiglu=config.gated_linear_unit,
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
        add_bias_linear=config.add_bias_linear,
        apply_layernorm_1p=config.layernorm_zero_centered_gamma,
        attention_output_gate=bool(getattr(config, "attention_output_gate", False)),
    )
    for key, value in (strategy.as_arguments() if strategy is not None else {}).items():
        setattr(args, key, value)
    return args


def save(model: torch.nn.Module, folder: str, strategy: Any = None) -> None:
    """As Megatron's loop saves, without an optimizer."""
    from megatron.core import dist_checkpointing

    target = os.path.join(folder, "iter_0000007")
    if torch.distributed.get_rank() == 0:
        os.makedirs(target)
    torch.distributed.barrier()
    state = {**model.sharded_state_dict(), "args": arguments_of(model.config, strategy), "iteration": 7}
    dist_checkpointing.save(state, target)
    if torch.distributed.get_rank() == 0:
        with open(os.path.join(folder, "latest_checkpointed_iteration.txt"), "w") as file:
            file.write("7")


def load(model: torch.nn.Module, folder: str, strict: str = "raise_all") -> None:
    """As Megatron's loop loads; every tensor of either side must have its counterpart."""
    from megatron.core import dist_checkpointing

    target = os.path.join(folder, "iter_0000007")
    state = dist_checkpointing.load(model.sharded_state_dict(), target, strict=strict)
    names = set(model.state_dict()) | {name for name in state if name.startswith("scalevec_guard.")}
    model.load_state_dict({name: value for name, value in state.items() if name in names})


def _build(kind: str, config: dict[str, Any] | None, dtype: str, overrides: dict[str, Any] | None):
    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from ranks.models import build_gpt

    model = build_gpt(kind, getattr(torch, dtype), **(overrides or {}))
    strategy = ScaleVecConfig(**config) if config else None
    if strategy is not None:
        apply_scale_vectors(model, strategy)
    return model, strategy


def save_model(
    folder: str,
    kind: str = "llama",
    config: dict[str, Any] | None = None,
    dtype: str = "float32",
    overrides: dict[str, Any] | None = None,
    **sizes: int,
) -> dict[str, Any]:
    """Build, fill by name and save. Returns this rank's parameters as numpy."""
    from megatron.core import parallel_state

    from ranks.models import initialize_parallel

    initialize_parallel(**sizes)
    model, strategy = _build(kind, config, dtype, overrides)
    fill_by_name(
        model,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    save(model, folder, strategy)
    return {name: param.detach().float().numpy().copy() for name, param in model.named_parameters()}


def load_model(
    folder: str,
    kind: str = "llama",
    config: dict[str, Any] | None = None,
    dtype: str = "float32",
    overrides: dict[str, Any] | None = None,
    strict: str = "raise_all",
    **sizes: int,
) -> dict[str, Any]:
    """Build and load. Returns this rank's parameters as numpy, or the error."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    from ranks.models import initialize_parallel

    initialize_parallel(**sizes)
    model, _ = _build(kind, config, dtype, overrides)
    try:
        load(model, folder, strict)
    except (KeyError, CheckpointingException, CheckpointException) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {name: param.detach().float().numpy().copy() for name, param in model.named_parameters()}
