"""Small models whose layers differ: hybrids, with plain torch for Mamba's kernels, and heterogeneous GPTs."""

from __future__ import annotations

import dataclasses
import functools
import json

import torch
import torch.nn.functional as F

from ranks.models import EXPERTS, SIZES, settings_of

__all__ = ["BUILDERS", "MAMBA", "build_heterogeneous", "build_hybrid", "local_stack_spec", "replace_kernels"]

MAMBA = {"mamba_state_dim": 4, "mamba_head_dim": 8, "mamba_num_groups": 2}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


class _GatedNorm(torch.nn.Module):
    """RMS norm over groups of channels, as the kernel package's, which has no CPU form."""

    def __init__(self, size, eps, group_size, norm_before_gate, device=None, dtype=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x):
        groups = x.unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def _convolution(x, weight, bias, activation, **_):
    """Causal, channel by channel, of [batch, length, channels], with SiLU behind; no final state."""
    padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0]).transpose(1, 2)), None


def _scan(zxbcdt, weight, bias, dt_bias, a, D, headdim, ngroups, **_):
    """Convolution, selective scan and gate of [batch, length, channels], position by position."""
    heads = dt_bias.shape[0]
    inner = heads * headdim
    state = (zxbcdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * ngroups * state, heads], -1)
    xbc, _ = _convolution(xbc, weight, bias, "silu")
    x, b, c = xbc.split([inner, ngroups * state, ngroups * state], -1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (t.unflatten(-1, (ngroups, state)).repeat_interleave(heads // ngroups, -2) for t in (b, c))
    dt = F.softplus(dt + dt_bias)
    memory = x.new_zeros(*x.shape[:1], heads, headdim, state)
    out = []
    for t in range(x.shape[1]):
        step = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None, :]
        memory = memory * torch.exp(dt[:, t] * a)[..., None, None] + step
        out.append((memory * c[:, t, :, None, :]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(out, 1).flatten(-2).to(z.dtype) * F.silu(z)


_REARRANGED = {
    "l b d -> b l d": lambda t: t.transpose(0, 1),
    "b l d -> l b d": lambda t: t.transpose(0, 1),
    "d 1 w -> d w": lambda t: t.squeeze(1),
}


def replace_kernels() -> None:
    """Put plain torch where Megatron expects CUDA kernels, einops and TransformerEngine's norm, for good."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import gated_delta_net, mamba_context_parallel, mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    owners = [gated_delta_net]
    if hasattr(gated_delta_net, "common"):  # 0.19
        owners = [gated_delta_net.common, gated_delta_net.gdn]
    for owner in owners:
        owner.HAVE_FLA = True
        owner.l2norm = lambda x, dim=-1, eps=1e-6: x * torch.rsqrt(x.square().sum(dim, True) + eps)
        owner.causal_conv1d = _convolution
        # Megatron's own for deterministic runs.
        owner.chunk_gated_delta_rule = owners[0].torch_chunk_gated_delta_rule
    mamba_mixer.HAVE_MAMBA_SSM = mamba_mixer.HAVE_EINOPS = mamba_context_parallel.HAVE_EINOPS = True
    mamba_mixer.rearrange = lambda tensor, pattern: _REARRANGED[pattern](tensor)
    mamba_mixer.ExtendedRMSNorm = _GatedNorm
    mamba_mixer.mamba_split_conv1d_scan_combined = _scan
    hybrid_block.TENorm = WrappedTorchNorm


def local_stack_spec(normalization: str = "RMSNorm"):
    """A hybrid stack of local layers; Megatron has one of TransformerEngine's only."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    whole = get_gpt_layer_local_spec(normalization=normalization).submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm,
        self_attention=whole.self_attention,
        self_attn_bda=whole.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=whole.pre_mlp_layernorm, mlp=whole.mlp, mlp_bda=whole.mlp_bda
    )
    experts = dataclasses.replace(
        mlp,
        mlp=get_moe_module_spec(use_te=False, num_experts=EXPERTS["mixtral"]["num_moe_experts"]),
    )
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
        mamba_bda=get_bias_dropout_add,
    )
    more = {"moe_layer": ModuleSpec(module=MoETransformerLayer, submodules=experts)}
    known = {field.name for field in dataclasses.fields(HybridStackSubmodules)}
    if "mla_layer" in known:
        whole = get_gpt_layer_local_spec(
            qk_layernorm=True, multi_latent_attention=True, normalization=normalization
        ).submodules
        latent = dataclasses.replace(attention, self_attention=whole.self_attention)
        more["mla_layer"] = ModuleSpec(module=TransformerLayer, submodules=latent)
    if "gdn_layer" in known:
        inner = GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        )
        delta = dataclasses.replace(
            attention, self_attention=ModuleSpec(module=GatedDeltaNet, submodules=inner)
        )
        more["gdn_layer"] = ModuleSpec(module=TransformerLayer, submodules=delta)
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
            **more,
        ),
    )


def build_hybrid(pattern: str = "M*-M-", dtype: torch.dtype = torch.float64, **overrides):
    """A hybrid model of local layers; ``overrides`` go into the TransformerConfig."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    replace_kernels()
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
    model = HybridModel(hybrid_stack_spec=local_stack_spec(), hybrid_layer_pattern=pattern, **given)
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
    "hybrid with experts": functools.partial(build_hybrid, "M*E"),
    "heterogeneous": build_heterogeneous,
}
"""Kinds of models beside those of ``ranks.models.build_gpt``."""
