"""Which of Megatron's arguments CPU mode changes, and which it has to refuse.

An option is changed when it only says how fast or with how much memory something is computed, and
refused when the run would be another one without it. Attributes are looked up by name and skipped
where a Megatron version does not have them; the tables cover 0.16.1 to 0.19.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_scalevec.errors import ScaleVecError

__all__ = ["choose_arguments"]


def choose_arguments(args: Any) -> list[str]:
    """Set in ``args``, and in one environment variable, what a run on CPU needs.

    Args:
        args: Megatron's parsed arguments, before ``validate_args``: validation derives other values
            from these.

    Returns:
        One line per change, as one would write it in a launch script.

    Raises:
        ScaleVecError: Something was asked for that has no CPU counterpart. ``args`` is unchanged.
    """
    for refusal in _REFUSALS:
        if hasattr(args, refusal.attribute) and refusal.applies(args):
            value = _text(getattr(args, refusal.attribute))
            raise ScaleVecError(
                f"{refusal.given.format(value=value)} cannot be served in CPU mode, because "
                f"{refusal.because}; {refusal.instead}."
            )
    changes = []
    for choice in _CHOICES:
        if hasattr(args, choice.attribute):
            changes.extend(choice.apply(args))
    changes.extend(_choose_hybrid_stack(args))
    changes.extend(_satisfy_connection_check())
    return changes


def _choose_hybrid_stack(args: Any) -> list[str]:
    """A hybrid stack of local layers, where the user's launch script names Megatron's or none."""
    if not any(getattr(args, name, None) for name in _HYBRID_PATTERNS) or _has_own_spec(args):
        return []
    old = getattr(args, "spec", None)
    # Megatron's stack makes of --qk-layernorm norms on the latents of such layers, and nothing elsewhere.
    norms = "+" in _hybrid_layers(args) and getattr(args, "qk_layernorm", False)
    args.spec = [_HYBRID_STACKS, "stack_with_latent_norms" if norms else "stack"]
    return [f"--spec {_text(old) if old else '(none)'} -> {_text(args.spec)}"]


_HYBRID_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
_HYBRID_STACKS = "megatron_scalevec.cpu.hybrid_stack"


def _hybrid_layers(args: Any) -> str:
    return next(filter(None, (getattr(args, name, None) for name in _HYBRID_PATTERNS)), "")


def _satisfy_connection_check() -> list[str]:
    """Megatron's validation wants this variable for tensor and context parallelism on GPUs.

    It limits a GPU's hardware queues and means nothing here, so nobody should have to set it.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    old = os.environ.get(name)
    os.environ[name] = "1"
    return [] if old == "1" else [f"{name} {old or '(unset)'} -> 1"]


# ------------------------------------------------------------------------------- choices


@dataclass(frozen=True)
class _Choice:
    """An attribute, the value it must have, and the flag a user would write.

    ``flag`` is one that sets the wanted value when ``value`` is a switch that CPU mode turns on, or
    whose default is on ("--no-…"); else it is the flag the user gave.
    """

    attribute: str
    flag: str
    value: Any
    only_if: Callable[[Any], bool] = bool
    offloading: bool | None = None  # only with, or only without, an offloaded optimizer

    def apply(self, args: Any) -> list[str]:
        if self.offloading not in (None, bool(getattr(args, "optimizer_cpu_offload", False))):
            return []
        old = getattr(args, self.attribute)
        new = self.value(old) if callable(self.value) else self.value
        if old == new or not self.only_if(old):
            return []
        setattr(args, self.attribute, new)
        if isinstance(new, bool):
            added = new or self.flag.startswith("--no-")
            return [f"{self.flag} added" if added else f"{self.flag} dropped"]
        if not new and new != 0:
            return [f"{self.flag} {_text(old)} dropped"]
        return [f"{self.flag} {_text(old)} -> {_text(new)}"]


def _always(value: Any) -> bool:
    return True


def _nothing(old: Any) -> list[Any]:
    return []


def _unfused(old: Any) -> Any:
    """The same attention in plain torch; "local" names a special layer spec and is left alone."""
    return type(old)["unfused"] if isinstance(old, enum.Enum) else "unfused"


def _is_gpu_attention(backend: Any) -> bool:
    return _text(backend) not in ("unfused", "local")


