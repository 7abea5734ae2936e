"""The audit: what was built, against what was asked for.

One object, made once after model and optimizer exist. It is what the user sees at start, what lies beside
the checkpoints as JSON, and what tests look at. A difference between the two columns stops the run.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megatron_scalevec.audit.chunks import (
    expert_ranks,
    is_copy,
    latent_norm_scales,
    unsharded_numel,
    unwrap,
)
from megatron_scalevec.audit.expected import Expectation, Share, expectation
from megatron_scalevec.audit.experts import experts_note
from megatron_scalevec.audit.groups import (
    GroupOfParameter,
    check_group,
    check_identities,
    groups_of_parameters,
)
from megatron_scalevec.audit.record import Audit, DecayGroup, Vector, kind_of
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert import applied_config, parameter_roles
from megatron_scalevec.decay import param_decays
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.execution.folds import folds_of
from megatron_scalevec.layers.common import Folded
from megatron_scalevec.layers.linear import leaf_class
from megatron_scalevec.pending import pending_config
from megatron_scalevec.vectors import role_of, vector_info, was_added
from megatron_scalevec.versions import megatron_version

__all__ = [
    "Audit",
    "DecayGroup",
    "Expectation",
    "Share",
    "Vector",
    "audit",
    "audit_of_records",
    "expert_ranks",
    "expectation",
    "is_copy",
    "rank_record",
    "unsharded_numel",
]


def audit(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any = None,
    *,
    config: ScaleVecConfig | None = None,
    reason: str | None = None,
) -> Audit:
    """Look at a built model, and at the optimizer if there is one.

    With pipeline parallelism this is collective: every rank of the pipeline group calls it, and all get
    the same record of the whole pipeline.

    Args:
        model: The model, or Megatron's list of model chunks; wrapped or not.
        optimizer: Megatron's optimizer over the same model.
        config: What was asked for; by default what the model says it was given.
        reason: Why the execution is what it is, where that is known.

    Raises:
        ScaleVecError: A chunk carries another strategy than the one asked for, a vector's decay in the
            optimizer is not what its class says, two of the optimizer's groups cannot be told apart, the
            optimizer does not fold the model's weights although it is to, or what was built differs from what
            was expected.
    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    config = config or applied_config(chunks[0])
    waiting = next(filter(None, map(pending_config, chunks)), None)
    if waiting is not None:
        raise ScaleVecError(
            f"the model's layer spec asks for {waiting.describe()}, and nothing of it is built: that is done "
            f"at the end of GPTModel's construction, and this is a {type(unwrap(chunks[0])).__name__}."
        )
    if config is None or not config.active:
        raise ScaleVecError(
            "there is nothing to audit: the model carries no scale vectors. Apply a strategy before the "
            "audit, or pass the one that was asked for."
        )
    for index, chunk in enumerate(chunks):
        if applied_config(chunk) != config:
            built = applied_config(chunk)
            raise ScaleVecError(
                f"model chunk {index} ({type(unwrap(chunk)).__name__}) carries "
                f"{built.describe() if built else 'no scale vectors'}, but {config.describe()} was asked "
                "for: the model is of a kind that the flag does not reach."
            )
    groups = None
    if optimizer is not None:
        _require_folding(chunks, optimizer)
        check_identities(optimizer)
        groups = groups_of_parameters(chunks, optimizer)
    records = _gather_over_pipeline(rank_record(chunks, config, groups))
    built = dataclasses.replace(config, execution=applied_config(chunks[0]).execution)
    result = audit_of_records(records, built, unwrap(chunks[0]).config, reason=reason)
    remark = _remark(optimizer)
    if remark:
        result = dataclasses.replace(result, execution_reason=f"{result.execution_reason}; {remark}")
    problems = result.problems()
    if problems:
        raise ScaleVecError(
            f"--scalevec-strategy {config.strategy} was not built everywhere: {'; '.join(problems)}. "
            "Nothing was trained."
        )
    return result


def _require_folding(chunks: list[torch.nn.Module], optimizer: Any) -> None:
    """Every weight that the optimizer is to fold is one that it does fold."""
    from megatron_scalevec.execution.optimizer import engine_of

    wanted = {id(fold) for chunk in chunks for fold in folds_of(chunk)}
    engine = engine_of(optimizer)
    folded = {id(fold) for fold in engine.folds} if engine is not None else set()
    if wanted - folded:
        raise ScaleVecError(
            f"the optimizer does not fold {len(wanted - folded)} of {len(wanted)} weights that are built for "
            "it, so their scale vectors would have no effect: call "
            "megatron_scalevec.execution.optimizer.execute_in_optimizer(optimizer, model_chunks) first."
        )


