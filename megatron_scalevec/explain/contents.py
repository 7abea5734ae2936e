"""What an explanation holds, and how it is found on the ranks of a dry run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from packaging.version import Version

from megatron_scalevec.audit import (
    Audit,
    Share,
    audit_of_records,
    expert_ranks,
    is_copy,
    rank_record,
    unsharded_numel,
)
from megatron_scalevec.audit.chunks import is_expert
from megatron_scalevec.audit.groups import ELEMENTWISE, GroupOfParameter
from megatron_scalevec.checkpoint.guard import scaled_weights
from megatron_scalevec.cost import Cost, Holding, cost
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.explain.dry_run import DryRun
from megatron_scalevec.vectors import was_added

__all__ = ["Explanation", "Parameters", "Stage", "Tensors", "look_at"]

_NORM_SCALE = re.compile(r"(norm\.weight|layer_norm_weight)$")


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters. ``added`` is net of the norm scales that the strategy retires."""

    stock: int
    added: int
    norm_scales: int

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.stock + other.stock, self.added + other.added, self.norm_scales + other.norm_scales
        )


@dataclass(frozen=True)
class Tensors:
    """All parameters of one name, over the layers and experts of the whole model."""

    name: str
    tensors: int
    decays: bool
    added: bool


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage; the others of the stage hold tensors of the same sizes.

    ``costs``: by execution mode, empty where nothing is folded.
    """

    rank: int
    layers: str
    parameters: Parameters
    linears: int
    in_flight: float
    costs: dict[str, Cost]


@dataclass(frozen=True)
class Explanation:
    """One record of everything; audits are None for a stock model."""

    strategy: str
    rank: int
    world_size: int
    place: dict[str, str]
    whole_model: Audit | None
    this_rank: Audit | None
    parameters: Parameters
    parameters_on_rank: Parameters
    weight_decay: tuple[Tensors, ...]
    stages: tuple[Stage, ...]
    ranks_built: int
    notes: tuple[str, ...]

    def problems(self) -> list[str]:
        """Where what was built differs from what was asked for."""
        audits = [audit for audit in (self.whole_model, self.this_rank) if audit is not None]
        return list(dict.fromkeys(problem for audit in audits for problem in audit.problems()))

    def to_json(self) -> str:
        """The record as JSON, keys in a stable order."""
        record = {**vars(self), "problems": self.problems()}
        for key in ("whole_model", "this_rank"):
            audit = getattr(self, key)
            record[key] = json.loads(audit.to_json()) if audit is not None else None
        for key in ("parameters", "parameters_on_rank"):
            numbers = asdict(getattr(self, key))
            percent = {f"{name}_percent": percent_of(numbers[name], numbers["stock"]) for name in numbers}
            record[key] = {**numbers, **{k: v for k, v in percent.items() if k != "stock_percent"}}
        for key in ("weight_decay", "stages"):
            record[key] = [asdict(row) for row in getattr(self, key)]
        return json.dumps(record, indent=2, sort_keys=True)


def percent_of(part: int, whole: int) -> float:
    """Rounded as the documents print it."""
    return round(100.0 * part / whole, 6) if whole else 0.0


def look_at(run: DryRun, *, every_rank: bool = False, bytes_per_second: float = 0.0) -> Explanation:
    """Build every stage of the rank's pipeline in turn, and the rank itself last.

    Args:
        run: What a launch line asks for.
        every_rank: Build all ranks of one copy of the model, not one of each stage.
        bytes_per_second: Memory bandwidth, for the time of folds.

    Raises:
        ScaleVecError: Two ranks of a stage hold different numbers of parameters.
    """
    config = run.session.config
    run.enter(run.rank)
    pipeline = run.pipeline()
    others = run.copy_of_the_model() if every_rank else []
    own: dict[str, Any] = {}
    records, rows, total = [], Counter(), Parameters(0, 0, 0)
    stages: dict[int, Stage] = {}
    for rank in [*(r for r in pipeline if r != run.rank), run.rank]:
        run.enter(rank)
        chunks = run.build()
        groups = _decay_groups(run, chunks)
        record = rank_record(chunks, config, groups) if config.active else None
        place = pipeline.index(rank)
        records.append((place, record))
        total += _count(chunks, whole=True)
        rows.update(_rows(chunks, groups))
        stages[place] = _stage(run, rank, chunks, bytes_per_second)
        if rank == run.rank:
            own = {"chunks": chunks, "record": record, "place": _place(chunks)}
    for rank in others:
        if rank not in pipeline:
            _compare_with_stage(run, rank, stages)
            run.enter(run.rank)
    model_config = own["chunks"][0].config
    whole = this_rank = None
    if config.active:
        in_order = [record for _, record in sorted(records, key=lambda pair: pair[0])]
        reason = run.session.execution_reason
        whole = audit_of_records(in_order, config, model_config, reason=reason)
        share = Share.held_by(own["chunks"])
        this_rank = audit_of_records([own["record"]], config, model_config, share, reason)
    return Explanation(
        strategy=config.describe(),
        rank=run.rank,
        world_size=run.world_size,
        place=own["place"],
        whole_model=whole,
        this_rank=this_rank,
        parameters=total,
        parameters_on_rank=_count(own["chunks"], whole=False),
        weight_decay=tuple(
            Tensors(name, tensors, decays, added) for (name, decays, added), tensors in sorted(rows.items())
        ),
        stages=tuple(stage for _, stage in sorted(stages.items())),
        ranks_built=len({*pipeline, *others}),
        notes=tuple(run.notes),
    )


def _stage(run: DryRun, rank: int, chunks: list[Any], bytes_per_second: float) -> Stage:
    weights = [chunk.get_parameter(name) for chunk in chunks for name in scaled_weights(chunk)]
    schedules = {of_experts: run.schedule(of_experts=of_experts) for of_experts in (False, True)}
    costs = {}
    if weights and bytes_per_second:
        for mode in ("autograd", "optimizer"):
            dense, experts = (
                cost(_holding(chunks, weights, of_experts), schedule, mode, bytes_per_second)
                for of_experts, schedule in schedules.items()
            )
            costs[mode] = dense + experts
    return Stage(
        rank=rank,
        layers=_layers(chunks),
        parameters=_count(chunks, whole=False),
        linears=len(weights),
        in_flight=schedules[False].in_flight,
        costs=costs,
    )


def _compare_with_stage(run: DryRun, rank: int, stages: dict[int, Stage]) -> None:
    run.enter(rank)
    stage = stages[run.pipeline().index(rank)]
    found = _count(run.build(), whole=False)
    if found != stage.parameters:
        raise ScaleVecError(
            f"rank {rank} holds {found} and rank {stage.rank} of the same pipeline stage {stage.parameters}: "
            "the layout does not divide the model evenly."
        )


def _holding(chunks: Iterable[Any], weights: Iterable[torch.nn.Parameter], of_experts: bool) -> Holding:
    """What the rank folds and what it gains, for the cost formulas.

    Args:
        chunks: The rank's.
        weights: Those among its parameters that are folded.
        of_experts: Whether to count the parameters whose optimizer state the expert-data-parallel ranks
            share, or the others.
    """

    def counts(param: torch.nn.Parameter) -> bool:
        return is_expert(param) == of_experts

    folded = [weight for weight in weights if counts(weight)]
    weight_bytes = max((weight.element_size() for weight in folded), default=0)
    vectors = vector_bytes = retired = 0
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if not counts(param):
                continue
            if was_added(param) and param.requires_grad:
                vectors += param.numel()
                vector_bytes = max(vector_bytes, param.element_size())
            elif not param.requires_grad and param.dim() == 1 and _NORM_SCALE.search(name):
                retired += param.numel()
                weight_bytes = max(weight_bytes, param.element_size())
    return Holding(
        weights=sum(weight.numel() for weight in folded),
        rows=sum(weight.shape[0] for weight in folded),
        weight_bytes=weight_bytes,
        vectors=vectors,
        vector_bytes=vector_bytes,
        retired=retired,
    )


def _count(chunks: Iterable[Any], *, whole: bool) -> Parameters:
    """Parameters of a rank: its own shards, or the whole tensors that they are shards of."""
    stock = added = norm_scales = 0
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if whole and is_copy(chunk, name):
                continue
            number = unsharded_numel(param) if whole else param.numel()
            if was_added(param):
                added += number if param.requires_grad else 0
                continue
            stock += number
            if param.dim() == 1 and _NORM_SCALE.search(name):
                norm_scales += number
                added -= 0 if param.requires_grad else number
    return Parameters(stock, added, norm_scales)


def _decay_groups(run: DryRun, chunks: Iterable[Any]) -> dict[int, GroupOfParameter]:
    """What Megatron's optimizer would do with each parameter, by its own rules and our hook on them."""
    from megatron.core.optimizer import combine_param_group_overrides
    from megatron.training.training import get_megatron_optimizer_config

    config, overrides = get_megatron_optimizer_config(run.args)
    groups = {}
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if param.requires_grad:
                matching = [override for key, override in overrides.items() if key.matches(param, name)]
                merged = combine_param_group_overrides(matching) if matching else {}
                groups[id(param)] = GroupOfParameter(
                    float(merged.get("wd_mult", 1.0)),
                    float(merged.get("max_lr", config.lr) or 0.0),
                    _optimizer_of(param, config, run.session.version),
                )
    return groups


