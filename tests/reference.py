"""A GPT with scale vectors in plain float64 torch: the oracle of the tests. Imports no Megatron.

Written from the definitions: every branch is a matrix of its own, multiplied separately, its scale vectors
applied to activations where the formula puts them. Nothing is fused, folded or sharded.

    input:      y_b = W_b (γ_b,in ⊙ x̂)
    output:     y_b = γ_b,out ⊙ (W_b x̂)
    dual:       y_b = γ_b,out ⊙ (W_b (γ_b,in ⊙ x̂))
    dual-norm:  y_b = γ_b,out ⊙ Norm(W_b (γ_b,in ⊙ x̂)), per head, for q, k and v; then RoPE

    product:    γ = β · α
    unit:       γ = g · u / rms(u)

x̂ is the norm's output without γ; a LayerNorm's bias belongs to x̂ (or to the norm's output, where γ stays in
the norm). A linear's bias is added after γ_out, and before an intermediate norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = [
    "Branch",
    "ReferenceConfig",
    "Routing",
    "attention",
    "effective_weight",
    "gpt_logits",
    "latent_attention",
    "layer_norm",
    "mixture",
    "mlp",
    "product",
    "rms_norm",
    "unit",
]


@dataclass(frozen=True)
class ReferenceConfig:
    """Sizes and kinds of the model."""

    heads: int
    groups: int
    head_dim: int
    gated: bool
    rope: bool
    rope_base: float = 10000.0
    rope_dim: int = 0  # channels of the rotary part of a latent attention's keys
    routing: Routing | None = None


@dataclass(frozen=True)
class Routing:
    """How a router's logits become the weights of the chosen experts.

    ``softmax``: over the chosen experts, or over all of them before the choice (``before_choice``).
    ``sigmoid``: of each logit, divided by the sum over the chosen ones; a bias takes part in the choice only.
    """

    chosen: int
    score: str = "softmax"
    before_choice: bool = False
    factor: float = 1.0


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


def product(beta: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """γ = β · α."""
    return beta * alpha


def unit(magnitude: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """γ = g · u / rms(u)."""
    return magnitude * direction / direction.pow(2).mean().sqrt()


def effective_weight(
    weight: torch.Tensor, gamma_in: torch.Tensor | None, gamma_out: torch.Tensor | None
) -> torch.Tensor:
    """diag(γ_out) W diag(γ_in), for the rows of one branch: what W is to a linear with scale vectors."""
    if gamma_in is not None:
        weight = weight @ torch.diag(gamma_in)
    if gamma_out is not None:
        weight = torch.diag(gamma_out) @ weight
    return weight


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
    """Rotary position embedding of [sequence, heads, head_dim], halves rotated against each other.

    Sines and cosines are tabulated in float32 whatever x is, as in Megatron: part of the model's
    definition rather than of its rounding.
    """
    sequence, _, dim = x.shape
    frequency = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = torch.outer(torch.arange(sequence, dtype=torch.float32), frequency)
    cos = torch.cat([angle.cos(), angle.cos()], -1)[:, None].to(x.dtype)
    sin = torch.cat([angle.sin(), angle.sin()], -1)[:, None].to(x.dtype)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def attention(x, q, k, v, o, config, norms=None, gate=None):
    """Causal grouped-query attention of [sequence, hidden].

    ``norms``: for each of q, k and v a function on [sequence, heads, head_dim] or None. ``gate``: a branch
    whose sigmoid multiplies the heads' outputs.
    """
    norms = norms or {}
    sequence = x.shape[0]
    queries = q(x).view(sequence, config.heads, config.head_dim)
    keys = k(x).view(sequence, config.groups, config.head_dim)
    values = v(x).view(sequence, config.groups, config.head_dim)
    if norms.get("q") is not None:
        queries = norms["q"](queries)
    if norms.get("k") is not None:
        keys = norms["k"](keys)
    if norms.get("v") is not None:
        values = norms["v"](values)
    if config.rope:
        queries, keys = rotate(queries, config.rope_base), rotate(keys, config.rope_base)
    mixed = _mix(queries, keys, values)
    if gate is not None:
        mixed = mixed * torch.sigmoid(gate(x))
    return o(mixed)


def _mix(queries, keys, values):
    """Causal softmax attention; [sequence, heads or groups, channels] each. Heads joined."""
    sequence, count, dim = queries.shape
    future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
    heads = []
    for head in range(count):
        group = head // (count // keys.shape[1])
        scores = queries[:, head] @ keys[:, group].T / math.sqrt(dim)
        heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ values[:, group])
    return torch.cat(heads, -1)


def latent_attention(x, layer, config):
    """Causal multi-latent attention of [sequence, hidden].

    ``layer``: the branches ``q``, or ``q_down`` and ``q_up``; ``kv_down``, ``k_rope``, ``k_up``, ``v_up`` and
    ``o``; ``latent_norms``: functions on the latents of q and kv, or None. Every query has its rotary part
    behind the other; all keys have one rotary part in common. Its channels are rotated in pairs.
    """
    norms = layer["latent_norms"]
    if "q_down" in layer:
        latent = layer["q_down"](x)
        queries = layer["q_up"](latent if norms["q"] is None else norms["q"](latent))
    else:
        queries = layer["q"](x)
    latent = layer["kv_down"](x)
    latent = latent if norms["kv"] is None else norms["kv"](latent)
    sequence = x.shape[0]
    queries = queries.view(sequence, config.heads, -1)
    plain, rotary = queries.split([queries.shape[-1] - config.rope_dim, config.rope_dim], -1)
    queries = torch.cat([plain, _rotate_pairs(rotary, config)], -1)
    shared = _rotate_pairs(layer["k_rope"](x)[:, None], config).expand(-1, config.heads, -1)
    keys = torch.cat([layer["k_up"](latent).view(sequence, config.heads, -1), shared], -1)
    return layer["o"](_mix(queries, keys, layer["v_up"](latent).view(sequence, config.heads, -1)))


def _rotate_pairs(x, config):
    """Channels 0 and 1, 2 and 3 and so on; the result has the first ones of all pairs before the second."""
    return rotate(torch.cat([x[..., 0::2], x[..., 1::2]], -1), config.rope_base)


def mlp(x, gate, up, down, gated):
    """SwiGLU, or a plain GELU MLP where ``gate`` is None."""
    return down(F.silu(gate(x)) * up(x)) if gated else down(F.gelu(up(x)))


def mixture(x, router, experts, shared, shared_gate, bias, latent, gated, routing):
    """Mixture of experts of [sequence, hidden], token by token, no token dropped.

    Args:
        x: Output of the pre-MLP norm, before any input scale.
        router: Branch to one logit per expert.
        experts: For each expert a dict of the branches ``gate`` (where gated), ``up``, ``down``.
        shared: The same for the shared expert, None where there is none.
        shared_gate: Branch to one number, whose sigmoid multiplies the shared expert's output, or None.
        bias: [experts] added to the scores for the choice, or None.
        latent: Branches from tokens to what the routed experts see of them, and from the sum of what those
            make of it back; None where they see the tokens.
        gated: SwiGLU.
        routing: Kind of scores.
    """
    logits = router(x)
    down, up = latent or (None, None)
    rows = []
    for token, logit in zip(x if down is None else down(x), logits):
        if routing.score == "sigmoid":
            score = torch.sigmoid(logit)
            choice = (score if bias is None else score + bias).topk(routing.chosen).indices
            weights = score[choice]
            if routing.chosen > 1:
                weights = weights / weights.sum()
        else:
            choice = logit.topk(routing.chosen).indices
            weights = logit.softmax(-1)[choice] if routing.before_choice else logit[choice].softmax(-1)
        outputs = [
            mlp(token, experts[e].get("gate"), experts[e]["up"], experts[e]["down"], gated) for e in choice
        ]
        rows.append(sum(routing.factor * weight * output for weight, output in zip(weights, outputs)))
    y = torch.stack(rows)
    if up is not None:
        y = up(y)
    if shared is not None:
        always = mlp(x, shared.get("gate"), shared["up"], shared["down"], gated)
        y = y + (always if shared_gate is None else always * torch.sigmoid(shared_gate(x)))
    return y


def gpt_logits(tokens, params, config):
    """Logits [sequence, vocabulary] of one sequence.

    Args:
        tokens: int64 [sequence].
        params: ``embedding``, ``position`` (or None), ``layers`` (dicts of norms, as functions, and
            :class:`Branch`), ``final`` norm, ``head`` weight.
        config: Sizes.
    """
    x = params["embedding"][tokens]
    if params["position"] is not None:
        x = x + params["position"][: len(tokens)]
    for layer in params["layers"]:
        if "kv_down" in layer:
            x = x + latent_attention(layer["attention_norm"](x), layer, config)
        else:
            x = x + attention(
                layer["attention_norm"](x),
                layer["q"],
                layer["k"],
                layer["v"],
                layer["o"],
                config,
                layer.get("head_norms"),
                layer.get("output_gate"),
            )
        normalized = layer["mlp_norm"](x)
        if "router" in layer:
            names = ("router", "experts", "shared", "shared_gate", "bias", "latent")
            x = x + mixture(normalized, *map(layer.get, names), config.gated, config.routing)
        else:
            x = x + mlp(normalized, layer.get("gate"), layer["up"], layer["down"], config.gated)
    return params["final"](x) @ params["head"].T
