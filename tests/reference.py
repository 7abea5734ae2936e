"""A GPT with scale vectors in plain float64 torch: the oracle of the tests. Imports no Megatron.

Written from the definitions: every branch is a matrix of its own, multiplied separately, its scale vectors
applied to activations where the formula puts them. Nothing is fused, folded or sharded.

    input:   y_b = W_b (γ_b,in ⊙ x̂)
    output:  y_b = γ_b,out ⊙ (W_b x̂)
    dual:    y_b = γ_b,out ⊙ (W_b (γ_b,in ⊙ x̂))

x̂ is the norm's output without γ; a LayerNorm's bias β belongs to x̂. A linear's bias is added after γ_out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["Branch", "ReferenceConfig", "attention", "gpt_logits", "layer_norm", "mlp", "rms_norm"]


@dataclass(frozen=True)
class ReferenceConfig:
    """Sizes and kinds of the model."""

    heads: int
    groups: int
    head_dim: int
    gated: bool
    rms: bool
    rope: bool
    eps: float = 1e-5
    rope_base: float = 10000.0


@dataclass
class Branch:
    """One linear map with its scale vectors; None where a vector does not exist."""

    weight: torch.Tensor
    gamma_in: torch.Tensor | None = None
    gamma_out: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.gamma_in is not None:
            x = self.gamma_in * x
        y = x @ self.weight.T
        if self.gamma_out is not None:
            y = self.gamma_out * y
        return y if self.bias is None else y + self.bias


def rms_norm(x: torch.Tensor, gamma: torch.Tensor | None, eps: float) -> torch.Tensor:
    """γ ⊙ x / rms(x) over the last axis."""
    y = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if gamma is None else gamma * y


def layer_norm(x, gamma, beta, eps):
    """γ ⊙ (x − mean) / std + β over the last axis."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    y = y if gamma is None else gamma * y
    return y if beta is None else y + beta


def rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary position embedding of [sequence, heads, head_dim], halves rotated against each other."""
    sequence, _, dim = x.shape
    frequency = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.outer(torch.arange(sequence, dtype=torch.float64), frequency)
    cos = torch.cat([angle.cos(), angle.cos()], -1)[:, None]
    sin = torch.cat([angle.sin(), angle.sin()], -1)[:, None]
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def attention(x, q, k, v, o, config, q_gamma=None, k_gamma=None):
    """Causal grouped-query attention of [sequence, hidden]; ``q_gamma`` and ``k_gamma``: q/k norms."""
    sequence = x.shape[0]
    queries = q(x).view(sequence, config.heads, config.head_dim)
    keys = k(x).view(sequence, config.groups, config.head_dim)
    values = v(x).view(sequence, config.groups, config.head_dim)
    if q_gamma is not None:
        queries = rms_norm(queries, q_gamma, config.eps)
        keys = rms_norm(keys, k_gamma, config.eps)
    if config.rope:
        queries, keys = rotate(queries, config.rope_base), rotate(keys, config.rope_base)
    future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
    heads = []
    for head in range(config.heads):
        group = head // (config.heads // config.groups)
        scores = queries[:, head] @ keys[:, group].T / math.sqrt(config.head_dim)
        heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ values[:, group])
    return o(torch.cat(heads, -1))


def mlp(x, gate, up, down, gated):
    """SwiGLU, or a plain GELU MLP where ``gate`` is None."""
    return down(F.silu(gate(x)) * up(x)) if gated else down(F.gelu(up(x)))


def gpt_logits(tokens, params, config):
    """Logits [sequence, vocabulary] of one sequence.

    Args:
        tokens: int64 [sequence].
        params: ``embedding``, ``position`` (or None), ``layers`` (dicts of norms as (γ or None, β or
            None) and :class:`Branch`), ``final`` norm, ``head`` weight.
        config: Sizes.
    """

    def norm(x, pair):
        gamma, beta = pair
        if config.rms:
            return rms_norm(x, gamma, config.eps)
        return layer_norm(x, gamma, beta, config.eps)

    x = params["embedding"][tokens]
    if params["position"] is not None:
        x = x + params["position"][: len(tokens)]
    for layer in params["layers"]:
        x = x + attention(
            norm(x, layer["attention_norm"]),
            layer["q"],
            layer["k"],
            layer["v"],
            layer["o"],
            config,
            layer.get("q_gamma"),
            layer.get("k_gamma"),
        )
        x = x + mlp(norm(x, layer["mlp_norm"]), layer.get("gate"), layer["up"], layer["down"], config.gated)
    return norm(x, params["final"]) @ params["head"].T
