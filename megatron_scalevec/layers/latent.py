"""The rotary part of the key of multi-latent attention under tensor parallelism.

All heads have this part in common, so its gradient is a sum over the heads of all tensor-parallel ranks.
Megatron makes that sum only where the key arrives cut by sequence parallelism out of a replicated
down-projection (TransformerEngine). Elsewhere (local layers, or no sequence parallelism) a rank's rows get
what its own heads contribute: wrong, and for replicated weights different on every rank. The gradient of
everything before the layer is off with it, and with it those of the scale vectors. So where a model carries
vectors, the sum is made.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_scalevec.layers.linear import leaf_class

__all__ = ["complete_rope_key_gradient"]


def complete_rope_key_gradient(attention: MLASelfAttention) -> None:
    """Change the output of ``linear_kv_down_proj`` so that the key's rotary part gets its whole gradient.

    Values stay the same. Nothing is done on a single tensor-parallel rank.
    """
    linear = attention.linear_kv_down_proj
    if leaf_class(linear).group_of(linear).size() > 1:
        linear.register_forward_hook(_complete)


class _SumGradient(torch.autograd.Function):
    """Identity whose backward sums the gradient over a group.

    Megatron's own, up to 0.18, sums a copy of a gradient that is not contiguous and returns the original.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


def _complete(linear: torch.nn.Module, _, output):
    """Hand Megatron what a replicated down-projection returns.

    Args:
        output: Keys and values [sequence, batch, channels], and a bias. Sequence or channels may be cut.

    Returns:
        The same with all channels, cut along the sequence under sequence parallelism, where Megatron then
        gathers the rotary part with a sum in the backward pass.
    """
    combined, bias = output
    leaf, config = leaf_class(linear), linear.config
    group = leaf.group_of(linear)
    if leaf.parallel == "column":
        combined = gather_from_tensor_model_parallel_region(combined, group=group)
        if config.sequence_parallel:
            combined = scatter_to_sequence_parallel_region(combined, group=group)
    if not config.sequence_parallel:
        latent, rope = combined.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        combined = torch.cat([latent, _SumGradient.apply(rope, group)], dim=-1)
    return combined, bias
