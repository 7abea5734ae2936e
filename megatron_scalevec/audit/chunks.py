"""Looking at Megatron's model chunks."""

from __future__ import annotations

import torch

__all__ = ["expert_ranks", "is_copy", "is_expert", "latent_norm_scales", "unsharded_numel", "unwrap"]


def is_copy(chunk: torch.nn.Module, name: str) -> bool:
    """Whether another pipeline stage holds the original of a parameter.

    The last stage has its own copy of tied embeddings, and a stage with multi-token prediction one of the
    embeddings that it looks tokens up in.
    """
    if name == "output_layer.weight":
        return chunk.share_embeddings_and_output_weights
    return name.startswith("embedding.") and not chunk.pre_process


def is_expert(param: torch.nn.Parameter) -> bool:
    """Whether other expert-parallel ranks have other experts in this parameter's place."""
    return not getattr(param, "allreduce", True)


def expert_ranks(param: torch.nn.Parameter) -> int:
    """Number of expert-parallel ranks that hold such a parameter for other experts; 1 outside of experts."""
    from megatron.core import parallel_state

    return parallel_state.get_expert_model_parallel_world_size() if is_expert(param) else 1


def latent_norm_scales(model: torch.nn.Module) -> set[str]:
    """Names of the scales of the norms on compressed latents, one of which is called as a norm on queries."""
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    paths = [path for path, module in model.named_modules() if isinstance(module, MultiLatentAttention)]
    return {f"{path}.{name}_layernorm.weight" for path in paths for name in ("q", "kv")}


def unsharded_numel(param: torch.nn.Parameter) -> int:
    """Size over all tensor- and expert-parallel ranks. A retired norm scale counts: stock trains it."""
    from megatron.core import parallel_state

    sharded = getattr(param, "tensor_model_parallel", False)
    if not is_expert(param):
        return param.numel() * (parallel_state.get_tensor_model_parallel_world_size() if sharded else 1)
    shards = parallel_state.get_expert_tensor_parallel_world_size() if sharded else 1
    return param.numel() * shards * expert_ranks(param)


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model
