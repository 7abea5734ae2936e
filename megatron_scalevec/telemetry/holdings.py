"""Where the values are that an optimizer steps: masters where it keeps some, parameters elsewhere.

In half precision the live parameters are too coarse for what one step does to them, with the distributed
optimizer they are stale until they have been gathered, and in execution inside the optimizer a live weight is
W_eff. The masters are none of this.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from megatron_scalevec.execution.members import Member, Shard, leaves_of

__all__ = ["data_parallel_group", "holdings_of"]


def holdings_of(optimizer: Any) -> dict[torch.nn.Parameter, Shard]:
    """What this rank steps of every parameter: a shard, the whole, or nothing (then it is missing)."""
    found: dict[torch.nn.Parameter, Shard] = {}
    for leaf in leaves_of(optimizer):
        if getattr(leaf, "is_stub_optimizer", False):
            continue
        found.update(Member(leaf).shards)
        if isinstance(leaf, DistributedOptimizer):
            for param, shard in zip(chain(*leaf.model_fp32_groups), chain(*leaf.shard_fp32_groups)):
                own = leaf._get_model_param_range_map(param)["param"]
                found[param] = Shard(param, shard, own.start, own.end)
            continue
        if isinstance(leaf, Float16OptimizerWithFloat16Params):
            full_precision = chain(*leaf.fp32_from_fp32_groups)
        else:
            full_precision = chain(*(group["params"] for group in leaf.param_groups))
        found.update((param, Shard(param, param, 0, param.numel())) for param in full_precision)
    return found


def data_parallel_group(expert: bool) -> Any:
    """Over whose ranks a parameter's masters are sharded or repeated."""
    from megatron.core import parallel_state

    if expert:
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
