"""Whether ranks that hold the same one-dimensional parameter hold the same values.

A vector that every tensor-parallel rank has a copy of stays the same only as long as its gradient is summed
over those ranks; where that is missing the copies drift apart, and losses look almost right. The check
compares copies bit for bit, with one collective per group of ranks and dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_scalevec.audit.chunks import is_expert, unwrap
from megatron_scalevec.errors import ScaleVecError

__all__ = ["check_replicas"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _Replicas:
    """Parameters of one dtype that the ranks of a group hold copies of."""

    over: str
    group: Any
    params: list[tuple[str, torch.nn.Parameter]] = field(default_factory=list)


def check_replicas(chunks: Iterable[torch.nn.Module], when: str = "") -> int:
    """Stop if copies of a one-dimensional parameter differ.

    Collective over the tensor-parallel, expert-tensor-parallel, data-parallel (context parallelism included)
    and expert-data-parallel groups. Parameters that are split over tensor-parallel ranks are compared over
    data-parallel ranks alone.

    Args:
        chunks: Megatron's model chunks, wrapped or not, with all gathers of parameters finished.
        when: What the message begins with, for example ``after step 3: ``.

    Returns:
        The number of comparisons of a parameter over a group.

    Raises:
        ScaleVecError: On every rank of a group in which copies differ, with the first parameter that does,
            the ranks that differ from the group's first, and the largest difference.
    """
    compared = 0
    for replicas in _replicas(chunks):
        first = _first_unequal(replicas)
        if first is not None:
            raise ScaleVecError(when + _sentence(replicas, *first))
        compared += len(replicas.params)
    return compared


def _replicas(chunks: Iterable[torch.nn.Module]) -> Iterator[_Replicas]:
    """In an order that depends on the model alone, as collectives need it."""
    from megatron.core import parallel_state as groups

    # Name, whether for parameters of experts, whether their shards are copies as well, and the group.
    kinds = (
        ("tensor-parallel", False, False, groups.get_tensor_model_parallel_group),
        (
            "data-parallel",
            False,
            True,
            lambda: groups.get_data_parallel_group(with_context_parallel=True),
        ),
        ("expert-tensor-parallel", True, False, groups.get_expert_tensor_parallel_group),
        ("expert-data-parallel", True, True, groups.get_expert_data_parallel_group),
    )
    params = [
        (name, param)
        for chunk in chunks
        for name, param in unwrap(chunk).named_parameters()
        if param.dim() == 1
    ]
    for over, of_experts, shards, group_of in kinds:
        found: dict[torch.dtype, _Replicas] = {}
        for name, param in params:
            is_shard = bool(getattr(param, "tensor_model_parallel", False))
            if is_expert(param) == of_experts and (shards or not is_shard):
                entry = found.setdefault(param.dtype, _Replicas(over, group_of()))
                entry.params.append((name, param))
        yield from (entry for entry in found.values() if entry.group.size() > 1)


def _bits(param: torch.nn.Parameter) -> torch.Tensor:
    """The values as integers, wide enough for every backend's reductions: comparing integers sees NaN too."""
    bits = param.detach().contiguous().view(_INTEGERS[param.element_size()])
    return bits if param.element_size() > 4 else bits.to(torch.int32)


def _first_unequal(replicas: _Replicas) -> tuple[str, torch.nn.Parameter] | None:
    own = torch.cat([_bits(param) for _, param in replicas.params])
    # The largest value, and (complemented, which turns the order around) the smallest, in one collective.
    extremes = torch.cat([own, ~own])
    torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX, group=replicas.group)
    unequal = extremes[: len(own)] != ~extremes[len(own) :]
    start = 0
    for name, param in replicas.params:
        if bool(unequal[start : start + param.numel()].any()):
            return name, param
        start += param.numel()
    return None


def _sentence(replicas: _Replicas, name: str, param: torch.nn.Parameter) -> str:
    copies: list[Any] = [None] * replicas.group.size()
    own = (torch.distributed.get_rank(), _bits(param).cpu(), param.detach().double().cpu())
    torch.distributed.all_gather_object(copies, own, group=replicas.group)
    first_rank, first_bits, first_values = copies[0]
    others = [copy for copy in copies if not torch.equal(copy[1], first_bits)]
    largest = max(float((values - first_values).abs().max()) for _, _, values in others)
    ranks = ", ".join(str(rank) for rank, _, _ in others)
    return (
        f"{name} must be the same on all {replicas.over} ranks, and on rank {ranks} it differs from rank "
        f"{first_rank}'s by up to {largest:.3g}; its gradient is not summed over these ranks, or something "
        "wrote to one copy alone, so the run was stopped."
    )
