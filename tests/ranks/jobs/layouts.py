"""The sharded state of large models, rank by rank, without the ranks."""

from __future__ import annotations

from typing import Any

__all__ = ["sharded_state_at_scale"]


def sharded_state_at_scale(arguments: list[str], of: int, more_ranks: list[int]) -> dict[str, Any]:
    """Build every rank of one copy of a model, and some ranks of other copies, and look at their checkpoints.

    Args:
        arguments: Megatron's.
        of: Number of ranks.
        more_ranks: Data- or context-parallel replicas to look at as well.

    Returns:
        ``shards``: (key, global shape, offset, shape, replica id) of every tensor of every rank;
        ``groups``: every set of overrides that the optimizer's rules give a parameter, with what tells its
        group apart when state is loaded; ``vectors``: keys of tensors that the strategy added.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.optimizer import combine_param_group_overrides
    from megatron.training.training import get_megatron_optimizer_config

    from megatron_scalevec.explain.dry_run import quietly, read_arguments
    from megatron_scalevec.vectors import was_added

    shards: list[tuple] = []
    groups: set[tuple] = set()
    vectors: set[str] = set()
    with quietly():
        run = read_arguments(arguments, 0, of)
        run.enter(0)
        for rank in [*run.copy_of_the_model(), *more_ranks]:
            run.enter(rank)
            [model] = run.build()
            added = {id(param) for param in model.parameters() if was_added(param)}
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            state = model.sharded_state_dict(metadata={"dp_cp_group": group})
            apply_factories(state)
            for tensor in nested_values(state):
                if isinstance(tensor, ShardedTensor):
                    shards.append(
                        (
                            tensor.key,
                            tuple(tensor.global_shape),
                            tuple(tensor.global_offset),
                            (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape),
                            tensor.replica_id,
                        )
                    )
                    if id(tensor.data) in added:
                        vectors.add(tensor.key)
            _, overrides = get_megatron_optimizer_config(run.args)
            for name, param in model.named_parameters():
                if param.requires_grad:
                    matching = [ov for key, ov in overrides.items() if key.matches(param, name)]
                    merged = combine_param_group_overrides(matching) if matching else {}
                    expert = not getattr(param, "allreduce", True)
                    identity = (merged.get("wd_mult", 1.0), merged.get("lr_mult", 1.0), expert)
                    groups.add((tuple(sorted(merged.items())), identity))
    return {"shards": shards, "groups": sorted(groups, key=repr), "vectors": sorted(vectors)}