def _remark(optimizer: Any) -> str:
    from megatron_scalevec.execution.optimizer import engine_of

    engine = None if optimizer is None else engine_of(optimizer)
    return "" if engine is None else engine.remark


def rank_record(
    chunks: list[torch.nn.Module],
    config: ScaleVecConfig,
    groups: dict[int, GroupOfParameter] | None = None,
) -> dict[str, Any]:
    """What this rank holds, for :func:`audit_of_records`; nothing collective.

    Experts count for all expert-parallel ranks, each of which looks at its own and expects the same.

    Args:
        chunks: The rank's model chunks.
        config: The strategy they were given.
        groups: ``id`` of every trainable parameter to what is known of its group.

    Raises:
        ScaleVecError: A vector's decay or optimizer is not what its class says.
    """
    vectors: dict[str, Vector] = {}
    counted: Counter = Counter()
    retired, linears, stock, added, retired_numel = 0, 0, 0, 0, 0
    for chunk in chunks:
        root = unwrap(chunk)
        parameter_roles(root)
        of_latents = latent_norm_scales(root)
        for module in root.modules():
            if isinstance(module, Folded):
                linears += sum(expert_ranks(weight) for weight in module.scaled_weights())
        linears += sum(expert_ranks(fold.weight) for fold in folds_of(root))
        for name, param in root.named_parameters():
            if was_added(param):
                added += unsharded_numel(param) if param.requires_grad else 0
            elif not is_copy(root, name):
                stock += unsharded_numel(param)
                if param.dim() == 1 and not param.requires_grad and _is_norm_scale(name, of_latents):
                    retired += 1
                    retired_numel += unsharded_numel(param)
            if groups is not None and id(param) in groups:
                counted[groups[id(param)]] += expert_ranks(param)
            info = vector_info(param)
            if info is None:
                continue
            wanted = bool(param_decays(param, config.weight_decay))
            if groups is not None:
                check_group(name, wanted, groups.get(id(param)))
            vector = Vector(
                name=_EXPERT.sub("*", _global_name(name, info.layer)),
                site=info.site,
                branch=info.branch,
                side=info.side,
                layer=info.layer,
                holder=info.holder,
                reparam=info.reparam,
                part=info.part,
                added=was_added(param),
                size=unsharded_numel(param) // expert_ranks(param),
                dtype=str(param.dtype).removeprefix("torch."),
                weight_decay_class=role_of(param),
                decays=wanted,
                tensor_parallel=_TENSOR_PARALLEL[_holder(root, name, info.holder)],
                copies=expert_ranks(param),
            )
            known = vectors.get(vector.name)
            vectors[vector.name] = vector if known is None else vector.joined(known)
    return {
        "vectors": list(vectors.values()),
        "groups": counted,
        "retired": retired,
        "linears": linears,
        "stock": stock,
        "added": added - retired_numel,
    }


# Norms that lose their scale; the q/k norms of a model never do, whatever stands behind them.
_NORM_SCALES = (
    "input_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "layer_norm_weight",  # fused into the linear behind it (TransformerEngine)
    "final_layernorm.weight",
    "enorm.weight",
    "hnorm.weight",
    "final_norm.weight",  # of hybrid models
    "mixer.norm.weight",  # Mamba's gated norm
    "self_attention.out_norm.weight",  # of a gated delta net
)


_TENSOR_PARALLEL = {
    "linear": "replicated, gradient summed over the group",
    "replicated": "as the weight that every rank holds whole",
    "norm": "as Megatron's norms",
}


def _holder(root: torch.nn.Module, name: str, holder: str) -> str:
    """As the vector says, but for linears whose weight every rank holds whole: which ones these are
    differs between implementations of the same model."""
    leaf = leaf_class(root.get_submodule(name.rpartition(".")[0]))
    return "replicated" if leaf is not None and leaf.parallel == "replicated" else holder


# An expert's index among those of its rank, in the names of modules or of vectors.
_EXPERT = re.compile(r"(?<=\blocal_experts\.)\d+(?=\.)|(?<=_)\d+(?=_|$)")


