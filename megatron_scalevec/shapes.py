"""The shapes of models that carry scale vectors, and those that do not, in one table.

``scalevec explain --support`` prints it. The branches are checked against what the configuration of such a
model comes to (``tests/test_shapes.py``), so that the table cannot say more than is built.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_scalevec.versions import SUPPORTED

__all__ = ["SHAPES", "Shape"]

_ATTENTION = ("q", "k", "v")
_LATENT = ("q_down", "kv_down", "k_rope", "q_up", "k_up", "v_up")
_MLP = ("gate", "up")
_EXPERTS = ("router", "expert_gate", "expert_up")
_SHARED_EXPERTS = ("shared_gate", "shared_up")
_MAMBA = ("z", "x", "B", "C", "dt", "out")
_DELTA = ("delta_q", "delta_k", "delta_v", "delta_z", "delta_b", "delta_a")
_SINCE_HYBRIDS = ">=0.18,<0.20"


@dataclass(frozen=True)
class Shape:
    """A kind of model.

    Attributes:
        name: With models of that kind.
        flags: Of Megatron, by which it is told.
        branches: With scale vectors of their own at the default sites, under a strategy that splits branches.
        versions: Of megatron-core.
        refused: Why such a model is refused; empty where it is supported.
    """

    name: str
    flags: str
    branches: tuple[str, ...] = ()
    versions: str = str(SUPPORTED)
    refused: str = ""


SHAPES: tuple[Shape, ...] = (
    Shape("GPT with a gated MLP (Llama, Qwen3)", "--swiglu", (*_ATTENTION, *_MLP)),
    Shape("GPT with a plain MLP (GPT-2)", "", (*_ATTENTION, "up")),
    Shape(
        "attention with an output gate",
        "--attention-output-gate",
        ("q", "output_gate", "k", "v", *_MLP),
    ),
    Shape("experts in every layer (Mixtral, Qwen3-MoE)", "--num-experts", (*_ATTENTION, *_EXPERTS)),
    Shape(
        "dense and expert layers, shared experts behind a gate",
        "--moe-layer-freq --moe-shared-expert-intermediate-size --moe-shared-expert-gate",
        (*_ATTENTION, *_MLP, *_EXPERTS, *_SHARED_EXPERTS, "shared_expert_gate"),
    ),
    Shape(
        "experts on latents (TransformerEngine)",
        "--moe-latent-size",
        (*_ATTENTION, "router", "latent_down"),
    ),
    Shape("latent attention (DeepSeek-V2)", "--multi-latent-attention --qk-layernorm", (*_LATENT, *_MLP)),
    Shape(
        "latent attention, a dense layer, experts, multi-token prediction (DeepSeek-V3)",
        "--multi-latent-attention --num-experts --mtp-num-layers",
        (*_LATENT, *_MLP, *_EXPERTS, *_SHARED_EXPERTS),
    ),
    Shape(
        "hybrid of Mamba, attention and MLP layers (Nemotron-H)",
        "--hybrid-layer-pattern M*-",
        (*_MAMBA, *_ATTENTION, *_MLP),
        _SINCE_HYBRIDS,
    ),
    Shape(
        "hybrid of Mamba, attention and expert layers",
        "--hybrid-layer-pattern M*E",
        (*_MAMBA, *_ATTENTION, *_EXPERTS),
        _SINCE_HYBRIDS,
    ),
    Shape(
        "hybrid of gated delta nets, attention and expert layers (Qwen3-Next)",
        "--hybrid-layer-pattern GE*E --attention-output-gate --moe-shared-expert-gate",
        ("q", "output_gate", "k", "v", *_EXPERTS, *_SHARED_EXPERTS, "shared_expert_gate", *_DELTA),
        _SINCE_HYBRIDS,
    ),
    Shape(
        "hybrid with latent attention",
        "--hybrid-layer-pattern M+-",
        (*_MAMBA, *_LATENT, *_MLP),
        ">=0.19,<0.20",
    ),
    Shape(
        "heterogeneous layers (Nemotron-NAS)",
        "--heterogeneous-layers-config-path",
        (*_ATTENTION, *_MLP),
    ),
    Shape(
        "encoder and decoder (T5), other cross-attention",
        "pretrain_t5.py",
        refused="the norm before cross-attention feeds the queries alone; keys and values come from "
        "elsewhere, without a norm of their own",
    ),
    Shape(
        "encoder alone (BERT), vision and multimodal models",
        "pretrain_bert.py, pretrain_vlm.py",
        refused="scale vectors are built on GPTModel and hybrid models",
    ),
    Shape(
        "sparse attention (DeepSeek-V3.2)",
        "--hybrid-layer-pattern D, --experimental-attention-variant dsa",
        refused="its indexer reads weights and normalized values outside of the attention's own maps",
    ),
)
