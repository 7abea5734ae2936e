"""Which mode a run gets: inside the optimizer where that is proven, by autograd elsewhere.

Decided on Megatron's parsed arguments, before anything is built; every reason is one line of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.support import applies_to, given

__all__ = ["OBSTACLES", "Choice", "Obstacle", "choose_execution"]


@dataclass(frozen=True)
class Choice:
    """A mode, and one clause that says why."""

    mode: str
    reason: str


@dataclass(frozen=True)
class Obstacle:
    """Something with which folding inside the optimizer is not proven, or cannot be right."""

    name: str
    applies: Callable[[Any, ScaleVecConfig], bool]
    reason: str
    versions: str = ""  # megatron-core versions it is confined to


_OPTIMIZERS = ("adam", "sgd", "lion", "muon", "dist_muon", "soap")

OBSTACLES: tuple[Obstacle, ...] = (
    Obstacle(
        "full-precision",
        lambda args, _: not (getattr(args, "bf16", False) or getattr(args, "fp16", False)),
        "an fp32 run has no masters beside its weights",
    ),
    Obstacle(
        "float32-vectors",
        lambda _, config: config.vector_dtype == "fp32",
        "--scalevec-vector-dtype fp32 keeps the vectors' masters in the model",
    ),
    Obstacle(
        "optimizer",
        lambda args, _: getattr(args, "optimizer", "adam") not in _OPTIMIZERS,
        "this optimizer's steps have not been shown to be the same in the two modes",
    ),
    Obstacle(
        "muon-before-0.17",
        lambda args, _: getattr(args, "optimizer", "adam") in ("muon", "dist_muon"),
        "with Muon it has not been tried before megatron-core 0.17",
        versions="<0.17",
    ),
    Obstacle(
        "optimizer-cpu-offload",
        given("optimizer_cpu_offload"),
        "the masters lie in the host's memory",
    ),
    Obstacle(
        "precision-aware-optimizer",
        given("use_precision_aware_optimizer"),
        "the masters lie inside the inner optimizer, which writes the weights itself",
    ),
    Obstacle(
        "fsdp",
        given("use_megatron_fsdp", "use_torch_fsdp2"),
        "FSDP shards the live weights themselves",
    ),
    Obstacle(
        "quantized-weights",
        given("fp8_param_gather", "fp4_param", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"),
        "the live weights are quantized",
    ),
    Obstacle(
        "gather-with-step",
        given("overlap_param_gather_with_optimizer_step"),
        "--overlap-param-gather-with-optimizer-step does not go with torch_dist checkpoints, the one format "
        "in which raw masters can be marked",
    ),
    Obstacle(
        "optimizer-cuda-graph",
        given("optimizer_cuda_graph"),
        "--optimizer-cuda-graph captures the step",
    ),
    Obstacle(
        "qk-clip",
        given("qk_clip"),
        "--qk-clip rescales live weights and masters by itself",
    ),
    Obstacle(
        "checkpoint-format",
        lambda args, _: (
            bool(getattr(args, "save", None) or getattr(args, "load", None))
            and getattr(args, "ckpt_format", "torch_dist") != "torch_dist"
        ),
        "checkpoints of other formats than torch_dist cannot mark raw masters",
    ),
    Obstacle(
        "checkpoint-conversion",
        lambda args, _: getattr(args, "ckpt_convert_format", None) not in (None, "torch_dist"),
        "--ckpt-convert-format writes another format than torch_dist, which cannot mark raw masters",
    ),
    Obstacle(
        "local-checkpoints",
        lambda args, _: getattr(args, "non_persistent_ckpt_type", None) == "local",
        "--non-persistent-ckpt-type local has not been tried",
    ),
)


def choose_execution(
    args: Any,
    config: ScaleVecConfig,
    version: Version,
    resumed: Callable[[], tuple[str, str] | None] | None = None,
) -> Choice:
    """The mode of a run.

    Args:
        args: Megatron's, validated.
        config: The strategy; ``execution`` is what was asked for.
        version: Of megatron-core.
        resumed: Called where it matters: the mode in which a run to be resumed was trained, and the folder of
            its checkpoint; None where there is none.

    Raises:
        ScaleVecError: ``optimizer`` was asked for where it has no effect or is not proven.
    """
    zero_centered = bool(getattr(args, "apply_layernorm_1p", False)) and config.has_input_scales
    folds = config.active and (config.owns_vectors or zero_centered)
    if not folds:
        if config.execution == "optimizer":
            raise ScaleVecError(
                f"--scalevec-execution optimizer has no effect with --scalevec-strategy {config.strategy}: "
                "no weight carries scale vectors; drop the flag."
            )
        return Choice("autograd", "the norms' own scales; nothing is formed")
    if config.execution == "autograd":
        return Choice("autograd", "as asked for; W_eff is formed in every forward pass")
    found = next((o for o in OBSTACLES if applies_to(o.versions, version) and o.applies(args, config)), None)
    before = resumed() if found is None and config.execution == "auto" and resumed is not None else None
    if before is not None and before[0] == "autograd":
        return Choice(
            "autograd",
            f"as before in {before[1]}; W_eff is formed in every forward pass, and once per step with "
            "--scalevec-execution optimizer",
        )
    if found is None:
        return Choice("optimizer", "the live weight is W_eff; W is the optimizer's fp32 master")
    if config.execution == "optimizer":
        raise ScaleVecError(
            f"--scalevec-execution optimizer: {found.reason}; use --scalevec-execution autograd, or drop "
            "the flag."
        )
    return Choice("autograd", f"W_eff is formed in every forward pass, because {found.reason}")
