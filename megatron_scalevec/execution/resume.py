"""Checkpoints of runs that fold inside the optimizer.

The model's part is a stock Megatron's: the weight under its own key is W_eff. The optimizer's part is not:
its masters are raw W. A stock Megatron that loads both would drop the fold at its first step, without a
word. So raw masters are saved under another key, which it does not find.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.execution.folds import Fold

__all__ = ["RAW", "rename_raw_masters"]

RAW = "scalevec_raw"
"""Part of the key of every tensor that holds raw masters."""

# Of the plain mixed-precision optimizer, and of the distributed one's fully reshardable format.
_MASTERS = ("optimizer.state.fp32_param.", "optimizer.state.param.")
_BUCKETS = ".bucket_idx_"
_FORMATS = ("dp_reshardable", "fully_reshardable", "fully_sharded_model_space")


def rename_raw_masters(
    state: Any, folds: Sequence[Fold], model_sharded_state_dict: Any = None, *_: Any, **__: Any
) -> None:
    """Give the raw masters in an optimizer's sharded state other keys, in place; for saving and loading.

    Args:
        state: What ``sharded_state_dict`` returned.
        folds: All folds of the optimizer.
        model_sharded_state_dict: What it was given: the model's keys.

    Raises:
        ScaleVecError: The format is one in which masters cannot be told from the rest.
        RuntimeError: There are tensors, and none was recognized as raw masters.
    """
    kind = state.get("param_state_sharding_type", "fully_reshardable")
    if kind not in _FORMATS:
        raise ScaleVecError(
            f"the optimizer's state was asked for as {kind}, where raw masters cannot be marked and a stock "
            "Megatron would take them for folded weights; use --ckpt-format torch_dist, or "
            "--scalevec-execution autograd."
        )
    weights = {id(fold.weight) for fold in folds}
    keys = {entry.key for _, _, entry in _sharded(model_sharded_state_dict) if id(entry.data) in weights}
    seen = renamed = 0
    for holder, index, entry in _sharded(state):
        seen += 1
        key = _renamed(entry.key, keys)
        if key != entry.key:
            holder[index] = dataclasses.replace(entry, key=key)
            renamed += 1
    if (
        keys and seen and not renamed and kind != "fully_sharded_model_space"
    ):  # there a rank has its own shards only
        raise RuntimeError(
            "no raw master was recognized in the optimizer's sharded state: a stock Megatron would load it "
            "without complaint and drop the fold"
        )


def _renamed(key: str, folded: set[str]) -> str:
    if _BUCKETS in key and key.endswith(".param"):
        # A bucket holds folded and other parameters without their names.
        return f"{key}.{RAW}"
    for prefix in _MASTERS:
        if key.startswith(prefix) and key.removeprefix(prefix) in folded:
            return f"{prefix}{RAW}.{key.removeprefix(prefix)}"
    return key


def _sharded(node: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(container, key, entry) of every sharded tensor."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for index, value in list(items):
        if isinstance(value, (ShardedTensor, ShardedTensorFactory)):
            yield node, index, value
        else:
            yield from _sharded(value)
