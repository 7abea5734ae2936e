"""Megatron's mixed-precision optimizers: which parameters they handle, and where a master lies.

Both kinds keep a float32 master per half-precision parameter: ``Float16OptimizerWithFloat16Params`` a whole
one on every rank, ``DistributedOptimizer`` one shard per data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

__all__ = ["Member", "Shard", "leaves_of"]


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
        """The master's gradient [elements], between copying it from the model and the step."""
        return self.main.grad.view(-1)

    @property
    def live(self) -> torch.Tensor:
        """The same elements of the model's parameter."""
        return self.param.data.view(-1)[self.start : self.stop]


class Member:
    """One of Megatron's optimizers that step by themselves."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.shards: dict[torch.nn.Parameter, Shard] = {}
        """The masters that this rank has."""
        self.params: set[torch.nn.Parameter] = set()
        """All half-precision parameters, those without a shard on this rank included."""
        self.group: Any = None
        """Over whose ranks the masters are sharded; None where every rank has them whole."""
        if getattr(optimizer, "is_stub_optimizer", False):
            return
        if isinstance(optimizer, DistributedOptimizer):
            pairs = zip(
                chain(*optimizer.model_float16_groups), chain(*optimizer.shard_fp32_from_float16_groups)
            )
            for param, main in pairs:
                own = optimizer._get_model_param_range_map(param)["param"]
                self.shards[param] = Shard(param, main, own.start, own.end)
            self.params = {param for buffer in optimizer.buffers for param in buffer.param_index_map}
            if optimizer.data_parallel_group.size() > 1:
                self.group = optimizer.data_parallel_group
        elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
            pairs = zip(chain(*optimizer.float16_groups), chain(*optimizer.fp32_from_float16_groups))
            self.shards = {param: Shard(param, main, 0, param.numel()) for param, main in pairs}
            self.params = set(self.shards)


def leaves_of(optimizer: Any) -> Iterator[Any]:
    """The optimizers inside a chain, or the one optimizer itself."""
    for inner in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        if inner is optimizer:
            yield optimizer
        else:
            yield from leaves_of(inner)
