"""What a model is, in terms that neither Megatron's arguments nor a Hugging Face config own.

Both sides are read into a :class:`Description` and written from one, so each fact of a model is translated
in one place per side.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError

__all__ = [
    "LLAMA3_FACTOR",
    "Description",
    "Experts",
    "Rope",
    "from_arguments",
    "megatron_flags",
    "to_arguments",
]

LLAMA3_FACTOR = 8.0
"""By which Llama 3.1 scales RoPE: the one factor that every version of Megatron builds, see
:func:`_rope_of`."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings over the whole head. ``llama3``: with the frequencies of Llama 3.1, by the
    constants that Megatron has built in and :data:`LLAMA3_FACTOR`."""

    theta: float
    llama3: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of experts. ``layers``: for every layer, whether it has one; ``width`` of an expert;
    ``renormalized``: the probabilities of the chosen experts sum to one."""

    number: int
    chosen: int
    width: int
    layers: tuple[bool, ...]
    renormalized: bool = True


@dataclass(frozen=True)
class Description:
    """A decoder with RMSNorm before each SwiGLU MLP and each self-attention with rotary positions.

    ``vocabulary``: rows of the embedding; ``head_norms``: which of q, k and v are normalized per head;
    ``width`` of the dense MLPs; ``zero_centered``: Megatron stores γ − 1 in its norms.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    width: int
    vocabulary: int
    positions: int
    epsilon: float
    rope: Rope
    tied: bool
    qkv_bias: bool = False
    linear_bias: bool = False
    head_norms: tuple[str, ...] = ()
    experts: Experts | None = None
    zero_centered: bool = False


# Argument, the values with which nothing is lost, and what would be lost with any other. An argument that a
# version of Megatron does not have is not used by it.
_PLAIN: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("normalization", ("RMSNorm",), "the centring and the biases of its LayerNorms"),
    ("swiglu", (True,), "its activation function: the architectures have SwiGLU"),
    ("position_embedding_type", ("rope",), "its position embeddings: the architectures have plain RoPE"),
    ("rotary_percent", (1.0, 1), "RoPE on a part of each head"),
    ("rotary_interleaved", (False,), "the interleaved pairs of its RoPE"),
    ("no_rope_freq", (None,), "its layers without RoPE"),
    ("mrope_section", (None,), "its sections of RoPE"),
    ("multi_latent_attention", (False,), "its latent attention"),
    ("experimental_attention_variant", (None,), "its kind of attention"),
    ("attention_output_gate", (False,), "the gate on the output of its attention"),
    ("window_size", (None,), "the window of its attention"),
    ("softmax_type", ("vanilla",), "the offset in the softmax of its attention"),
    ("qk_l2_norm", (False,), "the L2 norm on q and k"),
    ("apply_residual_connection_post_layernorm", (False,), "its residual connections"),
    ("activation_func_clamp_value", (None,), "the clamp in its activation function"),
    ("glu_linear_offset", (0.0, 0), "the offset in its activation function"),
    ("is_hybrid_model", (False,), "its layers other than attention and MLP"),
    ("hybrid_layer_pattern", (None,), "its layers other than attention and MLP"),
    ("heterogeneous_layers_config_path", (None,), "the differences between its layers"),
    ("heterogeneous_layers_config_encoded_json", (None,), "the differences between its layers"),
    ("use_mup", (False,), "the multipliers of its maximal-update parametrization"),
)
_PLAIN_EXPERTS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("moe_shared_expert_intermediate_size", (None, 0), "its shared expert"),
    ("moe_router_score_function", ("softmax",), "its router's score function"),
    ("moe_router_enable_expert_bias", (False,), "its router's expert bias"),
    ("moe_router_topk_scaling_factor", (None, 1.0), "the factor on its experts' probabilities"),
    ("moe_router_num_groups", (None,), "its groups of experts"),
    ("moe_router_group_topk", (None,), "its groups of experts"),
    ("moe_expert_capacity_factor", (None,), "the capacity of its experts: no token is dropped elsewhere"),
    ("moe_apply_probs_on_input", (False,), "probabilities applied before the experts"),
    ("moe_latent_size", (None,), "the latent projection around its experts"),
    ("moe_mlp_glu_interleave_size", (None,), "the order of the rows of its experts"),
    ("moe_input_jitter_eps", (None,), "the noise on its router's input"),
)


def from_arguments(args: argparse.Namespace) -> Description:
    """Read the arguments that a Megatron checkpoint holds.

    Raises:
        ScaleVecError: The model has something that no architecture of this package can hold; the message
            says what would be lost.
    """
    _require_plain(args, _PLAIN)
    scalevec = ScaleVecConfig.from_namespace(args)
    norms = {"q", "k"} if getattr(args, "qk_layernorm", False) else set()
    if scalevec.placement == "dual-norm" and "attention" in scalevec.sites:
        norms |= {"q", "k", "v"} - set(scalevec.branches_off)
    grouped = getattr(args, "group_query_attention", False)
    return Description(
        layers=args.num_layers,
        hidden=args.hidden_size,
        heads=args.num_attention_heads,
        groups=args.num_query_groups if grouped else args.num_attention_heads,
        head_dim=args.kv_channels,
        width=args.ffn_hidden_size,
        vocabulary=args.padded_vocab_size,
        positions=args.max_position_embeddings,
        epsilon=_first(args, "layernorm_epsilon", "norm_epsilon", default=1e-5),
        rope=_rope_of(args),
        tied=not args.untie_embeddings_and_output_weights,
        qkv_bias=bool(getattr(args, "add_qkv_bias", False) or args.add_bias_linear),
        linear_bias=bool(args.add_bias_linear),
        head_norms=tuple(branch for branch in ("q", "k", "v") if branch in norms),
        experts=_experts_of(args),
        zero_centered=bool(
            _first(args, "layernorm_zero_centered_gamma", "apply_layernorm_1p", default=False)
        ),
    )


def _first(args: argparse.Namespace, *names: str, default: Any) -> Any:
    """The value under whichever name this version of Megatron has given it."""
    values = [getattr(args, name) for name in names if getattr(args, name, None) is not None]
    return values[0] if values else default


def _require_plain(args: argparse.Namespace, table) -> None:
    for name, values, what in table:
        value = getattr(args, name, values[0])
        if value not in values:
            raise ScaleVecError(
                f"the checkpoint was trained with {name} {value}, and no architecture that this version "
                f"writes for Hugging Face holds that: {what} would be lost; nothing was written."
            )


def _rope_of(args: argparse.Namespace) -> Rope:
    """Of the flags that scale RoPE, ``gpt_builders.py``, by which Megatron's ``pretrain_gpt.py`` builds its
    models, passes on ``--use-rope-scaling`` alone (0.16 to 0.19), while the builder in the wheel of 0.19
    passes on all: with others than that one, what was trained cannot be known."""
    llama3 = bool(getattr(args, "use_rope_scaling", False))
    known = {"rotary_seq_len_interpolation_factor": None}
    if llama3:
        known["rope_scaling_factor"] = LLAMA3_FACTOR
    for name, value in known.items():
        if getattr(args, name, value) != value:
            raise ScaleVecError(
                f"the checkpoint says {name} {getattr(args, name)}, which Megatron's pretrain_gpt.py (0.16 "
                "to 0.19) does not pass on to the model while the builder in the wheel does, so the "
                "positions that it was trained with are not known; nothing was written."
            )
    return Rope(float(args.rotary_base), llama3)


def _experts_of(args: argparse.Namespace) -> Experts | None:
    number = getattr(args, "num_experts", None)
    if not number:
        return None
    _require_plain(args, _PLAIN_EXPERTS)
    balancing = getattr(args, "moe_router_load_balancing_type", "none")
    if "sinkhorn" in ([balancing] if isinstance(balancing, str) else balancing):
        raise ScaleVecError(
            "the checkpoint was trained with moe_router_load_balancing_type sinkhorn, and no architecture "
            "that this version writes for Hugging Face routes like that; nothing was written."
        )
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        has_experts = tuple(layer % frequency == 0 for layer in range(args.num_layers))
    else:
        has_experts = tuple(bool(one) for one in frequency)
    if len(has_experts) != args.num_layers:
        raise ScaleVecError(
            f"the checkpoint's moe_layer_freq names {len(has_experts)} layers and its num_layers is "
            f"{args.num_layers}; nothing was written."
        )
    return Experts(
        number=number,
        chosen=args.moe_router_topk,
        width=_first(args, "moe_ffn_hidden_size", default=args.ffn_hidden_size),
        layers=has_experts,
        renormalized=not getattr(args, "moe_router_pre_softmax", False),
    )


def _entries(model: Description, implementation: str) -> list[tuple[str, Any, list[str]]]:
    """Megatron's arguments of a model: attribute, value, and the words of the command line."""

    def flag(name: str, on: bool, attribute: str | None = None) -> tuple[str, Any, list[str]]:
        return (attribute or name.replace("-", "_"), on, [f"--{name}"] if on else [])

    def value(name: str, number: Any, attribute: str | None = None) -> tuple[str, Any, list[str]]:
        words = [] if number is None else [f"--{name}", str(number)]
        return (attribute or name.replace("-", "_"), number, words)

    grouped = model.groups != model.heads
    rope = model.rope
    entries = [
        value("num-layers", model.layers),
        value("hidden-size", model.hidden),
        value("ffn-hidden-size", model.width),
        value("num-attention-heads", model.heads),
        value("kv-channels", model.head_dim),
        flag("group-query-attention", grouped),
        value("num-query-groups", model.groups) if grouped else ("num_query_groups", model.heads, []),
        value("max-position-embeddings", model.positions),
        value("position-embedding-type", "rope"),
        value("rotary-base", int(rope.theta)),
        flag("use-rope-scaling", rope.llama3),
        value("normalization", "RMSNorm"),
        value("norm-epsilon", model.epsilon),
        flag("qk-layernorm", "q" in model.head_norms),
        flag("swiglu", True),
        ("add_bias_linear", model.linear_bias, [] if model.linear_bias else ["--disable-bias-linear"]),
        flag("add-qkv-bias", model.qkv_bias and not model.linear_bias),
        flag("untie-embeddings-and-output-weights", not model.tied),
        ("padded_vocab_size", model.vocabulary, []),
        value("transformer-impl", implementation),
        value("hidden-dropout", 0.0),
        value("attention-dropout", 0.0),
    ]
    experts = model.experts
    if experts is not None:
        everywhere = all(experts.layers)
        frequency = [int(one) for one in experts.layers]
        words = [] if everywhere else ["--moe-layer-freq", str(frequency).replace(" ", "")]
        entries += [
            value("num-experts", experts.number),
            value("moe-router-topk", experts.chosen),
            value("moe-ffn-hidden-size", experts.width),
            ("moe_layer_freq", 1 if everywhere else frequency, words),
            flag("moe-router-pre-softmax", not experts.renormalized),
            ("moe_router_score_function", "softmax", []),
            ("moe_router_enable_expert_bias", False, []),
        ]
    return entries


