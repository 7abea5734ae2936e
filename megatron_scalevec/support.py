"""What cannot be combined yet, in one table: every entry with its reason and a way out.

Entries look at Megatron's parsed arguments, so a run is refused before a process group exists or GPU
memory is taken. What arguments do not show is refused by :mod:`megatron_scalevec.convert` on the built
model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError

__all__ = [
    "REFUSALS",
    "Refusal",
    "applies_to",
    "given",
    "refusals",
    "refuse_unsupported",
    "refuse_unsupported_experts",
]


@dataclass(frozen=True)
class Refusal:
    """One unsupported combination."""

    name: str
    applies: Callable[[Any, ScaleVecConfig], bool]
    reason: str
    way_out: str
    versions: str = ""  # megatron-core versions it is confined to


def applies_to(versions: str, version: Version) -> bool:
    """Whether a version is among those that an entry of a table is confined to; empty for all."""
    return SpecifierSet(versions).contains(version.base_version, prereleases=True)


def given(*names: str) -> Callable[[Any, ScaleVecConfig], bool]:
    """Whether any of the arguments has a value other than None, False, zero or 'none'."""

    def applies(args: Any, _: ScaleVecConfig) -> bool:
        return any(getattr(args, name, None) not in (None, False, 0, "", "none", []) for name in names)

    return applies


def _differs(name: str, *accepted: Any) -> Callable[[Any, ScaleVecConfig], bool]:
    def applies(args: Any, _: ScaleVecConfig) -> bool:
        return hasattr(args, name) and getattr(args, name) not in accepted

    return applies


def _has_experts(args: Any) -> bool:
    return bool(getattr(args, "num_experts", None) or getattr(args, "num_moe_experts", None))


def _experts_with(*names: str) -> Callable[[Any, ScaleVecConfig], bool]:
    """Whether a model has experts, and any of the arguments is given."""
    has_any = given(*names)
    return lambda args, config: _has_experts(args) and has_any(args, config)


def _tensor_parallel(args: Any) -> int:
    return int(getattr(args, "tensor_model_parallel_size", None) or 1)


def expert_tensor_parallel(args: Any) -> int:
    """Ranks that share each routed expert, from Megatron's arguments."""
    return int(getattr(args, "expert_tensor_parallel_size", None) or _tensor_parallel(args))


def _heterogeneous_text(args: Any) -> str:
    """The description of heterogeneous layers, empty without one. A file is read as it lies there now."""
    text = getattr(args, "heterogeneous_layers_config_encoded_json", None)
    path = getattr(args, "heterogeneous_layers_config_path", None)
    if not text and path and os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            text = file.read()
    try:
        return json.dumps(json.loads(text)) if text else ""
    except json.JSONDecodeError:  # Megatron will say so
        return ""


