"""Small models and recipes: Hugging Face configs, and what makes a recipe run on a CPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

__all__ = ["FAMILIES", "LOCAL", "hf_config", "provider", "recipe"]

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    **_EXPERTS,
}
_HYBRID = {
    "hybrid_override_pattern": "M*-M-",
    "num_hidden_layers": 5,
    "ssm_state_size": 4,
    "mamba_num_heads": 16,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "chunk_size": 128,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, **_EXPERTS}),
    "gemma2": ("Gemma2", {}),
    "deepseek": ("DeepseekV3", _LATENT),
    "nemotron_h": ("NemotronH", _HYBRID),
}
"""Kinds of models: the name in transformers, and what differs from :data:`SIZES`."""

FIELDS: dict[str, dict[str, Any]] = {
    # Megatron's local attention cannot scale by anything else, and its local norms have no γ − 1.
    "gemma2": {"layernorm_zero_centered_gamma": False},
    "deepseek": {"moe_shared_expert_overlap": False},
    "nemotron_h": {"moe_shared_expert_overlap": False},
}
"""Fields of single kinds beside :data:`LOCAL`."""

LOCAL = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "cross_entropy_loss_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "use_cpu_initialization": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "bf16": False,
    "fp16": False,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "autocast_dtype": torch.float32,
    "seq_length": 32,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_flex_dispatcher_backend": None,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
}
"""Fields of a model configuration that megatron-core's own layers need on a CPU."""


def hf_config(kind: str) -> Any:
    """A small model of one of :data:`FAMILIES`, as Hugging Face describes it."""
    import transformers

    name, more = FAMILIES[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    config.architectures = [f"{name}ForCausalLM"]
    return config


def local_stack_spec() -> Any:
    """The layers of a hybrid model, with plain torch for the kernels that a CPU lacks."""
    from megatron_scalevec.cpu import hybrids
    from megatron_scalevec.patching import PatchSet

    hybrids.replace_kernels(PatchSet())
    return hybrids.local_stack_spec(latent_norms=True)


def _give_local_spec(provider: Any) -> None:
    """Local layers where the provider's are TransformerEngine's; DeepSeek's choose by themselves."""
    from megatron.bridge.models.gpt_provider import local_layer_spec

    if hasattr(provider, "hybrid_stack_spec"):
        provider.hybrid_stack_spec = local_stack_spec
    elif not isinstance(provider.transformer_layer_spec, functools.partial):
        provider.transformer_layer_spec = local_layer_spec


def provider(kind: str, hf: str | None = None, **fields: Any) -> Any:
    """What ``AutoBridge`` makes of :func:`hf_config`, with what a CPU can do; ``hf``: a folder of weights."""
    from megatron.bridge import AutoBridge

    if hf is None:
        made = AutoBridge.from_hf_config(hf_config(kind)).to_megatron_provider(load_weights=False)
    else:
        bridge = AutoBridge.from_hf_pretrained(hf, torch_dtype=torch.float32)
        made = bridge.to_megatron_provider(load_weights=True)
    for name, value in {**LOCAL, **FIELDS.get(kind, {}), **fields}.items():
        setattr(made, name, value)
    if "transformer_layer_spec" not in fields:
        _give_local_spec(made)
    return made


def recipe(kind: str, folder: Path, iterations: int = 4, hf: str | None = None, **model: Any) -> Any:
    """Bridge's vanilla recipe with the model of that kind, cut down to what a CPU can do.

    ``model`` are fields of the model, ``transformer_layer_spec`` among them; ``hf`` is a folder of weights.
    """
    from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config

    container = vanilla_gpt_pretrain_config()
    container.model = provider(kind, hf, **model)
    container.mixed_precision = None
    container.env_vars = {}
    container.dataset.seq_length = 32
    container.dataset.num_workers = 0
    container.dataset.split = "99,1,0"
    container.tokenizer.vocab_size = 127
    container.train.train_iters = iterations
    container.train.global_batch_size = 4
    container.train.micro_batch_size = 2
    container.validation.eval_iters = 0
    container.validation.eval_interval = 1000
    container.scheduler.lr_warmup_iters = 2
    container.scheduler.lr_decay_iters = 20
    container.optimizer.lr = 3e-3
    container.optimizer.min_lr = 3e-4
    container.optimizer.bf16 = container.optimizer.fp16 = False
    container.optimizer.params_dtype = torch.float32
    container.optimizer.use_distributed_optimizer = False
    container.ddp.use_distributed_optimizer = False
    container.ddp.grad_reduce_in_fp32 = False
    container.dist.distributed_backend = "gloo"
    container.logger.log_interval = 1
    container.logger.tensorboard_dir = None
    container.checkpoint.save = str(folder)
    container.checkpoint.load = None
    container.checkpoint.save_interval = 1000
    container.checkpoint.async_save = False
    return container