def _optimizer_of(param: torch.nn.Parameter, config: Any, version: Version) -> str:
    """The name of the optimizer that Megatron hands a parameter to."""
    name = config.optimizer.removeprefix("dist_")
    # From 0.18 on Lion takes the way of the optimizers for matrices, in which it leaves the rest to Adam.
    if name in ELEMENTWISE and (name != "lion" or version < Version("0.18.0")):
        return name
    matrix = param.dim() == 2 and not getattr(param, "is_embedding_or_output_parameter", False)
    if matrix:
        return name
    return getattr(config, "muon_scalar_optimizer", "adam") if "muon" in name else "adam"


def _rows(chunks: Iterable[Any], groups: dict[int, GroupOfParameter]) -> Counter:
    rows: Counter = Counter()
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if id(param) in groups:
                # Layers and experts by number; a grouped linear numbers its parameters instead.
                kind = re.sub(r"\.\d+(?=\.)", ".*", name)
                kind = re.sub(r"(?<=\.weight)\d+$|(?<=\.bias)\d+$|(?<=_)\d+(?=_|$)", "*", kind)
                rows[kind, groups[id(param)].weight_decay != 0.0, was_added(param)] += expert_ranks(param)
    return rows


def _place(chunks: list[Any]) -> dict[str, str]:
    """Where the present rank stands in every direction of parallelism, and its layers."""
    from megatron.core import parallel_state as state

    place = {}
    for name, rank, size in (
        ("tensor", state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        (
            "pipeline",
            state.get_pipeline_model_parallel_rank(),
            state.get_pipeline_model_parallel_world_size(),
        ),
        ("context", state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
        ("data", state.get_data_parallel_rank(), state.get_data_parallel_world_size()),
    ):
        place[name] = f"{rank} of {size}"
    place["layers"] = _layers(chunks)
    return place


def _layers(chunks: Iterable[Any]) -> str:
    return _spans([layer.layer_number for chunk in chunks for layer in chunk.decoder.layers])


def _spans(numbers: list[int]) -> str:
    """1-4,9-12"""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans) or "none"
