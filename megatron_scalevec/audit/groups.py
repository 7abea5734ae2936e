"""The optimizer's parameter groups, as the audit sees them."""

from __future__ import annotations

from typing import Any

import torch

from megatron_scalevec.audit.chunks import unwrap
from megatron_scalevec.errors import ScaleVecError

__all__ = ["check_decay", "groups_of_parameters"]


def _members(optimizer: Any) -> list[Any]:
    """Megatron's single optimizers inside a chain."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def groups_of_parameters(chunks: list[torch.nn.Module], optimizer: Any) -> dict[int, tuple[float, float]]:
    """``id`` of every trainable model parameter to (wd_mult, max_lr) of its group, None where it has none.

    Megatron's mixed-precision and distributed optimizers hold copies or shards in the groups, so the way
    from a model parameter to its group differs for each kind. A distributed optimizer knows only the
    parameters that this rank holds a shard of: what the other data-parallel ranks know is added (experts have
    data-parallel ranks of their own), which makes this collective over them.
    """
    params = [p for chunk in chunks for p in unwrap(chunk).parameters() if p.requires_grad]
    found: dict[int, tuple[float, float]] = {}
    sharded = False
    for member in _members(optimizer):
        groups = member.optimizer.param_groups
        index_map = getattr(member, "model_param_group_index_map", None)
        if index_map is not None:
            sharded = True
            pairs = [(param, groups[index]) for param, (index, _) in index_map.items()]
        elif hasattr(member, "float16_groups"):
            lists = zip(groups, member.float16_groups, member.fp32_from_fp32_groups)
            pairs = [(param, group) for group, half, single in lists for param in [*half, *single]]
        else:
            pairs = [(param, group) for group in groups for param in group["params"]]
        for param, group in pairs:
            found[id(param)] = (float(group["wd_mult"]), float(group.get("max_lr") or 0.0))
    if sharded:
        from megatron.core import parallel_state

        table = torch.tensor(
            [found.get(id(param), (-1.0, -1.0)) for param in params],
            dtype=torch.float64,
            device=params[0].device,
        )
        for group in (
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_expert_data_parallel_group(),
        ):
            torch.distributed.all_reduce(table, op=torch.distributed.ReduceOp.MAX, group=group)
        for param, (wd, lr) in zip(params, table.tolist()):
            if wd >= 0:
                found[id(param)] = (wd, lr)
    return {id(param): found[id(param)] for param in params if id(param) in found}


def check_decay(name: str, wanted: bool, group: tuple[float, float] | None) -> None:
    if group is None:
        raise ScaleVecError(f"the scale vector {name} is in no parameter group, so it would never train.")
    multiplier, _ = group
    if (multiplier != 0.0) != wanted:
        raise ScaleVecError(
            f"the scale vector {name} {'should' if wanted else 'should not'} decay, but the optimizer's "
            f"group has wd_mult {multiplier:g}: another rule for weight decay is in the way "
            "(config_overrides). Remove it, or use --scalevec-weight-decay stock."
        )
