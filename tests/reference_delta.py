"""A gated delta net with scale vectors in plain torch, position by position. Imports no Megatron.

Per head, with a state S [key channels, value channels] that starts at zero:

    S ← exp(−exp(A) · softplus(a + bias)) · S
    S ← S + β k ⊗ (v − kᵀ S),  β = sigmoid(b)
    o = Sᵀ q / √(key channels),  y = γ ⊙ Norm(o) ⊙ silu(z)

q, k and v come out of a causal convolution with SiLU behind, q and k have length one, and a head of q and k
serves several heads of v. Every branch is a matrix of its own (:class:`reference.Branch`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from reference import rms_norm

__all__ = ["delta_net"]


def delta_net(x, layer, *, key_heads, value_heads, eps):
    """Of [sequence, hidden].

    Args:
        x: Output of the norm before the layer, before any input scale.
        layer: The branches ``q``, ``k``, ``v``, ``z``, ``b``, ``a`` and ``out``; ``convolution`` [channels of
            q, k and v, width]; ``A`` and ``bias`` [value heads]; ``gamma`` of the norm over heads.
        key_heads: Of q and k.
        value_heads: Of v, a multiple of the former.
        eps: Of the norm.
    """
    sequence = x.shape[0]
    mixed = [layer[name](x) for name in "qkv"]
    sizes = [part.shape[-1] for part in mixed]
    q, k, v = _convolve(torch.cat(mixed, -1), layer["convolution"]).split(sizes, -1)
    q, k = (_unit(part.view(sequence, key_heads, -1)) for part in (q, k))
    q, k = (part.repeat_interleave(value_heads // key_heads, 1) for part in (q, k))
    v = v.view(sequence, value_heads, -1)
    strength = torch.sigmoid(layer["b"](x))
    decay = torch.exp(-torch.exp(layer["A"]) * F.softplus(layer["a"](x) + layer["bias"]))
    state = x.new_zeros(value_heads, k.shape[-1], v.shape[-1])
    rows = []
    for t in range(sequence):
        state = decay[t][:, None, None] * state
        error = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], strength[t][:, None] * error)
        rows.append(torch.einsum("hk,hkv->hv", q[t], state) / k.shape[-1] ** 0.5)
    gate = F.silu(layer["z"](x)).view(sequence, value_heads, -1)
    return layer["out"]((rms_norm(torch.stack(rows), layer["gamma"], eps) * gate).flatten(1))


def _convolve(x, weight):
    """y_t = Σ_w weight[:, w] · x_{t − width + 1 + w}, channel by channel, then SiLU."""
    width = weight.shape[1]
    padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    return F.silu(sum(weight[:, w] * padded[w : w + len(x)] for w in range(width)))


def _unit(x):
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)