_CHOICES = (
    # Where it runs.
    _Choice("distributed_backend", "--distributed-backend", "gloo"),
    _Choice("transformer_impl", "--transformer-impl", "local"),
    _Choice("use_cpu_initialization", "--use-cpu-initialization", True, _always),
    _Choice("attention_backend", "--attention-backend", _unfused, _is_gpu_attention),
    _Choice("use_flash_attn", "--use-flash-attn", False),
    # Kernels from TransformerEngine, apex or Triton that compute what plain torch does.
    _Choice("gradient_accumulation_fusion", "--no-gradient-accumulation-fusion", False),
    _Choice("masked_softmax_fusion", "--no-masked-softmax-fusion", False),
    _Choice("bias_gelu_fusion", "--no-bias-gelu-fusion", False),
    _Choice("bias_swiglu_fusion", "--no-bias-swiglu-fusion", False),
    _Choice("apply_rope_fusion", "--no-rope-fusion", False),
    _Choice("cross_entropy_loss_fusion", "--cross-entropy-loss-fusion", False),
    _Choice("cross_entropy_fusion_impl", "--cross-entropy-fusion-impl", "native"),
    _Choice("no_persist_layer_norm", "--no-persist-layer-norm", True, _always),
    _Choice("fused_residual_rmsnorm", "--fused-residual-rmsnorm", False),
    _Choice("use_te_activation_func", "--use-te-activation-func", False),
    _Choice("moe_grouped_gemm", "--moe-grouped-gemm", False),
    _Choice("moe_use_legacy_grouped_gemm", "--moe-use-legacy-grouped-gemm", False),
    _Choice("use_grouped_gemm_for_dense_mlp", "--use-grouped-gemm-for-dense-mlp", False),
    _Choice("use_grouped_gemm_for_shared_expert", "--use-grouped-gemm-for-shared-expert", False),
    _Choice("moe_permute_fusion", "--moe-permute-fusion", False),
    _Choice("moe_router_fusion", "--moe-router-fusion", False),
    _Choice(
        "moe_token_dispatcher_type",
        "--moe-token-dispatcher-type",
        "alltoall",
        lambda old: old == "flex",
    ),
    _Choice("moe_enable_deepep", "--moe-enable-deepep", False),
    _Choice("moe_permute_fusion_into_hybridep", "--moe-permute-fusion-into-hybridep", False),
    # Overlap of computation with communication or copies inside a layer.
    _Choice("tp_comm_overlap", "--tp-comm-overlap", False),
    _Choice("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm", False),
    _Choice(
        "overlap_dispatch_backward_with_experts_wgrad",
        "--overlap-dispatch-backward-with-experts-wgrad",
        False,
    ),
    _Choice("moe_shared_expert_overlap", "--moe-shared-expert-overlap", False),
    _Choice("delay_wgrad_compute", "--delay-wgrad-compute", False),
    _Choice("ep_overlap_early_attn_memory_release", "--ep-overlap-early-attn-memory-release", False),
    # CUDA graphs.
    _Choice("enable_cuda_graph", "--enable-cuda-graph", False),
    _Choice("external_cuda_graph", "--external-cuda-graph", False),
    _Choice("cuda_graph_impl", "--cuda-graph-impl", "none"),
    _Choice("cuda_graph_scope", "--cuda-graph-scope", _nothing),
    _Choice("cuda_graph_scope_deprecated", "--cuda-graph-scope", None),
    _Choice("cuda_graph_modules", "--cuda-graph-modules", _nothing),
    _Choice("optimizer_cuda_graph", "--optimizer-cuda-graph", False),
    _Choice("te_rng_tracker", "--te-rng-tracker", False),
    # Memory of a GPU.
    _Choice(
        "use_precision_aware_optimizer",
        "--use-precision-aware-optimizer",
        False,
        offloading=False,
    ),
    _Choice("pin_cpu_grads", "--no-pin-cpu-grads", False, offloading=True),
    _Choice("pin_cpu_params", "--no-pin-cpu-params", False, offloading=True),
    _Choice("main_grads_dtype", "--main-grads-dtype", "fp32"),
    _Choice("main_params_dtype", "--main-params-dtype", "fp32"),
    _Choice("exp_avg_dtype", "--exp-avg-dtype", "fp32"),
    _Choice("exp_avg_sq_dtype", "--exp-avg-sq-dtype", "fp32"),
    _Choice("cpu_offloading_num_layers", "--cpu-offloading-num-layers", 0),
    _Choice("fine_grained_activation_offloading", "--fine-grained-activation-offloading", False),
    _Choice("offload_modules", "--offload-modules", _nothing),
    # NCCL.
    _Choice("nccl_ub", "--use-nccl-ub", False),
    _Choice("use_sharp", "--use-sharp", False),
    _Choice("sharp_enabled_group", "--sharp-enabled-group", None),
    _Choice("nccl_communicator_config_path", "--nccl-communicator-config-path", None),
    _Choice("high_priority_stream_groups", "--high-priority-stream-groups", _nothing),
    _Choice("pipeline_model_parallel_comm_backend", "--pipeline-model-parallel-comm-backend", None),
    _Choice("symmetric_ar_type", "--symmetric-ar-type", None),
    # Tools that talk to a GPU's driver.
    _Choice("log_energy", "--log-energy", False),
    _Choice("record_memory_history", "--record-memory-history", False),
    _Choice("gpu_sniff_test_interval", "--gpu-sniff-test-interval", None),
    # The worker copies from a GPU in the background; what is written is the same.
    _Choice("async_save", "--async-save", False),
)


# ------------------------------------------------------------------------------- refusals


