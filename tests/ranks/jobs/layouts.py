"""The sharded state of large models, rank by rank, without the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["sharded_state_at_scale"]


def sharded_state_at_scale(
    arguments: list[str], of: int, built: Sequence[int], becoming: bool = True
) -> dict[str, Any]:
    """Look at the checkpoint of every rank of a cluster.

    One model is built for each pipeline stage and becomes every rank of the stage in turn: ranks of a stage
    differ in nothing but the process groups that they are in. Whether that is so is looked up on some ranks,
    whose models are built for themselves.

    Args:
        arguments: Megatron's.
        of: Number of ranks.
        built: Ranks whose own models are built and compared.
        becoming: Whether a stage's model is given the groups of each rank; without, it stays the first one.

    Returns:
        ``tiles``: (key, global shape, offset, shape, dtype) of every tensor to the replica ids that ranks
        give it; ``groups``: every set of overrides that the optimizer's rules give a parameter, with what
        tells its group apart when state is loaded; ``vectors``: keys of tensors that the strategy added;
        ``differing``: the ranks of ``built`` whose own model says something else.
    """
    from megatron.core import parallel_state

    from megatron_scalevec.explain.dry_run import quietly, read_arguments

    tiles: dict[tuple, list] = {}
    groups: set[tuple] = set()
    vectors: set[str] = set()
    differing: list[int] = []
    stages: dict[int, _Stage] = {}
    with quietly():
        run = read_arguments(arguments, 0, of)
        for rank in range(of):
            run.enter(rank)
            number = parallel_state.get_pipeline_model_parallel_rank()
            if number not in stages:
                stages[number] = _Stage(run.build())
                groups |= _optimizer_groups(run.args, stages[number].chunks)
                vectors |= stages[number].vector_keys()
            elif becoming:
                stages[number].become_present_rank()
            shards = stages[number].shards()
            if rank in built and _Stage(run.build()).shards() != shards:
                differing.append(rank)
            for tile, replica in shards:
                tiles.setdefault(tile, []).append(replica)
    return {
        "tiles": tiles,
        "groups": sorted(groups, key=repr),
        "vectors": sorted(vectors),
        "differing": differing,
    }


class _Stage:
    """The model chunks of a rank, and every place in them that holds one of the rank's process groups."""

    def __init__(self, chunks: list[Any]) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        self.chunks = chunks
        names = {id(group): name for name, group in _present_groups().items()}
        holders = {id(module): module for chunk in chunks for module in chunk.modules()}
        for module in list(holders.values()):
            held = vars(module).values()
            holders.update((id(one), one) for one in held if isinstance(one, ProcessGroupCollection))
        self._places = [
            (vars(holder), attribute, names[id(value)])
            for holder in holders.values()
            for attribute, value in vars(holder).items()
            if isinstance(value, torch.distributed.ProcessGroup)
        ]

    def become_present_rank(self) -> None:
        """Take over the groups of the rank that was entered last; it must be of the same stage."""
        groups = _present_groups()
        for holder, attribute, name in self._places:
            holder[attribute] = groups[name]

    def shards(self) -> list[tuple[tuple, Any]]:
        """((key, global shape, offset, shape, dtype), replica id) of every tensor of the checkpoint."""
        return [
            (
                (
                    tensor.key,
                    tuple(tensor.global_shape),
                    tuple(tensor.global_offset),
                    (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape),
                    str(tensor.dtype),
                ),
                tensor.replica_id,
            )
            for tensor in self._tensors()
        ]

    def vector_keys(self) -> set[str]:
        from megatron_scalevec.vectors import was_added

        added = {id(param) for chunk in self.chunks for param in chunk.parameters() if was_added(param)}
        return {tensor.key for tensor in self._tensors() if id(tensor.data) in added}

    def _tensors(self) -> list[Any]:
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        found = []
        for chunk in self.chunks:
            state = chunk.sharded_state_dict(metadata={"dp_cp_group": group})
            apply_factories(state)
            found += [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
        return found


def _present_groups() -> dict[str, torch.distributed.ProcessGroup]:
    """Megatron's groups of the present rank by the names of its variables, the world among them."""
    from megatron.core import parallel_state

    found = {
        name: value
        for name, value in vars(parallel_state).items()
        if isinstance(value, torch.distributed.ProcessGroup)
    }
    return {**found, "world": torch.distributed.group.WORLD}


def _optimizer_groups(args: Any, chunks: list[Any]) -> set[tuple]:
    from megatron.core.optimizer import combine_param_group_overrides
    from megatron.training.training import get_megatron_optimizer_config

    _, overrides = get_megatron_optimizer_config(args)
    groups = set()
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if param.requires_grad:
                matching = [override for key, override in overrides.items() if key.matches(param, name)]
                merged = combine_param_group_overrides(matching) if matching else {}
                expert = not getattr(param, "allreduce", True)
                identity = (merged.get("wd_mult", 1.0), merged.get("lr_mult", 1.0), expert)
                groups.add((tuple(sorted(merged.items())), identity))
    return groups
