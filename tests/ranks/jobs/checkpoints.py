"""What lies in a checkpoint."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["checkpoint_tensors"]


def checkpoint_tensors(folder: str) -> dict[str, Any]:
    """Every tensor of a torch_dist checkpoint, complete, as numpy."""
    from megatron.core import dist_checkpointing

    torch.distributed.init_process_group("gloo")
    return dict(_tensors(dist_checkpointing.load_plain_tensors(folder), ""))


def _tensors(node: Any, path: str):
    if isinstance(node, torch.Tensor):
        yield path, node.float().numpy()
    elif isinstance(node, (dict, list, tuple)):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _tensors(value, f"{path}/{key}")
