"""Small models whose layers differ: hybrids of CPU mode's stack, and heterogeneous GPTs."""

from __future__ import annotations

import functools
import json

import torch

from ranks.models import EXPERTS, SIZES, settings_of

__all__ = ["BUILDERS", "MAMBA", "build_heterogeneous", "build_hybrid"]

MAMBA = {"mamba_state_dim": 4, "mamba_head_dim": 8, "mamba_num_groups": 2}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def build_hybrid(pattern: str = "M*-M-", dtype: torch.dtype = torch.float64, **overrides):
    """A hybrid model of local layers; ``overrides`` go into the TransformerConfig."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from megatron_scalevec.cpu.hybrids import local_stack_spec, replace_kernels
    from megatron_scalevec.patching import PatchSet

    replace_kernels(PatchSet())
    latent = "+" in pattern
    kernels = {**MAMBA, **(DELTA if "G" in pattern else {}), **(EXPERTS["mixtral"] if "E" in pattern else {})}
    settings = {
        **settings_of("mla" if latent else "llama", dtype),
        **kernels,
        "num_layers": len(pattern),
        **overrides,
    }
    config = (MLATransformerConfig if latent else TransformerConfig)(**settings)
    given = {
        "config": config,
        "vocab_size": SIZES["vocabulary"],
        "max_sequence_length": SIZES["sequence"],
        "parallel_output": False,
    }
    model = HybridModel(
        hybrid_stack_spec=local_stack_spec(latent_norms=config.qk_layernorm),
        hybrid_layer_pattern=pattern,
        **given,
    )
    return model.to(dtype)


_BLOCKS = (
    {"attention": {"num_query_groups": 2}, "ffn": {"ffn_hidden_size": 48}},
    {"attention": {"num_query_groups": None, "no_op": True}, "ffn": {"ffn_hidden_size": 64}},
    {
        "attention": {"num_query_groups": 4},
        "ffn": {"ffn_hidden_size": None, "no_op": True},
    },
)
_REPLACED = {
    "attention": {"num_query_groups": None, "replace_with_linear": True},
    "ffn": {"ffn_hidden_size": 48},
}


def build_heterogeneous(dtype: torch.dtype = torch.float64, replaced: bool = False, **overrides):
    """Layers with two and four query groups and two MLP sizes, one without attention, one without an MLP.

    ``replaced``: add a layer with a linear in the attention's place.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
        get_gpt_heterogeneous_layer_spec,
    )
    from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig

    blocks = [*_BLOCKS, *([_REPLACED] if replaced else [])]
    settings = {**settings_of("llama", dtype), "num_layers": len(blocks), **overrides}
    text = json.dumps({"block_configs": blocks})
    config = HeterogeneousTransformerConfig(heterogeneous_layers_config_encoded_json=text, **settings)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_heterogeneous_layer_spec(config),
        vocab_size=SIZES["vocabulary"],
        max_sequence_length=SIZES["sequence"],
        parallel_output=False,
        position_embedding_type="rope",
    )
    return model.to(dtype)


BUILDERS = {
    "hybrid": build_hybrid,
    "delta": functools.partial(build_hybrid, "G-*-"),
    "latent hybrid": functools.partial(build_hybrid, "M+-"),
    "latent hybrid, bare": functools.partial(build_hybrid, "M+-", qk_layernorm=False),
    "hybrid with experts": functools.partial(build_hybrid, "M*E"),
    "qwen3-next": functools.partial(
        build_hybrid,
        "GE*E",
        moe_shared_expert_intermediate_size=16,
        moe_shared_expert_gate=True,
        attention_output_gate=True,
    ),
    "heterogeneous": build_heterogeneous,
}
"""Kinds of models beside those of ``ranks.models.build_gpt``."""
