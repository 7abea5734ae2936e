"""Hybrid models without a GPU: Megatron's stack is one of TransformerEngine's layers and CUDA kernels.

Here are a stack of local layers, and plain torch for what the kernels compute: the selective scan position by
position, its convolution, the gated norm. Slow, and the same function.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from megatron_scalevec.patching import PatchSet

__all__ = ["local_stack_spec", "replace_kernels"]


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


def replace_kernels(patches: PatchSet) -> None:
    """Put plain torch where Megatron expects CUDA kernels, einops and TransformerEngine's norm."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import gated_delta_net, mamba_context_parallel, mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    owners = [gated_delta_net]
    if hasattr(gated_delta_net, "common"):  # 0.19
        owners = [gated_delta_net.common, gated_delta_net.gdn]
    of_delta_nets = {
        "HAVE_FLA": True,
        "l2norm": _unit_length,
        "causal_conv1d": _convolution,
        # Megatron's own for deterministic runs.
        "chunk_gated_delta_rule": owners[0].torch_chunk_gated_delta_rule,
    }
    of_mamba = {
        "HAVE_MAMBA_SSM": True,
        "HAVE_EINOPS": True,
        "rearrange": _rearrange,
        "ExtendedRMSNorm": _GatedNorm,
        "mamba_split_conv1d_scan_combined": _scan,
    }
    for owner, names in (
        *((owner, of_delta_nets) for owner in owners),
        (mamba_mixer, of_mamba),
        (mamba_context_parallel, {"HAVE_EINOPS": True}),
        (hybrid_block, {"TENorm": WrappedTorchNorm}),
    ):
        for name, value in names.items():
            # Where the kernels' packages are missing, so are their names.
            patches.set(owner, name, value, create=True)


def _unit_length(x, dim=-1, eps=1e-6):
    return x * torch.rsqrt(x.square().sum(dim, True) + eps)


def _rearrange(tensor, pattern):
    return _REARRANGED[pattern](tensor)


def local_stack_spec(*, latent_norms: bool = False):
    """The spec of a hybrid stack of local layers, with a layer for every symbol but D, and without
    multi-token prediction.

    Args:
        latent_norms: Norms on the latents of ``+`` layers, which Megatron's own stack has where
            ``--qk-layernorm`` asks for them.
    """
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

    # The norms are torch's, of the kind that the model's configuration names.
    whole = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
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
        # Any number will do: how many there are is read from the configuration.
        mlp=get_moe_module_spec(use_te=False, num_experts=8),
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
            qk_layernorm=latent_norms, multi_latent_attention=True, normalization="RMSNorm"
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
