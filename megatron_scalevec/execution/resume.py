"""Raw masters in checkpoints, which stock Megatron must not take for the live weights'.

Where the optimizer folds, the model's part of a checkpoint is a stock Megatron's: the weight under its own
key is W_eff. The optimizer's part is not: its masters are raw W. A stock Megatron that loads both would drop
the fold at its first step, without a word. So raw masters are saved under another key, and theirs holds a
guard, as :mod:`megatron_scalevec.checkpoint.keys` describes it for weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_scalevec.checkpoint.keys import GUARD, GUARD_SHAPE, RAW_MASTER, raw_master_key
from megatron_scalevec.errors import ScaleVecError

__all__ = ["mark_raw_masters"]

# Of the plain mixed-precision optimizer, and of the distributed one's fully reshardable format.
_MASTERS = ("optimizer.state.fp32_param.", "optimizer.state.param.")
_BUCKETS = ".bucket_idx_"
_FORMATS = ("dp_reshardable", "fully_reshardable", "fully_sharded_model_space")


def mark_raw_masters(
    state: dict[str, Any],
    weights: Mapping[torch.nn.Parameter, Any],
    optimizer: Any,
    model_sharded_state_dict: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    """Give the raw masters in an optimizer's sharded state other keys, and their old keys a guard; in place,
    for saving and loading.

    Args:
        state: What the optimizer's ``sharded_state_dict`` returned.
        weights: Those whose masters are raw, and that are the optimizer's, with the tensor-parallel group
            that shares each (None where every rank holds it whole).
        optimizer: A single one, not a chain.
        model_sharded_state_dict: What it was given: the model's entries.

    Raises:
        ScaleVecError: The format is one in which masters cannot be told from the rest.
        RuntimeError: There are tensors, and none was recognized as raw masters.
    """
    if not weights:
        return
    kind = state.get("param_state_sharding_type", "fully_reshardable")
    if kind not in _FORMATS:
        raise ScaleVecError(
            f"the optimizer's state was asked for as {kind}, where raw masters cannot be marked and a stock "
            "Megatron would take them for folded weights; use --ckpt-format torch_dist, or "
            "--scalevec-execution autograd."
        )
    groups = {id(weight): group for weight, group in weights.items()}
    # Several layers may have one key, each its place in the tensor.
    entries = [e for _, _, e in _sharded(model_sharded_state_dict) if id(e.data) in groups]
    keys = {entry.key for entry in entries}
    prefixes: set[str] = set()
    guards: list[Any] = []
    seen = False
    for holder, index, entry in list(_sharded(state)):
        seen = True
        if _BUCKETS in entry.key and entry.key.endswith(".param"):
            # A bucket holds folded and other parameters without their names.
            if all(guard.key != entry.key for guard in guards):
                guards.append(_guard_of_bucket(entry, optimizer))
            holder[index] = dataclasses.replace(entry, key=f"{entry.key}.{RAW_MASTER}")
            continue
        for prefix in _MASTERS:
            key = entry.key.removeprefix(prefix)
            if key != entry.key and key in keys:
                prefixes.add(prefix)
                holder[index] = dataclasses.replace(entry, key=raw_master_key(prefix, key))
    if kind == "fully_sharded_model_space":  # there a rank has its own shards only
        prefixes = {_MASTERS[0]}
    guards += [
        guard
        for prefix in prefixes
        for entry in entries
        for guard in _guards_of_weight(entry, groups[id(entry.data)], prefix)
    ]
    if entries and seen and not guards:
        raise RuntimeError(
            "no raw master was recognized in the optimizer's sharded state: a stock Megatron would load it "
            "without complaint and drop the fold"
        )
    state[GUARD] = {f"{number} {guard.key}": guard for number, guard in enumerate(guards)}


def _guards_of_weight(entry: Any, group: Any, prefix: str) -> list[Any]:
    from megatron_scalevec.checkpoint.guard import guards_for

    guards = guards_for(entry, group)
    for guard in guards:
        guard.key = prefix + guard.key
    return guards


def _guard_of_bucket(entry: Any, optimizer: Any) -> Any:
    """All data-parallel ranks hold it, and one of them saves it."""
    return ShardedTensor.from_rank_offsets(
        entry.key,
        torch.zeros(GUARD_SHAPE, device=entry.data.device),
        replica_id=(entry.replica_id[0], 0, optimizer.data_parallel_group.rank()),
    )


def _sharded(node: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(container, key, entry) of every sharded tensor."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for index, value in list(items):
        if isinstance(value, (ShardedTensor, ShardedTensorFactory)):
            yield node, index, value
        else:
            yield from _sharded(value)