_STORED_ONLY = {
    "add_position_embedding": True,
    "use_rotary_position_embeddings": False,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "squared_relu": False,
    "apply_layernorm_1p": False,
    "apply_query_key_layer_scaling": False,
    # What a resume asks of the run that saved.
    "ckpt_format": "torch_dist",
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "world_size": 1,
    "data_parallel_size": 1,
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "skipped_train_samples": 0,
    "no_save_optim": True,
    "no_save_rng": True,
}
# Names that `--use-checkpoint-args` does not look for in a checkpoint (``load_args_from_checkpoint``).
_NOT_RESTORED = {
    "norm_epsilon",
    "qk_layernorm",
    "use_rope_scaling",
}


def to_arguments(model: Description, implementation: str) -> argparse.Namespace:
    """The arguments of a stock checkpoint of this model.

    Args:
        model: Without a v norm, which stock Megatron does not have.
        implementation: ``--transformer-impl``: ``transformer_engine`` or ``local``.
    """
    stored = {name: value for name, value, _ in _entries(model, implementation) if value is not None}
    stored["layernorm_epsilon"] = model.epsilon
    return argparse.Namespace(**_STORED_ONLY, **stored)


def megatron_flags(model: Description, implementation: str, *, restored: bool = True) -> list[str]:
    """The words of a command line that builds this model.

    Args:
        model: As for :func:`to_arguments`.
        implementation: As for :func:`to_arguments`.
        restored: Also those that ``--use-checkpoint-args`` takes from a checkpoint.
    """
    entries = _entries(model, implementation)
    return [word for name, _, words in entries if restored or name in _NOT_RESTORED for word in words]