@dataclass(frozen=True)
class _Refusal:
    attribute: str
    given: str  # "{value}" is what was given
    because: str
    instead: str
    applies_to: Callable[[Any], bool] = bool
    unless: Callable[[Any], bool] | None = None

    def applies(self, args: Any) -> bool:
        if not self.applies_to(getattr(args, self.attribute)):
            return False
        return self.unless is None or not self.unless(args)


def _tensor_parallel_only(args: Any) -> bool:
    return args.tensor_parallel_num_weight_shards <= args.tensor_model_parallel_size


def _expert_tensor_parallel_only(args: Any) -> bool:
    size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return args.expert_tensor_parallel_num_weight_shards <= size


def _has_own_spec(args: Any) -> bool:
    """A ``--spec`` from outside Megatron, which may well do without TransformerEngine."""
    spec = getattr(args, "spec", None)
    return bool(spec) and not str(spec[0]).startswith("megatron.")


_BF16_INSTEAD = "use --bf16 or fp32 here"
_TE_ONLY = "only TransformerEngine's GPU kernels implement it"
_PACKED = "Megatron's local attention does not take packed sequences"
_UNPACKED_INSTEAD = "train on unpacked sequences, or run on a GPU"

_REFUSALS = (
    _Refusal("fp8", "--fp8-format {value}", "no CPU has kernels for it", _BF16_INSTEAD),
    _Refusal("fp4", "--fp4-format {value}", "no CPU has kernels for it", _BF16_INSTEAD),
    _Refusal(
        "te_precision_config_file",
        "--te-precision-config-file {value}",
        _TE_ONLY,
        "leave it out here",
    ),
    _Refusal(
        "use_megatron_fsdp",
        "--use-megatron-fsdp",
        "it manages GPU memory through NCCL and CUDA streams",
        "use --use-distributed-optimizer here",
    ),
    _Refusal(
        "use_torch_fsdp2",
        "--use-torch-fsdp2",
        "it is not tested without GPUs",
        "use --use-distributed-optimizer here",
    ),
    _Refusal(
        "use_transformer_engine_op_fuser",
        "--use-transformer-engine-op-fuser",
        _TE_ONLY,
        "leave it out here",
    ),
    _Refusal(
        "transformer_impl",
        "--transformer-impl inference_optimized",
        "it is built on GPU kernels for inference",
        "leave it out to train with local layers",
        lambda value: value == "inference_optimized",
    ),
    _Refusal(
        "use_kitchen_attention",
        "--use-kitchen-attention",
        "the kitchen package runs on GPUs only",
        "leave it out here",
    ),
    _Refusal(
        "mla_down_proj_fusion",
        "--mla-down-proj-fusion",
        "the fused weight exists only in the TransformerEngine spec",
        "leave it out here",
    ),
    _Refusal(
        "tensor_parallel_num_weight_shards",
        "--tensor-parallel-num-weight-shards {value}",
        _TE_ONLY,
        "leave it out here",
        bool,
        _tensor_parallel_only,
    ),
    _Refusal(
        "expert_tensor_parallel_num_weight_shards",
        "--expert-tensor-parallel-num-weight-shards {value}",
        _TE_ONLY,
        "leave it out here",
        bool,
        _expert_tensor_parallel_only,
    ),
    _Refusal(
        "layernorm_zero_centered_gamma",
        "--apply-layernorm-1p",
        "torch's norms have no zero-centered weight",
        "leave it out here, or run on a GPU",
    ),
    _Refusal(
        "experimental_attention_variant",
        "--experimental-attention-variant {value}",
        "it is built on GPU kernels",
        "use ordinary attention or --multi-latent-attention here",
    ),
    *(
        _Refusal(
            name,
            f"--{name.replace('_', '-')} {{value}}",
            "sparse attention (D) and multi-token prediction (behind a /) of hybrid models exist "
            "with TransformerEngine layers only",
            "leave them out of the pattern, or name a --spec of your own",
            lambda value: bool(value) and ("D" in value or "/" in value),
            _has_own_spec,
        )
        for name in _HYBRID_PATTERNS
    ),
    _Refusal("sft", "--sft", _PACKED, _UNPACKED_INSTEAD),
    _Refusal(
        "dataloader_inter_document_masking",
        "--dataloader-inter-document-masking",
        _PACKED,
        _UNPACKED_INSTEAD,
    ),
    _Refusal("hybrid_context_parallel", "--hybrid-context-parallel", _PACKED, _UNPACKED_INSTEAD),
    _Refusal("rl_use_sequence_packing", "--rl-use-sequence-packing", _PACKED, _UNPACKED_INSTEAD),
    _Refusal(
        "perform_rl_step",
        "--perform-rl-step",
        "its rollouts need the GPU inference engine",
        "run it on a GPU",
    ),
    _Refusal(
        "batch_invariant_mode",
        "--batch-invariant-mode",
        "it replaces operators by GPU kernels",
        "leave it out here",
    ),
    _Refusal(
        "inprocess_restart",
        "--inprocess-restart",
        "it watches and resets CUDA devices",
        "leave it out here",
    ),
)


def _text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return " ".join(map(_text, value))
    return str(value)
