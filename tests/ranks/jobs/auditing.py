"""Audits and explanations."""

from __future__ import annotations

import json
from typing import Any

import torch

from ranks.jobs.building import _converted

__all__ = [
    "audit_broken",
    "audit_record",
    "audit_table",
    "explain_command",
    "explain_line",
    "write_audit",
]


def audit_broken(breakage: str | None) -> dict[str, Any]:
    """Convert, break one thing, and audit with an optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer import get_standard_config_overrides as standard
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from megatron_scalevec.audit import audit
    from megatron_scalevec.decay import with_decaying_vectors
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    model = build_gpt("llama", torch.float32)
    config = ScaleVecConfig(strategy="hg")
    apply_scale_vectors(model, config)
    optimizer_config = OptimizerConfig(lr=0.1, weight_decay=0.1, optimizer="adam")
    overrides = standard(optimizer_config)
    if breakage != "no-decay-rule":
        overrides = with_decaying_vectors(overrides, "split")
    last = model.decoder.layers[-1]
    if breakage == "not-in-optimizer":
        last.mlp.linear_fc1.gamma_in_up.requires_grad_(False)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(optimizer_config, [wrapped], config_overrides=overrides)
    if breakage == "drop-layer":
        last.mlp.linear_fc1.__class__ = ColumnParallelLinear
    elif breakage == "drop-vector":
        del last.mlp.linear_fc1.gamma_in_gate
    elif breakage == "thaw-norm":
        last.pre_mlp_layernorm.weight.requires_grad_(True)
        last.pre_mlp_layernorm.weight.scalevec_role = "stock"
    elif breakage == "late-vector":
        model.decoder.extra = torch.nn.Parameter(torch.ones(3))
    elif breakage == "other-config":
        config = ScaleVecConfig(strategy="dp")
    try:
        result = audit(wrapped, optimizer, config=config)
    except ScaleVecError as error:
        return {"error": str(error), "audit": None}
    return {"error": None, "audit": json.loads(result.to_json())}


def audit_table(config: dict[str, Any]) -> str:
    """The printed form."""
    from megatron_scalevec.audit import audit

    return audit(_converted(config)).table()


def audit_record(config: dict[str, Any], kind: str, **overrides: Any) -> dict[str, Any]:
    """The audit of a converted model, as a dict, and the ``roles`` of its trainable 1-D parameters."""
    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.audit import audit
    from megatron_scalevec.convert import parameter_roles
    from ranks.hybrids import BUILDERS
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    if kind in BUILDERS:
        model = BUILDERS[kind](dtype=torch.float32, **overrides)
    else:
        model = build_gpt(kind, torch.float32, **overrides)
    apply_scale_vectors(model, ScaleVecConfig(**config))
    roles = parameter_roles(model)
    return {"roles": roles} | json.loads(audit(model).to_json())


def write_audit(path: str) -> dict[str, str]:
    """Write, write again with an interruption, and write where nothing can be written."""
    import os

    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.audit import audit

    record = audit(_converted({"strategy": "hg"}))
    record.write(path)
    found = {}

    def full(*args):
        raise OSError(28, "No space left on device")

    keep, os.replace = os.replace, full
    try:
        record.write(path)
    except ScaleVecError as error:
        found["interrupted"] = type(error.__cause__).__name__
    os.replace = keep
    try:
        record.write(os.path.dirname(path))
    except ScaleVecError as error:
        found["refused"] = str(error)
    return found


def explain_line(arguments: list[str], of: int | None = None, **options: Any) -> dict[str, Any]:
    """What ``scalevec explain`` finds, or its sentence."""
    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.explain import explain
    from megatron_scalevec.explain.display import text

    try:
        found = explain(arguments, world_size=of, **options)
    except ScaleVecError as error:
        return {"error": str(error)}
    return {"error": None, "text": text(found), **json.loads(found.to_json())}


def explain_command(arguments: list[str]) -> dict[str, Any]:
    """``scalevec explain`` with its own options: exit code, output, and its sentence if it refuses."""
    import contextlib
    import io

    from megatron_scalevec import ScaleVecError
    from megatron_scalevec.explain import main

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            code = main(arguments)
    except ScaleVecError as error:
        return {"code": 2, "printed": printed.getvalue(), "error": str(error)}
    return {"code": code, "printed": printed.getvalue(), "error": None}
