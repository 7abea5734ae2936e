"""What cannot be combined yet, in one table: every entry with its reason and a way out.

Entries look at Megatron's parsed arguments, so a run is refused before a process group exists or GPU
memory is taken. What arguments do not show is refused by :mod:`megatron_scalevec.convert` on the built
model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError

__all__ = ["REFUSALS", "Refusal", "refuse_unsupported"]


@dataclass(frozen=True)
class Refusal:
    """One unsupported combination."""

    name: str
    applies: Callable[[Any, ScaleVecConfig], bool]
    reason: str
    way_out: str


def _given(*names: str) -> Callable[[Any, ScaleVecConfig], bool]:
    """Whether any of the arguments has a value other than None, False, zero or 'none'."""

    def applies(args: Any, _: ScaleVecConfig) -> bool:
        return any(getattr(args, name, None) not in (None, False, 0, "", "none", []) for name in names)

    return applies


def _differs(name: str, *accepted: Any) -> Callable[[Any, ScaleVecConfig], bool]:
    def applies(args: Any, _: ScaleVecConfig) -> bool:
        return hasattr(args, name) and getattr(args, name) not in accepted

    return applies


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "transformer-impl",
        _differs("transformer_impl", "local"),
        "scale vectors are built on Megatron's local layers only in this version, and the run uses "
        "--transformer-impl {transformer_impl}",
        "add --transformer-impl local",
    ),
    Refusal(
        "experts",
        _given("num_experts", "num_moe_experts"),
        "mixture-of-experts layers (--num-experts) do not carry scale vectors yet",
        "use a dense model",
    ),
    Refusal(
        "latent-attention",
        _given("multi_latent_attention"),
        "multi-latent attention (--multi-latent-attention) does not carry scale vectors yet",
        "use grouped-query attention",
    ),
    Refusal(
        "mtp",
        _given("mtp_num_layers"),
        "multi-token-prediction layers (--mtp-num-layers) do not carry scale vectors yet",
        "train without them",
    ),
    Refusal(
        "heterogeneous",
        _given("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
        "heterogeneous layers do not carry scale vectors yet",
        "use layers of one kind",
    ),
    Refusal(
        "experimental-attention",
        _given("experimental_attention_variant"),
        "--experimental-attention-variant {experimental_attention_variant} has rows of a kind this version "
        "does not know",
        "use standard attention",
    ),
    Refusal(
        "attention-output-gate",
        _given("attention_output_gate"),
        "--attention-output-gate adds gate rows to the fused q/k/v weight that no branch covers yet",
        "train without the gate",
    ),
    Refusal(
        "hybrid",
        _given("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model"),
        "hybrid and Mamba models do not carry scale vectors yet",
        "use a GPT model",
    ),
    Refusal(
        "legacy-models",
        _given("use_legacy_models"),
        "--use-legacy-models builds a model outside megatron.core",
        "drop that flag",
    ),
    Refusal(
        "fsdp",
        _given("use_megatron_fsdp", "use_torch_fsdp2", "use_custom_fsdp"),
        "fully sharded data parallelism is not proven with scale vectors yet",
        "use --use-distributed-optimizer",
    ),
    Refusal(
        "fp8-fp4",
        _given("fp8", "fp4", "fp8_param_gather", "fp4_param"),
        "FP8 and FP4 training are not proven with scale vectors yet",
        "train in bf16",
    ),
    Refusal(
        "optimizer",
        _differs("optimizer", "adam", "sgd"),
        "the weight-decay split is not proven with --optimizer {optimizer} yet",
        "use adam or sgd",
    ),
    Refusal(
        "optimizer-cpu-offload",
        _given("optimizer_cpu_offload"),
        "the weight-decay split is not proven with --optimizer-cpu-offload yet",
        "drop that flag",
    ),
    Refusal(
        "precision-aware-optimizer",
        _given("use_precision_aware_optimizer"),
        "the weight-decay split is not proven with --use-precision-aware-optimizer yet",
        "drop that flag",
    ),
    Refusal(
        "layernorm-1p",
        _given("apply_layernorm_1p", "layernorm_zero_centered_gamma"),
        "--apply-layernorm-1p stores γ − 1, so weight decay on it would pull γ toward 1, not 0",
        "train without it",
    ),
    Refusal(
        "wd-on-qk-norms",
        lambda args, config: (
            bool(getattr(args, "apply_wd_to_qk_layernorm", False)) and config.weight_decay == "split"
        ),
        "--apply-wd-to-qk-layernorm decays the q/k norms, which are Output-Norms and do not decay under "
        "--scalevec-weight-decay split",
        "drop it, or use --scalevec-weight-decay all",
    ),
    Refusal(
        "kitchen",
        _given("use_kitchen", "use_kitchen_attention"),
        "Kitchen layers do not carry scale vectors yet",
        "drop --use-kitchen",
    ),
    Refusal(
        "modelopt",
        _given("modelopt_enabled", "export_te_mcore_model", "export_quant_cfg"),
        "ModelOpt swaps the model's layers after they were built",
        "train without it",
    ),
    Refusal(
        "cuda-graphs",
        lambda args, _: (
            getattr(args, "cuda_graph_impl", "none") not in (None, "none")
            or bool(getattr(args, "enable_cuda_graph", False))
            or bool(getattr(args, "external_cuda_graph", False))
        ),
        "CUDA graphs are not proven with scale vectors yet",
        "add --cuda-graph-impl none",
    ),
    Refusal(
        "weight-rematerialization",
        lambda args, _: int(getattr(args, "gtp_weight_remat_size", 1) or 1) > 1,
        "--gtp-weight-remat-size shards a weight's rows once more than the scale vectors know",
        "set it to 1",
    ),
    Refusal(
        "delayed-wgrad",
        _given("delay_wgrad_compute"),
        "--delay-wgrad-compute computes the gradient of the folded weight outside of autograd, where the "
        "scale vectors would get none",
        "drop that flag",
    ),
    Refusal(
        "qk-clip",
        _given("qk_clip"),
        "--qk-clip rescales rows of the q/k/v weight and is not proven with scale vectors yet",
        "drop that flag",
    ),
)


def refuse_unsupported(args: Any, config: ScaleVecConfig) -> None:
    """Raise for the first entry of :data:`REFUSALS` that applies.

    Raises:
        ScaleVecError: With the entry's reason and way out.
    """
    if not config.active:
        return
    for refusal in REFUSALS:
        if refusal.applies(args, config):
            reason = refusal.reason.format_map(_Lookup(args))
            raise ScaleVecError(
                f"--scalevec-strategy {config.strategy}: {reason}; {refusal.way_out}, or drop "
                "--scalevec-strategy."
            )


class _Lookup(dict):
    def __init__(self, args: Any) -> None:
        super().__init__()
        self._args = args

    def __missing__(self, key: str) -> str:
        return str(getattr(self._args, key, None))
