"""Hugging Face's architectures: what each can hold, and their configs.

A config is written and read as JSON, without ``transformers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_scalevec.config import choose
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.huggingface.description import LLAMA3_FACTOR, Description, Experts, Rope

__all__ = ["ARCHITECTURES", "FORMATS", "Architecture", "choose_architecture", "config_of", "description_of"]

_NO_NORMS: tuple[str, ...] = ()
_QUERY_KEY = ("q", "k")


@dataclass(frozen=True)
class Architecture:
    """One ``model_type``.

    ``head_norms``: which norms on q, k and v it can have (None: any); ``qkv_bias`` and ``linear_bias``:
    whether it can do with or without them; ``experts``: in no layer, in all, or in some.
    """

    name: str
    class_name: str
    summary: str
    head_norms: tuple[str, ...] | None = _NO_NORMS
    qkv_bias: tuple[bool, ...] = (False,)
    linear_bias: tuple[bool, ...] = (False,)
    experts: str = "none"
    own_head_dim: bool = True

    def misses(self, model: Description) -> str | None:
        """What of the model this architecture cannot hold, None where it holds all of it."""
        if self.head_norms is not None and model.head_norms != self.head_norms:
            missing = [branch for branch in model.head_norms if branch not in self.head_norms]
            if missing:
                return f"the norm on {_and(missing)} of every attention layer would be lost"
            return f"it always has norms on {_and(self.head_norms)}, and the model does not"
        if model.linear_bias not in self.linear_bias:
            return "the biases of the linears would be lost"
        if model.qkv_bias not in self.qkv_bias and not model.linear_bias:
            if model.qkv_bias:
                return "the biases of q, k and v would be lost"
            return "it always has biases on q, k and v, and the model does not"
        if self.experts == "none" and model.experts is not None:
            return "the experts would be lost"
        if self.experts != "none" and model.experts is None:
            return "it always has experts, and the model does not"
        if self.experts == "all" and not all(model.experts.layers):
            return "it has experts in every layer, and the model does not"
        if self.name == "mixtral" and not model.experts.renormalized:
            return "probabilities of the experts that do not sum to one would be lost"
        if not self.own_head_dim and model.head_dim * model.heads != model.hidden:
            return "its heads have a size of hidden / heads, and the model's have another"
        if self.name == "llama" and model.hidden % model.heads:
            return "it wants a hidden size that its heads divide"
        return None


def _and(names) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


ARCHITECTURES: Mapping[str, Architecture] = {
    entry.name: entry
    for entry in (
        Architecture(
            "llama",
            "LlamaForCausalLM",
            "RMSNorm, SwiGLU, RoPE",
            qkv_bias=(False,),
            linear_bias=(False, True),
        ),
        Architecture(
            "qwen2",
            "Qwen2ForCausalLM",
            "the same with biases on q, k and v",
            qkv_bias=(True,),
            own_head_dim=False,
        ),
        Architecture(
            "qwen3", "Qwen3ForCausalLM", "the same with norms on q and k (dnp without v)", _QUERY_KEY
        ),
        Architecture("mixtral", "MixtralForCausalLM", "experts in every layer", experts="all"),
        Architecture(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "experts in some or all layers, norms on q and k",
            _QUERY_KEY,
            experts="some",
        ),
        Architecture(
            "scalevec",
            "ScaleVecForCausalLM",
            "any norms on q, k and v (unified, dnp); loads with trust_remote_code=True",
            head_norms=None,
            qkv_bias=(False, True),
        ),
    )
}
FORMATS = ("auto", *ARCHITECTURES)


def choose_architecture(model: Description, wanted: str) -> Architecture:
    """The architecture by name, or the first that holds the model (``auto``).

    Raises:
        ScaleVecError: It does not hold the model, or none does; the message says what would be lost.
    """
    choose("format", wanted, FORMATS)
    candidates = list(ARCHITECTURES.values()) if wanted == "auto" else [ARCHITECTURES[wanted]]
    misses = {entry.name: entry.misses(model) for entry in candidates}
    fitting = [entry for entry in candidates if misses[entry.name] is None]
    if fitting:
        return fitting[0]
    if wanted == "auto":
        reasons = "; ".join(f"{name}: {reason}" for name, reason in misses.items())
        raise ScaleVecError(f"no architecture of Hugging Face's holds this model whole ({reasons}).")
    others = [entry.name for entry in ARCHITECTURES.values() if entry.misses(model) is None]
    way_out = f"use --format {' or '.join(others)}" if others else "no other format holds it either"
    raise ScaleVecError(f"--format {wanted} cannot hold this model: {misses[wanted]}; {way_out}.")


def config_of(
    model: Description, architecture: Architecture, vocabulary: int, dtype: str, spread: float
) -> dict[str, Any]:
    """The contents of ``config.json``.

    Args:
        model: What the model is.
        architecture: One that holds it.
        vocabulary: Rows of the embedding.
        dtype: Name of the weights' dtype in torch, for example ``bfloat16``.
        spread: Standard deviation of the initial weights.

    RoPE is written in the form that transformers 4 reads and 5 still does.
    """
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.name,
        "vocab_size": vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.positions,
        "initializer_range": spread,
        "rms_norm_eps": model.epsilon,
        "rope_theta": model.rope.theta,
        "rope_scaling": _rope_scaling(model.rope),
        "tie_word_embeddings": model.tied,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }
    if not architecture.own_head_dim:
        del config["head_dim"]
    if architecture.name == "llama":
        config |= {"attention_bias": model.linear_bias, "mlp_bias": model.linear_bias}
    elif architecture.name in ("qwen3", "qwen3_moe"):
        config["attention_bias"] = False
    if architecture.name.startswith("qwen"):
        config["use_sliding_window"] = False
    if architecture.name == "mixtral":
        config |= {
            "intermediate_size": model.experts.width,
            "num_local_experts": model.experts.number,
            "num_experts_per_tok": model.experts.chosen,
            "sliding_window": None,
        }
    if architecture.name == "qwen3_moe":
        config |= {
            "moe_intermediate_size": model.experts.width,
            "num_experts": model.experts.number,
            "num_experts_per_tok": model.experts.chosen,
            "norm_topk_prob": model.experts.renormalized,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, has_experts in enumerate(model.experts.layers) if not has_experts],
        }
    if architecture.name == "scalevec":
        config |= {
            "auto_map": {
                "AutoConfig": "configuration_scalevec.ScaleVecConfig",
                "AutoModelForCausalLM": "modeling_scalevec.ScaleVecForCausalLM",
            },
            "head_norms": list(model.head_norms),
            "qkv_bias": model.qkv_bias,
        }
    return config


# The constants of `RotaryEmbedding._apply_scaling` in Megatron.
_LLAMA3 = {
    "factor": LLAMA3_FACTOR,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _rope_scaling(rope: Rope) -> dict[str, Any] | None:
    return {"rope_type": "llama3", **_LLAMA3} if rope.llama3 else None


# Values with which nothing is lost, where an entry is there at all.
_PLAIN_CONFIG: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
    "router_jitter_noise": (0.0, None),
}


def description_of(config: Mapping[str, Any]) -> tuple[Description, Architecture]:
    """Read a ``config.json``.

    Raises:
        ScaleVecError: An unknown architecture, a missing entry, or something that a stock Megatron model
            cannot hold.
    """
    name = config.get("model_type")
    if name == "scalevec":
        raise ScaleVecError(
            "this folder was exported with norms that stock Megatron has no place for (model_type "
            "scalevec): continue from the Megatron checkpoint it was made from."
        )
    if name not in ARCHITECTURES:
        readable = ", ".join(entry for entry in ARCHITECTURES if entry != "scalevec")
        raise ScaleVecError(f"config.json has the model_type {name!r}; this version reads {readable}.")
    for entry, values in _PLAIN_CONFIG.items():
        if config.get(entry, values[0]) not in values:
            raise ScaleVecError(
                f"config.json has {entry} {config[entry]!r}, which the Megatron model would not have: this "
                f"version reads {values[0]!r} only."
            )
    if name == "mixtral" and config.get("sliding_window") is not None:
        raise ScaleVecError(
            f"config.json has a sliding_window of {config['sliding_window']}, and the Megatron model would "
            "attend to everything; this version reads models without a window only."
        )
    architecture = ARCHITECTURES[name]
    hidden, heads = _entry(config, "hidden_size"), _entry(config, "num_attention_heads")
    linear_bias = _linear_bias(config, name)
    width_entry = "intermediate_size"
    model = Description(
        layers=_entry(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        groups=_entry(config, "num_key_value_heads"),
        head_dim=config.get("head_dim") or hidden // heads,
        width=_entry(config, width_entry),
        vocabulary=_entry(config, "vocab_size"),
        positions=_entry(config, "max_position_embeddings"),
        epsilon=_entry(config, "rms_norm_eps"),
        rope=_rope_from(config),
        # False is the default of every architecture in the table.
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=architecture.qkv_bias == (True,) or linear_bias,
        linear_bias=linear_bias,
        head_norms=architecture.head_norms,
        experts=_experts_from(config, architecture),
    )
    return model, architecture


def _entry(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ScaleVecError(
            f"config.json lacks {name}, whose default depends on the version of transformers: add it."
        )
    return config[name]


def _linear_bias(config: Mapping[str, Any], name: str) -> bool:
    attention = bool(config.get("attention_bias", False))
    mlp = bool(config.get("mlp_bias", False))
    if attention != mlp or (attention and name != "llama"):
        raise ScaleVecError(
            f"config.json has attention_bias {attention} and mlp_bias {mlp}; Megatron's linears all have "
            "biases or none (or those of q, k and v alone, as in qwen2)."
        )
    return attention


def _rope_from(config: Mapping[str, Any]) -> Rope:
    """From the one entry of transformers 5 or the two of transformers 4."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", config.get("rope_theta"))
    if theta is None:
        if config["model_type"] != "llama":
            raise ScaleVecError(
                "config.json lacks rope_theta, whose default depends on the version of transformers: add it."
            )
        theta = 10000.0  # the first Llama models have no such entry
    if float(theta) != int(theta):
        raise ScaleVecError(
            f"config.json has a rope_theta of {theta}; Megatron's --rotary-base is an integer."
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(float(theta))
    found = {key: scaling.get(key) for key in _LLAMA3}
    if kind == "llama3" and found == _LLAMA3:
        return Rope(float(theta), llama3=True)
    raise ScaleVecError(
        f"config.json scales RoPE by {kind!r} with {found if kind == 'llama3' else scaling}; every version "
        f"of Megatron builds 'llama3' with {_LLAMA3}, and nothing else."
    )


def _experts_from(config: Mapping[str, Any], architecture: Architecture) -> Experts | None:
    if architecture.experts == "none":
        return None
    layers = _entry(config, "num_hidden_layers")
    chosen = _entry(config, "num_experts_per_tok")
    if architecture.name == "mixtral":
        width, number = _entry(config, "intermediate_size"), _entry(config, "num_local_experts")
        return _routed(Experts(number, chosen, width, (True,) * layers))
    step, only_dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    has_experts = tuple(layer not in only_dense and (layer + 1) % step == 0 for layer in range(layers))
    return _routed(
        Experts(
            number=config.get("num_experts") or _entry(config, "num_local_experts"),
            chosen=chosen,
            width=_entry(config, "moe_intermediate_size"),
            layers=has_experts,
            renormalized=bool(config.get("norm_topk_prob", False)),
        )
    )


def _routed(experts: Experts) -> Experts:
    if experts.chosen == 1 and experts.renormalized:
        raise ScaleVecError(
            "config.json chooses one expert per token with a probability of one; Megatron routes to a single "
            "expert with --moe-router-pre-softmax only, whose probability is below one."
        )
    return experts
