"""Gradients of models with experts in every layout, and what their checkpoints hold."""

from __future__ import annotations

import json
from typing import Any

import torch

from ranks.initial import fill_by_name, name_of_expert
from ranks.jobs.building import _same, _state
from ranks.jobs.sabotage import SABOTAGE

__all__ = ["expert_audit", "expert_dtypes", "expert_gradients", "experts_refused", "version_of_megatron"]

_SEQUENCES = 4


def expert_gradients(
    config: dict[str, Any],
    experts: str,
    overrides: dict[str, Any] | None = None,
    sabotage: str | None = None,
    idle: int | None = None,
    audited: bool = True,
    **sizes: Any,
) -> dict[str, Any]:
    """One step of a model with experts on four sequences, which the data-parallel ranks share.

    Args:
        config: The strategy.
        experts: One of ``models.EXPERTS``.
        overrides: Of Megatron's configuration.
        sabotage: Name of a function in ``SABOTAGE``.
        idle: An expert that the router never chooses (models with a bias for the choice).
        audited: Look at what was built as well.
        sizes: Of Megatron's groups; ``sequence_parallel`` goes to the model.

    Returns:
        ``loss`` of this rank's sequences, times its share; ``norm`` of the gradient; ``gradients`` of the
        scale vectors that this rank holds, by name over the whole model; ``moved``: the vectors after the
        optimizer's step.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer import get_standard_config_overrides as standard

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.audit import audit
    from megatron_scalevec.decay import with_decaying_vectors
    from megatron_scalevec.patching import PatchSet
    from megatron_scalevec.vectors import vector_info
    from ranks.models import EXPERTS, SIZES, build_gpt, initialize_parallel

    if sabotage:
        SABOTAGE[sabotage](PatchSet())
    sequence_parallel = sizes.pop("sequence_parallel", False)
    initialize_parallel(**sizes)
    model = build_gpt(
        sequence_parallel=sequence_parallel, **{**EXPERTS[experts], **(overrides or {}), **sizes}
    )
    strategy = ScaleVecConfig(**config)
    apply_scale_vectors(model, strategy)
    tp_rank, tp_size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    fill_by_name(model, tp_rank, tp_size)
    if idle is not None:
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer[idle] = -100.0
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    # Megatron clips float32 only; the norm that it would clip by is looked at.
    optimizer_config = OptimizerConfig(optimizer="adam", lr=0.01, weight_decay=0.1, clip_grad=0.0)
    overridden = with_decaying_vectors(standard(optimizer_config), strategy.weight_decay)
    optimizer = get_megatron_optimizer(optimizer_config, [wrapped], config_overrides=overridden)
    found = audit(wrapped, optimizer) if audited else None
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    draw = torch.Generator().manual_seed(3)
    shape = (_SEQUENCES, SIZES["sequence"])
    tokens = torch.randint(SIZES["vocabulary"], shape, generator=draw)
    target = torch.randn(*shape, SIZES["vocabulary"], generator=draw)
    rank, ranks = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    own = slice(rank * _SEQUENCES // ranks, (rank + 1) * _SEQUENCES // ranks)
    position = torch.arange(shape[1]).expand(own.stop - own.start, -1)
    logits = wrapped(tokens[own], position, None)
    part = SIZES["vocabulary"] // tp_size
    if logits.shape[-1] == part:
        target = target[..., tp_rank * part : (tp_rank + 1) * part]
    loss = (logits * target[own]).sum() / (own.stop - own.start)
    loss.backward()
    finalize_model_grads([wrapped])
    offsets = {
        f"{name}.experts.": module.local_expert_indices[0]
        for name, module in model.named_modules()
        if hasattr(module, "local_expert_indices")
    }

    def vectors(value):
        result = {}
        for name, param in model.named_parameters():
            if param.requires_grad and vector_info(param) is not None:
                [offset] = [o for path, o in offsets.items() if name.startswith(path)] or [0]
                result[name_of_expert(name, offset)] = value(param).detach().double().numpy().copy()
        return result

    gradients = vectors(lambda param: param.main_grad)
    optimizer.prepare_grads()
    norm = optimizer.get_grad_norm()
    optimizer.step()
    return {
        "loss": float(loss) / ranks,
        "norm": float(norm),
        "gradients": gradients,
        "moved": vectors(lambda param: param),
        "audit": _counts(found) if audited else None,
    }


def _counts(found) -> tuple:
    """What every layout must agree in."""
    return (
        found.built_vectors,
        found.linears_converted,
        found.norm_scales_retired,
        found.parameters_stock,
        found.parameters_added,
        [(g.weight_decay_multiplier, g.tensors) for g in found.decay_groups],
        [(v.name, v.copies) for v in found.vectors],
    )


def expert_audit(
    config: dict[str, Any], experts: str, overrides: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The audit of a converted model."""
    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.audit import audit
    from ranks.models import EXPERTS, build_gpt, initialize_parallel

    initialize_parallel()
    model = build_gpt(dtype=torch.float32, **{**EXPERTS[experts], **(overrides or {})})
    apply_scale_vectors(model, ScaleVecConfig(**config))
    return json.loads(audit(model).to_json())


def expert_dtypes(config: dict[str, Any]) -> dict[str, set[str]]:
    """Dtypes after the cast of a whole model; the bias for the choice is not a parameter."""
    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.vectors import vector_info, was_added
    from ranks.models import EXPERTS, build_gpt, initialize_parallel

    initialize_parallel()
    model = build_gpt(dtype=torch.float32, **EXPERTS["shared"])
    apply_scale_vectors(model, ScaleVecConfig(**config))
    model.bfloat16()
    found: dict[str, set[str]] = {"vectors": set(), "others": set()}
    for param in model.parameters():
        own = vector_info(param) is not None and was_added(param)
        found["vectors" if own else "others"].add(str(param.dtype).removeprefix("torch."))
    return found


def experts_refused(case: str) -> dict[str, Any]:
    """Make one part of a layer with experts unknown, and look at the model after the refusal."""
    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from ranks.models import EXPERTS, build_gpt, initialize_parallel

    initialize_parallel()
    model = build_gpt(dtype=torch.float32, **EXPERTS["shared"])
    moe = model.decoder.layers[-1].mlp
    parts = {
        "router": moe.router,
        "experts": moe.experts,
        "expert": moe.experts.local_experts[0],
        "linear": moe.experts.local_experts[-1].linear_fc1,
        "shared": moe.shared_experts,
        "layer": moe,
    }
    if case in parts:
        parts[case].__class__ = type("Other", (type(parts[case]),), {})
    config: dict[str, Any] = {"strategy": "hg"}
    if case == "overlap":
        model.config.moe_shared_expert_overlap = True
    elif case == "branches-off":
        config["branches_off"] = "down"
    elif case == "trained":
        config["branches_off"] = "router"
        with torch.no_grad():
            model.decoder.layers[-1].pre_mlp_layernorm.weight.add_(0.5)
    state = _state(model)
    try:
        apply_scale_vectors(model, ScaleVecConfig(**config))
    except ScaleVecError as error:
        return {"error": str(error), "unchanged": _same(state, _state(model))}
    return {"error": "", "unchanged": False}


def version_of_megatron() -> str:
    """Of the one that the ranks run."""
    from megatron_scalevec.versions import megatron_version

    return megatron_version().base_version
