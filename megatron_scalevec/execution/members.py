"""Megatron's mixed-precision optimizers: which parameters they handle, and where a master lies.

All kinds keep a float32 master per half-precision parameter: ``Float16OptimizerWithFloat16Params`` a whole
one on every rank, ``DistributedOptimizer`` one shard per data-parallel rank, and the layer-wise optimizer
a whole one on one data-parallel rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

__all__ = ["Member", "Shard", "is_layer_wise", "leaves_of", "members_of", "without_copies_of"]


@dataclass(frozen=True)
class Shard:
    """Elements [start, stop) of a parameter, and the float32 master of them."""

    param: torch.nn.Parameter
    main: torch.Tensor
    start: int
    stop: int

    @property
    def master(self) -> torch.Tensor:
        """The master [elements]."""
        return self.main.detach().view(-1)

    @property
    def gradient(self) -> torch.Tensor:
        """The master's gradient [elements], between copying it from the model and the step.

        Outside Megatron's DistributedDataParallel a parameter without a gradient has left it without one.
        """
        if self.main.grad is None:
            self.main.grad = torch.zeros_like(self.main)
        return self.main.grad.view(-1)

    @property
    def live(self) -> torch.Tensor:
        """The same elements of the model's parameter."""
        return self.param.data.view(-1)[self.start : self.stop]


class Member:
    """One of Megatron's optimizers that step by themselves, or several whose parameters are dealt out
    together."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizers: tuple[Any, ...] = (optimizer,)
        """Those that step the parameters. One of them steps the shards that this rank has of a weight."""
        self.gathers: Any = optimizer
        """Whose step ends with the live parameters' way to the other ranks that need them."""
        self.shards: dict[torch.nn.Parameter, Shard] = {}
        """The masters that this rank has."""
        self.params: set[torch.nn.Parameter] = set()
        """All half-precision parameters, those without a shard on this rank included."""
        self.group: Any = None
        """Over whose ranks the masters are sharded; None where every rank has them whole."""
        if getattr(optimizer, "is_stub_optimizer", False):
            return
        if isinstance(optimizer, DistributedOptimizer):
            for param, main in _pairs_of(optimizer):
                own = optimizer._get_model_param_range_map(param)["param"]
                self.shards[param] = Shard(param, main, own.start, own.end)
            self.params = {param for buffer in optimizer.buffers for param in buffer.param_index_map}
            if optimizer.data_parallel_group.size() > 1:
                self.group = optimizer.data_parallel_group
        elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
            self.shards = {p: Shard(p, main, 0, p.numel()) for p, main in _pairs_of(optimizer)}
            self.params = set(self.shards)

    def weights_stepped_by(self, optimizer: Any) -> set[torch.nn.Parameter]:
        """The parameters of one of :attr:`optimizers` that this rank has a master of, or a share of one."""
        return Member(optimizer).params & self.params if optimizer in self.optimizers else set()


def members_of(optimizer: Any) -> list[Member]:
    """The members of a chain in the order of their steps, or the one that an optimizer is."""
    inner = getattr(optimizer, "chained_optimizers", None)
    if is_layer_wise(optimizer):
        return _members_of_layer_wise(optimizer)
    if not inner:
        return [Member(optimizer)]
    return [member for each in inner for member in members_of(each)]


def is_layer_wise(optimizer: Any) -> bool:
    """Whether it is the optimizer that gives every parameter to one data-parallel rank."""
    return hasattr(optimizer, "dp_cp_params_list")


def _members_of_layer_wise(optimizer: Any) -> list[Member]:
    """One member for the parameters that all data-parallel ranks share out, and one for those of experts.

    The optimizers inside (Muon for weights, another for vectors) know this rank's parameters only, so which
    of them steps another rank's is left open; all of them step before any parameter is gathered.
    """
    leaves = tuple(leaves_of(optimizer))
    shards = {param: shard for leaf in leaves for param, shard in Member(leaf).shards.items()}
    dense, experts, groups = (
        optimizer.dp_cp_params_list,
        optimizer.expt_dp_params_list,
        optimizer.pg_collection,
    )
    if dense is None:
        return [_joined(optimizer, leaves, shards, set(shards), None)]
    of_dense = set(chain(*dense))
    of_experts = set(chain(*experts)) if experts else set(shards) - of_dense
    return [
        _joined(optimizer, leaves, shards, of_dense, groups.dp_cp),
        _joined(optimizer, leaves, shards, of_experts, groups.expt_dp if experts else None),
    ]


def _joined(optimizer: Any, leaves: tuple[Any, ...], shards: dict, params: set, group: Any) -> Member:
    member = Member(None)
    member.optimizers, member.gathers, member.params = leaves, optimizer, params
    member.shards = {param: shard for param, shard in shards.items() if param in params}
    member.group = group
    return member


def leaves_of(optimizer: Any) -> Iterator[Any]:
    """The optimizers inside a chain, or the one optimizer itself."""
    for inner in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        if inner is optimizer:
            yield optimizer
        else:
            yield from leaves_of(inner)


def _names_of_groups(optimizer: Any) -> tuple[str, str]:
    """Attributes with groups of half-precision parameters, and with groups of their masters."""
    if isinstance(optimizer, DistributedOptimizer):
        return "model_float16_groups", "shard_fp32_from_float16_groups"
    return "float16_groups", "fp32_from_float16_groups"


def _pairs_of(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    params, masters = (getattr(optimizer, name) for name in _names_of_groups(optimizer))
    return zip(chain(*params), chain(*masters))


@contextlib.contextmanager
def without_copies_of(weights: Collection[torch.nn.Parameter], optimizer: Any) -> Iterator[bool]:
    """An optimizer that does not know of some weights, for the time in which it copies masters to the model.

    Yields:
        Whether it has other half-precision parameters to copy. Kernels for many tensors refuse to have none.
    """
    names = _names_of_groups(optimizer)
    kept = [getattr(optimizer, name) for name in names]
    others = [[index for index, param in enumerate(group) if param not in weights] for group in kept[0]]
    try:
        for name, groups in zip(names, kept):
            setattr(optimizer, name, [[group[i] for i in own] for group, own in zip(groups, others)])
        yield any(others)
    finally:
        for name, groups in zip(names, kept):
            setattr(optimizer, name, groups)