def _is_norm_scale(name: str, of_latents: set[str]) -> bool:
    return name.endswith(_NORM_SCALES) or name in of_latents or bool(_BEFORE_MIXER.search(name))


def _global_name(name: str, layer: int | None) -> str:
    """The name with the layer's index in the whole decoder instead of that in its pipeline stage."""
    if layer is None or not name.startswith("decoder."):
        return name
    return re.sub(r"\blayers\.\d+\b", f"layers.{layer - 1}", name, count=1)


def _gather_over_pipeline(record: dict[str, Any]) -> list[dict[str, Any]]:
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return [record]
    group = parallel_state.get_pipeline_model_parallel_group()
    records: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(records, record, group=group)
    return records


def _merge(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    records = list(records)
    groups: Counter = Counter()
    for record in records:
        groups.update(record["groups"])
    return {
        "vectors": [vector for record in records for vector in record["vectors"]],
        "groups": [DecayGroup(*group, tensors) for group, tensors in sorted(groups.items())],
        **{key: sum(record[key] for record in records) for key in ("retired", "linears", "stock", "added")},
    }


def audit_of_records(
    records: Iterable[dict[str, Any]],
    config: ScaleVecConfig,
    model_config: Any,
    share: Share | None = None,
    reason: str | None = None,
) -> Audit:
    """The audit of what some ranks hold, without judging it.

    Args:
        records: From :func:`rank_record`, one per pipeline stage.
        config: The strategy.
        model_config: Megatron's ``TransformerConfig``.
        share: What these ranks are to hold; by default the whole model.
        reason: Why the execution is what it is, where that is known.
    """
    from megatron_scalevec import __version__

    merged = _merge(records)
    expected = expectation(config, model_config, share)
    vectors = tuple(merged["vectors"])
    built: Counter = Counter()
    for vector in vectors:
        built[kind_of(vector)] += vector.copies
    notes = []
    if config.placement == "dual-norm":
        normalized = [branch for branch in ("q", "k", "v") if branch not in config.branches_off]
        if getattr(model_config, "multi_latent_attention", False):
            notes.append(_LATENT_NOTE)
        else:
            notes.append(
                f"dual-norm: {', '.join(normalized)} are normalized per head; everything else gets dual"
            )
    notes += experts_note(config, model_config, vectors)
    if config.branches_off:
        notes.append(f"without scale vectors: {', '.join(config.branches_off)}")
    return Audit(
        strategy=config.strategy,
        components={
            "branches": config.branches,
            "experts": config.experts,
            "placement": config.placement,
            "reparam": config.reparam,
            "weight_decay": config.weight_decay,
            "decay_v_norm": config.decay_v_norm,
            "vector_dtype": config.vector_dtype,
            "lr_mult": config.lr_mult,
            "branches_off": list(config.branches_off),
            "sites": list(config.sites),
        },
        execution=config.execution if config.execution == "optimizer" else "autograd",
        execution_reason=reason or _REASONS[config.execution if expected.linears else "nothing"],
        megatron_version=str(megatron_version()),
        plugin_version=__version__,
        vectors=tuple(sorted(vectors, key=lambda v: (v.layer is None, v.layer or 0, v.name))),
        expected_vectors=expected.vectors,
        built_vectors={
            key: built[key] for key in [*expected.vectors, *sorted(set(built) - set(expected.vectors))]
        },
        linears_converted=merged["linears"],
        linears_expected=expected.linears,
        norm_scales_retired=merged["retired"],
        norm_scales_expected=expected.norm_scales_retired,
        parameters_stock=merged["stock"],
        parameters_added=merged["added"],
        decay_groups=tuple(merged["groups"]),
        notes=tuple(notes),
    )


_REASONS = {
    "auto": "W_eff is formed in every forward pass; nothing is known of an optimizer here",
    "autograd": "as asked for; W_eff is formed in every forward pass",
    "optimizer": "the live weight is W_eff; W is the optimizer's fp32 master",
    "nothing": "the norms' own scales; nothing is formed",
}

_BEFORE_MIXER = re.compile(r"layers\.\d+\.norm\.weight$")  # of a Mamba layer
_LATENT_NOTE = "dual-norm: latent attention gets dual, as none of its maps makes whole heads (docs/models.md)"