def _hybrid_pattern(args: Any) -> str:
    names = ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern")
    return "".join(getattr(args, name, None) or "" for name in names)


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "transformer-impl",
        _differs("transformer_impl", "local", "transformer_engine"),
        "scale vectors are built on Megatron's local and TransformerEngine layers, and the run uses "
        "--transformer-impl {transformer_impl}",
        "use --transformer-impl transformer_engine or local",
    ),
    Refusal(
        "op-fuser",
        given("use_transformer_engine_op_fuser"),
        "--use-transformer-engine-op-fuser builds the MLP of TransformerEngine operations, which take the "
        "weight where scale vectors do not reach it",
        "drop that flag",
    ),
    Refusal(
        "grouped-dense-mlp",
        given("use_grouped_gemm_for_dense_mlp"),
        "--use-grouped-gemm-for-dense-mlp builds dense MLPs of expert layers, which do not carry scale "
        "vectors yet",
        "drop that flag",
    ),
    Refusal(
        "communication-overlap",
        given("tp_comm_overlap"),
        "--tp-comm-overlap hands weights to products that overlap with communication, which is not proven "
        "with scale vectors yet",
        "drop that flag",
    ),
    Refusal(
        "activation-offload",
        given("cpu_offloading_num_layers", "fine_grained_activation_offloading"),
        "offloading activations to the CPU may take the folded weights along, which is not proven yet",
        "drop --cpu-offloading-num-layers and --fine-grained-activation-offloading",
    ),
    Refusal(
        "main-params-from-checkpoint",
        lambda args, config: (
            given("load_main_params_from_ckpt")(args, config)
            # Norms that store γ − 1 give their scale to a vector.
            and (config.owns_vectors or config.has_input_scales and given("apply_layernorm_1p")(args, config))
        ),
        "--load-main-params-from-ckpt takes the optimizer's masters from the checkpoint's own tensors, past "
        "what loading makes of them for scale vectors",
        "drop that flag: masters then are those of the loaded model",
    ),
    Refusal(
        "experts-legacy-grouped",
        lambda args, _: (
            _has_experts(args)
            and (
                bool(getattr(args, "moe_use_legacy_grouped_gemm", False))
                or (
                    bool(getattr(args, "moe_grouped_gemm", False))
                    and getattr(args, "transformer_impl", None) == "local"
                )
            )
        ),
        "Megatron's legacy grouped experts keep the weights of all experts in one transposed tensor and "
        "multiply by it in the CUDA kernels of the grouped_gemm package alone, so scale vectors on them "
        "could not be tested",
        "use --moe-grouped-gemm with --transformer-impl transformer_engine and without "
        "--moe-use-legacy-grouped-gemm, or drop --moe-grouped-gemm for a module for each expert",
        versions="<0.17",
    ),
    Refusal(
        "experts-single-weight",
        _experts_with("moe_single_grouped_weight", "moe_single_grouped_bias"),
        "Megatron trains the single grouped weight of --moe-single-grouped-weight only with MXFP8 (0.18) or "
        "TransformerEngine's op fuser (0.19), and neither takes folded weights",
        "drop --moe-single-grouped-weight and --moe-single-grouped-bias",
    ),
    Refusal(
        "experts-interleaved-over-ranks",
        lambda args, _: (
            _has_experts(args)
            and bool(getattr(args, "moe_mlp_glu_interleave_size", None))
            and expert_tensor_parallel(args) > 1
        ),
        "with gate and up rows that take turns (--moe-mlp-glu-interleave-size) on several expert-tensor-"
        "parallel ranks, Megatron saves halves of each rank's rows as gate and up, so that another layout "
        "would load other rows than the scale vectors are for",
        "add --expert-tensor-parallel-size 1, or drop that flag",
    ),
    Refusal(
        "experts-latent-shared",
        lambda args, config: (
            _has_experts(args)
            and bool(getattr(args, "moe_latent_size", None))
            and config.experts == "shared"
            and "projections" not in config.sites
        ),
        "--scalevec-experts shared has no effect on experts behind a latent projection (--moe-latent-size): "
        "the norm feeds the projection, and routed experts have vectors only among --scalevec-sites "
        "projections",
        "drop --scalevec-experts, or name projections",
    ),
    Refusal(
        "experts-fused-shared",
        _experts_with("use_grouped_gemm_for_shared_expert"),
        "--use-grouped-gemm-for-shared-expert takes the weights where scale vectors do not reach them",
        "drop that flag",
    ),
    Refusal(
        "experts-overlap",
        _experts_with(
            "moe_shared_expert_overlap",
            "overlap_moe_expert_parallel_comm",
            "overlap_dispatch_backward_with_experts_wgrad",
        ),
        "running experts beside their communication, piece by piece (--moe-shared-expert-overlap, "
        "--overlap-moe-expert-parallel-comm, --overlap-dispatch-backward-with-experts-wgrad), is not proven "
        "with scale vectors yet",
        "drop those flags",
    ),
    Refusal(
        "experts-stash",
        _experts_with("moe_paged_stash"),
        "--moe-paged-stash moves what the experts keep for the backward pass, which is not proven with scale "
        "vectors yet",
        "drop that flag",
    ),
    Refusal(
        "experts-upcycling",
        _experts_with("moe_use_upcycling"),
        "--moe-use-upcycling makes experts of a dense checkpoint, where scale vectors of the dense MLP have "
        "no place",
        "upcycle with a stock run first",
    ),
    Refusal(
        "experts-tensor-parallel",
        lambda args, _: (
            _has_experts(args) and expert_tensor_parallel(args) not in (1, _tensor_parallel(args))
        ),
        "with --expert-tensor-parallel-size other than 1 and --tensor-model-parallel-size, this Megatron "
        "counts parameters of experts wrongly in the gradient norm",
        "set it to 1 or to the tensor-parallel size, or use megatron-core 0.19",
        versions="<0.19",
    ),
    Refusal(
        "cached-latents",
        given("cache_mla_latents"),
        "--cache-mla-latents takes the up-projection of latent attention apart for inference, where scale "
        "vectors do not reach",
        "fold the model to a stock one first, or drop that flag",
    ),
    Refusal(
        "fused-down-projection",
        lambda args, _: (
            bool(getattr(args, "mla_down_proj_fusion", False))
            and int(getattr(args, "tensor_model_parallel_size", 1) or 1) > 1
        ),
        "--mla-down-proj-fusion with tensor parallelism gives the rows of the rotary key the gradient of one "
        "rank's heads alone, and with it everything before the layer",
        "drop that flag, or use --tensor-model-parallel-size 1",
    ),
    Refusal(
        "v-norm-of-latent-attention",
        lambda args, config: (
            bool(getattr(args, "multi_latent_attention", False)) and config.decay_v_norm == "output"
        ),
        "--scalevec-decay-v-norm has no effect on latent attention, where dual-norm places no norm on v",
        "drop that flag",
    ),
    Refusal(
        "encoder-decoder",
        given("decoder_num_layers"),
        "encoder-decoder models have cross-attention (--decoder-num-layers), whose norm feeds the queries "
        "alone, and do not carry scale vectors yet",
        "use a decoder-only model",
    ),
    Refusal(
        "linear-replacements",
        lambda args, _: '"replace_with_linear": true' in _heterogeneous_text(args),
        "a heterogeneous layer with a linear in the place of its attention or MLP (replace_with_linear) has "
        "no branches to tell apart",
        "use layers with attention, an MLP, or neither",
    ),
    Refusal(
        "heterogeneous-mtp",
        lambda args, _: bool(_heterogeneous_text(args)) and bool(getattr(args, "mtp_num_layers", None)),
        "multi-token prediction beside heterogeneous layers is not proven with scale vectors",
        "drop --mtp-num-layers",
    ),
    Refusal(
        "hybrid-layer-kinds",
        lambda args, _: "D" in _hybrid_pattern(args),
        "the hybrid pattern has layers of sparse attention (D), which do not carry scale vectors yet",
        "use a pattern of M, G, *, +, - and E (+ from megatron-core 0.19 on)",
    ),
    Refusal(
        "hybrid-latent-before-0.19",
        lambda args, _: "+" in _hybrid_pattern(args),
        "the hybrid pattern has layers of latent attention (+), which this Megatron does not have",
        "use megatron-core 0.19, or a pattern without them",
        versions=">=0.18,<0.19",
    ),
    Refusal(
        "hybrid-before-0.18",
        lambda args, _: bool(_hybrid_pattern(args)) or bool(getattr(args, "is_hybrid_model", False)),
        "hybrid and Mamba models are not proven with scale vectors before megatron-core 0.18",
        "use a newer megatron-core",
        versions="<0.18",
    ),
    Refusal(
        "hybrid-mtp",
        lambda args, _: (
            "/" in _hybrid_pattern(args)
            or (bool(_hybrid_pattern(args)) and bool(getattr(args, "mtp_num_layers", None)))
        ),
        "multi-token prediction in a hybrid model is not proven with scale vectors",
        "drop it from the pattern (what follows the first /)",
    ),
    Refusal(
        "experimental-attention",
        given("experimental_attention_variant"),
        "--experimental-attention-variant {experimental_attention_variant} has rows of a kind this version "
        "does not know",
        "use standard attention",
    ),
    Refusal(
        "legacy-models",
        given("use_legacy_models"),
        "--use-legacy-models builds a model outside megatron.core",
        "drop that flag",
    ),
    Refusal(
        "fsdp",
        given("use_megatron_fsdp", "use_torch_fsdp2", "use_custom_fsdp"),
        "fully sharded data parallelism is not proven with scale vectors yet",
        "use --use-distributed-optimizer",
    ),
    Refusal(
        "fp8-fp4",
        given("fp8", "fp4", "fp8_param_gather", "fp4_param", "te_precision_config_file"),
        "FP8 and FP4 training are not proven with scale vectors yet",
        "train in bf16",
    ),
    Refusal(
        "optimizer",
        _differs("optimizer", "adam", "sgd", "muon", "dist_muon", "adaptive_muon", "soap", "lion"),
        "the weight-decay split is not proven with --optimizer {optimizer}",
        "use adam, sgd, muon, adaptive_muon, soap or lion",
    ),
    Refusal(
        "layer-wise-float32",
        lambda args, _: (
            getattr(args, "optimizer", "adam") not in ("adam", "sgd")
            and any(
                getattr(args, name, False)
                for name in ("use_distributed_optimizer", "use_layer_wise_distributed_optimizer")
            )
            and not getattr(args, "bf16", False)
        ),
        "the layer-wise optimizer that --use-distributed-optimizer stands for with --optimizer {optimizer} "
        "takes no step in float32 (AttributeError: no attribute 'get_loss_scale')",
        "add --bf16, or drop --use-distributed-optimizer",
        versions=">=0.18",
    ),
    Refusal(
        "soap-checkpoints",
        lambda args, _: (
            getattr(args, "optimizer", "adam") == "soap"
            and bool(getattr(args, "save", None))
            and getattr(args, "ckpt_format", "torch_dist") == "torch_dist"
        ),
        "Megatron cannot save SOAP's preconditioners in the torch_dist format (AssertionError: optimizer "
        "shape does not match model shape)",
        "add --ckpt-format torch, or drop --save",
    ),
    Refusal(
        "precision-aware-optimizer",
        # Offloading takes that flag, and keeps its own fp32 copies.
        lambda args, _: (
            bool(getattr(args, "use_precision_aware_optimizer", False))
            and not getattr(args, "optimizer_cpu_offload", False)
        ),
        "the weight-decay split is not proven with --use-precision-aware-optimizer yet",
        "drop that flag",
    ),
    Refusal(
        "no-weight-decay",
        lambda args, config: (
            config.decay_alone
            and not any(
                getattr(args, name, None)
                for name in ("weight_decay", "start_weight_decay", "end_weight_decay")
            )
            and hasattr(args, "weight_decay")
        ),
        "the strategy lets the norms' own scales decay and does nothing else, and --weight-decay is 0",
        "give --weight-decay a value",
    ),
    Refusal(
        "wd-on-qk-norms",
        lambda args, config: (
            bool(getattr(args, "apply_wd_to_qk_layernorm", False))
            and config.weight_decay in ("split", "none")
        ),
        "--apply-wd-to-qk-layernorm decays the q/k norms, which are Output-Norms and do not decay under "
        "--scalevec-weight-decay split and none",
        "drop it, or use --scalevec-weight-decay all",
    ),
    Refusal(
        "kitchen",
        given("use_kitchen", "use_kitchen_attention"),
        "Kitchen layers do not carry scale vectors yet",
        "drop --use-kitchen",
    ),
    Refusal(
        "modelopt",
        given("modelopt_enabled", "export_te_mcore_model", "export_quant_cfg", "restore_modelopt_state"),
        "ModelOpt swaps the model's layers after they were built",
        "train without it",
    ),
    Refusal(
        "adapters",
        given("peft"),
        "parameter-efficient fine-tuning (peft) wraps linears after they were given their scale vectors",
        "train the whole model",
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
        given("delay_wgrad_compute"),
        "--delay-wgrad-compute computes the gradient of the folded weight outside of autograd, where the "
        "scale vectors would get none",
        "drop that flag",
    ),
    Refusal(
        "fused-qkv-rope",
        lambda args, config: (
            bool(getattr(args, "fused_single_qkv_rope", False)) and config.placement == "dual-norm"
        ),
        "--fused-single-qkv-rope leaves no place for the norms on q, k and v of dual-norm placement",
        "drop that flag, or use --scalevec-placement dual",
    ),
    Refusal(
        "qk-l2-norm",
        lambda args, config: bool(getattr(args, "qk_l2_norm", False)) and config.placement == "dual-norm",
        "--qk-l2-norm normalizes q and k already, without a scale",
        "drop that flag, or use --scalevec-placement dual",
    ),
    Refusal(
        "float32-vectors",
        lambda args, config: (
            config.vector_dtype == "fp32"
            and bool(getattr(args, "bf16", False) or getattr(args, "fp16", False))
            and not getattr(args, "use_distributed_optimizer", False)
        ),
        "--scalevec-vector-dtype fp32 in a bf16 or fp16 run needs Adam's distributed optimizer: the others "
        "cannot save a parameter group of two dtypes",
        "use --optimizer adam with --use-distributed-optimizer, or drop --scalevec-vector-dtype",
    ),
    Refusal(
        "learning-rates-on-resume",
        lambda _, config: bool(config.lr_mult),
        "--scalevec-lr-mult needs megatron-core 0.19: before, two parameter groups that differ in their "
        "learning rate alone are mixed up when the optimizer state is loaded",
        "drop that flag",
        versions="<0.19",
    ),
    Refusal(
        "telemetry-of-offloaded-masters",
        lambda args, config: (
            given("scalevec_log_interval", "scalevec_log")(args, config)
            and bool(getattr(args, "optimizer_cpu_offload", False))
        ),
        "--scalevec-log-interval reads masters and gradients on the device, and --optimizer-cpu-offload has "
        "them in the host's memory",
        "drop one of the two",
    ),
    Refusal(
        "meta-device-init",
        given("init_model_with_meta_device"),
        "--init-model-with-meta-device replaces every parameter after the model is built, and with it what "
        "marks a scale vector",
        "drop that flag",
    ),
    Refusal(
        "qk-clip",
        given("qk_clip"),
        "--qk-clip rescales rows of the q/k/v weight and is not proven with scale vectors yet",
        "drop that flag",
    ),
)


def refusals(
    args: Any, config: ScaleVecConfig, version: Version, table: Sequence[Refusal] = REFUSALS
) -> list[str]:
    """A sentence for every entry of the table that applies; empty for a stock run."""
    found = []
    for refusal in table if config.active else ():
        if applies_to(refusal.versions, version) and refusal.applies(args, config):
            reason = refusal.reason.format_map(_Lookup(args))
            found.append(
                f"--scalevec-strategy {config.strategy}: {reason}; {refusal.way_out}, or drop "
                "--scalevec-strategy."
            )
    return found


def refuse_unsupported(args: Any, config: ScaleVecConfig, version: Version) -> None:
    """Raise for the first entry of :data:`REFUSALS` that applies.

    Raises:
        ScaleVecError: With the entry's reason and way out.
    """
    for sentence in refusals(args, config, version):
        raise ScaleVecError(sentence)


def refuse_unsupported_experts(model_config: Any, config: ScaleVecConfig, version: Version) -> None:
    """:func:`refuse_unsupported` for the entries on experts, which a ``TransformerConfig`` shows as well.

    For models that were built without Megatron's arguments.

    Raises:
        ScaleVecError: With the entry's reason and way out.
    """
    entries = [refusal for refusal in REFUSALS if refusal.name.startswith("experts-")]
    for sentence in refusals(model_config, config, version, entries):
        raise ScaleVecError(sentence)


class _Lookup(dict):
    def __init__(self, args: Any) -> None:
        super().__init__()
        self._args = args

    def __missing__(self, key: str) -> str:
        return str(getattr(self._args, key, None))
